"""Hand-made layers for the tests of single quantities: one batch of tokens, no model."""

import math
from typing import Any

import torch
from torch import Tensor

from sse_convert.analysis.capture import Seen, Sizes, see
from sse_convert.data.sample_text import Text

CPU = torch.device("cpu")


def sizes(**changes: Any) -> Sizes:
    """Two partitions and a shared one, two heads of four channels."""
    values = {"partitions": 2, "shared": True, "heads": 2, "query_heads": 2, "head_dim": 4, "device": CPU, **changes}
    return Sizes(**{"value_dim": values["head_dim"], **values})


def text(ids: Tensor | None = None) -> Text:
    """Rows of token ids; by default two rows of the tokens 0 to 11, over and over."""
    ids = torch.arange(2 * 160).view(2, 160) % 12 if ids is None else ids
    return Text.of(ids, lambda tokens: f"<{tokens[0]}>")


def inputs(s: Sizes, tokens: int, *, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Random arguments of the operator for a layer of these sizes, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    T, N, H, Q, D = tokens, s.partitions, s.heads, s.query_heads, s.head_dim
    values = {
        **{"q": random(T, Q, D), "k": random(T, H, D), "v": random(T, H, D), "router_logits": random(T, N)},
        "log_decay": -0.1 * random(T, H, D).abs(),
        "shared": (random(T, Q, D), random(T, H, D), -0.2 * random(T, H, D).abs()) if s.shared else None,
        **{"top_k": 1, "k_map": "softmax"},
    }
    return {**values, **changes}


def by_head(s: Sizes, tokens: int) -> dict[str, Tensor]:
    """Random logits of writing and of reading where every head chooses for itself."""
    generator = torch.Generator().manual_seed(7)
    names, shape = ("router_logits", "read_logits"), (tokens, s.heads, s.partitions)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in names}


def seen(s: Sizes, t: Text | None = None, **changes: Any) -> Seen:
    """What a layer of these sizes does with the rows of a text, from random inputs but for `changes`."""
    t = text() if t is None else t
    offsets = torch.arange(len(t.ids) + 1) * t.length
    return see(inputs(s, t.tokens, **changes), offsets, t.index.flatten())


def logits(partitions: Tensor, n: int) -> Tensor:
    """Router logits [T, n] that send each token to the partition given for it."""
    return 4.0 * torch.nn.functional.one_hot(partitions, n).double()


def constant(s: Sizes, t: Text, decay: float, shared_decay: float = 0.5) -> dict[str, Any]:
    """Arguments with one decay everywhere."""
    q, k, _ = inputs(s, t.tokens)["shared"]
    shape = t.tokens, s.heads, s.head_dim
    full = torch.full(shape, math.log(decay)).double()
    return {"log_decay": full, "shared": (q, k, torch.full(shape, math.log(shared_decay)).double())}
