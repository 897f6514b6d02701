"""Speed of prefill and decoding, and the bytes a real cache holds, by context length."""

import dataclasses as dc
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sse_convert.console import Bar
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.report import FieldsReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dc.dataclass(frozen=True, slots=True)
class Speed(FieldsReport):
    """What one model does at one context length, for one sequence."""

    length: int
    """tokens of context: a prompt, and the tokens decoded after it"""
    prefill_tokens_per_s: float
    """tokens of the prompt per second, first logits included; median of the repeats"""
    decode_tokens_per_s: float
    """new tokens per second at the end of the context; from the median step"""
    cache_bytes: int
    """bytes of the real cache at the end of the context"""
    decoded: int
    """tokens decoded"""
    repeats: int
    """timed prefills"""
    formula_bytes: int | None = None
    """what `surgery.budget` says the cache takes, with keys and values in the type of this measurement"""


@torch.no_grad()
def throughput(
    model: "PreTrainedModel",
    lengths: Iterable[int],
    *,
    repeats: int = 3,
    decode_tokens: int = 16,
    seed: int = 0,
    bar: Bar | None = None,
) -> list[Speed]:
    """Time a model on random tokens, one sequence at a time, after one untimed warm-up per length.

    On a GPU the steps are replayed from a graph from the third on (`decoding.graphed`), for every kind of model alike.

    Args:
        model: causal language model in evaluation mode.
        lengths: context lengths in tokens, at least 2.
        repeats: timed prefills per length; the median counts.
        decode_tokens: the last tokens of the context, decoded one by one and timed.
        seed: of the random tokens.
        bar: advanced by one per length.
    """
    device = model.device
    generator = torch.Generator().manual_seed(seed)
    results = []
    for length in lengths:
        prompt = max(1, length - decode_tokens)
        ids = torch.randint(decoder_config(model.config).vocab_size, (1, length), generator=generator).to(device)
        _run(model, ids[:, : prompt + 1], prompt)
        runs = [_run(model, ids, prompt) for _ in range(repeats)]
        results.append(
            Speed(
                length=length,
                prefill_tokens_per_s=prompt / statistics.median(prefill for prefill, _, _ in runs),
                decode_tokens_per_s=1 / statistics.median(step for _, steps, _ in runs for step in steps),
                cache_bytes=runs[-1][2],
                decoded=length - prompt,
                repeats=repeats,
            )
        )
        if bar is not None:
            bar.update()
    return results


def _run(model: "PreTrainedModel", ids: Tensor, prompt: int) -> tuple[float, list[float], int]:
    """Prefill seconds, decode seconds per step, cache bytes at the end."""
    from sse_convert.inference.cuda_graphs import graphed
    from sse_convert.modeling.compat import CACHE

    with graphed(model, slots=ids.shape[1]):
        start = _now(ids)
        out = model(input_ids=ids[:, :prompt], use_cache=True, logits_to_keep=1)
        ends = [_now(ids)]
        cache = out[CACHE]
        for i in range(prompt, ids.shape[1]):
            model(input_ids=ids[:, i : i + 1], use_cache=True, logits_to_keep=1, **{CACHE: cache})
            ends.append(_now(ids))
    return ends[0] - start, [b - a for a, b in itertools.pairwise(ends)], allocated_cache_bytes(cache)


def _now(ids: Tensor) -> float:
    if ids.device.type != "cpu":
        torch.accelerator.synchronize(ids.device)
    return time.perf_counter()


def allocated_cache_bytes(cache: Any) -> int:
    """Bytes of memory that the tensors of a transformers cache occupy, keys, values and states of all layers.

    Storage is counted, once each: a layer that keeps a view into a longer tensor pays for all of it, but for the few
    columns that softmax layers of converted models hold ready on a CPU.
    """
    tensors = _tensors(cache.layers)
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(stored.values()) - sum(getattr(layer, "free_bytes", 0) for layer in cache.layers)


def _tensors(value: Any) -> Iterator[Tensor]:
    from transformers.cache_utils import CacheLayerMixin

    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, CacheLayerMixin):
        yield from _tensors(vars(value))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
