"""What the bytes of tensors say."""

import math

import pytest
import torch

from sse_convert.checkpoints.tensor_data import nonfinite, tensor_bytes

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


def test_whole_numbers_are_finite():
    assert nonfinite(memoryview(bytearray(8)), "I32") == 0
