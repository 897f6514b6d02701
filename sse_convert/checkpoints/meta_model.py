"""Models without data (torch's meta device): which tensors, of which shapes, a configuration calls for."""

import copy
import re
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sse_convert.checkpoints.foreign import refusing
from sse_convert.checkpoints.teacher import Teacher, check_floats, check_shapes
from sse_convert.compat import ignored_on_loading
from sse_convert.modeling.architectures import further_tokens
from sse_convert.modeling.auto import auto_class
from sse_convert.modeling.sink_attention import use_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel


EXPERTS = ".experts."
"""in the name of every weight of routed experts"""


SKELETONS = 4
"""kept: the same few models are asked for again and again while a recipe is planned, checked and run"""
_kept: dict[tuple[type, str], "PreTrainedModel"] = {}


def skeleton(config: Any) -> "PreTrainedModel":
    """The model with a language-model head of a transformers configuration, on the meta device. It is to be read, as
    others get the same one.

    Raises:
        CheckpointError: transformers cannot build a model of it.
    """
    key = type(config), config.to_json_string(use_diff=False)
    model = _kept.pop(key, None) or unfilled_model(config, buffers=False)
    _kept[key] = model
    for oldest in list(_kept)[:-SKELETONS]:
        del _kept[oldest]
    return model


def unfilled_model(config: Any, *, buffers: bool = True) -> "PreTrainedModel":
    """A new one, to be filled.

    Args:
        config: the configuration.
        buffers: give it real buffers (rotary frequencies and the like), which are small.

    Raises:
        CheckpointError: transformers cannot build a model of it.
    """
    from accelerate import init_empty_weights

    with (
        refusing(
            f"config.json does not make a {config.model_type} model",
            expected="a configuration that transformers can build",
            fix="correct config.json, or download it again",
        ),
        init_empty_weights() if buffers else torch.device("meta"),
    ):
        model: PreTrainedModel = auto_class(config.model_type).from_config(config)
    return model


def filled_model(config: Any, tensors: dict[str, Tensor], like: "PreTrainedModel") -> "PreTrainedModel":
    """A model with given tensors, which become its own: nothing is copied.

    Args:
        config: the configuration.
        tensors: all that its state dict has, of one device; tied ones under any of their names.
        like: a model whose device, mode and settings of generation it has.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    model = unfilled_model(config)
    what = f"these are not the tensors of a {config.model_type} model"
    with refusing(what, expected="a model as transformers makes it", fix="load it anew, without adapters or changes"):
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        if wrong := [*unexpected, *(name for name in missing if name not in model.all_tied_weights_keys)]:
            raise ValueError(f"{len(wrong)} missing or unexpected, such as {wrong[0]}")
    model.tie_weights()
    model.generation_config = copy.deepcopy(like.generation_config)
    use_kernels(model)
    return model.to(like.device).train(like.training)


def model_shapes(model: "PreTrainedModel") -> dict[str, tuple[int, ...]]:
    """Shapes of what a checkpoint of `model` must hold: parameters and persistent buffers, tied ones once."""
    persistent = model.state_dict().keys()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tuple(tensor.shape) for name, tensor in tensors if name in persistent}


def image_parameters(teacher: Teacher, model: "PreTrainedModel") -> int:
    """Elements of what sees images in the teacher's skeleton, which stages do not train."""
    return sum(int(p.numel()) for name, p in model.named_parameters() if teacher.spec.sees_images(name))


def idle_parameters(teacher: Teacher, model: "PreTrainedModel") -> int:
    """Elements that a token of text does not meet: of each layer's routed experts, all but those it is sent to, and all
    of what sees images or what transformers leaves out.

    Args:
        teacher: the source.
        model: its skeleton.
    """
    left_out = sum(teacher.files.tensors[name].numel for name in left_out_tensors(teacher, model))
    left_out += image_parameters(teacher, model)
    met: int | list[int] | None = getattr(teacher.text, teacher.spec.experts_per_token, None)
    if met is None:
        return left_out
    most = max(met) if isinstance(met, list) else met
    experts = [p for name, p in model.named_parameters() if EXPERTS in name]
    idle: int = sum(p.numel() // len(p) * max(0, len(p) - most) for p in experts)
    return left_out + idle


def left_out_tensors(teacher: Teacher, model: "PreTrainedModel") -> list[str]:
    """Stored tensors that a model leaves out by name: those its class names, and layers that predict further tokens."""
    patterns = ignored_on_loading(model)
    found = [
        name
        for name in teacher.files.tensors
        if predicts_further(teacher, name) or any(re.search(pattern, name) for pattern in patterns)
    ]
    used = stored_shapes(teacher, model, teacher.files.tensors) if found else {}
    return [name for name in found if name not in used]


def predicts_further(teacher: Teacher, name: str) -> bool:
    """Whether a stored tensor is of a layer that predicts further tokens, by its name."""
    return re.search(further_tokens(teacher.config), name) is not None


def stored_shapes(teacher: Teacher, model: "PreTrainedModel", stored: Container[str]) -> dict[str, tuple[int, ...]]:
    """The same by the names that a checkpoint uses.

    Args:
        teacher: the source, or a converted checkpoint seen as its source; says whether names begin with the backbone.
        model: the source's or the hybrid's skeleton.
        stored: names in the checkpoint. What is not among them by the model's own name is expected as transformers
            saves it: GPT-NeoX's head under another name, merged experts one by one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = model_shapes(model)
    own = {name: shape for name, shape in shapes.items() if teacher.stored(name) in stored}
    others = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if name not in own}
    saved = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, others).items()}
    return {teacher.stored(name): shape for name, shape in (own | saved).items()}


def check_complete(teacher: Teacher) -> list[str]:
    """Make sure that the checkpoint holds every tensor of its model, in the right shape.

    Returns:
        Tensors that the model does not use, such as old rotary tables.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    expected = stored_shapes(teacher, skeleton(teacher.config), teacher.files.tensors)
    check_shapes(teacher.files, expected)
    check_floats(teacher.files, expected)
    return sorted(teacher.files.tensors.keys() - expected.keys())
