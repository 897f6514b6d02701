"""The sizes of a teacher that costs depend on, from its configuration and headers."""

import dataclasses as dc

from sse_convert.checkpoints.meta_model import idle_parameters, image_parameters, skeleton
from sse_convert.checkpoints.safetensors_io import ITEM_BYTES
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.modeling.architectures import has_experts
from sse_convert.modeling.attention_dims import bounds_scores, differs_by_layer, document_attention_problem
from sse_convert.surgery.budget import Geometry


def geometry_of(teacher: Teacher) -> Geometry:
    """The sizes that costs depend on."""
    config, files, model = teacher.text, teacher.files, skeleton(teacher.config)
    softmax, differs = teacher.softmax_layers, differs_by_layer(teacher.config)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    geometry = Geometry(
        dims=teacher.dims,
        windows=tuple(teacher.windows),
        linear=frozenset(range(teacher.num_layers)) - frozenset(softmax),
        cache_element_bytes=ITEM_BYTES[teacher.dtype],
        parameters=files.parameters,
        has_experts=has_experts(teacher.config),
        image_parameters=image_parameters(teacher, model),
        embedding_parameters=files.tensors[teacher.embedding].numel,
        tied=bool(teacher.config.tie_word_embeddings),
        attention_parameters=_attention_parameters(teacher, softmax[0]),
        by_layer=tuple(
            (teacher.dims_of(i), _attention_parameters(teacher, i)) for i in range(differs * teacher.num_layers)
        ),
        intermediate=inner or 4 * teacher.dims.hidden,
        vocabulary=config.vocab_size,
        qk_norm=teacher.spec.qk_norm != "none",
        document_masks=document_attention_problem(config) is not None,
        scores_written=bounds_scores(config),
    )
    idle = idle_parameters(teacher, model)
    return dc.replace(geometry, idle_parameters=idle, intermediate=_met_width(geometry, idle)) if idle else geometry


def _attention_parameters(teacher: Teacher, layer: int) -> int:
    prefix = teacher.attention_tensor(layer, "")
    return sum(info.numel for name, info in teacher.files.tensors.items() if name.startswith(prefix))


def _met_width(geometry: Geometry, idle: int) -> int:
    """Mean width of the experts that a token meets, the shared one's included, as if they were one feed-forward layer
    of three matrices."""
    around = geometry.embedding_parameters * (1 if geometry.tied else 2)
    attention = sum(geometry.at(i).attention_parameters for i in range(geometry.layers))
    layers = geometry.parameters - idle - around - attention
    return layers // (geometry.layers * 3 * geometry.dims.hidden)
