"""What a model answers in the forms that its training planted: the whole answers, and their first tokens alone.

The first token by which a row's answers differ says whether a key was looked up. Those behind it follow from it where
values differ, so a model that finds any value at all has most of them right.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch

from sse_convert.data.needle import KeyWords
from sse_convert.data.recall_rows import RecallRow, recall_row
from sse_convert.recipe.schema import Needles

ROWS = 64
"""of each form"""
SEED = 7


def own_forms(
    model: Any, tokenizer: Any, haystack: Sequence[int], words: KeyWords, needles: Needles, length: int
) -> dict[str, dict[str, int]]:
    """By form: `answers` asked for, those that are `right` as a whole, and those of which the `first` token is right
    that the row's answers do not have in common.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: the model's.
        haystack: tokens of held-out text, in which facts are planted.
        words: key words.
        needles: forms, kinds and numbers, as of the training.
        length: tokens of a row.
    """
    found = {}
    for form in needles.drawn_forms():
        one = Needles(forms={form: 1.0}, keys=needles.keys, kinds=needles.kinds, early=needles.early)
        rng = random.Random(SEED)
        rows = [recall_row(rng, haystack, length, one, tokenizer, words) for _ in range(ROWS)]
        counts = [_counts(model, row) for row in rows]
        found[form] = {key: sum(count[key] for count in counts) for key in ("answers", "right", "first")}
    return found


@torch.no_grad()
def _counts(model: Any, row: RecallRow) -> dict[str, int]:
    """Of one row, every answer given the right tokens before it."""
    ids = torch.tensor([row.token_ids], device=model.device)
    hits = (model(ids, use_cache=False).logits[0, :-1].argmax(1) == ids[0, 1:]).tolist()
    asked = row.answers[1:]
    begins = [i for i, answer in enumerate(asked) if answer and not (i and asked[i - 1])]
    spans = [(i, next((j for j in range(i, len(asked)) if not asked[j]), len(asked))) for i in begins]
    places = zip(*(row.token_ids[i + 1 : j + 1] for i, j in spans), strict=False)
    shared = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, places)
    common = sum(1 for _ in shared) if len(spans) > 1 else 0
    right = sum(all(hits[i:j]) for i, j in spans)
    return {"answers": len(spans), "right": right, "first": sum(hits[min(i + common, j - 1)] for i, j in spans)}
