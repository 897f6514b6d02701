import struct

import pytest

from sse_convert.errors import OutputError, UsageError
from sse_convert.evaluation.plot import plot
from tests.evaluation.test_report import make_report


def size_in_pixels(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_plot_of_one_and_of_several_students(tmp_path):
    report = make_report().to_dict()
    plot([report], tmp_path / "one.png")
    plot([report] * 8, tmp_path / "many.png", labels=[f"student {i}" for i in range(8)])
    for name in ("one.png", "many.png"):
        width, height = size_in_pixels(tmp_path / name)
        assert width > 1200
        assert height > 400
        assert (tmp_path / name).stat().st_size > 10_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["many.png", "one.png"]


def test_empty_report_still_draws(tmp_path):
    report = make_report().to_dict()
    report["cache"] = []
    for model in ("teacher", "student"):
        report[model]["held_out"] = report[model]["needles"] = []
    plot([report], tmp_path / "empty.png")
    assert size_in_pixels(tmp_path / "empty.png")[0] > 1200


def test_divergence_has_a_panel_of_its_own(tmp_path):
    plain = make_report().to_dict()
    report = make_report().to_dict()
    buckets = [{"stop": 64, "kl": 0.5}, {"stop": 129, "kl": 0.1}]
    report["student"]["agreement"] = [{"length": 129, "kl": 0.2, "top1": 0.9, "buckets": buckets}]
    before = make_report().to_dict()  # a report written before these figures existed
    for model in ("teacher", "student"):
        for key in ("agreement", "tasks"):
            del before[model][key]
    for name, reports in {"plain": [plain], "before": [before], "full": [report, before]}.items():
        plot(reports, tmp_path / f"{name}.png")
    widths = {name: size_in_pixels(tmp_path / f"{name}.png")[0] for name in ("plain", "before", "full")}
    assert widths["plain"] == widths["before"]
    assert widths["full"] > 1.25 * widths["plain"]


def test_bad_requests(tmp_path):
    report = make_report().to_dict()
    with pytest.raises(UsageError, match="no report"):
        plot([], tmp_path / "x.png")
    with pytest.raises(UsageError, match="2 labels for 1 reports"):
        plot([report], tmp_path / "x.png", labels=["a", "b"])
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        plot([report], tmp_path / "file" / "x.png")
