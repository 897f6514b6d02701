"""Private APIs of torch and transformers that the model itself needs. This file travels inside checkpoints."""

import inspect
import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.cache_utils import DynamicLayer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import create_causal_mask
from transformers.utils import output_capturing

from sse_convert.errors import CheckpointError

CACHE_NAMES = ("cache", "past_key_values")
"""what versions of transformers call the cache among a model's arguments: the newer name first"""
CACHE = next(name for name in CACHE_NAMES if name in inspect.signature(create_causal_mask).parameters)
"""what this version calls it, in arguments and outputs"""
LAYER_CACHE_NAMES = (*CACHE_NAMES, "layer_past")
"""what families call it among the arguments of their attention"""

_VARLEN_SHARES_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_FIRST_DOT = re.compile(r"^\.")


def cache_argument(attention: type[nn.Module]) -> str:
    """What a family's class of attention calls the cache among its forward's arguments.

    Raises:
        CheckpointError: none of the known names is there: without the cache a layer would forget what it has seen.
    """
    arguments = inspect.signature(attention.forward).parameters
    for name in LAYER_CACHE_NAMES:
        if name in arguments:
            return name
    raise CheckpointError(
        f"{attention.__name__} of transformers {transformers.__version__} takes no cache under a known name",
        expected=f"one of {', '.join(LAYER_CACHE_NAMES)}",
        fix="install a version of transformers that this one was tried with",
    )


class GrowingLayer(DynamicLayer):
    """transformers' keys and values of a softmax layer; its 5.17 cannot crop those that saw nothing, above an early
    exit."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens."""
        if self.is_initialized:
            super().crop(tokens_to_remove)


def in_backward() -> bool:
    """Whether the autograd engine runs, as where gradient checkpointing repeats a forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def record_outputs(model: Any) -> None:
    """Enter a model of another class than it was made with in transformers' registry of recordable outputs, which goes
    by class name."""
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(model.__class__), model._can_record_outputs)


def has_hooks(module: nn.Module) -> bool:
    """Whether something runs before or after a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooks_of(module: nn.Module) -> list[Any]:
    """What runs before or after a module's forward."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def is_bare(module: nn.Module) -> bool:
    """Whether a module is no more than its class says: no hook, no forward of another."""
    return not (has_hooks(module) or "forward" in vars(module))


def mark_static(tensor: Tensor) -> None:
    """Tell torch.compile's CUDA graphs that a tensor stays where it is."""
    torch._dynamo.mark_static_address(tensor)


def share_weight_names(source: Any, name: str, model_type: str) -> None:
    """Give a derived class what transformers renames or merges on loading, and takes apart on saving: GPT-NeoX stores
    its head as embed_out, and experts are stored one by one. It goes by class name, else by model type.

    Args:
        source: the class of the family.
        name: of the derived class.
        model_type: of the derived configuration.
    """
    for theirs, ours in ((source.__name__, name), (source.config_class.model_type, model_type)):
        if (rules := get_checkpoint_conversion_mapping(theirs)) is not None:
            register_checkpoint_conversion_mapping(ours, [_of_whole_words(rule) for rule in rules], overwrite=True)


def _of_whole_words(rule: Any) -> Any:
    """A renaming whose first dot is a dot: by Phimoe's, `.router.weight` would be found in `sse_router.weight`."""
    if type(rule) is not WeightRenaming:
        return rule
    ways = rule.source_patterns, rule.target_patterns
    return WeightRenaming(*([_FIRST_DOT.sub(r"\\.", name) for name in names] for names in ways))


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Torch's causal attention within documents, under the arguments that this version of torch has for it.

    Args:
        q: [T, Hq, D].
        k: [T, H, D].
        v: [T, H, D].
        offsets: int32 [S + 1], where documents begin, then T.
        longest: no document has more tokens.
        scaling: of the products; None for D ** -0.5.
        window: tokens a query sees, itself included; None for all.
    """
    more: dict[str, Any] = {"enable_gqa": True} if _VARLEN_SHARES_KEYS else {}
    o = varlen_attn(q, k, v, *_within(offsets, longest), scale=scaling, window_size=(_before(window), 0), **more)
    assert isinstance(o, Tensor)
    return o


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scaling: float, window: int | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Heads [T, Hq, D] of `varlen_attention`, the log-sum-exp [Hq, T] of each query's scores, in float32, and what the
    backward wants beside them. Nothing is recorded for autograd. Arguments as of `varlen_attention`.
    """
    flash = torch.ops.aten._flash_attention_forward
    where = _within(offsets, longest)
    o, scores, *state, _ = flash(q, k, v, *where, 0.0, window is None, False, **_seen(scaling, window))
    return o, scores, state


def varlen_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    scores: Tensor,
    offsets: Tensor,
    longest: int,
    scaling: float,
    window: int | None,
    state: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, which with other arguments are as of `varlen_attention`.

    Args:
        do: gradient of the heads [T, Hq, D].
        o: the heads.
        scores: the log-sum-exp [Hq, T].
        state: what `varlen_forward` gave third.
    """
    flash = torch.ops.aten._flash_attention_backward
    where = _within(offsets, longest)
    found = flash(do, q, k, v, o, scores, *where, 0.0, window is None, *state, **_seen(scaling, window))
    dq, dk, dv = found
    return dq, dk, dv


def _within(offsets: Tensor, longest: int) -> tuple[Tensor, Tensor, int, int]:
    return offsets, offsets, longest, longest


def _seen(scaling: float | None, window: int | None) -> dict[str, Any]:
    """Keyword arguments of torch's flash attention."""
    return {"scale": scaling, "window_size_left": _before(window), "window_size_right": 0}


def _before(window: int | None) -> int:
    """Tokens that a query sees before itself, as torch's flash attention counts them."""
    return -1 if window is None else window - 1
