"""A teacher of which there is a config.json alone: its tensors are those that transformers would make."""

import dataclasses as dc
from pathlib import Path

import torch

from sse_convert.checkpoints.meta_model import model_shapes, skeleton
from sse_convert.checkpoints.open import CheckpointFiles, open_checkpoint
from sse_convert.checkpoints.safetensors_io import TensorInfo
from sse_convert.checkpoints.teacher import Teacher, as_teacher, build_source_config
from sse_convert.checkpoints.tensor_data import DTYPE_NAMES
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import spec_for

NOWHERE = "none"
"""shard of a tensor that exists by its shape alone"""


def open_for_planning(source: str | Path, revision: str | None = None) -> Teacher:
    """A teacher to plan with: as `open_teacher`, or by its config.json where there are no weights.

    Args:
        source: local folder, or hub id.
        revision: hub branch, tag or commit.

    Raises:
        CheckpointError: see `open_teacher`; having no weights is no fault here.
        HubError: the hub refused or cannot be reached, and its cache has no config.json.
    """
    files = open_checkpoint(source, revision, config_enough=True)
    return as_teacher(files if files.tensors else with_shapes(files))


def with_shapes(files: CheckpointFiles) -> CheckpointFiles:
    """The same with the tensors that its config.json calls for.

    Raises:
        CheckpointError: the family is unknown, or the values do not make a model.
    """
    spec_for(files.model_type)
    config = build_source_config(files.config, files.name)
    shapes = model_shapes(skeleton(config))
    dtype = DTYPE_NAMES[config.dtype or decoder_config(config).dtype or torch.float32]
    return dc.replace(files, tensors={name: TensorInfo(dtype, shape, NOWHERE, 0) for name, shape in shapes.items()})


def has_weights(files: CheckpointFiles) -> bool:
    """Whether the tensors are of files, here or on the hub."""
    return bool(files.shard_bytes)
