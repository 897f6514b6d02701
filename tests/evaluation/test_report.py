import json
import math

import pytest

from sse_convert.errors import OutputError
from sse_convert.evaluation.figures import CacheSize, ModelScores, paired_gaps
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.evaluation.perplexity import HeldOutLoss, PositionLoss
from sse_convert.evaluation.report import EvalReport
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


def make_report(hits=((20, 15), (10, 5)), student_sums=(396.8, 407.36)):
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
        teacher=teacher,
        student=student,
        loss_gaps=paired_gaps(teacher, student),
        cache=cache,
        conditions={"device": "cpu", "seed": 0},
    )


def test_gap_and_retention_by_hand():
    report = make_report()
    (gap,) = report.loss_gaps
    assert gap.gap == pytest.approx(0.11)
    assert gap.gap_se == pytest.approx(0.01)
    assert [row.share for row in report.retention()] == [0.75, 0.5]


def test_of_a_teacher_that_retrieves_nothing_there_is_no_share():
    assert make_report(hits=((0, 0),)).retention()[0].share is None


def test_lines_show_every_figure():
    text = "\n".join(make_report().lines())
    assert "3.031" in text
    assert "0.11" in text
    assert "75.0% (53-89)" in text
    assert "4.1 kB" in text


def test_json_values_are_plain(tmp_path):
    report = make_report()
    write_json(tmp_path / "r.json", report.to_dict())
    assert json.loads((tmp_path / "r.json").read_text()) == report.to_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_an_unwritable_report_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        write_json(tmp_path / "file" / "r.json", make_report().to_dict())


def test_a_broken_student_is_reported():
    report = make_report(student_sums=(math.nan, 400.0))
    data = report.to_dict()
    assert data["student"]["held_out"][0]["loss"] is None
    assert "nan" in "\n".join(report.lines())
