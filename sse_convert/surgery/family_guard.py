"""Whether a family's entry names everything that its attention does, before anything expensive starts.

A converted layer does what its `ArchSpec` says and no more: a norm, gate or clip of the family's attention that the
entry does not name would be lost without a sign. So the model is built without data, and each of its attention modules
is compared with the entry: children, parameters, buffers, arguments, and the config fields that its code reads.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

from sse_convert.checkpoints.meta_model import skeleton
from sse_convert.errors import CheckpointError
from sse_convert.modeling.arch_spec import ArchSpec, decoder_config
from sse_convert.modeling.attention_dims import attention_dims, softmax_layers
from sse_convert.modeling.compat import LAYER_CACHE_NAMES
from sse_convert.modeling.projections import is_rotated

SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "per_layer_config",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_hidden_layers",
    "max_position_embeddings",
)
"""config fields that shapes follow from"""
MODULES = (
    "attention_bias",
    "attention_out_bias",
    "use_bias",
    "use_qkv_bias",
    "qkv_bias",
    "rms_norm_eps",
    "layer_norm_eps",
)
"""config fields that are in the modules a converted layer takes over"""
ROTATION = ("rope_parameters", "no_rope_layers", "layer_types")
"""config fields that are in the tables (cos, sin) that a layer is handed, or in `ArchSpec.rotated_layers`"""
SOFTMAX = (
    "_attn_implementation", "attention_dropout", "attention_multiplier", "attn_logit_softcapping",
    "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern", "use_sliding_window", "attention_chunk_size",
    "pretraining_tp",
)  # fmt: skip
"""config fields of what SSE replaces: scores, their scale, who sees whom"""
ARGUMENTS = (
    "hidden_states", "position_embeddings", "attention_mask", "position_ids", "cache_position", "output_attentions",
    "use_cache", "head_mask",
)  # fmt: skip
"""arguments of an attention module that a converted layer takes, or that only softmax needs"""


def check_family(config: Any, spec: ArchSpec) -> None:
    """Make sure that a model is what its family's entry describes.

    Args:
        config: the transformers configuration of the source.
        spec: the entry.

    Raises:
        CheckpointError: naming what the entry does not.
    """
    refuse_family(spec, model_problems(skeleton(config), spec))


def refuse_family(spec: ArchSpec, problems: list[str]) -> None:
    """Raise the problems of a model, if there are any.

    Raises:
        CheckpointError: with each of them.
    """
    if problems:
        raise CheckpointError(
            f"this {spec.model_type} model has what its family's entry does not name, and conversion would lose: "
            + "; ".join(problems),
            expected=f"attention as in the entry {spec.model_type!r} of sse_convert/modeling/architectures.py",
            fix="convert another checkpoint, or describe it in the entry if one can (docs: Add a family)",
        )


def model_problems(model: Any, spec: ArchSpec) -> list[str]:
    """What of a model an entry does not name; each thing once, with the first layer that has it.

    Args:
        model: the causal language model of the source, with or without data.
        spec: the entry.
    """
    if model.config_class.__name__ != spec.config_class:
        return [f"class {type(model).__name__}, which belongs to {model.config_class.__name__}"]
    layers = dict(model.named_modules()).get(spec.layers_path)
    if not isinstance(layers, nn.ModuleList):
        return [f"no decoder layers at {spec.layers_path}"]
    config = decoder_config(model.config)
    softmax = softmax_layers(config)
    found: dict[str, int] = {}
    if not getattr(config, "is_causal", True):
        return ["attention to later tokens (is_causal is False)"]
    for index, layer in enumerate(layers):
        for problem in _layer_problems(layer, config, spec, index, linear=index not in softmax):
            found.setdefault(problem, index)
    return [f"{problem} (layer {index})" for problem, index in found.items()]


def _layer_problems(layer: Any, config: Any, spec: ArchSpec, index: int, *, linear: bool) -> Iterator[str]:
    attention = getattr(layer, spec.attention, None)
    if linear and spec.linear_layers:
        return
    if attention is None or isinstance(attention, nn.ModuleList):
        yield f"a {type(layer).__name__} without attention at {spec.attention}"
        return
    own_values = spec.keys_as_values is None or attention_dims(config, index).own_values
    spec = spec.of(config, rotated=is_rotated(attention, spec), own_values=own_values)
    known = {*spec.children, *spec.inert, *spec.softmax_parameters}
    have = dict(attention.named_children())
    yield from (f"no module {name}" for name in spec.children if name not in have)
    yield from (f"module {name}" for name in have if name not in known)
    parts = {"parameter": attention.named_parameters(recurse=False), "buffer": attention.named_buffers(recurse=False)}
    for what, tensors in parts.items():
        yield from (f"{what} {name}" for name, _ in tensors if name not in known)
    kind: Any = type(attention)
    yield from (f"argument {name} of its forward" for name in _arguments(kind) if name not in _known_arguments(spec))
    for name in _fields(kind):
        if name not in _known_fields(spec) and (value := _value(config, name)):
            yield f"config field {name} = {value!r}"
    layer_kind: Any = type(layer)
    if spec.hands_on and not _hands_on(layer_kind, spec.attention):
        yield f"{layer_kind.__name__}.forward, which hands no keyword arguments to {spec.attention}"


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' error for fields that vary by layer
        return "one for each layer"


@functools.cache
def _known_arguments(spec: ArchSpec) -> frozenset[str]:
    return frozenset((*ARGUMENTS, *LAYER_CACHE_NAMES, *spec.arguments))


@functools.cache
def _known_fields(spec: ArchSpec) -> frozenset[str | None]:
    named = {spec.output_dropout, spec.qk_norm_switch, spec.keys_as_values} - {None}
    return frozenset((*SIZES, *MODULES, *ROTATION, *SOFTMAX, *named, *spec.switches))


@functools.cache
def _arguments(kind: Any) -> tuple[str, ...]:
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Config fields that the code of a module's class and of its bases reads."""
    return tuple(sorted({name for node in _code(kind) if (name := _field(node)) is not None}))


def _field(node: ast.AST) -> str | None:
    """`name` of `config.name`, `self.config.name` and `getattr(config, "name", ...)`."""
    if isinstance(node, ast.Attribute) and _is_config(node.value):
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        owner, name, *_ = node.args
        if _is_config(owner) and isinstance(name, ast.Constant):
            return str(name.value)
    return None


def _is_config(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "config") or (
        isinstance(node, ast.Attribute) and node.attr == "config"
    )


@functools.cache
def _hands_on(kind: Any, attention: str) -> bool:
    """Whether a decoder layer gives its own keyword arguments to its attention."""
    calls = (node for node in _code(kind) if isinstance(node, ast.Call))
    ours = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == attention]
    return any(word.arg is None for call in ours for word in call.keywords)


def _code(kind: type[nn.Module]) -> Iterator[ast.AST]:
    """The syntax of a class and of its bases, as far as they belong to the family."""
    for cls in kind.__mro__:
        if cls is not object and not cls.__module__.startswith("torch."):
            yield from ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls))))
