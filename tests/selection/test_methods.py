"""Each method on a table of known figures: which layers it keeps, with which scores, and what it measures."""

import pytest

from sse_convert.selection.choice import Choice, agreements, best, rank_correlation
from sse_convert.selection.greedy import greedy
from sse_convert.selection.kl_restore import kl_restore
from sse_convert.selection.measure import Measurement
from sse_convert.selection.recall_ratio import recall_ratio
from sse_convert.selection.sensitivity import sensitivity
from sse_convert.selection.uniform import uniform


class Table:
    """A meter whose figures are a formula of the kept set.

    Recall costs 4 without layer 2 and 1 more without layer 4; text costs 0.1 per replaced layer, 0.5 for layer 0.
    """

    recall_weight = 1.0

    def __init__(self, layers=6):
        self.layers = range(layers)
        self.asked = []

    def measure(self, kept):
        kept = tuple(sorted(kept))
        self.asked.append(kept)
        text = sum(0.5 if i == 0 else 0.1 for i in self.layers if i not in kept)
        recall = 0.0 if {2, 4} <= set(kept) else 1.0 if 2 in kept else 5.0
        return Measurement(
            probe="needle", kept=kept, text_loss=3 + text, text_kl=text, recall_loss=recall, recall_kl=recall,
            recall_accuracy=float(recall == 0), tokens=10, seconds=0.0,
        )  # fmt: skip

    def measure_all(self, sets, beside):
        return [self.measure(kept) for kept in sets]

    def without_each(self):
        return {layer: self.measure(i for i in self.layers if i != layer) for layer in self.layers}


def test_sensitivity_adds_text_and_recall():
    choice = sensitivity(Table(), 2)
    assert choice.kept == (2, 4)
    assert choice.scores == pytest.approx({0: 0.5, 1: 0.1, 2: 5.1, 3: 0.1, 4: 1.1, 5: 0.1})


def test_kl_restore_sees_one_layer_at_a_time():
    choice = kl_restore(Table(), 2)
    assert choice.kept == (0, 2)  # layer 4 helps recall only beside layer 2
    assert choice.scores == pytest.approx({0: 0.5, 1: 0.1, 2: 4.1, 3: 0.1, 4: 0.1, 5: 0.1})


def test_greedy_sees_layers_that_help_together():
    table = Table()
    choice = greedy(table, 3)
    assert choice.kept == (0, 2, 4)
    assert sorted(choice.scores, key=choice.scores.get, reverse=True)[:3] == [2, 4, 0]
    assert max(map(len, table.asked)) == 3
    assert sum(len(kept) == 2 for kept in table.asked) == 5 + 1  # candidates of the second round, then its winner


def test_recall_ratio_prefers_recall_that_text_does_not_need():
    choice = recall_ratio(Table(), 2)
    assert choice.kept == (2, 4)
    assert choice.scores[2] == 50.0  # the cap
    assert choice.scores[0] == choice.scores[1] == 0.0


@pytest.mark.parametrize(
    ("layers", "keep", "kept"), [(10, 2, (4, 9)), (18, 3, (5, 11, 17)), (7, 3, (1, 3, 6)), (4, 1, (3,))]
)
def test_uniform_takes_the_last_of_each_stretch(layers, keep, kept):
    table = Table(layers)
    assert uniform(table, keep).kept == kept
    assert table.asked == []


def test_recall_weight_zero_is_text_alone():
    table = Table()
    table.recall_weight = 0.0
    for method in (sensitivity, kl_restore, greedy):
        assert method(table, 1).kept == (0,)


def test_ties_go_to_the_earlier_layer():
    assert best("x", {3: 1.0, 1: 1.0, 2: 0.0, 0: 2.0}, 2).kept == (0, 1)


@pytest.mark.parametrize(("kept", "run"), [((2, 4), 2), ((0, 1), 0), ((7,), 7), ((), None)])
def test_longest_run(kept, run):
    assert Choice(method="x", kept=kept, scores={}).longest_run == run


def test_rank_correlation_by_hand():
    scores = [{0: 1.0, 1: 2.0, 2: 3.0}, {0: 10.0, 1: 20.0, 2: 90.0}, {0: 3.0, 1: 2.0, 2: 1.0}]
    assert rank_correlation(scores[0], scores[1]) == pytest.approx(1.0)
    assert rank_correlation(scores[0], scores[2]) == pytest.approx(-1.0)
    ties = {0: 1.0, 1: 1.0, 2: 5.0}  # ranks 1.5, 1.5, 3 against 1, 2, 3
    assert rank_correlation(scores[0], ties) == pytest.approx(3**0.5 / 2)
    assert rank_correlation(scores[0], {0: 1.0, 1: 1.0, 2: 1.0}) is None


def test_agreement_counts_common_layers():
    a, b = best("a", {0: 1.0, 1: 2.0, 2: 3.0}, 2), best("b", {0: 9.0, 1: 1.0, 2: 5.0}, 2)
    plain = Choice(method="c", kept=(0, 1), scores={})
    found = {(x.first, x.second): (x.common, x.rank_correlation) for x in agreements([a, b, plain])}
    assert found == {("a", "b"): (1, pytest.approx(-0.5)), ("a", "c"): (1, None), ("b", "c"): (1, None)}
