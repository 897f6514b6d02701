"""What is found in a run's folders, finished or not, and what is refused."""

import json
import shutil

import pytest

from sse_convert.errors import CheckpointError, UsageError
from sse_convert.results.collect import collect

STEPS = ["convert", "calibrate", "align", "distill", "eval", "export"]


@pytest.mark.parametrize("name", ["out", "out.stages"])
def test_a_run_is_found_by_either_folder(made, name):
    run = collect(made / name)
    assert run.name == "out"
    assert [step.name for step in run.steps] == STEPS
    assert [step.name for step in run.trained] == ["align", "distill"]
    assert [step.metrics[-1]["tokens"] for step in run.trained] == [256, 256]
    assert run.model.layers == ["sse", "sliding", "full"]
    assert run.evaluation.to_dict() == json.loads((made / "out.stages" / "04-eval" / "evaluation.json").read_text())


def test_the_folder_one_stands_in(made, monkeypatch):
    monkeypatch.chdir(made / "out")
    assert [step.name for step in collect(".").steps] == STEPS


def test_an_exported_model_alone(place):
    shutil.rmtree(place / "out.stages")
    run = collect(place / "out")
    assert run.steps == ()
    assert run.evaluation is not None
    assert run.model.layers == ["sse", "sliding", "full"]


def test_a_checkpoint_of_a_single_stage(place):
    shutil.move(place / "out.stages" / "02-align", place / "mine")
    run = collect(place / "mine")
    assert [step.name for step in run.steps] == ["align"]
    assert len(run.steps[0].metrics) == 2


def test_an_unfinished_run(place):
    shutil.rmtree(place / "out")
    for name in ("04-eval", "05-export"):
        shutil.rmtree(place / "out.stages" / name)
    distill = place / "out.stages" / "03-distill"
    (distill / "stage.json").unlink()
    shutil.rmtree(distill.with_name("03-distill.work"))
    distill.rename(distill.with_name("03-distill.work"))
    run = collect(place / "out")
    assert [(step.name, step.record is None) for step in run.steps][-2:] == [("align", False), ("distill", True)]
    assert run.model.name == str(place / "out.stages" / "02-align")
    assert run.evaluation is None


def test_what_is_no_run(made, tmp_path):
    (tmp_path / "empty.stages").mkdir()
    (tmp_path / "file").write_text("")
    for path, what in ((tmp_path / "none", "does not exist"), (tmp_path / "file", "is a file")):
        with pytest.raises(UsageError, match=what):
            collect(path)
    with pytest.raises(UsageError, match="holds no run"):
        collect(tmp_path / "empty")
    with pytest.raises(UsageError, match="holds no run") as caught:
        collect(made)
    assert caught.value.fix == f"give {made / 'out'}"


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("04-eval/evaluation.json", "{", "cannot be read"),
        ("04-eval/evaluation.json", "[]", "is not an object"),
        ("04-eval/evaluation.json", '{"schema": 2}', "has schema 2"),
        ("04-eval/evaluation.json", '{"schema": 1, "conditions": {}, "teacher": {}}', "teacher.name is missing"),
        ("02-align/stage.json", '{"inputs": {}, "hash": 1}', "is damaged"),
        ("02-align/metrics.jsonl", "{\n{\n", "cannot be read"),
    ],
)
def test_damaged_files_are_named(place, file, content, what):
    (place / "out.stages" / file).write_text(content)
    with pytest.raises(CheckpointError, match=what) as caught:
        collect(place / "out")
    assert file in caught.value.what
    assert caught.value.fix
