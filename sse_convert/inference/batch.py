"""Continue many prompts at once: left-padded, through the cache. What a row samples is its own affair."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sse_convert.inference.sampling import Sampling, as_asked

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def continue_rows(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:
    """New token ids after each prompt, up to and with the model's end token.

    Rows are as if each had been continued alone: exactly in float64; in lower precision a batch of another shape rounds
    otherwise, which can tip a choice. The model's own settings, its end tokens aside, do not count.

    Args:
        model: causal language model in evaluation mode.
        prompts: token ids, at least one each.
        sampling: how tokens are chosen, and how many at most.
        seeds: of the rows; unset takes `sampling.seed` for each.
    """
    from transformers import LogitsProcessorList

    from sse_convert.inference.cuda_graphs import graphed
    from sse_convert.inference.seeded_choice import SeededChoice

    rows, mask = left_padded(prompts, model.device)
    width = rows.shape[1]
    ends = end_tokens(model)
    choices = LogitsProcessorList()
    if sampling.temperature > 0:
        seeds = [sampling.seed] * len(prompts) if seeds is None else seeds
        choices.append(SeededChoice(sampling, seeds, width, rows.device))
    with as_asked(model), graphed(model, slots=width + sampling.max_new_tokens):
        out = model.generate(  # type: ignore[operator]
            rows,
            attention_mask=mask,
            max_new_tokens=sampling.max_new_tokens,
            logits_processor=choices,
            do_sample=False,
            pad_token_id=min(ends, default=0),
        )
    return [_up_to_end(row, ends) for row in out[:, width:].tolist()]


def end_tokens(model: "PreTrainedModel") -> set[int]:
    """Token ids with which a model ends an answer."""
    assert model.generation_config is not None
    end = model.generation_config.eos_token_id
    return set(end if isinstance(end, list) else [] if end is None else [end])


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask [B, T] of prompts that end together."""
    longest = max(map(len, prompts))
    rows = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(rows)
    for i, prompt in enumerate(prompts):
        rows[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    return rows.to(device), mask.to(device)


def _up_to_end(ids: list[int], ends: set[int]) -> list[int]:
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]
