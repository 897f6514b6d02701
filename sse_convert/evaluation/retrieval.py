"""Needle retrieval: does the model answer with the planted value, token for token?

An answer counts when every one of its tokens is the model's first choice given the tokens before it. That equals
greedy decoding followed by an exact comparison: the first wrong choice ends both.
"""

import dataclasses as dc
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sse_convert.console import Bar
from sse_convert.data.needle import KeyWords, NeedleSample, evaluation_sample
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.recipe.schema import NeedleEval

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEPTH_BUCKETS = 5


@dc.dataclass(frozen=True, slots=True)
class NeedleScore:
    """Accuracy of one model on samples of one kind, number of keys and length."""

    kind: str
    """kind of the values"""
    keys: int
    """needles in the text"""
    length: int
    """tokens per row"""
    total: Accuracy
    """over all depths"""
    depths: tuple[Accuracy, ...]
    """by fifth of the text in which the asked needle stands, first fifth first"""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready: the setting, the accuracy with its interval, and one entry per depth bucket."""
        return {
            "kind": self.kind,
            "keys": self.keys,
            "length": self.length,
            **self.total.to_dict(),
            "depths": depth_entries(self.depths),
        }


def needle_samples(
    settings: NeedleEval,
    haystack_ids: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    words: KeyWords,
    seed: int = 0,
) -> list[list[NeedleSample]]:
    """The samples of an evaluation: one list per length, kind and number of keys, depths spread evenly.

    Each list depends on its own setting and the seed alone, so that adding a length changes no other figure.

    Raises:
        DataError: needles do not fit a length, or the text is too short.
    """
    groups = []
    for length in settings.lengths:
        for kind in settings.kinds:
            for keys in settings.keys:
                rng = random.Random(f"{seed} {length} {kind} {keys}")
                groups.append(
                    [
                        evaluation_sample(
                            rng,
                            haystack_ids,
                            length,
                            kind=kind,
                            keys=keys,
                            tokenizer=tokenizer,
                            words=words,
                            depths=(i % DEPTH_BUCKETS / DEPTH_BUCKETS, (i % DEPTH_BUCKETS + 1) / DEPTH_BUCKETS),
                        )
                        for i in range(settings.samples)
                    ]
                )
    return groups


def needle_score(
    model: "PreTrainedModel", samples: Sequence[NeedleSample], *, batch_tokens: int = 16384, bar: Bar | None = None
) -> NeedleScore:
    """Score one list of `needle_samples`.

    Args:
        model: causal language model in evaluation mode.
        samples: rows of equal length, kind and number of keys; at least one.
        batch_tokens: tokens per forward pass, at least one row.
        bar: advanced by one per sample.
    """
    hits: list[tuple[float, float]] = []
    size = max(1, batch_tokens // len(samples[0].token_ids))
    for first in range(0, len(samples), size):
        batch = samples[first : first + size]
        hits += [
            (sample.depth, int(all(right))) for sample, right in zip(batch, right_tokens(model, batch), strict=True)
        ]
        if bar is not None:
            bar.update(len(batch))
    return NeedleScore(
        kind=samples[0].kind,
        keys=samples[0].keys,
        length=len(samples[0].token_ids),
        total=Accuracy(sum(hit for _, hit in hits), len(hits)),
        depths=by_depth(hits),
    )


def by_depth(hits: Sequence[tuple[float, float]]) -> tuple[Accuracy, ...]:
    """Accuracy by fifth of the text from (depth, hit) pairs, first fifth first."""
    buckets: list[list[float]] = [[] for _ in range(DEPTH_BUCKETS)]
    for depth, hit in hits:
        buckets[min(int(depth * DEPTH_BUCKETS), DEPTH_BUCKETS - 1)].append(hit)
    return tuple(Accuracy(sum(bucket), len(bucket)) for bucket in buckets)


def depth_entries(depths: Sequence[Accuracy]) -> list[dict[str, float | int | None]]:
    """JSON-ready: the accuracies that `by_depth` gives, each with its part of the text."""
    return [
        {"start": i / DEPTH_BUCKETS, "stop": (i + 1) / DEPTH_BUCKETS, **accuracy.to_dict()}
        for i, accuracy in enumerate(depths)
    ]


@torch.no_grad()
def right_tokens(model: "PreTrainedModel", batch: Sequence[NeedleSample]) -> Iterator[list[bool]]:
    """Of each answer whether its tokens are the model's first choice, given the right ones before them.

    Args:
        model: causal language model in evaluation mode.
        batch: rows of equal length, read in one pass.
    """
    rows = torch.tensor([sample.token_ids for sample in batch], device=model.device)
    longest = max(sample.answer_len for sample in batch)
    logits = model(input_ids=rows, use_cache=False, logits_to_keep=longest + 1).logits
    right = (logits[:, :-1].argmax(-1) == rows[:, -longest:]).tolist()
    for row, sample in zip(right, batch, strict=True):
        yield row[-sample.answer_len :]
