"""A checkpoint that can be converted: its family, sizes and tensors, checked against each other from headers alone."""

import dataclasses as dc
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.foreign import check_sizes, refusing
from sse_convert.checkpoints.open import CheckpointFiles, open_checkpoint
from sse_convert.checkpoints.safetensors_io import FLOAT_DTYPES
from sse_convert.checkpoints.tokenizer_ids import tokenizer_size
from sse_convert.errors import CheckpointError
from sse_convert.modeling.arch_spec import SSE_PREFIX, ArchSpec, decoder_config
from sse_convert.modeling.architectures import check_text_type, source_fields, source_spec, spec_for
from sse_convert.modeling.attention_dims import (
    AttentionDims,
    attention_dims,
    dims_by_layer,
    native_windows,
    separable_heads,
    softmax_layers,
)
from sse_convert.recipe.problems import shortened
from sse_convert.report import counted

DEQUANTISED = ("fp8", "mxfp4")
"""quantisations that `sse-convert dequantize` undoes"""
_OLDER_PREFIXES = ("language_model.model.", "model.")


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SourceModel:
    """A model of a known family that can be converted, in files or in memory, as its configuration describes it."""

    name: str
    """what messages call it"""
    spec: ArchSpec
    """the family"""
    config: Any
    """transformers configuration object, with the family's defaults filled in"""
    dims: AttentionDims
    """sizes of an attention layer: of the first, where they differ"""

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.text.num_hidden_layers)

    @property
    def text(self) -> Any:
        """Configuration of the decoder: `config`, but in models of images and text."""
        return decoder_config(self.config)

    @property
    def windows(self) -> list[int | None]:
        """Native sliding window of each layer, None for full attention."""
        return native_windows(self.config)

    def dims_of(self, layer: int) -> AttentionDims:
        """Sizes of a layer's attention."""
        return attention_dims(self.config, layer)

    @property
    def softmax_layers(self) -> list[int]:
        """Indices of the layers with softmax attention."""
        return softmax_layers(self.config)

    @property
    def separable_heads(self) -> tuple[int, ...]:
        """Key-value heads of each layer of which some can stay softmax; 0 where none can."""
        return separable_heads(self.config)


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Teacher(SourceModel):
    """A checkpoint of a known family whose attention has the shapes its config says."""

    files: CheckpointFiles
    """config, headers, folder"""
    stored_prefix: str
    """what stored tensor names begin with where the causal LM's begin with the backbone: the same, an older name, or
    nothing"""

    def stored(self, name: str) -> str:
        """The name under which the checkpoint stores the causal LM's tensor `name`."""
        backbone = f"{self.spec.backbone}."
        return self.stored_prefix + name.removeprefix(backbone) if name.startswith(backbone) else name

    def attention_tensor(self, layer: int, name: str) -> str:
        """Stored name of a tensor of a layer's attention."""
        return self.stored(f"{self.spec.attention_path(layer)}.{name}")

    @property
    def dtype(self) -> str:
        """Stored dtype of the attention weights, which new tensors take too."""
        return self.files.tensors[self.attention_tensor(self.softmax_layers[0], f"{self.spec.output}.weight")].dtype

    @property
    def embedding(self) -> str:
        """Stored name of the token embeddings."""
        return self.stored(f"{self.spec.backbone}.{self.spec.embeddings}.weight")


def open_teacher(source: str | Path, revision: str | None = None) -> Teacher:
    """Open a checkpoint for conversion.

    Raises:
        CheckpointError: see `open_checkpoint`; also an unknown family, a converted or quantised checkpoint, another
            head than the language-model head, or config, tensors and tokenizer that do not fit together.
        HubError: the hub refused or cannot be reached.
    """
    return as_teacher(open_checkpoint(source, revision))


def as_teacher(files: CheckpointFiles) -> Teacher:
    """Check that an opened checkpoint can be converted.

    Raises:
        CheckpointError: see `open_teacher`.
    """
    spec = spec_for(files.model_type)
    _check_kind(files, spec)
    config = build_source_config(files.config, files.name)
    check_sharing(config, files.name)
    teacher = _described(files, spec, config)
    _check_tensors(teacher)
    _check_vocabulary(teacher)
    return teacher


def source_view(files: CheckpointFiles) -> Teacher:
    """A converted (or plain) checkpoint seen as its source model: without the new tensors and the field `sse`.

    Raises:
        CheckpointError: the family is unknown, or config and tensors do not fit together, such as quantised ones.
    """
    spec = source_spec(files.model_type)
    raw = source_fields(files.config)
    config = build_source_config(raw, files.name)
    kept = {name: info for name, info in files.tensors.items() if not is_new_tensor(name)}
    view = _described(dc.replace(files, config=raw, tensors=kept), spec, config)
    try:
        _check_tensors(view)
    except CheckpointError:
        refuse_quantised(files)
        raise
    return view


