"""What the bytes of tensors say."""

import math

import pytest
import torch

from sse_convert.checkpoints.tensor_data import nonfinite, tensor_bytes
from sse_convert.checkpoints.weights import nonfinite_tensors

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("values", "count"),
    [([1.0, -2.0], 0), ([1.0, INF], 1), ([-INF, 1.0], 1), ([INF, -INF], 2), ([NAN, 1.0, INF, NAN], 3)],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
def test_every_element_that_is_not_finite_counts(values, count, dtype, name):
    data = bytearray(tensor_bytes(torch.tensor(values, dtype=dtype)))
    assert nonfinite(memoryview(data), name) == count


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_tensors_of_a_model_that_are_not_finite_are_named(bad):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0)))
    assert nonfinite_tensors(model) == []
    model[0].weight.data[3, 2] = bad
    model[1].running_var[2] = bad
    assert nonfinite_tensors(model) == ["0.weight", "1.running_var"]


def test_whole_numbers_are_finite():
    assert nonfinite(memoryview(bytearray(8)), "I32") == 0
