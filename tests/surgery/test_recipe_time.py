"""Recipes that fit a time: on GPUs by the plan, on a CPU by its own speed."""

import dataclasses as dc
from pathlib import Path

import pytest

from sse_convert import api
from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.errors import UsageError
from sse_convert.recipe import load_recipe
from sse_convert.recipe.checks import check_run
from sse_convert.surgery import new_recipe as module
from sse_convert.surgery.new_recipe import Cpu, Machine, Wanted, new_recipe
from sse_convert.surgery.recipe_time import Pace, fitted_share
from tests.model_configs import model_config
from tests.surgery.synthetic import teacher_from_config

TEACHER = Path(__file__).parents[2] / "demo" / "teacher"
CORES = Cpu(24 << 30)
"""two cores with SmolLM2"""


def made(name, machine, hours=None):
    teacher = teacher_from_config(model_config(name), name)
    wanted = Wanted(model=f"X/{name}", name=name, title=name, command=name, hours=hours)
    return new_recipe(teacher, wanted, machine)


@pytest.fixture(autouse=True)
def _speed(monkeypatch):
    _computes(monkeypatch, 1e11)


def _computes(monkeypatch, flops):
    for name in ("choice_cost", "plan"):
        monkeypatch.setattr(f"sse_convert.surgery.{name}.forward_flops_per_second", lambda dtype: flops)


def tokens_of(new):
    return sum(stage.tokens for stage in new.recipe.stages)


@pytest.mark.parametrize("hours", [1, 2, 8])
def test_a_cpu_gets_what_it_finishes(hours):
    new = made("smollm2-135m", CORES, hours)
    took = new.pace.hours(new.data["stages"])
    assert 0.9 * hours < took <= 1.02 * hours  # tokens have two digits
    trained = sum(row.cpu_hours for row in new.plan.stages)
    assert took == pytest.approx(trained + new.plan.cpu_beside_hours + new.plan.choice.cpu_hours, rel=0.02)
    assert list(check_run(new.recipe)) == []
    assert [stage.seq_len for stage in new.recipe.stages] == [512, 2048]
    for stage in new.recipe.stages:
        assert stage.tokens >= 14 * stage.batch_tokens
    assert "Takes: the CPU that it was written on" in new.text
    assert "of this CPU" in new.text
    assert "GPU" not in new.text.replace("GPU time", "GPU")


@pytest.mark.parametrize(("gib", "trained"), [(24, "all"), (6, "mixers")])
def test_all_weights_are_trained_where_the_machine_s_memory_holds_that(gib, trained):
    new = made("smollm2-135m", dc.replace(CORES, memory=gib << 30), 1)
    assert {stage.train for stage in new.recipe.stages} == {trained}


def test_a_cpu_takes_two_hours_where_nobody_says():
    new, asked = made("smollm2-135m", CORES), made("smollm2-135m", CORES, 2)
    assert new.recipe.stages == asked.recipe.stages


@pytest.mark.parametrize(("name", "machine"), [("smollm2-135m", CORES), ("qwen3-8b", Machine(1, 80))])
def test_a_time_too_short_names_the_smallest(name, machine):
    with pytest.raises(UsageError, match=r"0\.01 hours are too short") as caught:
        made(name, machine, 0.01)
    smallest = float(caught.value.fix.rpartition(" ")[2])
    assert made(name, machine, smallest).fits
    with pytest.raises(UsageError, match="too short"):
        made(name, machine, smallest / 2)


@pytest.mark.parametrize("hours", [0.2, 2])
def test_gpus_get_the_tokens_of_a_time(hours):
    machine = Machine(2, 80)
    new, whole = made("qwen3-0.6b", machine, hours), made("qwen3-0.6b", machine)
    took = (new.way.gpu_hours + new.plan.choice.gpu_hours) / 2 + new.way.beside
    assert took == pytest.approx(hours, rel=0.05)
    assert (tokens_of(new) > tokens_of(whole)) == (hours == 2)
    assert new.recipe.stages[-1].seq_len == whole.recipe.stages[-1].seq_len


def test_more_time_than_anyone_tried_is_not_used():
    assert tokens_of(made("qwen3-0.6b", Machine(8, 80), 1e5)) == pytest.approx(800e6, rel=0.02)


def test_a_text_bounds_what_a_time_does():
    stages = [{"tokens": 0, "batch_tokens": 10}]

    def of(share):
        return [{**stages[0], "tokens": int(1e6 * share)}]

    assert fitted_share(Pace(tokens=(1e-6,)), 100.0, of, 0.5) == 0.5
    assert fitted_share(Pace(tokens=(1e-6,)), 0.25, of, 0.5) == pytest.approx(0.25, rel=1e-3)


def test_a_cpu_too_slow_gets_a_recipe_for_gpus_unless_it_is_asked(tmp_path, monkeypatch):
    _computes(monkeypatch, 1e6)
    monkeypatch.setattr(module, "machine_here", lambda: None)
    monkeypatch.setattr(module, "cpu_of", lambda *_: CORES)
    told = api.recipes_new(TEACHER, tmp_path / "a.yaml").lines()
    assert any("the recipe is for the fewest GPUs" in line for line in told)
    assert any(line.startswith("2 hours are too short") for line in told)
    with pytest.raises(UsageError, match=r"0\.5 hours are too short"):
        api.recipes_new(TEACHER, tmp_path / "b.yaml", hours=0.5)
    monkeypatch.setattr(module, "cpu_of", lambda *_: None)
    with pytest.raises(UsageError, match="there is no GPU here"):
        api.recipes_new(TEACHER, tmp_path / "b.yaml", hours=0.5)
    assert not (tmp_path / "b.yaml").exists()


def test_this_cpu_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "machine_here", lambda: None)
    lines = api.recipes_new(TEACHER, tmp_path / "a.yaml", hours=50).lines()
    assert any("the recipe is for this CPU" in line for line in lines)
    assert list(check_run(load_recipe(tmp_path / "a.yaml"))) == []


def test_a_model_that_memory_does_not_hold_is_for_gpus(monkeypatch):
    teacher = open_for_planning(TEACHER)
    assert module.cpu_of(teacher) is not None
    large = dc.replace(module.geometry_of(teacher), parameters=10**13)
    monkeypatch.setattr(module, "geometry_of", lambda _: large)
    assert module.cpu_of(teacher) is None
