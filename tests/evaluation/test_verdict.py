"""One fake evaluation for each verdict, and what the words say of it."""

import dataclasses as dc
import math

import pytest

from sse_convert.errors import VerificationError
from sse_convert.evaluation.intervals import share_interval
from sse_convert.surgery.guessing import guesses
from tests.evaluation.test_report import loss, make_report, needle

TEACHER_SUMS = (384.0, 392.0)


def judged(gap=0.0, hits=((20, 20),), vocabulary=1000, **changes):
    """The verdict of a student `gap` nats above its teacher in both windows (128 predictions each)."""
    report = make_report(hits=hits, student_sums=tuple(total + 128 * gap for total in TEACHER_SUMS))
    return dc.replace(report, conditions={"vocab_size": vocabulary}, **changes).verdict()


@pytest.mark.parametrize(
    ("gap", "hits", "grade"),
    [
        (0.008, ((20, 20),), "keeps"),
        (-0.1, ((20, 20),), "keeps"),
        (0.06, ((20, 20),), "loses"),
        (0.0, ((20, 18),), "loses"),
        (0.31, ((20, 20),), "damaged"),
        (0.0, ((20, 13),), "damaged"),
        (1.9, ((20, 0),), "damaged"),
        (2.1, ((20, 20),), "destroyed"),
        (3075.0, ((20, 0),), "destroyed"),
        (math.nan, ((20, 20),), "destroyed"),
        (math.inf, ((20, 20),), "destroyed"),
    ],
)
def test_the_grade_is_that_of_the_worst_figure(gap, hits, grade):
    found = judged(gap, hits)
    assert found.grade == grade
    assert found.destroyed == (grade == "destroyed")
    assert ("not offered for push" in found.text) == found.destroyed


def test_words_of_a_good_and_of_a_destroyed_model():
    low, high = share_interval(19, 20, 20, 20)
    assert judged(0.008, ((20, 19),)).text == (
        f"keeps the teacher's quality: 95.0% [{100 * low:.0f}, {100 * high:.0f}] of its needles, "
        "loss 0.008 ± 0.000 nats above the teacher's at 129 tokens"
    )
    assert judged(8.1, ((20, 0),)).text.startswith("destroyed: 0.0% [0, ")
    assert "loss 8.100 ± 0.000 nats above the teacher's at 129 tokens, worse than guessing; not" in judged(8.1).text
    assert "its loss is not finite" in judged(math.nan).text


def test_guessing_needs_a_teacher_that_does_better():
    assert judged(0.5, vocabulary=30).grade == "destroyed"  # 3.03 < ln 30 = 3.40 < 3.53
    assert judged(0.5, vocabulary=20).grade == "unknown"  # the teacher itself is above ln 20 = 3.00


def test_a_teacher_that_guesses_is_no_measure():
    found = judged(0.0, ((20, 20),), vocabulary=20)
    assert found.grade == "unknown"
    assert found.text.startswith("none: the teacher's own loss is 3.03 nats, no better than guessing")
    assert judged(0.0, ((20, 20),), vocabulary=30).grade == "keeps"
    assert [guesses(loss, 512) for loss in (47.42, 10.59, math.log(512), 5.8, math.nan)] == [
        True,
        True,
        True,
        False,
        True,
    ]


def test_what_the_teacher_cannot_do_is_left_out_and_said():
    found = judged(0.0, ((20, 20), (11, 0), (12, 12)))
    assert found.grade == "keeps"
    assert found.notes == (
        "the teacher itself finds less than 60%, so the verdict leaves out: number among 2 at 512 (55%)",
    )
    report = make_report(hits=((20, 20), (11, 0)))
    assert f"note: {found.notes[0]}" in report.lines()
    assert report.lines()[-1] == f"verdict: {report.verdict().text}"


def test_loss_alone_is_said_to_be_alone():
    assert judged(0.008, ((11, 11),)).text.endswith(", retrieval not measured")
    assert "not measured" not in judged(0.008, ((20, 19),)).text


def test_wide_intervals_do_not_destroy():
    report = make_report(student_sums=(384.0, 392.0 + 2 * 128 * 2.2))  # 2.2 on the mean, 0 in one window
    assert report.verdict().grade == "damaged"


def test_nothing_measured_is_no_verdict():
    bare = make_report()
    models = {name: dc.replace(getattr(bare, name), held_out=(), needles=()) for name in ("teacher", "student")}
    assert dc.replace(bare, loss_gaps=(), **models).verdict().grade == "unknown"


def test_the_report_stores_its_verdict():
    found = make_report().verdict()
    assert make_report().to_dict()["verdict"] == {"grade": "loses", "text": found.text, "notes": list(found.notes)}


def test_only_a_destroyed_model_is_refused():
    judged(1.9).require_sound("train longer")
    with pytest.raises(VerificationError, match="destroyed") as caught:
        judged(5.0).require_sound("train longer")
    assert (caught.value.exit_code, caught.value.fix) == (6, "train longer")


def test_the_helpers_figures_are_what_they_are_said_to_be():
    assert loss(TEACHER_SUMS).loss == pytest.approx(776 / 256)
    assert needle(11).total.value == 0.55
