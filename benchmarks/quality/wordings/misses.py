"""At which token of an answer a model goes wrong, in the wording that it is asked in.

Misses at the first tokens say that the key was not looked up, misses in the middle that a value was not copied whole,
and misses at the last token, a full stop, that the model ends answers as the rows of its training do.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from sse_convert.checkpoints.load_model import load_model, load_tokenizer
from sse_convert.data.needle import NeedleSample, load_words
from sse_convert.data.tokens import token_ids
from sse_convert.evaluation.retrieval import needle_samples
from sse_convert.recipe.schema import NeedleEval

ROWS = 64
"""of each kind and number of needles"""
AT_ONCE = 8


def misses(folder: Path, text: Path, words: str | None, asked: NeedleEval) -> list[dict[str, Any]]:
    """By kind, number of needles and length: how many answers have their first wrong token at each place, from 0, those
    whose last token alone is wrong apart from them, and how many answers are right.

    Args:
        folder: of the model.
        text: a file of held-out text.
        words: file of key words, as in `data.needles.words`.
        asked: what is asked.
    """
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    (haystack,) = token_ids(tokenizer, [text.read_text(encoding="utf-8")])
    asked = NeedleEval(lengths=asked.lengths[:1], samples=ROWS, kinds=asked.kinds, keys=asked.keys)
    found = []
    for samples in needle_samples(asked, haystack, tokenizer, load_words(words)):
        places = Counter(
            place for i in range(0, len(samples), AT_ONCE) for place in _first_wrong(model, samples[i : i + AT_ONCE])
        )
        first = samples[0]
        setting = {"kind": first.kind, "keys": first.keys, "length": len(first.token_ids), "samples": len(samples)}
        found.append({**setting, "first_wrong": dict(sorted(places.items()))})
    return found


@torch.no_grad()
def _first_wrong(model: Any, samples: list[NeedleSample]) -> list[str]:
    """Of each answer the place of its first wrong token, every one given the right tokens before it; `last` for the
    last one, `right` where there is none."""
    rows = torch.tensor([sample.token_ids for sample in samples], device=model.device)
    longest = max(sample.answer_len for sample in samples)
    logits = model(input_ids=rows, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    wrong = (logits.argmax(-1) != rows[:, -longest:]).tolist()
    return [_place(row[-sample.answer_len :]) for row, sample in zip(wrong, samples, strict=True)]


def _place(wrong: list[bool]) -> str:
    if not any(wrong):
        return "right"
    place = wrong.index(True)
    return "last" if place == len(wrong) - 1 else f"{place:02}"
