import dataclasses as dc

import pytest
import torch

from sse_convert.analysis.branches import BranchNorms
from sse_convert.mixers import BUILT_IN, SSEMixer
from tests.analysis.cases import seen, sizes, text


def branches(sparse, shared):
    quantity = BranchNorms(sizes(), text())
    quantity.add(dc.replace(seen(sizes()), sparse_TQV=sparse, shared_TQV=shared))
    return quantity.result()


def test_known_sizes():
    ones = torch.ones(320, 2, 4)
    result = branches(3 * ones, 4 * ones)
    assert result["sparse_rms"] == pytest.approx(3)
    assert result["shared_rms"] == pytest.approx(4)
    assert result["sparse_share"] == pytest.approx(9 / 25)
    assert result["sparse_share_by_head"] == pytest.approx([9 / 25] * 2)
    assert result["cosine"] == pytest.approx(1)
    assert branches(ones, -ones)["cosine"] == pytest.approx(-1)


def test_heads_apart():
    sparse, shared = torch.zeros(320, 2, 4), torch.zeros(320, 2, 4)
    sparse[:, 0], shared[:, 1] = 1.0, 3.0
    result = branches(sparse, shared)
    assert result["sparse_share_by_head"] == [1, 0]
    assert result["sparse_share"] == pytest.approx(0.1)
    assert result["sparse_rms"] == pytest.approx(0.5**0.5)


def test_needs_a_shared_partition():
    assert BranchNorms.absent(BUILT_IN["gla"]) == "no shared partition"
    assert BranchNorms.absent(SSEMixer()) is None
