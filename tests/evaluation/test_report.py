import math

import pytest

from sse_convert.errors import OutputError, VerificationError
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.evaluation.perplexity import HeldOutLoss, PositionLoss
from sse_convert.evaluation.plot import plot
from sse_convert.evaluation.report import CacheSize, EvalReport, ModelScores
from sse_convert.evaluation.retrieval import NeedleScore
from sse_convert.files import write_json


def loss(sums, length=129):
    counts = (128,) * len(sums)
    mean = sum(sums) / sum(counts)
    bucket = PositionLoss(0, length, sum(counts), mean, 0.01, 1.5)
    return HeldOutLoss(length, len(sums), sum(counts), mean, 0.01, 1.5, (bucket,), tuple(sums), counts)


def needle(correct, samples=20, keys=1):
    depths = tuple(Accuracy(correct // 5, samples // 5) for _ in range(5))
    return NeedleScore("number", keys, 512, Accuracy(correct, samples), depths)


def make_report(limits, hits=((20, 15), (10, 5)), student_sums=(396.8, 407.36)):
    teacher = ModelScores(
        name="t",
        parameters=10,
        dtype="float32",
        held_out=(loss([384.0, 392.0]),),
        needles=tuple(needle(t, keys=i + 1) for i, (t, _) in enumerate(hits)),
    )
    student = ModelScores(
        name="s",
        parameters=12,
        dtype="float32",
        held_out=(loss(student_sums),),
        needles=tuple(needle(s, keys=i + 1) for i, (_, s) in enumerate(hits)),
    )
    cache = (CacheSize(length=512, teacher_bytes=4096, student_bytes=1024, student_state_bytes=512),)
    return EvalReport(
        teacher=teacher, student=student, cache=cache, limits=limits, conditions={"device": "cpu", "seed": 0}
    )


def test_gap_and_retention_by_hand():
    report = make_report({})
    (gap,) = report.loss_gaps()
    assert gap["gap"] == pytest.approx(0.11)
    assert gap["gap_se"] == pytest.approx(0.01)
    assert [row["share"] for row in report.retention()] == [0.75, 0.5]


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ({}, []),
        ({"loss_gap": 0.12}, []),
        ({"loss_gap": 0.10}, ["loss_gap"]),
        ({"needle_retention": 20 / 30}, []),
        ({"needle_retention": 0.67}, ["needle_retention"]),
        ({"loss_gap": 0.1, "needle_retention": 0.9}, ["loss_gap", "needle_retention"]),
    ],
)
def test_gate(limits, missed):
    report = make_report(limits)
    assert [check.name for check in report.gate() if not check.passed] == missed
    if not missed:
        report.require_gate()
        return
    with pytest.raises(VerificationError, match="evaluation gate missed") as caught:
        report.require_gate()
    assert all(name in caught.value.what and name in caught.value.expected for name in missed)
    assert caught.value.exit_code == 6


def test_a_teacher_that_retrieves_nothing_cannot_pass_a_retention_gate():
    report = make_report({"needle_retention": 0.0}, hits=((0, 0),))
    assert report.retention()[0]["share"] is None
    with pytest.raises(VerificationError, match="undefined"):
        report.require_gate()


def test_lines_show_every_figure():
    text = "\n".join(make_report({"loss_gap": 0.1}).lines())
    assert "3.031" in text
    assert "0.11" in text
    assert "75.0% (53-89)" in text
    assert "gate loss_gap: 0.11, limit 0.1: MISSED" in text
    assert "4.1 kB" in text


def test_json_values_are_plain(tmp_path):
    report = make_report({"loss_gap": 0.2})
    write_json(tmp_path / "r.json", report.to_dict())
    assert '"passed": true' in (tmp_path / "r.json").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_an_unwritable_report_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        write_json(tmp_path / "file" / "r.json", make_report({}).to_dict())


def test_a_broken_student_is_reported_and_fails_its_gate(tmp_path):
    report = make_report({"loss_gap": 10.0}, student_sums=(math.nan, 400.0))
    data = report.to_dict()
    assert data["student"]["held_out"][0]["loss"] is None
    assert not data["gate"][0]["passed"]
    assert "nan" in "\n".join(report.lines())
    plot([data], tmp_path / "broken.png")
    assert (tmp_path / "broken.png").stat().st_size > 10_000
