"""Models trained from random weights, in miniature."""

import json

import pytest

from benchmarks.paper import from_scratch, random_model
from sse_convert import api


def run(given, out, *more):
    """Over the text of the tiny recipe, with its model's shape."""
    folder = given.parent
    text = ["--train", str(folder / "train.txt"), "--valid", str(folder / "valid.txt")]
    return from_scratch.main(["--tiny", "--out", str(out), "--shape", str(folder / "teacher"), *text, *more])


@pytest.mark.smoke
def test_every_model_learns_and_a_run_goes_on(given, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(from_scratch, "HEADS", 4)
    out = tmp_path / "scratch.json"
    assert run(given, out, "--models", "GLA", "--seeds", "1") == 0
    first = json.loads(out.read_text())
    assert run(given, out, "--seeds", "1", "--resume") == 0
    report = json.loads(out.read_text())
    assert [own["name"] for own in report["runs"]] == ["GLA", "softmax", "SSE, N = 4, k = 1"]
    assert report["runs"][0] == first["runs"][0]
    assert all(own["loss"] < own["at_random"] for own in report["runs"])
    assert len({own["at_random"] for own in report["runs"]}) == 1
    assert report["verdict"]["outcome"] == "undecided"
    assert "SSE, N = 4, k = 1 over GLA" in capsys.readouterr().err
    assert run(given, tmp_path / "other.json", "--minutes", "-1") == 0
    assert not (tmp_path / "other.json").exists()


def test_seeds_that_all_models_have_decide():
    losses = {"GLA": (2.0, 2.01), "SSE, N = 4, k = 1": (1.5, 1.52), "softmax": (1.2, 1.21, 1.3)}
    runs = [{"name": name, "seed": i, "loss": x} for name, own in losses.items() for i, x in enumerate(own)]
    found = from_scratch.verdict(runs)
    assert found["outcome"] == "holds"
    assert found["sse_over_gla"]["by"] == pytest.approx(0.495)
    assert found["softmax_over_sse"]["by"] == pytest.approx(0.305)


@pytest.mark.parametrize("name", from_scratch.MODELS)
def test_every_model_of_the_table_plans(given, tmp_path, name):
    options = from_scratch.parser().parse_args(["--out", "x"])
    random_model.save_random(given.parent / "teacher", str(given.parent / "teacher"), tmp_path / "random")
    recipe = from_scratch.recipe_of(options, name, 0, tmp_path)
    assert {row.mixer for row in api.plan(recipe).layers} == {from_scratch.MODELS[name][0]}


def test_a_seed_is_a_model(given, tmp_path, capsys):
    teacher, weights = str(given.parent / "teacher"), "model.safetensors"
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made = [teacher, "--tokenizer", teacher, "--out", str(tmp_path / name), "--seed", str(seed)]
        assert random_model.main(made) == 0
    a, b, c = ((tmp_path / name / weights).read_bytes() for name in "abc")
    assert a == b != c
    assert random_model.main(made) == 8
    assert "exists" in capsys.readouterr().err


def test_a_vocabulary_too_small_and_a_missing_config_are_refused(given, tmp_path, capsys):
    teacher = given.parent / "teacher"
    config = json.loads((teacher / "config.json").read_text()) | {"vocab_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path, message in ((tmp_path / "config.json", "as large"), (tmp_path / "none", "no config.json")):
        assert random_model.main([str(path), "--tokenizer", str(teacher), "--out", str(tmp_path / "out")]) == 4
        assert message in capsys.readouterr().err
