"""The greedy choice on a table of known figures: which layers it keeps, with which scores, and what it measures."""

import pytest

from sse_convert.selection.choice import Choice
from sse_convert.selection.greedy import greedy
from sse_convert.selection.measure import Measurement


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


def test_greedy_sees_layers_that_help_together():
    table = Table()
    choice = greedy(table, 3)
    assert choice.kept == (0, 2, 4)
    assert sorted(choice.scores, key=choice.scores.get, reverse=True)[:3] == [2, 4, 0]
    assert max(map(len, table.asked)) == 3
    assert sum(len(kept) == 2 for kept in table.asked) == 5 + 1  # candidates of the second round, then its winner


def test_recall_weight_zero_is_text_alone():
    table = Table()
    table.recall_weight = 0.0
    assert greedy(table, 1).kept == (0,)


@pytest.mark.parametrize(("kept", "run"), [((2, 4), 2), ((0, 1), 0), ((7,), 7), ((), None)])
def test_longest_run(kept, run):
    assert Choice(method="x", kept=kept, scores={}).longest_run == run
