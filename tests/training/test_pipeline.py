"""The whole recipe: every step once, finished ones skipped, changed inputs refused, interruptions continued."""

import inspect
import json
import shutil

import pytest
import torch
import yaml

from sse_convert import api, pipeline
from sse_convert.checkpoints import open as opening
from sse_convert.checkpoints.manifest import read_manifest
from sse_convert.checkpoints.run_lock import run_lock
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DataError, OutputError, RecipeError, TrainingError, VerificationError
from sse_convert.mixers import BUILT_IN, SSEMixer, mixer_to_dict
from sse_convert.modeling.auto import load_pretrained
from sse_convert.pipeline import run_recipe
from sse_convert.recipe import load_recipe
from sse_convert.report import format_bytes
from sse_convert.training import attempt, loop
from tests.training.test_resume import Killed, same, steps_then

TINY = {"tokens": 128, "batch_tokens": 128}


@pytest.fixture
def recipe(make, text_folder):
    """Builds recipes of the whole pipeline; keyword arguments replace parts."""

    def build(**settings):
        parts = {
            "calibrate": {"rows": 2, "seq_len": 32},
            "data": {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]},
            "eval": {"tokens": 128},
        }
        return make(("align", TINY), ("uptrain", {**TINY, "tokens": 384, "checkpoint_steps": 1}), **(parts | settings))

    return build


STEPS = ["convert", "calibrate", "align", "uptrain", "eval", "export"]


def test_a_run_does_everything_once(recipe, tmp_path, monkeypatch, capsys):
    report = run_recipe(recipe())
    assert [step["name"] for step in report.steps] == STEPS
    assert not any(step["already_done"] for step in report.steps)
    folders = sorted(path.name for path in (tmp_path / "out.stages").iterdir() if path.suffix == "")
    assert folders == [f"{i:02d}-{name}" for i, name in enumerate(STEPS)]
    assert all((tmp_path / "out.stages" / name / "stage.json").is_file() for name in folders)
    load_pretrained(tmp_path / "out")
    assert load_recipe(tmp_path / "out.stages" / "recipe.yaml") == recipe()
    assert (tmp_path / "out" / "evaluation.json").is_file()
    assert json.loads(json.dumps(report.to_dict()))["out"] == str(tmp_path / "out")
    verdict, left, finished = report.lines()[-3:]
    assert (verdict, finished) == (report.verdict.line(), f"finished model: {tmp_path / 'out'}")
    work = [path for path in (tmp_path / "out.stages").rglob("*") if ".work" in str(path) and path.is_file()]
    assert report.to_dict()["work_bytes"] == sum(path.stat().st_size for path in work) > 10_000
    assert left.startswith(f"{tmp_path / 'out.stages'}/*.work hold {format_bytes(report.work_bytes)} of training")
    shared, guessing = report.warnings
    assert "no better than guessing one of 320 tokens" in guessing  # random weights, here
    assert shared.startswith("data.train has 1 file of data.valid as well, such as ")
    assert f"warning: {shared}" in report.lines()
    told = capsys.readouterr().err
    assert f"warning: {shared}" in told
    assert "warning: align: hardly trained by 1 step; raise" in told

    for name in ("convert_checkpoint", "calibrate_checkpoint", "Evaluator", "export_checkpoint"):
        monkeypatch.setattr(pipeline, name, lambda *args, **kwargs: pytest.fail("done twice"))
    again = run_recipe(recipe())
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if not line.startswith("warning: ")] == [
        f"{name}: done before ({tmp_path / 'out.stages' / f'{i:02d}-{name}'})" for i, name in enumerate(STEPS)
    ]
    assert all(step["already_done"] for step in again.steps)
    assert again.steps[3]["report"]["loss_last"] == report.steps[3]["report"]["loss_last"]


