"""Rows hold only what was measured alike; the rest stands apart, with a note."""

import dataclasses as dc
import math

import pytest

from sse_convert.evaluation.agreement import Agreement
from sse_convert.evaluation.harness import TaskScore
from sse_convert.results.board import make_board
from sse_convert.results.scores import (
    DIVERGENCE,
    GAP,
    LOSS,
    NEEDLES,
    SHARE,
    TASKS,
    TOP1,
    model_measures,
    relative_measures,
)
from tests.evaluation.test_report import make_report


def evaluation(**conditions):
    report = make_report()
    return dc.replace(report, conditions={**report.conditions, "text": "books", **conditions})


def changed(report, **fields):
    """The report with other fields of both models, by functions of what they are."""
    models = {
        which: dc.replace(scores, **{name: change(getattr(scores, name)) for name, change in fields.items()})
        for which in ("teacher", "student")
        if (scores := getattr(report, which))
    }
    return dc.replace(report, **models)


def figures(found):
    return [*relative_measures(found), *model_measures(found, found.student)]


def test_figures_and_intervals_by_hand():
    shown = {(m.quantity, m.setting): m for m in figures(evaluation())}
    gap = shown[GAP, "129 tokens"]
    assert gap.text == "+0.110 ± 0.020"
    assert gap.low == pytest.approx(0.11 - 1.96 * 0.01, abs=1e-4)
    assert shown[NEEDLES, "number, 1 key, 512 tokens"].text == "75% [53, 89]"
    share = shown[SHARE, "number, 1 key, 512 tokens"]
    assert share.value == 0.75
    assert 0.5 < share.low < 0.75 < share.high < 1.1


def test_alike_figures_share_rows():
    board = make_board([("a", figures(evaluation())), ("b", figures(evaluation()))])
    assert all(None not in row.cells for row in board.rows)
    assert board.notes == ()


def test_other_text_stands_apart():
    board = make_board([("a", figures(evaluation())), ("b", figures(evaluation(text="news")))])
    losses = [row for row in board.rows if row.quantity == LOSS]
    assert [[cell is not None for cell in row.cells] for row in losses] == [[True, False], [False, True]]
    (note,) = board.notes
    assert note.startswith("not comparable: held-out loss (nats per token), loss above the teacher's")
    assert note.endswith("[a] text books; [b] text news")
    assert any("129 tokens [b]" in line for line in board.lines())


def test_other_samples_stand_apart_and_losses_do_not():
    more = changed(
        evaluation(),
        needles=lambda scores: tuple(dc.replace(s, total=dc.replace(s.total, samples=40)) for s in scores),
    )
    board = make_board([("a", figures(evaluation())), ("b", figures(more))])
    assert {row.quantity for row in board.rows if row.mark} == {NEEDLES, SHARE}
    assert board.notes[0].endswith("[a] samples 20; [b] samples 40")


def test_another_teacher_splits_what_depends_on_it():
    other = changed(evaluation(), parameters=lambda _: 7_000_000)
    board = make_board([("a", figures(evaluation())), ("b", figures(other))])
    assert {row.quantity for row in board.rows if row.mark} == {LOSS, GAP, SHARE}
    assert "teacher t (10)" in board.notes[0]
    assert "teacher t (7M)" in board.notes[0]


def test_a_loss_that_is_not_finite_is_said():
    broken = changed(evaluation(), held_out=lambda losses: tuple(dc.replace(one, loss=math.nan) for one in losses))
    assert "not finite" in [m.text for m in figures(broken) if m.quantity == LOSS]


def test_agreement_and_tasks():
    found = changed(
        evaluation(),
        agreement=lambda _: (Agreement(129, 2, 256, 0.2, 0.01, 0.9, None, ()),),
        tasks=lambda _: (TaskScore("piqa", "acc", 0.7, 0.01, 100, True),),
    )
    measures = list(figures(found))
    shown = {(m.quantity, m.setting): m.text for m in measures}
    assert shown[DIVERGENCE, "129 tokens"] == "0.200 ± 0.020"
    assert shown[TOP1, "129 tokens"] == "0.900"
    assert shown[TASKS, "piqa, acc"] == "0.700 ± 0.020"


def test_json_names_conditions():
    data = make_board([("a", figures(evaluation()))]).to_dict()
    row = next(row for row in data["rows"] if row["quantity"] == LOSS)
    assert row["conditions"] == {"teacher": "t (10)", "text": "books", "seed": "0", "windows": "2"}
    assert set(row["cells"][0]) == {"value", "low", "high"}
