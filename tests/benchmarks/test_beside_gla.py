"""States of SSE beside those of GLA, in miniature."""

import json
from pathlib import Path

import pytest

from benchmarks.analysis import beside_gla


@pytest.mark.smoke
def test_both_models_are_analysed_and_a_run_goes_on(given, tmp_path, capsys):
    out, text = tmp_path / "beside.json", given.parent / "valid.txt"
    stage = "stages=[{name: distill, loss: kl, tokens: 256, seq_len: 64, lr: 1.0e-3, batch_tokens: 128}]"
    run = [
        "--recipe",
        str(given),
        "--set",
        stage,
        "--set",
        "mixers={}",
        "--keep",
        "1",
        "--tokens",
        "256",
        "--rows",
        "64",
    ]
    run += ["--text", str(text), "--read", "256", "--length", "128", "--out", str(out)]
    assert beside_gla.main(run) == 0
    report = json.loads(out.read_text())
    assert [(own["model"], own["tokens"]) for own in report["models"]] == [
        ("SSE", 0), ("SSE", 256), ("GLA", 0), ("GLA", 256)
    ]  # fmt: skip
    assert set(report["sentences"]) == {"0", "256"}
    assert all(layer["index"] != 1 for own in report["models"] for layer in own["layers"])
    assert (tmp_path / "beside.png").stat().st_size > 0
    part = {**report, "models": report["models"][:1]}
    out.write_text(json.dumps(part))
    assert beside_gla.main([*run, "--resume", "--tokens", "0"]) == 0
    assert [(own["model"], own["tokens"]) for own in json.loads(out.read_text())["models"]] == [("SSE", 0), ("GLA", 0)]
    assert beside_gla.main([*run, "--resume", "--length", "64"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_sentence_is_judged_layer_by_layer():
    assert beside_gla.outcome(8, 0, 8) == "holds"
    assert beside_gla.outcome(0, 8, 8) == "fails"
    assert beside_gla.outcome(7, 1, 8) == "mixed"
    assert beside_gla.outcome(7, 0, 8) == beside_gla.outcome(0, 0, 8) == "undecided"


def test_the_stored_sentences_are_those_of_the_stored_models():
    report = json.loads(Path("benchmarks/analysis/beside_gla.json").read_text())
    for tokens, rows in report["sentences"].items():
        assert rows == beside_gla.sentences(report["models"], int(tokens))