def test_each_step_says_what_it_came_to_when_it_finishes(recipe, tmp_path, monkeypatch):
    """The main figure of each, and where it is, before the next step begins."""
    said = []
    monkeypatch.setattr(pipeline, "say", said.append)
    report = run_recipe(recipe())
    root = tmp_path / "out.stages"
    heads = [f"== {name} -> {root / f'{i:02d}-{name}'}" for i, name in enumerate(STEPS)]
    starts = [said.index(head) for head in heads]
    assert starts == sorted(starts)
    found = [said[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(said)], strict=True)]
    assert [name for name, lines in zip(STEPS, found, strict=True) if not lines] == []
    convert, calibrate, align, uptrain, evaluated, export = ("\n".join(lines) for lines in found)
    assert convert.startswith(f"wrote {root / '00-convert'}: ")
    assert calibrate.startswith(f"wrote {root / '01-calibrate'}: ")
    assert align.startswith("align (layer_mse): loss ")
    assert uptrain.endswith(f"wrote {root / '03-uptrain'}")
    assert evaluated.endswith(f"{report.verdict.line()}\nreport: {root / '04-eval' / 'evaluation.json'}")
    assert export.startswith(f"wrote {tmp_path / 'out'}: ")
    assert not any(line in report.lines() for line in (*found[0], *found[3]))


@pytest.mark.parametrize(("what", "allowed"), [("record_of", 2), ("add_to_manifest", 2), ("move_folder", 0)])
def test_killed_between_export_and_its_place(recipe, tmp_path, monkeypatch, what, allowed):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, what, steps_then(getattr(pipeline, what), allowed, Killed()))
        with pytest.raises(Killed):
            run_recipe(recipe(calibrate={"enabled": False}))
    assert not (tmp_path / "out").exists()
    report = run_recipe(recipe(calibrate={"enabled": False}))
    assert [step["already_done"] for step in report.steps] == [True] * 4 + [what == "move_folder"]
    load_pretrained(tmp_path / "out")
    step = tmp_path / "out.stages" / "04-export"
    assert {path.name for path in step.iterdir()} == {"stage.json", "manifest.json"}
    assert list(read_manifest(step)) == ["stage.json"]


def test_a_second_run_of_a_recipe_is_refused_by_name(recipe, tmp_path):
    (tmp_path / "out.stages").mkdir()
    with run_lock(tmp_path / "out.stages"), pytest.raises(TrainingError, match="another run writes to it: process"):
        run_recipe(recipe())


def test_a_destroyed_model_ends_the_run_with_exit_code_6(recipe, tmp_path, capsys):
    settings = recipe().to_dict()
    settings["stages"][1] |= {"lr": 30.0, "tokens": 512, "warmup": 0.0, "checkpoint_steps": 100}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    for _ in range(2):  # finished steps do not hide it
        assert run_app(app, ["run", str(path)]) == 6
        told = capsys.readouterr().err
        assert "error: destroyed: loss " in told
        assert "not offered for push" in told
        assert "sse-convert push" not in told
        assert "finished model" not in told
    assert (tmp_path / "out" / "config.json").is_file()
    assert "Verdict: destroyed: " in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(VerificationError, match="destroyed"):
        api.push(tmp_path / "out", "ada/tiny", dry_run=True)
    assert api.push(tmp_path / "out", "ada/tiny", dry_run=True, anyway=True).remarks[0].startswith("verdict: destroyed")


def test_a_recipe_takes_five_hops_to_the_loop(recipe, monkeypatch):
    chains = []

    def caught(*args, **kwargs):
        frames = [info.frame for info in inspect.stack(0)][::-1]
        names = [f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}" for frame in frames]
        chains.append([name for name in names if name.startswith("sse_convert.") and "<locals>" not in name])
        raise Killed

    monkeypatch.setattr(attempt, "train", caught)
    with pytest.raises(Killed):
        api.run(recipe())
    assert chains == [
        [  # cli.app calls the first of these, the last one calls training.loop.train
            "sse_convert.api.running.run",
            "sse_convert.pipeline.run_recipe",
            "sse_convert.training.stage.run_stage",
            "sse_convert.training.attempt.train_stage",
            "sse_convert.training.attempt.Attempt.train",
        ]
    ]


def test_the_teacher_is_opened_once_in_a_run(recipe, teacher_folder, text_folder, tmp_path, monkeypatch):
    """By a run with every step, whose text is partly sampled from it."""
    opened, read = [], opening.read_header
    monkeypatch.setattr(opening, "read_header", lambda path: opened.append(path.parent) or read(path))
    sampled = {"kind": "teacher", "rows": 4, "length": 64}
    data = {"train": [{"path": str(text_folder)}, sampled], "valid": [{"path": str(text_folder / "5.txt")}, sampled]}
    report = run_recipe(recipe(layers={"pattern": ["sse"], "select": {"keep": 1}}, data=data))
    names = [step["name"] for step in report.steps]
    assert names == ["select", "convert", "calibrate", "align", "uptrain", "eval", "export"]
    assert opened.count(teacher_folder) == 1


