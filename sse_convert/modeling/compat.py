"""Private APIs of torch and transformers that the model itself needs. This file travels inside checkpoints."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing


def in_backward() -> bool:
    """Whether the autograd engine runs, as where gradient checkpointing repeats a forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def record_outputs(model: Any) -> None:
    """Enter a model of another class than it was made with in transformers' registry of recordable outputs, which goes
    by class name."""
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(model.__class__), model._can_record_outputs)


def mark_static(tensor: Tensor) -> None:
    """Tell torch.compile's CUDA graphs that a tensor stays where it is."""
    torch._dynamo.mark_static_address(tensor)
