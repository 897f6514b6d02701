"""Generation of the end-to-end benchmark: one timed prefill, then greedy steps at the end of the context.

All is the package's own, for teachers and hybrids alike: RMS norms are one kernel each, and a step is a CUDA graph over
a cache of fixed size. Softmax layers run the package's kernel (`own`), which skips empty slots, or torch's flash or
cuDNN kernel without a mask; the new token then attends to the few slots that are still empty too, which is the work of
a step at exactly that context.
"""

import contextlib
import copy
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from benchmarks.kernels.hybrid_measure import GIB, attention, attention_choices, measure, peak_memory, release, timed
from benchmarks.kernels.hybrid_profile import profile
from benchmarks.kernels.hybrid_training import COLD_LIMIT, random_ids
from sse_convert.evaluation.throughput import allocated_cache_bytes
from sse_convert.inference.cuda_graphs import TokenStep
from sse_convert.inference.fused_norms import fused_norms

OWN = "own"
"""the package's kernel for one token against a cache of fixed size"""
ALL_SLOTS = "benchmark_all_slots"
BLOCKS, STEPS = 5, 8
"""timed blocks, and steps in each; the median block counts"""
WARM_UP = 2
"""a plain step, and the one that is recorded"""
UNFILLED = WARM_UP + BLOCKS * STEPS
"""slots that the prefill leaves empty"""


def step_choices(device: torch.device) -> tuple[str, ...]:
    """What softmax layers may run in a step."""
    return (OWN, *attention_choices(device))


def attend_to_all_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention of one token [B, Hq, 1, D] to every slot [B, H, slots, D] of a cache."""
    assert query.shape[2] == 1, "a prefill would see what comes after it"
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2), None


AttentionInterface.register(ALL_SLOTS, attend_to_all_slots)


@contextlib.contextmanager
def step_attention(model: PreTrainedModel, choice: str) -> Iterator[None]:
    """Softmax layers run one of `step_choices` in this block."""
    if choice == OWN:
        yield
        return
    model.set_attn_implementation(ALL_SLOTS)
    try:
        with attention(choice):
            yield
    finally:
        model.set_attn_implementation("sdpa")


def prefill(model: Any, ids: Tensor) -> Any:
    """The dynamic cache after ids [B, T]."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values


class Generation:
    """A model at one context: its prefill is timed once, its decoding for any batch.

    Args:
        model: in evaluation mode.
        context: tokens that the cache holds at the end.
        choice: attention kernel of softmax layers in the prefill.
    """

    def __init__(self, model: PreTrainedModel, context: int, choice: str) -> None:
        self._model = model
        self._context = context
        self._choice = choice
        self._cache: Any = None

    @torch.no_grad()
    def prefill(self, *, budget: float, compiles: bool) -> dict[str, Any]:
        """Read all but the last tokens of a row."""
        device, figures = self._model.device, dict[str, Any]()
        ids = random_ids(self._model, 1, self._context - UNFILLED)

        def run() -> None:
            self._cache = None
            self._cache = prefill(self._model, ids)

        limit = float("inf") if compiles else COLD_LIMIT
        with fused_norms(self._model), attention(self._choice), peak_memory(device, figures, "prefill_peak_gib"):
            timing = measure(run, device, budget=budget, cold_limit=limit)
        tokens_per_s = ids.shape[1] / timing.seconds
        return {"prefill_seconds": timing.seconds, "prefill_tokens_per_s": tokens_per_s, **figures}

    @torch.no_grad()
    def decode(self, batch: int, choice: str, *, compiled: bool = False) -> dict[str, Any]:
        """Decode the last tokens of `batch` equal rows. Memory is without the cache that the prefill keeps here."""
        model, device = self._model, self._model.device
        step, cache = self._step(batch, compiled=compiled)
        figures: dict[str, Any] = {}

        def block() -> None:
            for _ in range(STEPS):
                step()

        with step_attention(model, choice), peak_memory(device, figures, "peak_gib"):
            for _ in range(WARM_UP):
                step()
            times = [timed(block, device) / STEPS for _ in range(BLOCKS)]
        if figures:
            figures["peak_gib"] -= allocated_cache_bytes(self._cache) / GIB
        seconds = statistics.median(times)
        return {
            "step_ms": 1e3 * seconds,
            "spread": max(times) / min(times),
            "tokens_per_s": batch / seconds,
            **figures,
            "cache_gib": allocated_cache_bytes(cache) / GIB,
            "least_read_gib": (allocated_cache_bytes(cache) + _weight_bytes(model)) / GIB,
        }

    @torch.no_grad()
    def profile(self, *, compiled: bool = False) -> dict[str, Any]:
        """Where the time of a recorded step of one row goes."""
        step, _ = self._step(1, compiled=compiled)
        for _ in range(WARM_UP):
            step()
        return profile(step)

    def _step(self, batch: int, *, compiled: bool) -> tuple[TokenStep, Any]:
        """Steps from the prefill on, of `batch` equal rows, and their cache."""
        model = self._model
        release(model.device)
        cache = copy.deepcopy(self._cache)
        cache.batch_repeat_interleave(batch)
        return TokenStep(model, cache, random_ids(model, batch, 1), self._context, compiled=compiled), cache


def _weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decode step reads: all but the table of input embeddings, unless it is the head."""
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    unread = 0 if table.weight is head.weight else table.weight.numel()
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    return int(stored - unread * table.weight.element_size())