def test_plan_opens_the_teacher_once(recipe, teacher_folder, monkeypatch):
    opened, read = [], opening.read_header
    monkeypatch.setattr(opening, "read_header", lambda path: opened.append(path.parent) or read(path))
    api.plan(recipe())
    assert opened == [teacher_folder]


def test_changed_inputs_are_refused_by_name(recipe, tmp_path):
    plain = {"eval": {"tokens": 0}}
    run_recipe(recipe(**plain))
    stages = tmp_path / "out.stages"
    mixers = {"sse": {"qk_rank": 4, "num_partitions": 8}, "sliding": {"window": 8}}
    for change, folder, message in (
        ({"mixers": mixers}, "00-convert", r"mixers\.sse\.num_partitions was 4, is 8"),
        ({"calibrate": {"rows": 3, "seq_len": 32}}, "01-calibrate", r"calibrate\.rows was 2, is 3"),
        ({"train": {"seed": 7}}, "00-convert", r"train\.seed was 0, is 7"),
        ({"data": {**recipe().to_dict()["data"], "seed": 5}}, "01-calibrate", r"data\.seed was 0, is 5"),
    ):
        with pytest.raises(TrainingError, match=message) as caught:
            run_recipe(recipe(**(plain | change)))
        assert str(stages / folder) in caught.value.what
        assert f"delete {stages / folder}" in caught.value.fix
    shutil.rmtree(stages / "01-calibrate")
    shutil.rmtree(stages / "02-align")
    with pytest.raises(TrainingError, match="checkpoint was"):  # what follows a new calibration must be made again
        run_recipe(recipe(**plain, calibrate={"rows": 3, "seq_len": 32}))


def test_a_name_that_meant_another_mixer_is_refused_and_the_fix_goes_on(recipe, tmp_path, monkeypatch):
    """The text of the recipe is the same, and the built-in mixer that it names is not."""
    parts = {"eval": {"tokens": 0}, "layers": {"pattern": ["sse", "full", "full"]}, "mixers": {}}
    before = SSEMixer(num_partitions=600, top_k=4, update="delta", k_feature_map="l2", decay_params="separate")
    with monkeypatch.context() as patch:
        patch.setitem(BUILT_IN, "sse", before)
        run_recipe(recipe(**parts))
        assert any("is larger than the teacher's" in warning for warning in run_recipe(recipe(**parts)).warnings)
    with pytest.raises(RecipeError, match=r"num_partitions: 1 in the recipe, 600 in the checkpoint") as caught:
        run_recipe(recipe(**parts))
    assert str(tmp_path / "out.stages" / "00-convert") in caught.value.what
    sets = [text.split(maxsplit=1)[0].strip(";") for text in caught.value.fix.split("--set ")[1:]]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(**parts).to_dict()))
    report = run_recipe(load_recipe(tmp_path / "recipe.yaml", sets))
    assert all(step["already_done"] for step in report.steps)


def test_a_line_that_says_what_the_built_in_mixer_is_may_go(recipe):
    parts = {"eval": {"tokens": 0}, "layers": {"pattern": ["sse", "full", "full"]}}
    run_recipe(recipe(**parts, mixers={"sse": mixer_to_dict(BUILT_IN["sse"])}))
    assert all(step["already_done"] for step in run_recipe(recipe(**parts, mixers={})).steps)


def test_changed_text_is_refused(recipe, text_folder, tmp_path):
    shutil.copytree(text_folder, tmp_path / "text")
    data = {"train": [{"path": str(tmp_path / "text")}]}
    settings = {"data": data, "eval": {"tokens": 0}, "calibrate": {"enabled": False}}
    run_recipe(recipe(**settings))
    with (tmp_path / "text" / "0.txt").open("a") as file:
        file.write(" and more")
    with pytest.raises(TrainingError, match=r"text\.0\.bytes was"):
        run_recipe(recipe(**settings))


