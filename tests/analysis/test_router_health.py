import math

import pytest
import torch

from sse_convert.analysis.router_health import RouterHealth, evenness
from sse_convert.analysis.tokens import TOP, TopTokens, distinctive
from sse_convert.mixers import SSEMixer
from tests.analysis.cases import logits, seen, sizes, text


def health(s, t, **changes):
    quantity = RouterHealth(s, t)
    quantity.add(seen(s, t, **changes))
    return quantity.result()


def test_evenness():
    assert float(evenness(torch.ones(5))) == pytest.approx(1)
    assert float(evenness(torch.tensor([0.0, 7.0]))) == 0
    assert float(evenness(torch.tensor([1.0, 1, 0, 0]))) == pytest.approx(0.5)


def test_hand_made_routing_with_a_dead_partition():
    s, t = sizes(partitions=4), text()
    route = torch.tensor([0, 0, 1, 2] * 80)
    result = health(s, t, router_logits=logits(route, 4))
    e = math.exp(4) / (math.exp(4) + 3)
    assert result["load"] == pytest.approx([0.5, 0.25, 0.25, 0])
    assert result["load_entropy"] == pytest.approx(1.5 * math.log(2) / math.log(4))
    assert result["dead"] == [3]
    assert result["gate_mean"] == pytest.approx(e)
    other = (1 - e) / 3
    assert result["gate_entropy"] == pytest.approx(-(e * math.log(e) + 3 * other * math.log(other)) / math.log(4))


def test_even_routing():
    s, t = sizes(partitions=4), text()
    result = health(s, t, router_logits=torch.zeros(320, 4), top_k=4)
    assert result["load"] == [1, 1, 1, 1]
    assert result["load_entropy"] == pytest.approx(1)
    assert result["gate_entropy"] == pytest.approx(1)
    assert result["gate_mean"] == pytest.approx(0.25)
    assert result["dead"] == []


@pytest.mark.parametrize(("tokens", "dead"), [(1, [1]), (2, [])])
def test_dead_means_less_than_a_hundredth_of_an_even_share(tokens, dead):
    """An even share of 320 tokens over 2 partitions is 160, a hundredth of it 1.6."""
    route = torch.zeros(320, dtype=torch.long)
    route[:tokens] = 1
    assert health(sizes(), text(), router_logits=logits(route, 2))["dead"] == dead


def test_batches_add_up():
    s, t = sizes(), text()
    quantity = RouterHealth(s, t)
    quantity.add(seen(s, t, router_logits=logits(torch.zeros(320, dtype=torch.long), 2)))
    quantity.add(seen(s, t, router_logits=logits(torch.ones(320, dtype=torch.long), 2)))
    assert quantity.result()["load"] == [0.5, 0.5]


def test_one_partition_has_no_routing():
    for kind in (RouterHealth, TopTokens):
        assert kind.absent(SSEMixer(num_partitions=1)) == "one partition: nothing is routed"
        assert kind.absent(SSEMixer()) is None


def test_distinctive_tokens():
    """Counts of three tokens: one for each partition alone, and one that is even."""
    score = distinctive(torch.tensor([[10, 0, 20], [0, 10, 20]]))
    assert score[0].tolist() == pytest.approx([10 * math.log(2), 0, 0])
    assert score[1].tolist() == pytest.approx([0, 10 * math.log(2), 0])
    more = distinctive(torch.tensor([[10, 1, 20], [0, 10, 20]]))
    assert more[0, 0] > 0 > more[0, 1]


def top_tokens(t, route, **changes):
    quantity = TopTokens(sizes(partitions=3), t)
    quantity.add(seen(sizes(partitions=3), t, router_logits=logits(route, 3), **changes))
    return quantity.result()["top"]


def test_tokens_by_partition():
    ids = torch.tensor([[5, 6, 7, 7] * 40, [5, 6, 7, 7] * 40])
    t = text(ids)
    route = torch.tensor([0, 1, 0, 1] * 80)  # 5 to partition 0, 6 to partition 1, 7 to both
    first, second, third = top_tokens(t, route)
    assert first == [{"id": 5, "text": "<5>", "count": 80, "of": 80}]
    assert second == [{"id": 6, "text": "<6>", "count": 80, "of": 80}]
    assert third == [], "nothing went there"


def test_no_more_than_the_best_tokens():
    ids = torch.arange(320).view(2, 160)
    top = top_tokens(text(ids), torch.arange(320) % 2)
    assert [len(tokens) for tokens in top] == [TOP, TOP, 0]
