import dataclasses as dc
import math

import pytest
import torch

from benchmarks.analysis.similarity import RowSimilarity, unit_rows
from tests.analysis.cases import seen, sizes, text


def similarity_of(states, **changes):
    quantity = RowSimilarity(sizes(**changes), text())
    quantity.add(dc.replace(seen(sizes(**changes)), states_SMHDV=states))
    return quantity


def test_unit_rows():
    rows = unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0], [-1e-30, 0.0]]))
    assert rows.tolist() == [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]]


def test_orthogonal_rows():
    states = (torch.eye(4) * torch.tensor([1.0, 2, 3, 4])).expand(1, 3, 2, 4, 4)
    quantity = similarity_of(states)
    result = quantity.result()
    assert result["within"] == result["within_shared"] == 0
    assert result["across"] == result["sparse_to_shared"] == pytest.approx(1 / 4), "each row meets itself once in four"


def test_equal_and_opposite_rows():
    row = torch.tensor([1.0, -2.0, 0.5, 3.0])
    same, turned = row.expand(4, 4), torch.tensor([1.0, 1, -1, -1])[:, None] * row
    result = similarity_of(torch.stack([same, turned, -same])[None, :, None].expand(1, 3, 2, 4, 4)).result()
    assert result["within"] == result["across"] == result["sparse_to_shared"] == pytest.approx(1)
    assert result["signed"][0][0] == pytest.approx(1)
    assert result["signed"][1][1] == pytest.approx((2 * 2 - 2 * 4) / 12), "4 pairs agree, 8 of 12 are opposite"
    assert result["signed"][0][2] == pytest.approx(-1)


def test_zero_rows_count_nowhere():
    states = torch.zeros(1, 3, 2, 4, 4)
    states[:, 0, :, :2] = torch.tensor([1.0, 1, 0, 0])
    quantity = similarity_of(states)
    result = quantity.result()
    assert result["within"] == pytest.approx(1)
    assert math.isnan(result["across"])
    assert math.isnan(result["within_shared"])


def test_equals_brute_force():
    states = torch.randn(3, 3, 2, 4, 4)
    quantity = similarity_of(states)
    sums, pairs = torch.zeros(3, 3), torch.zeros(3, 3)
    for stacked in states.transpose(1, 2).flatten(0, 1).flatten(1, 2):
        for i in range(12):
            for j in range(12):
                if i != j:
                    cosine = torch.nn.functional.cosine_similarity(stacked[i], stacked[j], dim=0)
                    sums[i // 4, j // 4] += cosine.abs()
                    pairs[i // 4, j // 4] += 1
    torch.testing.assert_close(torch.tensor(quantity.result()["absolute"]), sums / pairs, rtol=1e-5, atol=1e-6)
    assert quantity.result()["within"] == pytest.approx(float((sums[0, 0] + sums[1, 1]) / 24 / 6))


def test_one_partition():
    s = {"partitions": 1, "shared": False}
    result = similarity_of(torch.randn(1, 1, 2, 4, 4), **s).result()
    assert result["across"] is result["within_shared"] is result["sparse_to_shared"] is None
    assert 0 < result["within"] < 1
