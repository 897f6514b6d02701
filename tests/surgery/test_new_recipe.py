"""`sse-convert recipes new`: the recipe that the rule gives, for a model, a machine and a text."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sse_convert import api
from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DataError, OutputError
from sse_convert.recipe import load_recipe
from sse_convert.recipe.recommended import recommended_stages
from sse_convert.report import time_in_words
from sse_convert.surgery import new_recipe as module
from sse_convert.surgery.costs_report import fewest_gpus, gpus_in_words
from sse_convert.surgery.memory import GIB
from sse_convert.surgery.new_recipe import Machine, Wanted, new_recipe, sizes_of
from sse_convert.surgery.recipe_text import RecipeText
from sse_convert.surgery.speed import nearest_speed
from sse_convert.surgery.wanted_recipe import read_weight_size
from tests.model_configs import config_path, model_config
from tests.surgery.synthetic import teacher_from_config

ROOT = Path(__file__).parents[2]
TEACHER = ROOT / "demo" / "teacher"


@pytest.fixture(autouse=True)
def _no_cpu(monkeypatch):
    monkeypatch.setattr(module, "cpu_of", lambda *_: None)


def made(name, machine=None, **more):
    teacher = teacher_from_config(model_config(name), name)
    wanted = Wanted(model=f"X/{name}", name=name, title=name, command=name, **more)
    return teacher, new_recipe(teacher, wanted, machine)


@pytest.mark.parametrize("name", ["smollm2-135m", "gpt-oss-20b"])
def test_what_is_written_is_what_was_planned(name, tmp_path):
    teacher, new = made(name, text=RecipeText(train=({"path": "it's: [odd], #1.txt"},)))
    (tmp_path / "recipe.yaml").write_text(new.text)
    assert load_recipe(tmp_path / "recipe.yaml") == new.recipe
    assert [stage.tokens for stage in new.recipe.stages] == [s["tokens"] for s in recommended_stages(sizes_of(teacher))]
    for row in new.plan.stages:
        assert f"{row.steps:,} steps" in new.text


def test_rates_follow_the_size_of_weights_that_are_on_this_machine(tmp_path):
    teacher = open_teacher(TEACHER)
    tensors = load_file(TEACHER / "model.safetensors")
    sizes = [weight.float().square().mean().sqrt() for name, weight in tensors.items() if "o_proj.weight" in name]
    assert read_weight_size(teacher) == pytest.approx(torch.stack(sizes).quantile(0.5).item(), rel=0.01)
    other = shutil.copytree(TEACHER, tmp_path / "other")
    for factor, expected in {0.1: read_weight_size(teacher) / 10, 0.0: None, float("nan"): None}.items():
        save_file({name: tensor * factor for name, tensor in tensors.items()}, other / "model.safetensors")
        assert read_weight_size(open_teacher(other)) == (expected and pytest.approx(expected, rel=0.01))
    (other / "model.safetensors").unlink()
    assert read_weight_size(open_for_planning(other)) is None
    rates = {}
    for size, said in {0.017: "(0.17 to 0.017)", None: "(0.17 to 0.02, the usual one: they were not read)"}.items():
        _, new = made("qwen3-0.6b", weight_size=size)
        assert f"rates by the size of weights {said}" in new.text
        rates[size] = new.recipe.stages[0].lr.mixers
    assert rates[0.017] == pytest.approx(0.85 * rates[None], rel=0.05)


def test_rows_become_as_long_as_the_machine_holds():
    rows = {gib: made("qwen3-0.6b", Machine(1, gib))[1] for gib in (141, 12)}
    lengths = {gib: new.recipe.stages[-1].seq_len for gib, new in rows.items()}
    assert lengths[141] == 32768 > lengths[12] >= 2048
    assert all(new.fits for new in rows.values())
    assert "Takes: 1 GPU of 12 GiB or more, " in rows[12].text
    assert "Takes: 1 GPU of 24 GiB or more, " in rows[141].text  # as `plan` says, not what it was written on
    assert "GiB of each used where it has 141; " in rows[141].text
    _, small = made("qwen3-14b", Machine(1, 24))
    assert not small.fits
    assert small.recipe.stages[-1].seq_len == 2048
    assert "Takes: more memory than the GPUs that it was written for have" in small.text


def test_one_gpu_trains_the_converted_layers_of_8b():
    _, new = made("qwen3-8b", Machine(1, 80))
    assert new.way.how == "as it is"
    assert new.recipe.stages[-1].seq_len == 32768
    assert {stage.train for stage in new.recipe.stages} == {"mixers"}


@pytest.mark.parametrize(
    ("name", "machine", "trained"),
    [
        ("qwen3-0.6b", None, "all"),
        ("qwen3-0.6b", Machine(1, 24), "all"),
        ("qwen3-4b", Machine(1, 80), "mixers"),
        ("qwen3-4b", Machine(1, 141), "all"),
        ("qwen3-8b", None, "mixers"),
    ],
)
def test_all_weights_are_trained_where_the_machine_holds_that(name, machine, trained):
    _, new = made(name, machine)
    assert {stage.train for stage in new.recipe.stages} == {trained}
    assert [stage.lr.rest is None for stage in new.recipe.stages] == [trained == "mixers"] * 2
    assert ("training of converted layers alone" in new.text) == (trained == "mixers")
    assert new.fits


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b", "gpt-oss-20b"])
def test_machine_command_and_time_are_those_of_the_plan(name):
    teacher, new = made(name)
    way, choice = fewest_gpus(new.plan.costs), new.plan.choice
    assert f"# Run:   {new.plan.next_command().replace('RECIPE', name)}\n" in new.text
    assert f"# Takes: {gpus_in_words(way)}" in new.text
    run = way.gpu_hours + choice.gpu_hours + way.gpus * way.beside
    assert f"{way.bytes / GIB:.1f} GiB of each used; {time_in_words(run)} of" in new.text
    assert f"tokens; {time_in_words(choice.gpu_hours)} of GPU time" in new.text
    for stage in new.plan.costs.stages:
        assert f"steps; {time_in_words(stage.gpu_hours)} of GPU time" in new.text
    speed = nearest_speed("kl", teacher.text.hidden_size, 4096, whole=True, experts=name == "gpt-oss-20b")
    assert choice.gpu_hours == pytest.approx(choice.flops / speed.flops_per_second / 3600)


@pytest.mark.parametrize(("gpus", "used"), [(0, None), (1, 1), (3, 2), (6, 4), (12, 8)])
def test_as_many_gpus_as_can_share_the_rows(monkeypatch, gpus, used):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    properties = SimpleNamespace(total_memory=int(79.6 * GIB))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: properties)
    assert module.machine_here() == (None if used is None else Machine(used, 80))


def test_several_gpus_are_launched():
    _, new = made("qwen3-14b", Machine(8, 80))
    assert "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 -m sse_convert run qwen3-14b" in new.text


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "machine_here", lambda: None)
    (tmp_path / "mine.txt").write_text("text")
    target = tmp_path / "new.yaml"
    arguments = ["recipes", "new", str(TEACHER), str(target), "--text", str(tmp_path / "mine.txt")]
    assert run_app(app, arguments) == 0
    told = capsys.readouterr()
    assert "2 of 18 key-value heads to be chosen; needs 1 GPU of 24 GiB or more" in told.out + told.err
    recipe = load_recipe(target)
    assert [source.path for source in recipe.data.train] == [str(tmp_path / "mine.txt")]
    assert [source.kind for source in recipe.data.valid] == ["teacher"]
    assert api.plan(target).choice.keep == 2
    assert run_app(app, arguments) != 0
    assert "pass --overwrite" in capsys.readouterr().err
    assert run_app(app, [*arguments, "--overwrite"]) == 0


def test_a_config_is_enough_as_it_is_for_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "machine_here", lambda: None)
    (tmp_path / "config.json").write_text(config_path("qwen3-0.6b").read_text())
    api.recipes_new(tmp_path, tmp_path / "new.yaml")
    assert api.plan(tmp_path / "new.yaml").choice.keep == 22  # of 28 layers of 8 heads


def test_what_does_not_fit_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "machine_here", lambda: Machine(1, 24))
    (tmp_path / "config.json").write_text(config_path("qwen3-8b").read_text())
    assert "it does not fit 1 GPU of 24 GiB" in "\n".join(api.recipes_new(tmp_path, tmp_path / "new.yaml").lines())


@pytest.mark.parametrize(("positions", "window"), [(64, 8), (512, 64), (1000, 64), (1024, 128), (40960, 512)])
def test_windows_fit_the_context_and_rows_look_beyond(tmp_path, monkeypatch, positions, window):
    monkeypatch.setattr(module, "machine_here", lambda: None)
    config = model_config("qwen3-0.6b", {"max_position_embeddings": positions})
    (tmp_path / "config.json").write_text(json.dumps(config))
    api.recipes_new(tmp_path, tmp_path / "new.yaml")
    recipe = load_recipe(tmp_path / "new.yaml")
    mixer = recipe.known_mixers["sse+sliding"]
    assert mixer.window == window
    assert ("rows, window.\n" in (tmp_path / "new.yaml").read_text()) == (window != 128)
    assert min(stage.seq_len for stage in recipe.stages) > mixer.window + mixer.sinks
    assert not any("learns nothing" in note for note in api.plan(tmp_path / "new.yaml").notes)


def test_a_cache_larger_than_the_teachers_is_said(tmp_path, monkeypatch):
    """Partitions beside whole layers, at a context that a state outweighs."""
    monkeypatch.setattr(module, "machine_here", lambda: None)
    for positions, warned in {1024: True, 32768: False}.items():
        config = model_config("qwen3-0.6b", {"max_position_embeddings": positions, "num_key_value_heads": 2})
        (tmp_path / "config.json").write_text(json.dumps(config))
        lines = api.recipes_new(tmp_path, tmp_path / "new.yaml", overwrite=True).lines()
        assert any(line.startswith("warning: the cache of ") for line in lines) == warned


@pytest.mark.parametrize("option", ["--text", "--held-out"])
def test_a_folder_that_is_not_there_is_no_hub_dataset(tmp_path, monkeypatch, capsys, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("text")
    arguments = ["recipes", "new", str(TEACHER), "x.yaml", "--text", "mine.txt", option, "missing/"]
    assert run_app(app, arguments) == DataError.exit_code
    assert "missing/ does not exist" in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "a.txt").write_text("text")
    assert run_app(app, arguments) == 0
    data = load_recipe("x.yaml").data
    assert {"--text": data.train, "--held-out": data.valid}[option][-1].path == "missing"


@pytest.mark.parametrize(
    ("model", "text", "error", "match"),
    [
        ("nowhere-at-all/", (), CheckpointError, "nowhere-at-all"),
        (TEACHER, ("no-such-folder/texts/x",), DataError, "no-such-folder/texts/x does not exist"),
        (TEACHER, (str(Path(__file__).parents[2] / "recipes"),), DataError, "recipes holds no text"),
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
