"""RULER's score: are the values asked for in what the model writes? Beside it, which values it finds likely.

Generation is greedy, in left-padded batches with a cache, and stops at the model's end token or after 128 tokens. The
score of a sample is the share of its answers that the text holds, ignoring case (string_match_all). Likelihood needs no
generation: an answer counts when it is a likelier continuation, by the sum over its tokens, than nine wrong values,
those of the haystack first. Guessing gives 10%.
"""

import copy
import dataclasses as dc
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sse_convert.console import Bar
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.evaluation.retrieval import by_depth, depth_entries
from sse_convert.evaluation.ruler_rows import NEW_TOKENS, RulerSample
from sse_convert.inference.batch import continue_rows, left_padded
from sse_convert.inference.sampling import Sampling

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

_CONTROL = re.compile(r"[\x00-\x1f]")


@dc.dataclass(frozen=True, slots=True)
class RulerScore:
    """Accuracy of one model on one task at one length."""

    task: str
    """task name"""
    length: int
    """context length in tokens, the answer included"""
    generated: Accuracy
    """string_match_all; samples with several answers count in part"""
    likelihood: Accuracy | None
    """answers that beat nine wrong values, in the same way; None where not asked for"""
    depths: tuple[Accuracy, ...]
    """`generated` by fifth of the haystack in which the asked needle stands; empty where several are asked for"""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready: the setting, both accuracies with their intervals, and one entry per depth bucket."""
        return {
            "task": self.task,
            "length": self.length,
            **self.generated.to_dict(),
            "likelihood": None if self.likelihood is None else self.likelihood.to_dict(),
            "depths": depth_entries(self.depths),
        }


def ruler_score(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    samples: Sequence[RulerSample],
    *,
    likelihood: bool = True,
    batch_tokens: int = 16384,
    bar: Bar | None = None,
) -> RulerScore:
    """Score one list of `ruler_samples`.

    Args:
        model: causal language model in evaluation mode.
        tokenizer: the model's tokenizer.
        samples: of one task and length; at least one.
        likelihood: also compare the likelihood of right and wrong values.
        batch_tokens: tokens per forward pass, at least one row.
        bar: advanced by one per sample.
    """
    told: list[float] = []
    likely: list[float] = []
    size = max(1, batch_tokens // samples[0].length)
    for first in range(0, len(samples), size):
        batch = samples[first : first + size]
        texts = answer(model, tokenizer, batch)
        told += [string_match_all(text, sample.answers) for text, sample in zip(texts, batch, strict=True)]
        if likelihood:
            likely += _preferred(model, batch)
        if bar is not None:
            bar.update(len(batch))
    placed = [(s.depth, score) for s, score in zip(samples, told, strict=True) if s.depth is not None]
    return RulerScore(
        task=samples[0].task,
        length=samples[0].length,
        generated=Accuracy(sum(told), len(told)),
        likelihood=Accuracy(sum(likely), len(likely)) if likelihood else None,
        depths=by_depth(placed) if placed else (),
    )


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that a generated text holds, ignoring case; control characters count as line breaks."""
    clean = _CONTROL.sub("\n", text).strip().lower()
    return sum(answer.lower() in clean for answer in answers) / len(answers)


def answer(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", samples: Sequence[RulerSample]) -> list[str]:
    """What a model writes after each prompt, greedily."""
    new = continue_rows(model, [sample.token_ids for sample in samples], Sampling(max_new_tokens=NEW_TOKENS))
    return [str(text) for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


@torch.no_grad()
def _preferred(model: "PreTrainedModel", samples: Sequence[RulerSample]) -> list[float]:
    """Share of each sample's answers that are likelier than all its wrong values."""
    from sse_convert.modeling.compat import CACHE

    rows, mask = left_padded([sample.token_ids for sample in samples], model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    out = model(input_ids=rows, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    first = torch.log_softmax(out.logits[:, -1].float(), -1)
    values = [(*sample.right, *sample.wrong) for sample in samples]
    past = {CACHE: out[CACHE]}
    scores = [_continuations(model, list(each), first, past, mask) for each in zip(*values, strict=True)]
    answers = len(samples[0].right)
    right, wrong = torch.stack(scores[:answers]), torch.stack(scores[answers:])
    shares: list[float] = (right > wrong.amax(0)).double().mean(0).tolist()
    return shares


def _continuations(
    model: "PreTrainedModel", values: list[tuple[int, ...]], first: Tensor, past: dict[str, "Cache"], mask: Tensor
) -> Tensor:
    """Summed log probability [B] of one continuation per row, after a prefill that is left as it is.

    Args:
        model: the model.
        values: B lists of token ids.
        first: [B, V] log probabilities of the first token.
        past: the cache of the prefill, by the name of its argument.
        mask: [B, T] of the prefill.
    """
    longest = max(map(len, values))
    ids = torch.zeros(len(values), longest, dtype=torch.long, device=mask.device)
    there = torch.zeros_like(ids)
    for row, value in enumerate(values):
        ids[row, : len(value)] = torch.tensor(value, device=mask.device)
        there[row, : len(value)] = 1
    total = first.gather(1, ids[:, :1])[:, 0]
    if longest == 1:
        return total
    logits = model(
        input_ids=ids[:, :-1],
        attention_mask=torch.cat([mask, there[:, :-1]], 1),
        position_ids=mask.sum(1, keepdim=True) + torch.arange(longest - 1, device=mask.device),
        use_cache=True,
        **copy.deepcopy(past),
    ).logits
    later = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None])[:, :, 0]
    return total + (later * there[:, 1:]).sum(1)
