import math

import pytest
import torch

from benchmarks.analysis.receptive import ReceptiveField, field_widths
from tests.analysis.cases import constant, logits, seen, sizes, text


@pytest.mark.parametrize(("decay", "width"), [(0.5, 9), (0.9, 65), (0.0005, 0), (1.0, None), (0.99, None)])
def test_constant_gates(decay, width):
    """0.5^9 and 0.9^65 are at least 0.001, one more decay is not; weak decays reach back to the start."""
    widths = field_widths(torch.full((200, 3), math.log(decay)), 128)
    assert widths.shape == (128, 3)
    expected = torch.arange(72, 200) if width is None else torch.full((128,), width)
    assert widths.tolist() == expected[:, None].expand(128, 3).tolist()


def test_equals_brute_force():
    log_decay = -0.3 * torch.rand(150, 4).double()
    widths = field_widths(log_decay, 128, threshold=0.05)
    for row, t in enumerate(range(22, 150)):
        for c in range(4):
            alive = [t - s for s in range(t + 1) if math.exp(log_decay[s + 1 : t + 1, c].sum()) >= 0.05]
            assert widths[row, c] == max(alive)


def test_partitions_decay_at_their_own_tokens_only():
    """A partition that every second token writes has 9 decays left in 18 tokens; the shared one has them in 9."""
    s, t = sizes(), text()
    route = torch.arange(t.tokens) % 2
    quantity = ReceptiveField(s, t)
    quantity.add(seen(s, t, router_logits=logits(route, 2), **constant(s, t, 0.5)))
    result = quantity.result()
    assert result["partitions"] == [18, 18]
    assert result["sparse"] == {"mean": 18, "p10": 18, "median": 18, "p90": 18, "full": 0}
    assert result["shared"]["mean"] == 9
    assert (result["window"], result["threshold"]) == (128, 0.001)


def test_width_is_measured_where_a_partition_is_read():
    s, t = sizes(shared=False), text()
    route = torch.zeros(t.tokens, dtype=torch.long)  # partition 1 is never written, and read from by everyone
    found = seen(s, t, router_logits=logits(route, 2), read_top_k=2, log_decay=torch.full((320, 2, 4), -0.7).double())
    quantity = ReceptiveField(s, t)
    quantity.add(found)
    result = quantity.result()
    assert result["partitions"][0] == 9
    assert result["partitions"][1] == sum(range(32, 160)) / 128, "an undecayed state reaches back to the row's start"
    assert result["sparse"]["full"] == 0.5
    assert result["shared"] is None


def test_a_partition_nobody_reads_has_no_width():
    s, t = sizes(), text()
    quantity = ReceptiveField(s, t)
    quantity.add(seen(s, t, router_logits=logits(torch.zeros(t.tokens, dtype=torch.long), 2)))
    first, second = quantity.result()["partitions"]
    assert first > 0
    assert math.isnan(second)
