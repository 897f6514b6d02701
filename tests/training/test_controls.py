"""Control runs beside a run: trained once, measured alike, listed when missing."""

import json

import pytest

from sse_convert import pipeline
from sse_convert.errors import UsageError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.pipeline import run_recipe
from tests.training.test_resume import steps_then

TINY = {"tokens": 128, "batch_tokens": 128}


@pytest.fixture
def recipe(make, text_folder):
    """Builds recipes that measure and ask for controls."""

    def build(*controls, **settings):
        text = [{"path": str(text_folder)}]
        measured = {
            "calibrate": {"rows": 2, "seq_len": 32},
            "data": {"train": text, "valid": text},
            "eval": {"lengths": [32], "tokens": 256},
            "controls": list(controls),
        }
        return make(("align", TINY), ("uptrain", TINY), **(measured | settings))

    return build


@pytest.mark.slow
def test_all_controls_are_run_measured_and_compared(recipe, tmp_path, monkeypatch):
    report = run_recipe(recipe("all"), command="sse-convert run r.yaml")
    folder = tmp_path / "out.controls"
    steps = {
        path.name.removesuffix(".stages"): sorted(p.name for p in path.iterdir() if p.suffix not in (".work", ".yaml"))
        for path in folder.glob("*.stages")
    }
    assert steps == {
        "teacher_tuned": ["00-convert", "01-uptrain", "02-eval"],
        "window": ["00-convert", "01-eval"],
        "window_trained": ["00-convert", "01-align", "02-uptrain", "03-eval"],
        "gla": ["00-convert", "01-calibrate", "02-align", "03-uptrain", "04-eval"],
        "pure_sse": ["00-convert", "01-calibrate", "02-align", "03-uptrain", "04-eval"],
    }
    layers = {name: load_pretrained(folder / f"{name}.stages" / steps[name][-2]).config.sse["layers"] for name in steps}
    assert layers == {
        "teacher_tuned": ["full"] * 3,
        "window": ["sliding", "sliding", "full"],
        "window_trained": ["sliding", "sliding", "full"],
        "gla": ["sse-gla", "sliding", "full"],
        "pure_sse": ["sse"] * 3,
    }
    assert [run.status for run in report.controls.runs] == ["measured"] * 5
    assert {j.control for j in report.controls.judgements()} == {"window", "window_trained", "gla", "pure_sse"}
    assert json.loads((folder / "comparison.json").read_text()) == report.controls.to_dict()
    assert any("the window control, loss gap at 32: " in line for line in report.lines())
    teachers = [report.controls.main["teacher"], *(run.report["teacher"] for run in report.controls.runs)]
    assert all(teacher == teachers[0] for teacher in teachers)
    tuned = load_pretrained(folder / "teacher_tuned.stages" / "01-uptrain")
    teacher = load_pretrained(recipe().model)
    assert not tuned.lm_head.weight.equal(teacher.lm_head.weight)

    for name in ("convert_checkpoint", "calibrate_checkpoint", "Evaluator", "export_checkpoint"):
        monkeypatch.setattr(pipeline, name, lambda *args, **kwargs: pytest.fail("done twice"))
    assert run_recipe(recipe("all")).controls.to_dict()["judgements"] == report.controls.to_dict()["judgements"]


def test_controls_can_follow_later_and_continue(recipe, tmp_path, monkeypatch):
    first = run_recipe(recipe(), command="sse-convert run r.yaml")
    missing = {run.name: run.note for run in first.controls.runs if run.status == "not run"}
    assert missing["window_trained"] == "sse-convert run r.yaml --controls window_trained"
    assert any(line.endswith("not run; sse-convert run r.yaml --controls gla") for line in first.lines())
    assert list((tmp_path / "out.controls").iterdir()) == [tmp_path / "out.controls" / "comparison.json"]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "Evaluator", steps_then(None, 0, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe("window_trained"))
    assert (tmp_path / "out.controls" / "window_trained.stages" / "02-uptrain" / "stage.json").is_file()
    report = run_recipe(recipe("window_trained"))
    assert all(step["already_done"] for step in report.steps)
    assert [run.name for run in report.controls.runs if run.status == "measured"] == ["window_trained"]


def test_a_control_that_cannot_be_is_refused_first(make, tmp_path):
    with pytest.raises(UsageError, match="'teacher_tuned' is asked for: no stage of loss ce"):
        run_recipe(make(("align", TINY), controls=["teacher_tuned"]))
    assert not (tmp_path / "out.stages").exists()


def test_results_from_before_these_settings_are_still_good(recipe, tmp_path):
    """A run folder written before lm-eval and controls existed does not count as changed."""
    run_recipe(recipe())
    path = tmp_path / "out.stages" / "04-eval" / "stage.json"
    record = json.loads(path.read_text())
    assert record.pop("sha256")
    assert record["inputs"]["eval"].pop("lm_eval") is None
    path.write_text(json.dumps(record))
    assert all(step["already_done"] for step in run_recipe(recipe()).steps)


@pytest.mark.slow
def test_the_teacher_is_tuned_by_answers_of_the_row(make, text_folder, tmp_path):
    text, needles = [{"path": str(text_folder)}], {"share": 1.0, "answers": "row", "forms": {"copy": 1}, "keys": [1]}
    settings = {"data": {"train": text, "valid": text, "needles": needles}, "eval": {"lengths": [32], "tokens": 256}}
    run_recipe(make(("distill", TINY), controls=["teacher_tuned"], calibrate={"enabled": False}, **settings))
    stages = tmp_path / "out.controls" / "teacher_tuned.stages"
    assert sorted(path.name for path in stages.iterdir() if not path.suffix) == ["00-convert", "01-distill", "02-eval"]
    before, tuned = (load_pretrained(stages / name) for name in ("00-convert", "01-distill"))
    assert not tuned.lm_head.weight.equal(before.lm_head.weight)
