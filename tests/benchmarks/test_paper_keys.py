import pytest
import torch

from benchmarks.analysis.keys import RowSparsity, small_share
from tests.analysis.cases import inputs, logits, seen, sizes, text


def test_share_below_the_threshold():
    assert small_share(torch.tensor([0.0, 9e-6, -9e-6, 1.1e-5, -1.0, 3.0])) == 0.5


def test_sparse_and_shared():
    s, t = sizes(), text()
    k = torch.ones(t.tokens, 2, 4).double()
    k[..., 0] = 0
    shared = torch.ones(t.tokens, 2, 4).double()
    shared[..., 1:] = -1e-6
    q, _, decay = inputs(s, t.tokens)["shared"]
    quantity = RowSparsity(s, t)
    quantity.add(seen(s, t, k=k, k_map="identity", shared=(q, shared, decay)))
    assert quantity.result() == {"threshold": 1e-5, "sparse": 0.25, "shared": 0.75}


def test_softmax_before_the_gate():
    s, t = sizes(shared=False), text()
    k = torch.zeros(t.tokens, 2, 4).double()
    k[..., 0] = 20.0  # softmax leaves e^-20 to the others
    quantity = RowSparsity(s, t)
    quantity.add(seen(s, t, k=k, router_logits=torch.zeros(t.tokens, 2)))
    assert quantity.result()["sparse"] == pytest.approx(0.75)
    assert quantity.result()["shared"] is None


def test_own_keys_of_the_partition_written():
    s, t = sizes(shared=False), text()
    k = torch.ones(t.tokens, 2, 2, 4).double()
    k[:, 1] = 0  # partition 1 would be written with zeros, by a quarter of the tokens
    route = (torch.arange(t.tokens) % 4 == 0).long()
    quantity = RowSparsity(s, t)
    quantity.add(seen(s, t, k=k, k_map="identity", router_logits=logits(route, 2)))
    assert quantity.result()["sparse"] == pytest.approx(0.25)
