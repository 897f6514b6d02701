"""Generation of the end-to-end benchmark: one timed prefill, then greedy steps against a static cache.

A row is read once into a dynamic cache, which fills every row of a static one. In a timed step the new token attends to
all slots of the static cache, the few still empty ones included: the work of a step at exactly that context, with no
mask, so that the flash kernel takes it.
"""

import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, StaticCache

from benchmarks.kernels.hybrid_measure import GIB, attention, measure, peak_memory, release, timed
from benchmarks.kernels.hybrid_training import COLD_LIMIT, random_ids
from sse_convert.evaluation.throughput import cache_bytes
from sse_convert.modeling.cache import SSECacheLayer

ALL_SLOTS = "benchmark_all_slots"
BLOCKS, STEPS = 5, 8
"""timed blocks, and steps in each; the median block counts"""
WARM_UP = 3
"""steps before a graph is captured"""
UNFILLED = WARM_UP + BLOCKS * STEPS
"""slots that the prefill leaves empty"""


def attend_to_all_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention of one token [B, Hq, 1, D] to every slot [B, H, slots, D] of a static cache."""
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2), None


AttentionInterface.register(ALL_SLOTS, attend_to_all_slots)


def prefill(model: Any, ids: Tensor) -> Any:
    """The dynamic cache after ids [1, T]."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values


def static_copy(model: Any, source: Any, slots: int, batch: int) -> StaticCache:
    """A static cache whose every row holds what the one row of a dynamic cache does."""
    target = StaticCache(config=model.config, max_cache_len=slots)
    if hasattr(model.base_model, "sse_install"):
        model.base_model.sse_install(target)
    tokens = source.get_seq_length()
    for old, new in zip(source.layers, target.layers, strict=True):
        if isinstance(new, SSECacheLayer):
            new.write(old.state.repeat_interleave(batch, 0), tokens, _no_replay)
        else:
            new.update(*(x.expand(batch, -1, -1, -1) for x in (old.keys, old.values)))
    return target


def _no_replay(state: Tensor, tokens: int) -> Tensor:
    raise AssertionError("a benchmark takes no tokens back")


class Decoder:
    """Greedy decoding, one token per row and step; on a GPU a step is one CUDA graph after `capture`."""

    def __init__(self, model: Any, cache: Any, first: Tensor, filled: int) -> None:
        self._model = model
        self._cache = cache
        self._ids = first.clone()
        self._position = torch.full_like(first, filled)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.logits = first.new_zeros(())

    def step(self) -> None:
        """Decode one token per row; `logits` [B, 1, V] are those of the last step."""
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def block(self) -> None:
        """STEPS steps."""
        for _ in range(STEPS):
            self.step()

    def capture(self) -> None:
        """Run WARM_UP steps, then capture one."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward()
        self._graph = graph

    def _forward(self) -> None:
        self.logits = self._model(
            input_ids=self._ids,
            position_ids=self._position,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._ids.copy_(self.logits.argmax(-1))
        self._position.add_(1)


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

        self._model.set_attn_implementation("sdpa")
        limit = float("inf") if compiles else COLD_LIMIT
        with attention(self._choice), peak_memory(device, figures, "prefill_peak_gib"):
            timing = measure(run, device, budget=budget, cold_limit=limit)
        tokens_per_s = ids.shape[1] / timing.seconds
        return {"prefill_seconds": timing.seconds, "prefill_tokens_per_s": tokens_per_s, **figures}

    @torch.no_grad()
    def decode(self, batch: int, choice: str, *, graph: bool) -> dict[str, Any]:
        """Decode the last tokens of `batch` equal rows. Memory is without the prefill's own copy of the cache."""
        model, device = self._model, self._model.device
        release(device)
        figures: dict[str, Any] = {}
        model.set_attn_implementation(ALL_SLOTS)
        with attention(choice), peak_memory(device, figures, "peak_gib"):
            cache = static_copy(model, self._cache, self._context, batch)
            decoder = Decoder(model, cache, random_ids(model, batch, 1), self._context - UNFILLED)
            if graph:
                decoder.capture()
            else:
                for _ in range(WARM_UP):
                    decoder.step()
            times = [timed(decoder.block, device) / STEPS for _ in range(BLOCKS)]
        if figures:
            figures["peak_gib"] -= cache_bytes(self._cache) / GIB
        seconds = statistics.median(times)
        return {
            "step_ms": 1e3 * seconds,
            "spread": max(times) / min(times),
            "tokens_per_s": batch / seconds,
            **figures,
            "cache_gib": cache_bytes(cache) / GIB,
            "least_read_gib": (cache_bytes(cache) + _weight_bytes(model)) / GIB,
        }


def _weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a decode step reads: all but the table of input embeddings, unless it is the head."""
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    unread = 0 if table.weight is head.weight else table.weight.numel()
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    return int(stored - unread * table.weight.element_size())
