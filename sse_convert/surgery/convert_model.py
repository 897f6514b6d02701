"""Convert a model that is in memory, by what converts checkpoints: family, layers, configuration and new tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.checkpoints.meta_model import filled_model
from sse_convert.checkpoints.safetensors_io import FLOAT_DTYPES
from sse_convert.checkpoints.teacher import SourceModel, check_sharing
from sse_convert.errors import CheckpointError, UsageError
from sse_convert.mixers import BUILT_IN, FULL, Mixer, mixer_to_dict
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.tried import warn_of_newer
from sse_convert.recipe.build import build
from sse_convert.recipe.problems import Problem, dotted, shortened, suggest
from sse_convert.recipe.recommended import MIXER, recommended_mixer
from sse_convert.surgery.compatibility import mixer_problems
from sse_convert.surgery.convert import fresh_tensors
from sse_convert.surgery.family_guard import model_problems, refuse_family

_UNWRAPPED = {
    "PeftModel": "give model.merge_and_unload(), or convert first and add adapters then",
    "DataParallel": "give model.module",
    "DistributedDataParallel": "give model.module",
    "OptimizedModule": "give the model before torch.compile",
}
"""class of what is around a model -> how to get at it"""


def convert_model(
    model: PreTrainedModel, *, keep: Sequence[int], mixer: str | Mapping[str, Any] | None = None, seed: int = 0
) -> PreTrainedModel:
    """A hybrid of a model in memory: its softmax attention becomes `mixer` in all layers but those of `keep`.

    The model stays as it is, so that it can be the teacher of `kl_loss`. The hybrid has weights of its own: memory
    holds them twice, and training it changes nothing in the model. It has the model's device, dtypes and mode; all its
    parameters can be trained, also where the model is frozen. Its `save_pretrained` writes what
    `AutoModelForCausalLM.from_pretrained` loads.

    The command `convert` makes the same of a folder, with the same seed to the bit. `calibrate` comes next.

    Args:
        model: of `AutoModelForCausalLM` (or `AutoModelForImageTextToText`), on one device.
        keep: indices of the layers that stay softmax attention; negative ones count from the end. Layers of linear
            attention stay in any case.
        mixer: what the others become: the name of a built-in mixer (sse, sse+sliding, sliding, paper, gla, gdn),
            or settings as in a recipe, with their kind: `{"kind": "sse+sliding", "window": 256}`. Unset: SSE
            beside a window as `sse-convert recipes new` has it beside whole layers.
        seed: of the new tensors.

    Raises:
        UsageError: the model is wrapped, spread over devices or without weights, `keep` names no layers of it or all,
            or the mixer is unknown or does not fit the model.
        CheckpointError: the model is converted already, quantised, or of a family that cannot be converted.
    """
    source = _source(model)
    built = _mixer(mixer, source)
    names = _layer_names(keep, built.kind, source)
    warn_of_newer()
    sse = {"layers": names, "mixers": {built.kind: mixer_to_dict(built)}, "base_model": source.name}
    tensors: dict[str, Tensor] = _copies(model)
    output = f"{source.spec.attention_path(source.softmax_layers[0])}.{source.spec.output}.weight"
    for (layer, name), tensor in fresh_tensors(source, names, {built.kind: built}, seed):
        tensors[f"{source.spec.attention_path(layer)}.{name}"] = tensor.to(tensors[output])
    config = build_config(model.config, sse)
    config._attn_implementation = model.config._attn_implementation
    return filled_model(config, tensors, like=model)


def _source(model: Any) -> SourceModel:
    """The model as what is to be converted, after a look at everything that can be wrong with it."""
    if not isinstance(model, PreTrainedModel):
        kinds = [kind.__name__ for kind in type(model).__mro__]
        raise UsageError(
            f"model is a {type(model).__name__}",
            expected="a transformers model with its language-model head",
            fix=next((_UNWRAPPED[kind] for kind in kinds if kind in _UNWRAPPED), "load it with AutoModelForCausalLM"),
        )
    spec, name = spec_for(model.config.model_type), model.name_or_path or type(model).__name__
    if type(model).__name__ != spec.causal_lm_class:
        raise CheckpointError(
            f"model is a {type(model).__name__}",
            expected=spec.causal_lm_class,
            fix=f"load it with {spec.auto_class}",
        )
    _check_weights(model)
    check_sharing(model.config, name)
    refuse_family(spec, model_problems(model, spec))
    return SourceModel(name=name, spec=spec.of(model.config), config=model.config, dims=attention_dims(model.config))


def _check_weights(model: nn.Module) -> None:
    """Make sure that the weights are here, in one place, and numbers."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in devices or len(devices) > 1:
        raise UsageError(
            f"the model's weights are on {', '.join(devices)}" + " (without data)" * ("meta" in devices),
            expected="one device that holds them all",
            fix="load it without device_map, convert it, and move it then",
        )
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if (wrong := dtypes.difference(FLOAT_DTYPES.values())) or getattr(model.config, "quantization_config", None):
        raise CheckpointError(
            "the model is quantised" + f" (weights of {', '.join(sorted(wrong))})" * bool(wrong),
            expected=f"weights of {', '.join(FLOAT_DTYPES.values())}",
            fix="load the original model, or a copy by `sse-convert dequantize`, and quantise the result",
        )


def _mixer(mixer: str | Mapping[str, Any] | None, source: SourceModel) -> Mixer:
    """The mixer of a name or of a recipe's settings, or the recommended one, once it fits the model."""
    if mixer is None:
        mixer = {"kind": MIXER, **recommended_mixer(source.text.max_position_embeddings)}
    if isinstance(mixer, str) and mixer not in BUILT_IN:
        raise UsageError(f"mixer is {shortened(mixer)!r}" + suggest(mixer, BUILT_IN), expected=", ".join(BUILT_IN))
    found: list[Problem] = []
    settings = {"kind": mixer} if isinstance(mixer, str) else dict(mixer)
    built: Any = build(Mixer, settings, ("mixer",), found)
    problems = [f"{dotted(problem.path)}: {problem.message}" for problem in found]
    if built is not None:
        problems += [f"mixer: {problem}" for problem in mixer_problems(built, source)]
    if problems:
        raise UsageError(
            "\n".join(problems),
            expected=f"settings of a mixer that fit {source.name}: heads of {source.dims.head_dim}, "
            f"{source.text.max_position_embeddings} positions",
            fix="give a built-in mixer's name, or its settings as in a recipe",
        )
    mixer_built: Mixer = built
    return mixer_built


def _layer_names(keep: Sequence[int], kind: str, source: SourceModel) -> list[str]:
    """The mixer's name, or `full`, for each layer."""
    count = source.num_layers
    if isinstance(keep, str) or not all(isinstance(layer, int) and -count <= layer < count for layer in keep):
        raise UsageError(
            f"keep is {shortened(repr(keep))}",
            expected=f"a list of layers from {-count} to {count - 1}: the model has {count}",
            fix="name them, e.g. keep=[0, -1]; `sse-convert select` finds those that retrieve",
        )
    kept = {layer % count for layer in keep}
    names = [kind if i in source.softmax_layers and i not in kept else FULL for i in range(count)]
    if kind not in names:
        raise UsageError(
            f"keep is {shortened(repr(keep))}, so all {count} layers stay as they are",
            expected="at least one layer of softmax attention beside them",
            fix="keep fewer layers",
        )
    return names


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by name, copied; tied ones once."""
    found: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    with torch.no_grad():
        return {name: found.setdefault(id(tensor), tensor.detach().clone()) for name, tensor in state.items()}