def test_interrupted_in_each_step_and_continued(recipe, tmp_path, monkeypatch):
    settings = {"eval": {"tokens": 64}}
    for name in ("convert_checkpoint", "calibrate_checkpoint", "align", "uptrain", "Evaluator", "export_checkpoint"):
        with monkeypatch.context() as patch:
            if name in ("align", "uptrain"):
                patch.setattr(loop, "_gradients", steps_then(loop._gradients, name == "uptrain", KeyboardInterrupt()))
            else:
                patch.setattr(pipeline, name, steps_then(None, 0, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                run_recipe(recipe(**settings))
        assert not (tmp_path / "out").exists()
        assert not [p for p in (tmp_path / "out.stages").glob("*") if p.name.startswith(".")]
    report = run_recipe(recipe(**settings))
    assert [step["already_done"] for step in report.steps] == [True, True, True, True, True, False]
    done = tmp_path / "out.stages" / "03-uptrain"
    shutil.move(tmp_path / "out.stages", tmp_path / "first")
    shutil.rmtree(tmp_path / "out")
    run_recipe(recipe(**settings))
    assert same(done, tmp_path / "first" / "03-uptrain")


def test_killed_between_a_step_and_its_record(recipe, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "record_of", steps_then(None, 0, Killed()))
        with pytest.raises(Killed):
            run_recipe(recipe())
    assert (tmp_path / "out.stages" / "00-convert" / "config.json").is_file()
    assert run_recipe(recipe(eval={"tokens": 0})).steps[0]["already_done"] is False


def test_task_files_with_code_are_found_before_the_first_step(recipe, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "own.yaml").write_text("task: own\ndoc_to_text: !function utils.text\n")
    asked = {"tasks": ["own"], "include_path": str(tmp_path / "tasks")}
    with pytest.raises(DataError, match="names Python functions"):
        run_recipe(recipe(eval={"tokens": 0, "lm_eval": asked}))
    assert not (tmp_path / "out.stages").exists()


def test_an_existing_result_is_refused_before_anything_starts(recipe, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match=f"{tmp_path / 'out'} exists"):
        run_recipe(recipe())
    assert not (tmp_path / "out.stages").exists()


def test_a_deleted_result_is_exported_again(recipe, tmp_path):
    settings = {"eval": {"tokens": 0}}
    run_recipe(recipe(**settings))
    shutil.rmtree(tmp_path / "out")
    report = run_recipe(recipe(**settings))
    assert [step["already_done"] for step in report.steps] == [True, True, True, True, False]
    assert (tmp_path / "out" / "config.json").is_file()
    with pytest.raises(OutputError, match="earlier run"):
        run_recipe(recipe(**settings), resume=False)


def test_another_export_is_made_at_once(recipe, tmp_path, capsys):
    """Nothing is trained from it, so its settings may change; what was exported before stays."""
    settings, export = {"eval": {"tokens": 0}}, {"dir": str(tmp_path / "out")}
    run_recipe(recipe(**settings))
    capsys.readouterr()
    report = run_recipe(recipe(**settings, export={**export, "dtype": "bfloat16", "license": "mit"}))
    aside = tmp_path / "out.stages" / "outdated-04-export"
    changed = "export: export.dtype was 'keep', is 'bfloat16'; export.license was None, is 'mit'"
    assert f"{changed}: what was made before is now in {aside}" in capsys.readouterr().err
    assert [step["already_done"] for step in report.steps] == [True] * 4 + [False]
    assert {path.name for path in aside.iterdir()} == {"04-export", "out"}
    dtypes = {str(folder): load_pretrained(folder).dtype for folder in (tmp_path / "out", aside / "out")}
    assert list(dtypes.values()) == [torch.bfloat16, torch.float32]


def test_a_damaged_result_is_no_finished_model(recipe, tmp_path):
    settings = {"eval": {"tokens": 0}}
    run_recipe(recipe(**settings))
    for path in (tmp_path / "out" / name for name in ("model.safetensors", "tokenizer.json", "manifest.json")):
        content = path.read_bytes()
        for damaged in (None, content[:-9], content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=path.name) as caught:
                run_recipe(recipe(**settings))
            assert caught.value.fix.startswith(f"delete {tmp_path / 'out'}, and run again")
        path.write_bytes(content)
    (tmp_path / "out" / "README.md").rename(tmp_path / "card")
    with pytest.raises(CheckpointError, match=r"README\.md is missing"):
        run_recipe(recipe(**settings))
    (tmp_path / "card").rename(tmp_path / "out" / "README.md")
    assert all(step["already_done"] for step in run_recipe(recipe(**settings)).steps)


def test_bad_text_of_a_later_step_is_found_first(recipe, tmp_path, text_folder):
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(tmp_path / "bad.txt")}]}
    with pytest.raises(DataError, match="byte 0xff at offset 0"):
        run_recipe(recipe(data=data))
    assert not (tmp_path / "out.stages").exists()
