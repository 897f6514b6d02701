"""SSE beside window attention in one layer: two branches over the teacher's projections, added head by head.

    y = o_proj(sse_window_scale * window + norm(SSE) * sse_out_scale)

The family's own attention computes the window branch, with its norms, rotation, scaling, soft caps and dropout, and the
output projection; SSE's heads join before that projection. The state-dict keys are those of SSE layers, and one more.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.mixers import SSEMixer, SSESlidingMixer
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.compat import cache_argument
from sse_convert.modeling.initialise import precise_dtype
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import LAYOUT, SequenceLayout
from sse_convert.modeling.projections import projections
from sse_convert.modeling.state_cache import SSECacheLayer
from sse_convert.modeling.window.sliding import with_window
from sse_convert.modeling.window.window_attention import head_order, use_window_attention

_INITIALISED = "_is_hf_initialized"
"""attribute by which transformers knows modules whose weights are set; those of the new tensors are not yet"""


class FamilyMethod:
    """A method of a family's attention, which its forward calls on itself, for a module of another class. An object, so
    that models can be pickled.

    Args:
        function: the method, as its class has it.
        module: what it is called on.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.function = function
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method gives."""
        return self.function(self.module, *args, **kwargs)


class RunOnce:
    """A module of which some children run once in a forward: what they made of the same memory is given again.

    Args:
        module: the module, as it is in all else.
        names: of those children, which take one tensor [..., in] and give one [..., out].
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._module = module
        self._names = frozenset(names)
        self._made: dict[str, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        child = getattr(self._module, name)
        return functools.partial(self._once, name, child) if name in self._names else child

    def _once(self, name: str, child: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        given, made = self._made.get(name, (None, None))
        if given is None or made is None or given.data_ptr() != x.data_ptr() or given.numel() != x.numel():
            made = child(x)
            self._made[name] = x, made
        return made.view(*x.shape[:-1], -1)


def _own_methods(kind: type[nn.Module]) -> set[str]:
    """Methods that a class and its bases have, but for those of every module."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return {name for cls in classes for name, member in vars(cls).items() if inspect.isfunction(member)}


class SSESlidingAttention(SSEAttention):
    """An SSE layer with a window branch. See `SSEAttention` for arguments and errors.

    The source's forward runs on this module, which has the source's children and settings: replacing one of them, as
    adapters do, holds for both branches.
    """

    mixer: SSESlidingMixer
    config: Any
    scaling: float
    sse_window_scale: nn.Parameter

    def __init__(
        self,
        source: nn.Module,
        config: Any,
        layer_idx: int,
        *,
        spec: ArchSpec,
        mixer: SSEMixer,
        backend: str = "auto",
    ) -> None:
        super().__init__(source, config, layer_idx, spec=spec, mixer=mixer, backend=backend)
        self.order = head_order(self.mixer.full_heads, self.source_dims.kv_heads)
        use_window_attention(source)
        for name in vars(source).keys() - vars(self).keys() - {_INITIALISED}:
            setattr(self, name, getattr(source, name))
        self._softmax = type(source).forward
        for name in _own_methods(type(source)):
            if not hasattr(self, name):
                setattr(self, name, FamilyMethod(getattr(type(source), name), self))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        sse_layout: SequenceLayout | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As that of `SSEAttention`; the window's mask comes with the other arguments, and padding is not zero."""
        precise, source, projected = precise_dtype(hidden_states), self._source(sse_layout), None
        if source is not self:
            projected = self._own(projections(source, self.spec, self.source_dims, hidden_states.flatten(0, 1)))
        packed, layout = self.heads(hidden_states, sse_layout, kwargs, precise, projected)
        heads = layout.unpack(packed, *hidden_states.shape[:2])
        kwargs = with_window(
            {**kwargs, LAYOUT: sse_layout}, self.layer_idx, self.mixer, self.cache_argument, self.order
        )
        if position_embeddings is not None:
            kwargs["position_embeddings"] = position_embeddings
        join = functools.partial(self._join, heads)
        result: tuple[Tensor, Tensor | None] = self._softmax(source, hidden_states, join=join, **kwargs)
        return result

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As that of `SSEAttention`, of the heads that SSE has."""
        return self._own(super().project(x))

    def _own(self, projected: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What of the projections belongs to heads that SSE has."""
        if self.order is None:
            return projected
        q, k, v = (self.order.apart(flat, -1)[1] for flat in projected)
        return q, k, v

    def _source(self, layout: SequenceLayout | None) -> Any:
        """What both branches take their projections from: where nothing is packed or differentiated, each runs once."""
        apart = layout is None or layout.tokens is not None
        if apart or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self
        return RunOnce(self, self.spec.qkv)

    def keep_for_softmax(self, name: str, parameter: nn.Parameter) -> None:
        """Take over a parameter of the source's softmax, which the window branch uses."""
        self.register_parameter(name, parameter)

    def state_layer(self, cache: Any) -> SSECacheLayer:
        """The part of the layer's cache that holds the state."""
        layer: SSECacheLayer = cache.layers[self.layer_idx].recurrent
        return layer

    def _join(self, heads: Tensor, window: Tensor) -> Tensor:
        return branch_sum(heads, window, self.sse_window_scale)


def branch_sum(heads: Tensor, window: Tensor, window_scale: Tensor) -> Tensor:
    """SSE's heads [..., Hq * D] and the window's [..., Hq, D], times its scale [Hq], added in the latter's form."""
    dtype = precise_dtype(window)
    scale = window_scale.to(dtype)[:, None]
    return (window.to(dtype) * scale + heads.view(window.shape)).to(window.dtype)


def attention_layer(
    source: nn.Module, config: Any, layer_idx: int, *, spec: ArchSpec, mixer: SSEMixer, backend: str = "auto"
) -> SSEAttention:
    """The layer of a recurrent mixer; see `SSEAttention` for arguments, it and `compat.cache_argument` for errors."""
    kind = SSESlidingAttention if isinstance(mixer, SSESlidingMixer) else SSEAttention
    layer = kind(source, config, layer_idx, spec=spec, mixer=mixer, backend=backend)
    layer.cache_argument = cache_argument(type(source))
    return layer
