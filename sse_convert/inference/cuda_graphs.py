"""Decoding at the speed of the device: a step of one token per row is recorded as a CUDA graph once, then replayed.

Between the prefill and the end of an answer the cache is fixed: its tensors keep their size and their place. Softmax
layers then hold a slot for every token to come, recurrent layers are as small as ever. Teachers and converted models
are treated alike.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutputWithPast

from sse_convert.compat import attending_by, is_compiled
from sse_convert.errors import UsageError
from sse_convert.inference.fused_layers import fused_layers
from sse_convert.inference.fused_norms import fused_norms
from sse_convert.kernels.triton.config import MAX_DIM
from sse_convert.kernels.triton_backend import unavailable_reason
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import has_experts, source_spec
from sse_convert.modeling.compat import CACHE
from sse_convert.modeling.roomy_keys import RoomyLayer
from sse_convert.modeling.state_cache import SSECacheLayer, with_slots
from sse_convert.modeling.window.sliding import TOKEN_ATTENTION
from sse_convert.modeling.window_cache import JoinedCacheLayer, SlidingCacheLayer

_SOFTMAX = (DynamicLayer, DynamicSlidingWindowLayer, RoomyLayer)
_OWN = (SSECacheLayer, SlidingCacheLayer, JoinedCacheLayer)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOVING_ROPE = ("dynamic", "longrope")
"""rotary embeddings that look at the positions on the host in every step"""


class TokenStep:
    """Steps of one new token per row, after a prefill. The first step runs plainly, the second is recorded.

    After a step, `tokens` holds the likeliest next tokens and `positions` theirs, so that steps may follow each other
    without the host knowing any token; to continue with other tokens, overwrite `tokens` in place.

    Args:
        model: causal language model in evaluation mode.
        cache: filled by a prefill of the model; fixed until `release`.
        tokens: int64 [B, 1], the first new token of each row.
        slots: columns that the cache can hold in the end, padding included.
        attention_mask: [B, columns so far], of a left-padded batch.
        compiled: also let torch.compile fuse the model's small operations; takes minutes for a large model.
        forward: what to call instead of the model.

    Raises:
        UsageError: the cache is empty, too long, or of a kind that cannot be fixed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        tokens: Tensor,
        slots: int,
        attention_mask: Tensor | None = None,
        *,
        compiled: bool = False,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.length = int(cache.get_seq_length())
        if not 0 < self.length < slots or not can_fix(cache):
            raise UsageError(
                f"a cache of {self.length} columns, to be fixed at {slots}",
                expected="a dynamic cache after a prefill, shorter than its slots, that does not record its past",
            )
        self.tokens = tokens.clone()
        self.positions = torch.full_like(tokens, self.length)
        self._mask: Tensor | None = None
        if attention_mask is not None:
            self.positions = attention_mask.long().sum(1, keepdim=True)
            self._mask = torch.zeros(len(tokens), slots, dtype=torch.bool, device=tokens.device)
            self._mask[:, : self.length] = attention_mask
        self._column = torch.full((1,), self.length, device=tokens.device)
        self._model = model
        self._forward = model.forward if forward is None else forward
        if compiled:
            self._forward = torch.compile(self._forward, fullgraph=True, dynamic=False)
        self._compiled = is_compiled(self._forward)
        self._cache = _FixedCache(cache, slots)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded = tokens.new_empty(0)
        self._plain = tokens.device.type != "cuda"
        self._first = True

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Process `tokens`; returns logits [B, vocab], which the next step may overwrite."""
        if self.length == self._cache.slots:
            raise UsageError(f"the cache's {self.length} slots are full", fix="ask for more slots")
        self.length += 1
        if self._plain or self._first:
            self._first = False
            with fixed_cache_attention(self._model), self._fused():
                return self._run()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            recording = torch.cuda.graph(graph, capture_error_mode="thread_local")
            with fixed_cache_attention(self._model), self._fused(), recording:
                self._recorded = self._run()
            self._graph = graph
        self._graph.replay()
        return self._recorded

    def release(self) -> None:
        """Give the cache back, dynamic as it was, with what the steps added."""
        self._cache.release(self.length)

    @contextmanager
    def _fused(self) -> Iterator[None]:
        """Fused layers and norms, unless torch.compile fuses them with their surroundings."""
        if self._compiled:
            yield
            return
        with fused_layers(self._model), fused_norms(self._model):
            yield

    def _run(self) -> Tensor:
        if self._mask is not None:
            self._mask.index_fill_(1, self._column, True)
        logits: Tensor = self._forward(
            input_ids=self.tokens,
            attention_mask=self._mask,
            position_ids=self.positions,
            use_cache=True,
            **{CACHE: self._cache.cache},
        ).logits[:, -1]
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.positions.add_(1)
        self._column.add_(1)
        return logits


@contextmanager
def graphed(model: PreTrainedModel, slots: int | None = None) -> Iterator[None]:
    """In this block, `model.generate` with at most `slots` tokens replays its steps, if model and device allow it.

    Without `slots`, a converted model's own `generate` says how many (`sse_columns`). Sampling, stopping, streaming and
    the prefill, but for its norms, stay those of `generate`; beams and assisted decoding are not for this. A model on a
    CPU has its norms fused, and is else as it was.
    """
    if not runs_graphs(model):
        with fused_norms(model) if model.device.type == "cpu" else nullcontext():
            yield
        return
    replayer = _Replayer(model, slots)
    replaced = vars(model).get("forward")
    model.forward = functools.update_wrapper(replayer, model.forward)
    try:
        with fused_norms(model):
            yield
    finally:
        del model.forward
        if replaced is not None:
            model.forward = replaced
        replayer.release()


def runs_graphs(model: PreTrainedModel) -> bool:
    """Whether the steps of a model can be recorded: it is on one CUDA device, which it asks for neither positions nor
    where tokens go."""
    rope = getattr(decoder_config(model.config), "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
    around = bool(source_spec(model.config.model_type).text_types)  # counts positions of images, in Python
    asks = around or set(kinds) & set(_MOVING_ROPE) or has_experts(model.config)
    return model.device.type == "cuda" and not spread and not asks


def can_fix(cache: Cache) -> bool:
    """Whether every layer of a cache can be fixed: filled, dynamic, and not recording its past for `crop`."""
    return all(
        type(layer) in (*_SOFTMAX, *_OWN) and layer.is_initialized and not getattr(layer, "record_past", False)
        for layer in cache.layers
    )


def has_room(cache: Cache, slots: int) -> bool:
    """Whether its device has twice the memory that a dynamic cache takes besides, if all of its slots are there."""
    layers = [part for layer in cache.layers if isinstance(part := getattr(layer, "whole", layer), _SOFTMAX)]
    tensors = [x for layer in layers for x in (layer.keys, layer.values)]
    if not tensors or tensors[0].device.type != "cuda":
        return True
    device = tensors[0].device
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    more = sum(x.nbytes // x.shape[2] * (slots - x.shape[2]) for x in tensors)
    return bool(2 * more <= torch.cuda.mem_get_info(device)[0] + unused)


@contextmanager
def fixed_cache_attention(model: PreTrainedModel) -> Iterator[None]:
    """In this block, softmax layers attend to a fixed cache with a kernel made for it, where they used torch's."""
    if model.config._attn_implementation != "sdpa":
        yield
        return
    with attending_by(model, TOKEN_ATTENTION, _attend):
        yield


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As `sdpa_attention_forward`: query [B, Hq, T, D], key and value [B, H, slots, D] -> [B, T, Hq, D]."""
    plain = kwargs.get("softcap") is None and kwargs.get("position_bias") is None and query.dtype in _KERNEL_DTYPES
    masked = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
    fits = masked and plain and max(query.shape[-1], value.shape[-1]) <= MAX_DIM
    if not fits or unavailable_reason(query.device) is not None:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    from sse_convert.kernels.triton.generation.token_attention import token_attention

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert attention_mask is not None
    o = token_attention(query[:, :, 0], key.contiguous(), value.contiguous(), attention_mask[:, 0, 0], scale)
    return o[:, None], None


class _FixedCache:
    """A cache whose layers are, until `release`, as large as they will get."""

    def __init__(self, cache: Cache, slots: int) -> None:
        self.cache = cache
        self.slots = slots
        self._replaced: dict[int, CacheLayerMixin] = {}
        length = int(cache.get_seq_length())
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, _OWN):
                layer.fix(slots)
            else:
                self._replaced[index] = layer
                cache.layers[index] = with_slots(layer, slots, length)

    def release(self, length: int) -> None:
        """Make the layers dynamic again, of `length` columns."""
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, _OWN):
                layer.release(length)
            else:
                before = self._replaced[index]
                first = 0
                if isinstance(before, DynamicSlidingWindowLayer):
                    first = max(0, length - before.sliding_window + 1)
                    before.cumulative_length = length
                before.keys, before.values = (x[:, :, first:length] for x in (layer.keys, layer.values))
                self.cache.layers[index] = before


class _Replayer:
    """Stands in for a model's forward: takes steps of one token to a graph, and everything else to the model."""

    def __init__(self, model: PreTrainedModel, slots: int | None) -> None:
        self._model = model
        self._forward = model.forward
        self._given = slots
        self._step: TokenStep | None = None
        self._cache: Cache | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What generation calls with one new token per row, after a prefill; and what it calls before."""
        cache, tokens = kwargs.get(CACHE), kwargs.get("input_ids")
        one_each = not args and tokens is not None and tokens.shape[1] == 1
        if self._step is None or not one_each or cache is not self._cache:
            self.release()
            others = {name: value for name, value in kwargs.items() if name != CACHE}
            if not one_each or not self._begin(cache, **others):
                return self._forward(*args, **kwargs)
        assert self._step is not None
        assert tokens is not None
        self._step.tokens.copy_(tokens)
        return CausalLMOutputWithPast(logits=self._step()[:, None], **{CACHE: cache})

    @property
    def _slots(self) -> int:
        return self._model.sse_columns if self._given is None else self._given

    def release(self) -> None:
        """Give the cache back."""
        if self._step is not None:
            self._step.release()
        self._step = self._cache = None

    def _begin(
        self,
        cache: Cache | None,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> bool:
        """Fix the cache and prepare steps from here on; False where this is none, or asks for more than logits."""
        length = 0 if cache is None else cache.get_seq_length()
        wanted = {name for name, value in options.items() if value is not None and value is not False}
        if (
            not 0 < length < self._slots
            or not can_fix(cache)
            or not has_room(cache, self._slots)
            or wanted - {"use_cache", "return_dict", "logits_to_keep"}
            or getattr(attention_mask, "ndim", 2) != 2
            or torch.is_grad_enabled()
        ):
            return False
        padded = attention_mask is not None and not bool(attention_mask.all())
        mask = attention_mask[:, :length] if padded else None
        self._step = TokenStep(self._model, cache, input_ids, self._slots, mask, forward=self._forward)
        if position_ids is not None:
            self._step.positions.copy_(position_ids)
        self._cache = cache
        return True