def _described(files: CheckpointFiles, spec: ArchSpec, config: Any) -> Teacher:
    """An opened checkpoint of a family as its configuration describes it."""
    return Teacher(
        name=files.name,
        files=files,
        spec=spec.of(config),
        config=config,
        dims=attention_dims(config),
        stored_prefix=_stored_prefix(files, spec),
    )


def is_new_tensor(name: str) -> bool:
    """Whether a tensor was added by conversion."""
    return any(part.startswith(SSE_PREFIX) for part in name.split("."))


def build_source_config(raw: dict[str, Any], name: str) -> Any:
    """The transformers configuration object of config.json.

    Args:
        raw: config.json of a source family.
        name: the checkpoint, for messages.

    Raises:
        CheckpointError: heads do not divide, or transformers refuses the values or lacks the family.
    """
    from transformers import CONFIG_MAPPING, __version__

    if raw["model_type"] not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{name} is a {raw['model_type']} model, which transformers {__version__} does not have",
            expected=f"transformers newer than {__version__}",
            fix="upgrade transformers",
        )
    family = CONFIG_MAPPING[raw["model_type"]]
    check_sizes(raw, family.attribute_map, name)
    if isinstance(inside := raw.get("text_config"), dict):
        check_sizes(inside, {}, name)
    with refusing(
        f"config.json of {name} does not describe a {raw['model_type']} model",
        expected="a configuration that transformers can build",
        fix="correct config.json, or download it again",
    ):
        config = config_object(raw)
        config.to_dict()
    if (decoder := decoder_config(config)) is not config:
        check_text_type(source_spec(config.model_type), decoder.model_type)
    dims = max(dims_by_layer(config), key=lambda dims: dims.query_heads % dims.kv_heads)
    if dims.query_heads % dims.kv_heads:
        raise CheckpointError(
            f"config.json of {name}: {dims.query_heads} attention heads over {dims.kv_heads} key-value heads",
            expected="num_attention_heads divisible by num_key_value_heads",
            fix="correct config.json",
        )
    if (types := getattr(decoder, "layer_types", None)) is not None and len(types) != decoder.num_hidden_layers:
        raise CheckpointError(
            f"config.json of {name}: {len(types)} layer_types for {decoder.num_hidden_layers} layers",
            expected="one for each layer",
            fix="correct config.json, or download it again",
        )
    return config


def check_sharing(config: Any, name: str) -> None:
    """Make sure that every layer has keys and values of its own.

    Raises:
        CheckpointError: some reuse those of others.
    """
    if shared := getattr(decoder_config(config), "num_kv_shared_layers", 0):
        raise CheckpointError(
            f"config.json of {name}: num_kv_shared_layers is {shared}, so its last layers reuse the keys and values of "
            "earlier ones, which a converted layer does not make",
            expected="num_kv_shared_layers: 0",
            fix="convert a checkpoint whose layers have keys and values of their own",
        )


def config_object(raw: dict[str, Any]) -> Any:
    """The transformers configuration of config.json, source or converted, of a model type that transformers knows."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[raw["model_type"]].from_dict(_with_floats(raw))


def _with_floats(value: Any) -> Any:
    """JSON data with transformers' stand-ins for what JSON cannot say, such as {"__float__": "Infinity"}, replaced."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(part) for key, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


def _check_kind(files: CheckpointFiles, spec: ArchSpec) -> None:
    refuse_quantised(files)
    classes = files.config.get("architectures") or [spec.causal_lm_class]
    if not isinstance(classes, list) or spec.causal_lm_class not in classes:
        found = shortened(", ".join(map(str, classes)) if isinstance(classes, list) else repr(classes))
        raise CheckpointError(
            f"{files.name} is a {found}",
            expected=f"a {_kind(spec)}: {spec.causal_lm_class}",
            fix="use the checkpoint with a language-model head",
        )


def _kind(spec: ArchSpec) -> str:
    return "model of images and text" if spec.text_types else "causal language model"


def quantization_method(files: CheckpointFiles) -> str | None:
    """How config.json says that weights are quantised, such as fp8, mxfp4 or gptq; None where they are not."""
    quantization = files.config.get("quantization_config")
    if not quantization:
        return None
    return shortened(
        str(quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization)
    )


def refuse_quantised(files: CheckpointFiles) -> None:
    """Make sure that weights are whole.

    Raises:
        CheckpointError: config.json says that they are quantised.
    """
    if (method := quantization_method(files)) is not None:
        raise quantised(files, method)


def quantised(files: CheckpointFiles, method: str) -> CheckpointError:
    """The refusal of a checkpoint whose weights are quantised."""
    if files.model_type.startswith(SSE_PREFIX):
        fix = "name the converted folder that this was made from; eval, generate and chat take a quantised one"
    elif method in DEQUANTISED:
        command = f"sse-convert dequantize {shlex.quote(files.name)} -o FOLDER"
        fix = f"make a bfloat16 copy and convert that: {command}, and model: FOLDER"
    elif method == "bitsandbytes":
        fix = (
            "convert the original model and quantise the result; without it, on a GPU: AutoModelForCausalLM."
            f"from_pretrained({files.name!r}).dequantize().save_pretrained(FOLDER), and model: FOLDER"
        )
    else:
        fix = "convert the original model, which the model card names, and quantise the result"
    return CheckpointError(
        f"{files.name} is quantised ({method})", expected="float32, bfloat16 or float16 weights", fix=fix
    )


