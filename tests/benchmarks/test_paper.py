"""The commands that rebuild figures and statements of the paper, in miniature."""

import json

import pytest
import torch

from benchmarks.paper import mqar_topk, propositions
from benchmarks.paper.row_sparse.results import Claim

SMALLEST = ["--tiny", "--device", "cpu", "--steps", "2", "--widths", "8", "16", "--test", "20", "--valid", "20"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("mqar") / "figure.json"
    assert mqar_topk.main(["--out", str(out), *SMALLEST]) == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["figure.json", "figure.png"]
    return json.loads(out.read_text())


def test_every_point_of_the_figure_is_measured(report):
    points = [(c["mixer"], c["noise"], c["width"], c["rows"]) for c in report["cells"]]
    assert len(set(points)) == len(points) == 3 * 2 * 2 * 2
    assert {(width, rows) for _, _, width, rows in points} == {(8, None), (8, 1), (16, None), (16, 2)}
    assert all(len(c["accuracy"]["by_seed"]) == 1 and 0 <= c["accuracy"]["mean"] <= 1 for c in report["cells"])
    assert len(report["claims"]) == 3 * 3 * 2
    assert {"command", "commit", "device", "torch", "date"} <= report["environment"].keys()
    assert report["settings"]["steps"] == 2
    assert "out" not in report["settings"]


def test_an_unfinished_figure_goes_on(report, tmp_path):
    out = tmp_path / "figure.json"
    assert mqar_topk.main(["--out", str(out), *SMALLEST, "--mixers", "gla", "--widths", "16"]) == 0
    first = json.loads(out.read_text())
    assert mqar_topk.main(["--out", str(out), *SMALLEST, "--mixers", "gla", "--resume"]) == 0
    whole = json.loads(out.read_text())
    assert whole["cells"] == [cell for cell in report["cells"] if cell["mixer"] == "gla"]
    assert whole["timings"][1] == first["timings"][0]


def test_points_of_two_runs_in_one_file_are_judged_together(report, tmp_path):
    out = tmp_path / "figure.json"
    out.write_text(json.dumps({**report, "claims": report["claims"][:1], "seconds": 0}))
    assert mqar_topk.main(["--out", str(out), *SMALLEST, "--resume"]) == 0
    whole = json.loads(out.read_text())
    assert whole["claims"] == report["claims"]
    assert whole["seconds"] == report["seconds"]


def test_a_training_that_time_cut_off_goes_on(report, tmp_path, capsys):
    """At the best rate of an earlier figure, which has one."""
    out, earlier = tmp_path / "figure.json", tmp_path / "earlier.json"
    earlier.write_text(json.dumps(report))
    given = ["--out", str(out), *SMALLEST, "--mixers", "gla", "--widths", "8", "--best-of", str(earlier), "--resume"]
    assert mqar_topk.main([*given, "--minutes", "0"]) == 0
    assert "gla 8: time is over" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier.json", "figure.json", "figure_gla_8.pt"]
    assert mqar_topk.main(given) == 0
    whole = json.loads(out.read_text())
    assert whole["cells"] == [cell for cell in report["cells"] if (cell["mixer"], cell["width"]) == ("gla", 8)]
    assert not (tmp_path / "figure_gla_8.pt").exists()
    earlier.write_text(json.dumps({"cells": []}))
    assert mqar_topk.main(given[:-1]) == 2
    assert "no point of gla at width 8" in capsys.readouterr().err


def test_a_figure_with_other_settings_is_not_mixed_in(tmp_path, capsys):
    out = tmp_path / "figure.json"
    assert mqar_topk.main(["--out", str(out), *SMALLEST, "--mixers", "gla", "--widths", "8"]) == 0
    before = out.read_bytes()
    assert mqar_topk.main(["--out", str(out), *SMALLEST, "--vocab", "64", "--resume"]) == 2
    assert "measured with other settings: vocab 32, now 64" in capsys.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.smoke
def test_the_default_rows_are_a_quarter():
    options = mqar_topk.parser().parse_args(["--out", "x"])
    settings = mqar_topk.ModelSettings(mixer="gla", width=64, vocab_size=100)
    runs = mqar_topk.runs_of(options, settings)
    assert {run.update.rows for run in runs if run.update} == {8}
    assert [run.update is None for run in runs] == [True] * 18 + [False] * 18
    assert len(set(runs)) == 36


def test_training_validation_and_test_rows_differ():
    options = mqar_topk.parser().parse_args(["--out", "x", "--train", "30", "--valid", "30", "--test", "30"])
    sets = mqar_topk.data(options, torch.device("cpu"))
    rows = {tuple(row) for questions in sets for row in questions.inputs_SNT[0].tolist()}
    assert len(rows) == 90


def test_verdict_counts_panels():
    claims = [
        Claim("a beats b", "gla", False, "holds", ((0.1, 0.02), (0.2, 0.01)), 5, 1, 6),
        Claim("a beats b", "gla", True, "fails", ((-0.1, 0.02),), 0, 3, 3),
    ]
    assert mqar_topk.verdict(claims) == [
        "a beats b: holds in 1, fails in 1 of 2 panels; true of 5 and false of 4 of 9 pairs",
        "    gla, setting 1: zeros: holds (+10.0 ± 2.0, +20.0 ± 1.0 points)",
        "    gla, setting 2: noise: fails (-10.0 ± 2.0 points)",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "1.5"], "rows between 0 and 1"),
        (["--seeds", "0"], "at least one seed"),
        (["--pairs", "99"], "an even length of at least 396"),
        (["--widths", "7"], "a multiple of 2"),
    ],
)
def test_impossible_settings_are_refused(arguments, message, tmp_path, capsys):
    assert mqar_topk.main(["--out", str(tmp_path / "x.json"), *SMALLEST, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_propositions_are_reported(tmp_path, capsys):
    out = tmp_path / "propositions.json"
    assert propositions.main(["--out", str(out), "--instances", "500"]) == 0
    printed = capsys.readouterr().err
    assert "UNEXPECTED" not in printed
    report = json.loads(out.read_text())
    assert [c["proposition"] for c in report["checks"]] == sorted(c["proposition"] for c in report["checks"])
    assert printed.count("\n") == len(report["checks"])


def test_an_unexpected_outcome_is_an_error(monkeypatch, capsys):
    broken = propositions.Check(1, "never true", True, 10, 3, -1.0)
    monkeypatch.setattr(propositions, "check_all", lambda *_: [broken])
    assert propositions.main([]) == 6
    assert "breaks in 30.0%" in capsys.readouterr().err
