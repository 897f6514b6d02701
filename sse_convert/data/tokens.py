"""Token ids of plain texts: with a fast tokenizer of transformers, its Rust part is asked directly.

The way through transformers makes offsets and masks too, and checks settings in Python: a short text takes three times
as long, a long one half as long again.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without the tokenizer's special tokens around it.

    Args:
        tokenizer: any; one that has an encoding of its own in Python is asked as transformers does.
        texts: encoded in parallel by a fast tokenizer.
    """
    if not texts:
        return []
    kind: Any = type(tokenizer)
    if not _is_plain(kind):
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(ids) for ids in encoded]
    fast: Any = tokenizer
    backend = fast.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = fast.split_special_tokens
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether tokenizers of a class only call their Rust part to encode."""
    from transformers import PreTrainedTokenizerFast

    own = ("__call__", "_encode_plus")
    fast = issubclass(kind, PreTrainedTokenizerFast)
    return fast and all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in own)