def _stored_prefix(files: CheckpointFiles, spec: ArchSpec) -> str:
    """`model.` and the like, or what transformers once called a language model inside another model; empty for
    checkpoints saved from the backbone alone, such as the original GPT-2."""
    prefixes = (f"{spec.backbone}.", *(_OLDER_PREFIXES if spec.text_types else ()))
    layers = {prefix: f"{prefix}{spec.layers}." for prefix in prefixes}
    return next((p for p in prefixes if any(name.startswith(layers[p]) for name in files.tensors)), "")


def attention_shapes(spec: ArchSpec, dims: AttentionDims) -> dict[str, tuple[int, ...]]:
    """Shapes of the teacher's projection weights of one layer, by name below the attention module."""
    query, key = dims.query_heads * dims.head_dim, dims.kv_heads * dims.head_dim
    if spec.qkv_layout == "latent":
        shapes = _latent_shapes(spec, dims)
    elif spec.qkv_layout == "separate":
        shapes = dict(
            zip(
                spec.qkv,
                ((query * (2 if spec.gated else 1), dims.hidden), (key, dims.hidden), (key, dims.hidden)),
                strict=dims.own_values,
            )
        )
    else:
        shapes = {spec.qkv[0]: (query + 2 * key, dims.hidden)}
    shapes[spec.output] = (dims.hidden, dims.query_heads * dims.value_dim)
    return {f"{name}.weight": shape[::-1] if spec.conv1d else shape for name, shape in shapes.items()}


def _latent_shapes(spec: ArchSpec, dims: AttentionDims) -> dict[str, tuple[int, ...]]:
    assert dims.latent is not None
    rank, shared, first = dims.latent.key_value, dims.latent.shared_key, dims.latent.query
    query = dims.query_heads * dims.head_dim
    of_query = ((query, dims.hidden),) if first is None else ((first, dims.hidden), (first,), (query, first))
    expanded = dims.kv_heads * (dims.head_dim - shared + dims.value_dim)
    return dict(zip(spec.qkv, (*of_query, (rank + shared, dims.hidden), (rank,), (expanded, rank)), strict=True))


def _layer_shapes(teacher: Teacher, layer: int) -> dict[str, tuple[int, ...]]:
    dims = teacher.dims_of(layer)
    return attention_shapes(teacher.spec.of(teacher.config, own_values=dims.own_values), dims)


def _check_tensors(teacher: Teacher) -> None:
    expected = {
        teacher.attention_tensor(layer, name): shape
        for layer in teacher.softmax_layers
        for name, shape in _layer_shapes(teacher, layer).items()
    }
    expected[teacher.embedding] = (teacher.text.vocab_size, teacher.dims.hidden)
    check_shapes(teacher.files, expected)
    check_floats(
        teacher.files, [name for name in teacher.files.tensors if name in expected or name.endswith(".weight")]
    )


def check_floats(files: CheckpointFiles, names: Iterable[str]) -> None:
    """Make sure that tensors are stored as numbers that a model computes with.

    Raises:
        CheckpointError: naming the first one that is not, such as one of a quantised model.
    """
    for name in names:
        if (dtype := files.tensors[name].dtype) not in FLOAT_DTYPES:
            raise CheckpointError(
                f"tensor {name} of {files.name} is stored as {dtype}",
                expected=f"one of {', '.join(FLOAT_DTYPES)}",
                fix="convert the original, unquantised model",
            )


def check_shapes(files: CheckpointFiles, expected: dict[str, tuple[int, ...]]) -> None:
    """Make sure that tensors exist and have the expected shapes.

    Raises:
        CheckpointError: naming the first ones that do not.
    """
    if missing := [name for name in expected if name not in files.tensors]:
        raise CheckpointError(
            f"{files.name} lacks {counted(len(missing), 'tensor')} that its config calls for: {', '.join(missing[:3])}",
            expected=f"the tensors of a {files.model_type} model",
            fix="download the checkpoint again, or correct config.json",
        )
    for name, shape in expected.items():
        if (found := files.tensors[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name} of {files.name} has shape {list(found)}",
                expected=f"{list(shape)}, from config.json",
                fix="use the config.json that belongs to these weights",
            )


def _check_vocabulary(teacher: Teacher) -> None:
    size = tokenizer_size(teacher.files.folder)
    rows = teacher.text.vocab_size
    if size is not None and size > rows:
        raise CheckpointError(
            f"the tokenizer of {teacher.files.name} has ids up to {size - 1}, the embedding has {rows} rows",
            expected=f"token ids below {rows}",
            fix="use the tokenizer that belongs to these weights, or resize the embedding first",
        )
