"""`sse-convert recipes new`: the recipe that the rule gives, for a model, a machine and a text."""

import json
from pathlib import Path

import pytest

from sse_convert import api
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DataError, OutputError
from sse_convert.recipe import load_recipe
from sse_convert.recipe.recommended import recommended_stages
from sse_convert.surgery import new_recipe as module
from sse_convert.surgery.new_recipe import Machine, Wanted, new_recipe, sizes_of
from tests.surgery.synthetic import teacher_from_config

ROOT = Path(__file__).parents[2]
TEACHER = ROOT / "demo" / "teacher"
CONFIGS = ROOT / "tests" / "fixtures" / "configs"


def made(name, machine=None, **more):
    teacher = teacher_from_config(json.loads((CONFIGS / f"{name}.json").read_text()), name)
    wanted = Wanted(model=f"X/{name}", name=name, title=name, command=name, **more)
    return teacher, new_recipe(teacher, wanted, machine)


@pytest.mark.parametrize("name", ["smollm2-135m", "gpt-oss-20b"])
def test_what_is_written_is_what_was_planned(name, tmp_path):
    teacher, new = made(name, train=({"path": "it's: [odd], #1.txt"},))
    (tmp_path / "recipe.yaml").write_text(new.text)
    assert load_recipe(tmp_path / "recipe.yaml") == new.recipe
    assert [stage.tokens for stage in new.recipe.stages] == [s["tokens"] for s in recommended_stages(sizes_of(teacher))]
    for row in new.plan.stages:
        assert f"{row.steps:,} steps" in new.text


def test_rows_become_as_long_as_the_machine_holds():
    rows = {gib: made("qwen3-0.6b", Machine(1, gib))[1] for gib in (141, 24)}
    lengths = {gib: new.recipe.stages[-1].seq_len for gib, new in rows.items()}
    assert lengths[141] == 32768 > lengths[24] >= 2048
    assert all(new.fits for new in rows.values())
    assert "Takes: one GPU of 24 GB; " in rows[24].text
    _, small = made("qwen3-8b", Machine(1, 24))
    assert not small.fits
    assert "which is too small by the estimate" in small.text


def test_several_gpus_are_launched():
    _, new = made("qwen3-8b", Machine(8, 80))
    assert "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 -m sse_convert run qwen3-8b" in new.text


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "machine_here", lambda: None)
    (tmp_path / "mine.txt").write_text("text")
    target = tmp_path / "new.yaml"
    arguments = ["recipes", "new", str(TEACHER), str(target), "--text", str(tmp_path / "mine.txt")]
    assert run_app(app, arguments) == 0
    told = capsys.readouterr()
    assert "2 of 6 layers to be chosen; needs one GPU of 24 GB" in told.out + told.err
    recipe = load_recipe(target)
    assert [source.path for source in recipe.data.train] == [str(tmp_path / "mine.txt")]
    assert [source.kind for source in recipe.data.valid] == ["teacher"]
    assert api.plan(target).choice.keep == 2
    assert run_app(app, arguments) != 0
    assert "pass --overwrite" in capsys.readouterr().err
    assert run_app(app, [*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("model", "text", "error", "match"),
    [
        ("nowhere-at-all/", (), CheckpointError, "nowhere-at-all"),
        (TEACHER, ("no-such-folder/texts/x",), DataError, "no-such-folder/texts/x does not exist"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path, model, text, error, match):
    with pytest.raises(error, match=match):
        api.recipes_new(model, tmp_path / "x.yaml", text=text)
    assert not (tmp_path / "x.yaml").exists()


def test_a_file_that_exists_is_left_alone(tmp_path):
    (tmp_path / "teacher.yaml").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        api.recipes_new(TEACHER, tmp_path)
    assert (tmp_path / "teacher.yaml").read_text() == "mine"
