"""Kernel tests run on a CUDA device, or in Triton's interpreter on the CPU."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    """Where the tensors of a kernel test live."""
    return "cuda" if torch.cuda.is_available() else "cpu"
