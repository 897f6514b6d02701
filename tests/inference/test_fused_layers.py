"""Steps of fused layers compute what plain layers compute, launch few kernels, and what cannot be fused says why."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.inference import cuda_graphs, fused_layers
from sse_convert.inference.cuda_graphs import TokenStep, graphed
from sse_convert.kernels import triton_backend
from sse_convert.mixers import BUILT_IN, SlidingMixer, SSEMixer, SSESlidingMixer
from tests.inference.test_cuda_graphs import plain_steps, prefill
from tests.modeling.tiny import PAD, prompts, tiny_model, tiny_source

FAMILIES = fused_layers.FAMILIES
STEPS = 3


def test_it() -> None:
    pass
