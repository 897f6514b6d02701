"""At which token of an answer a model goes wrong, in the wording that it is asked in.

Misses at the first tokens say that the key was not looked up, misses in the middle that a value was not copied whole,
and misses at the last token, a full stop, that the model ends answers as the rows of its training do.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sse_convert.data.needle import KeyWords
from sse_convert.evaluation.retrieval import needle_samples, right_tokens
from sse_convert.recipe.schema import NeedleEval

ROWS = 64
"""of each kind and number of needles"""
AT_ONCE = 8


def misses(
    model: Any, tokenizer: Any, haystack: Sequence[int], words: KeyWords, asked: NeedleEval
) -> list[dict[str, Any]]:
    """By kind and number of needles, at the first length: how many answers have their first wrong token at each place,
    from 0, those whose last token alone is wrong apart from them, and how many answers are right.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: the model's.
        haystack: tokens of held-out text.
        words: key words.
        asked: what is asked.
    """
    asked = NeedleEval(lengths=asked.lengths[:1], samples=ROWS, kinds=asked.kinds, keys=asked.keys)
    found = []
    for samples in needle_samples(asked, haystack, tokenizer, words):
        batches = [samples[i : i + AT_ONCE] for i in range(0, len(samples), AT_ONCE)]
        places = Counter(place(right) for batch in batches for right in right_tokens(model, batch))
        first = samples[0]
        setting = {"kind": first.kind, "keys": first.keys, "length": len(first.token_ids), "samples": len(samples)}
        found.append({**setting, "first_wrong": dict(sorted(places.items()))})
    return found


def place(right: list[bool]) -> str:
    """Of the first wrong token; `last` for the last one, `right` where there is none."""
    if all(right):
        return "right"
    place = right.index(False)
    return "last" if place == len(right) - 1 else f"{place:02}"
