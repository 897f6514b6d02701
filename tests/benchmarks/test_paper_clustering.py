import math

import pytest
import torch

from benchmarks.analysis.clustering import Clustering, explained_variance
from tests.analysis.cases import logits, seen, sizes, text


def explained(values, classes, n):
    sums = torch.zeros(1, n, values.shape[1]).double().index_add_(1, classes, values[None])
    return float(explained_variance(sums, torch.bincount(classes, minlength=n)[None], values.square().sum()[None]))


def test_explained_variance():
    classes = torch.arange(400) % 5
    centres = torch.randn(5, 3).double()
    noise = torch.randn(400, 3).double()
    assert explained(centres[classes], classes, 8) == pytest.approx(1)
    assert explained(noise, classes, 8) == pytest.approx(0, abs=0.03)
    # equal variance between and within: half is explained
    mixed = torch.cat(
        [torch.tensor([[1.0], [-1.0]]).double()[torch.arange(2000) % 2], torch.randn(2000, 1).double()], 1
    )
    assert explained(mixed, torch.arange(2000) % 2, 2) == pytest.approx(0.5, abs=0.05)


def keys_for(row):
    return 10 * torch.nn.functional.one_hot(row, 4).double()[:, None].expand(-1, 2, -1)


def cluster(route, row, v, t=None):
    s, t = sizes(shared=False), t or text()
    quantity = Clustering(s, t)
    quantity.add(seen(s, t, k=keys_for(row), v=v, router_logits=logits(route, 2)))
    return quantity


def test_values_that_go_by_row_and_partition():
    route, row = torch.arange(320) % 2, torch.arange(320) // 2 % 3
    centres = torch.randn(6, 2, 4).double()
    quantity = cluster(route, row, centres[3 * route + row])
    result = quantity.result()
    assert result["explained"] == pytest.approx(1)
    assert result["explained_by_head"] == pytest.approx([1, 1])
    assert (result["rows"], result["rows_used"]) == (8, 6)


def test_values_that_do_not():
    route, row = torch.arange(320) % 2, torch.arange(320) // 2 % 3
    result = cluster(route, row, torch.randn(320, 2, 4).double()).result()
    assert abs(result["explained"]) < 0.05


def test_equal_values_have_no_variance():
    row = torch.arange(320) % 4
    assert math.isnan(cluster(row % 2, row, torch.zeros(320, 2, 4).double()).result()["explained"])
