import math

import pytest
import torch

from sse_convert.analysis.decay import HalfLife
from tests.analysis.cases import constant, logits, seen, sizes, text


def half_life(s, t, **changes):
    quantity = HalfLife(s, t)
    quantity.add(seen(s, t, **changes))
    return quantity.result()


def test_half_lives_of_constant_gates():
    s, t = sizes(), text()
    route = torch.arange(t.tokens) % 4 // 3  # partition 1 gets every fourth token
    result = half_life(s, t, router_logits=logits(route, 2), **constant(s, t, 0.5, shared_decay=0.5**0.1))
    assert result["own"]["median"] == pytest.approx(1)
    assert result["sparse"]["p10"] == pytest.approx(4 / 3)
    assert result["sparse"]["p90"] == pytest.approx(4)
    assert result["shared"]["median"] == pytest.approx(10)
    assert result["shared_by_head"] == pytest.approx([10, 10])
    assert len(result["sparse_by_head"]) == 2


def test_half_lives_leave_dead_partitions_out():
    s, t = sizes(), text()
    result = half_life(s, t, router_logits=logits(torch.ones(t.tokens, dtype=torch.long), 2), **constant(s, t, 0.25))
    assert [result["sparse"][level] for level in ("p10", "median", "p90")] == pytest.approx([0.5, 0.5, 0.5])


def test_channels_that_do_not_decay_live_for_ever():
    s, t = sizes(shared=False), text()
    log_decay = torch.full((t.tokens, 2, 4), -0.5).double()
    log_decay[..., :2] = 0
    result = half_life(s, t, log_decay=log_decay, router_logits=torch.zeros(t.tokens, 2))
    assert result["sparse"]["p10"] == pytest.approx(math.log(2) / 0.5)
    assert result["sparse"]["p90"] == math.inf
    assert result["shared"] is None
