"""Configurations of converted models, derived on demand from the source family's: `SSEQwen3Config` and so on."""

import copy
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from sse_convert.errors import CheckpointError
from sse_convert.mixers import FULL, Mixer, mixer_from_dict
from sse_convert.modeling.arch_spec import DELTA, LENT_FILE, SSE_PREFIX, ArchSpec, decoder_config
from sse_convert.modeling.architectures import (
    ARCHITECTURES,
    GUARD,
    IMAGE_TEXT,
    INSIDE,
    check_text_type,
    source_fields,
    source_spec,
    spec_for,
)
from sse_convert.modeling.remote_code import CODE_FOLDER, CONFIGURATION_FILE, MODELING_FILE, write_remote_code

_Source: Any = object
"""what the mixin is put in front of; to a type checker, a class with any attribute"""
FORMAT = 2
"""of the field `sse`"""
SMALL_FORMAT = 3
"""of a small checkpoint's, which versions that know no such ones must not load"""
_GUARD_TEXT = "this checkpoint has SSE layers: load it with {}, not as its source class"


class SSEConfigMixin(_Source):
    """Adds the field `sse` to a source configuration; `layer_types` keeps the source's values.

    `sse` holds format, source_model_type, layers (a mixer name or `full` per layer), mixers (name to settings),
    base_model, base_revision, recipe, recipe_hash and backend.
    """

    base_model_tp_plan = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop(GUARD, None)
        if isinstance(inside := getattr(self, "text_config", None), dict):
            self.text_config = source_fields(inside)
        super().__post_init__(**kwargs)
        hand_down(self)
        if self.sse is not None:
            layer_mixers(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the entry points of the code that travels with the checkpoint."""
        found = {**super().to_dict(), **entry_points(self.model_type)}
        if "text_config" in found:
            found["text_config"] = {k: v for k, v in found["text_config"].items() if k not in ("sse", "auto_map")}
        return found

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json stores."""
        return {**super().to_diff_dict(), **entry_points(self.model_type)}

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: on this transformers would copy code beside config.json, and `save_pretrained` writes it already."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json and the code files that load the model where sse_convert is not installed."""
        write_remote_code(Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


def entry_points(model_type: str) -> dict[str, Any]:
    """The fields of config.json that name the code beside it, and stop classes that would load the model wrongly.

    Args:
        model_type: of a converted model.

    Raises:
        CheckpointError: the family is unknown.
    """
    spec = source_spec(model_type)
    return {
        "auto_map": {
            "AutoConfig": f"{CODE_FOLDER}/{CONFIGURATION_FILE}.{spec.hybrid_config}",
            **{auto: f"{CODE_FOLDER}/{MODELING_FILE}.{name}" for auto, name in spec.auto_classes.items()},
        },
        # transformers only warns when a source class loads a foreign model_type; it does take a nested dict that
        # names its own model_type for the real configuration, and this one fails with the text.
        GUARD: {
            "model_type": spec.model_type,
            "text_config" if spec.text_types else "vocab_size": _GUARD_TEXT.format(spec.auto_class),
        },
    }


def hand_down(config: Any) -> None:
    """Give the configuration of the language model inside a converted model the field `sse` of the whole.

    Args:
        config: of any converted model; nothing happens where nothing is inside.

    Raises:
        CheckpointError: the language model is of another family than the entry says.
    """
    inside = decoder_config(config)
    if config.sse is None or inside is config:
        return
    name = inside.model_type.removeprefix(SSE_PREFIX)
    check_text_type(spec_of(config), name)
    if name == inside.model_type:
        inside = copy.copy(inside)
        inside.__class__ = config_class_for(type(inside))
        vars(inside).pop("model_type", None)  # that of the source, where its config.json named it
        config.text_config = inside
    inside.sse = {**config.sse, "source_model_type": name}


def layer_mixers(config: Any) -> list[Mixer | None]:
    """The mixer of each layer; None for the teacher's softmax attention, untouched.

    A function, not a method: remote code may hold two copies of these classes, one beside the configuration and one
    beside the model, and a model needs its own.

    Args:
        config: a converted model's configuration.

    Raises:
        CheckpointError: the field `sse` is missing, of another format, or does not fit the model.
    """
    return stored_mixers(checked_sse(config.sse, spec_of(config), decoder_config(config).num_hidden_layers))


def stored_mixers(sse: dict[str, Any]) -> list[Mixer | None]:
    """The mixer of each layer that a field `sse` names; None for softmax attention.

    Raises:
        CheckpointError: a mixer or one of its settings is unknown.
    """
    try:
        mixers = {name: mixer_from_dict(data) for name, data in sse["mixers"].items()}
        return [None if name == FULL else mixers[name] for name in sse["layers"]]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"config.json: the field sse does not describe the layers: {error}",
            expected=f"layers named {FULL!r} or after an entry of sse.mixers",
            fix="convert the model again",
        ) from error


def checked_sse(sse: dict[str, Any] | None, spec: ArchSpec, num_layers: int) -> dict[str, Any]:
    """The field `sse` of a converted model, once its form is known to be right.

    Args:
        sse: the field, if there is one.
        spec: the family of the source.
        num_layers: layers of the model.

    Raises:
        CheckpointError: it is missing, of another format, or does not fit the model.
    """
    problems: list[str] = []
    if not isinstance(sse, dict):
        problems.append("is missing")
    elif sse.get("format") != (known := SMALL_FORMAT if DELTA in sse else FORMAT):
        problems.append(f"has format {sse.get('format')!r}, expected {known}")
    elif missing := {"source_model_type", "layers", "mixers"} - sse.keys():
        problems.append(f"lacks {sorted(missing)}")
    else:
        if sse["source_model_type"] != spec.model_type:
            problems.append(f"has source_model_type {sse['source_model_type']!r}, expected {spec.model_type!r}")
        if not isinstance(sse["layers"], list) or not isinstance(sse["mixers"], dict):
            problems.append("has other than a list of layers and a mapping of mixers")
        elif len(sse["layers"]) != num_layers:
            problems.append(f"names {len(sse['layers'])} layers, the model has {num_layers}")
    if problems or sse is None:
        raise CheckpointError(
            f"config.json: the field sse {'; '.join(problems)}",
            expected="a checkpoint written by sse-convert of this format",
            fix="convert the model again, or upgrade sse-convert",
        )
    return sse


def small_entry(sse: dict[str, Any]) -> dict[str, Any]:
    """The field `sse` of a small checkpoint, from that of a whole one."""
    return {**sse, "format": SMALL_FORMAT, DELTA: LENT_FILE}


def whole_entry(sse: dict[str, Any]) -> dict[str, Any]:
    """The field `sse` of a whole checkpoint, from that of a small one."""
    return {**{key: value for key, value in sse.items() if key != DELTA}, "format": FORMAT}


def spec_of(config: Any) -> ArchSpec:
    """The family of a converted model's configuration (or its class)."""
    return source_spec(config.model_type)


_CLASSES: dict[type, type] = {}


def config_class_for(source: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The configuration class of converted models of a source family; the same class each time.

    Raises:
        CheckpointError: the family is unknown.
    """
    if source not in _CLASSES:
        spec = source_spec(source.model_type)
        namespace = {
            "__annotations__": {"sse": dict[str, Any] | None},
            "sse": None,
            "model_type": spec.hybrid_type,
            "__module__": __name__,
            "__qualname__": spec.hybrid_config,
            "__doc__": f"{spec.config_class} of a model with converted layers.",
        }
        _CLASSES[source] = type(spec.hybrid_config, (SSEConfigMixin, source), namespace)
    return _CLASSES[source]


def build_config(source: PreTrainedConfig, sse: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of a converted model: the source's, with the field `sse`.

    Args:
        source: the teacher's configuration.
        sse: the field's content; `format`, `source_model_type` and `backend` are filled in.

    Raises:
        CheckpointError: the family is unknown, already converted, or `sse` does not fit the model.
    """
    spec = spec_for(source.model_type)
    fields = source.to_dict()
    for name in ("model_type", "transformers_version", "architectures", "auto_map"):
        fields.pop(name, None)
    sse = {"format": FORMAT, "source_model_type": spec.model_type, "backend": "auto", **sse}
    config = config_class_for(type(source))(**fields, sse=sse)
    config.architectures = [spec.hybrid_causal_lm]
    return config


def __getattr__(name: str) -> type[PreTrainedConfig]:
    for spec in (ARCHITECTURES | IMAGE_TEXT | INSIDE).values():
        if name == spec.hybrid_config:
            return config_class_for(getattr(transformers, spec.config_class))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
