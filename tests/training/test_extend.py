"""A finished stage goes on to a larger budget; what was made from its old end is set aside, and less is refused."""

import json
import shutil

import pytest

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.errors import TrainingError
from sse_convert.pipeline import run_recipe
from sse_convert.training import loop
from sse_convert.training.extend import Extension
from tests.training.conftest import losses
from tests.training.test_resume import Killed, same, steps_then

CONSTANT = {"min_lr": 1.0, "checkpoint_steps": 2}


@pytest.mark.parametrize("name", ["align", "distill"])
def test_a_constant_rate_goes_on_as_if_the_budget_had_been_larger_from_the_start(train, capsys, tmp_path, name):
    whole, _ = train(name, "whole", tokens=768, **CONSTANT)
    first, _ = train(name, "grown", tokens=384, **CONSTANT)
    old = tmp_path / "outdated-grown" / "grown"
    before = checkpoint_identity(first)
    capsys.readouterr()
    folder, report = train(name, "grown", tokens=768, **CONSTANT)
    told = capsys.readouterr().err
    assert f"{name}: what was made before is now in {old.parent}" in told
    assert f"{name}: the budget went from 384 to 768 tokens after step 3; learning rates are those of" in told
    assert f"{name}: continuing at step 3 of 6" in told
    assert losses(folder) == losses(whole)
    assert losses(folder, "grad_norm") == losses(whole, "grad_norm")
    assert same(folder, whole)
    assert report.extended == [{"step": 3, "tokens": 384, "seamless": True}]
    assert not [line for line in report.warnings() if "budget" in line]
    assert len(losses(old)) == 3
    assert len({before, checkpoint_identity(folder), checkpoint_identity(whole)}) == 3
    assert train(name, "grown", tokens=768, **CONSTANT)[1].already_done
    assert train(name, "grown", tokens=896, **CONSTANT)[1].extended == [
        {"step": 3, "tokens": 384, "seamless": True},
        {"step": 6, "tokens": 768, "seamless": True},
    ]


def test_a_cosine_that_is_stretched_is_named(train, capsys):
    train("uptrain", tokens=384)
    capsys.readouterr()
    folder, report = train("uptrain", tokens=768)
    told = capsys.readouterr().err
    assert "warning: uptrain: the budget went from 384 to 768 tokens after step 3: the learning rate follows" in told
    assert "goes from 0.10 to 0.41 of its peak" in told
    assert any("with other learning rates" in line for line in report.warnings())
    assert json.loads((folder / "stage.json").read_text())["inputs"]["extended"] == report.extended
    assert report.extended[0]["seamless"] is False


def test_killed_while_it_goes_on(train, monkeypatch, tmp_path):
    train("uptrain", "grown", tokens=384, **CONSTANT)
    whole, _ = train("uptrain", "whole", tokens=768, **CONSTANT)
    for steps in (0, 2):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "_gradients", steps_then(loop._gradients, steps, Killed()))
            with pytest.raises(Killed):
                train("uptrain", "grown", tokens=768, **CONSTANT)
    assert not (tmp_path / "grown").exists()
    with pytest.raises(TrainingError, match=r"grown was trained on 512 tokens, the recipe's budget is 384"):
        train("uptrain", "grown", tokens=384, **CONSTANT)
    folder, report = train("uptrain", "grown", tokens=768, **CONSTANT)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)
    assert report.extended == [{"step": 3, "tokens": 384, "seamless": True}]


def test_an_interrupted_stage_takes_another_budget(train, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, Killed()))
        with pytest.raises(Killed):
            train("uptrain", tokens=512, **CONSTANT)
    _, report = train("uptrain", tokens=384, **CONSTANT)
    assert (report.steps, report.extended) == (3, [{"step": 2, "tokens": 512, "seamless": True}])


def test_fewer_tokens_than_were_trained_on_are_refused(train, tmp_path):
    folder, _ = train("uptrain", tokens=384)
    with pytest.raises(TrainingError, match=r"result was trained on 384 tokens, the recipe's budget is 256") as caught:
        train("uptrain", tokens=256)
    assert caught.value.fix.startswith(f"raise tokens, or delete {folder}, {folder}.work and")
    assert (folder / "stage.json").is_file()
    with pytest.raises(TrainingError, match=r"stage\.lr was"):
        train("uptrain", tokens=768, lr=0.1)


def test_without_its_training_checkpoint_a_stage_cannot_go_on(train, tmp_path):
    folder, _ = train("uptrain", tokens=384)
    shutil.rmtree(tmp_path / "result.work")
    assert train("uptrain", tokens=384)[1].already_done
    with pytest.raises(TrainingError, match=r"the training checkpoint in .*result\.work is gone") as caught:
        train("uptrain", tokens=768)
    assert "put more tokens into a stage of their own" in caught.value.fix
    assert (folder / "stage.json").is_file()


def test_one_training_checkpoint_is_left(train, tmp_path):
    train("uptrain", checkpoint_steps=1)
    left = sorted(path.name for path in (tmp_path / "result.work").iterdir())
    assert [name for name in left if name != "lock"] == ["chosen.json", "inputs.json", "step-000006"]


def test_steps_after_the_grown_one_are_made_again(make, text_folder, tmp_path, capsys):
    def recipe(tokens):
        size = {"batch_tokens": 128, "tokens": 128}
        data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
        stages = ("align", size), ("uptrain", {**size, "tokens": tokens}), ("distill", size)
        return make(*stages, calibrate={"enabled": False}, data=data, eval={"tokens": 64})

    run_recipe(recipe(256))
    capsys.readouterr()
    root = tmp_path / "out.stages"
    before = {path.name for path in root.iterdir()}
    report = run_recipe(recipe(384))
    done = {step["name"]: step["already_done"] for step in report.steps}
    assert done == {"convert": True, "align": True, "uptrain": False, "distill": False, "eval": False, "export": False}
    aside = root / "outdated-02-uptrain"
    moved = {path.name for path in aside.iterdir()}
    assert moved == {"02-uptrain", "03-distill", "03-distill.work", "04-eval", "05-export", "out"}
    assert {path.name for path in root.iterdir()} == before | {aside.name}
    assert str(aside) in capsys.readouterr().err
    assert all(step["already_done"] for step in run_recipe(recipe(384)).steps)


def test_a_stage_that_is_added_makes_the_result_anew(make, text_folder, tmp_path, capsys):
    size = {"batch_tokens": 128, "tokens": 128}

    def recipe(*names):
        data = {"train": [{"path": str(text_folder)}]}
        return make(*((name, size) for name in names), calibrate={"enabled": False}, data=data)

    run_recipe(recipe("align"))
    old = checkpoint_identity(tmp_path / "out")
    capsys.readouterr()
    report = run_recipe(recipe("align", "uptrain"))
    assert [step["already_done"] for step in report.steps] == [True, True, False, False]
    assert checkpoint_identity(tmp_path / "out") != old
    aside = tmp_path / "out.stages" / "outdated-02-export"
    assert {path.name for path in aside.iterdir()} == {"02-export", "out"}
    assert checkpoint_identity(aside / "out") == old
    assert f"02-export is uptrain now: what was made before is now in {aside}" in capsys.readouterr().err
    assert all(step["already_done"] for step in run_recipe(recipe("align", "uptrain")).steps)


def test_a_warm_up_that_gets_longer_is_not_seamless(make):
    (stage,) = make(("uptrain", {"min_lr": 1.0, "warmup": 0.5})).stages
    assert not Extension(stage, 384, 3).seamless
    assert Extension(stage, 768, 6).seamless
