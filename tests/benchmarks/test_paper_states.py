import dataclasses as dc
import math

import pytest
import torch

from benchmarks.analysis.states import StateEntropy, singular_value_entropy
from tests.analysis.cases import seen, sizes, text


def entropy(state, n=None):
    return float(singular_value_entropy(state.mT @ state, n or min(state.shape)))


def test_known_entropies():
    assert entropy(3 * torch.eye(8).double()) == pytest.approx(1)
    assert entropy(torch.outer(torch.arange(1.0, 9), torch.arange(3.0, 11)).double()) == pytest.approx(0, abs=1e-12)
    half = torch.diag(torch.tensor([5.0, 5, 0, 0])).double()
    assert entropy(half) == pytest.approx(math.log(2) / math.log(4))
    skewed = torch.diag(torch.tensor([2.0, 1.0])).double()  # shares of the power 4/5 and 1/5
    assert entropy(skewed) == pytest.approx(-(0.8 * math.log(0.8) + 0.2 * math.log(0.2)) / math.log(2))
    assert math.isnan(entropy(torch.zeros(4, 4).double()))


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12)])
def test_equals_the_formula_on_singular_values(shape):
    state = torch.randn(*shape, dtype=torch.float64)
    p = torch.linalg.svdvals(state).square()
    p = p / p.sum()
    assert entropy(state) == pytest.approx(float(-(p * p.log()).sum() / math.log(min(shape))))


def with_states(states):
    return dc.replace(seen(sizes()), states_SMHDV=states)


def test_partitions_alone_and_stacked():
    halves = torch.zeros(2, 4, 4)
    halves[0, 0, 0] = halves[0, 1, 1] = halves[1, 2, 2] = halves[1, 3, 3] = 1.0
    shared = torch.zeros(4, 4)
    shared[:, 0] = 1.0
    states = torch.stack([halves[0], halves[1], shared])[None, :, None].expand(2, 3, 2, 4, 4)
    quantity = StateEntropy(sizes(), text())
    quantity.add(with_states(states))
    result = quantity.result()
    assert result["partitions"] == pytest.approx([0.5, 0.5])
    assert result["sparse_stacked"] == pytest.approx(1.0), "the two halves fill all directions"
    assert result["shared"] == pytest.approx(0.0, abs=1e-9)
    assert 0.5 < result["stacked"] < 1


def test_empty_partitions_do_not_count():
    states = torch.zeros(1, 3, 2, 4, 4)
    states[:, 0, 0] = torch.eye(4)
    quantity = StateEntropy(sizes(), text())
    quantity.add(with_states(states))
    result = quantity.result()
    assert result["partitions"][0] == pytest.approx(1.0), "the mean is over the head that has a state"
    assert math.isnan(result["partitions"][1])
    assert math.isnan(result["shared"])
    assert result["stacked"] == pytest.approx(1.0)


def test_mean_over_rows_whatever_the_batches():
    both, apart = (StateEntropy(sizes(), text()) for _ in range(2))
    one = seen(sizes())
    both.add(one)
    for row in one.states_SMHDV.split(1):
        apart.add(dc.replace(one, states_SMHDV=row))
    assert both.result()["partitions"] == pytest.approx(apart.result()["partitions"])


def test_layer_without_shared_partition():
    s = sizes(partitions=1, shared=False)
    quantity = StateEntropy(s, text())
    quantity.add(seen(s))
    result = quantity.result()
    assert result["shared"] is None
    assert result["partitions"] == pytest.approx([result["stacked"]])
    assert 0 < result["stacked"] < 1
