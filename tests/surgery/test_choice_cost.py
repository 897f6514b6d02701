"""What a choice takes, and the less of it on a CPU."""

import re

import pytest
import torch

from sse_convert.recipe import load_recipe
from sse_convert.recipe.choosing import TRIES, probe_rows
from sse_convert.report import time_in_words
from sse_convert.selection import from_recipe
from sse_convert.surgery.budget import forward_flops
from sse_convert.surgery.choice_cost import CPU_FLOPS, choice_effort, cpu_hours
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from tests.model_configs import model_config
from tests.surgery.synthetic import teacher_from_config

SIZES = {"smollm2-135m": (9, 90), "qwen3-8b": (29, 288)}


def effort(name, *, cpu, by="heads", keep=None):
    teacher = teacher_from_config(model_config(name), name)
    kept, among = SIZES[name]
    rows = probe_rows(load_recipe(name), teacher.text.max_position_embeddings)
    return choice_effort(geometry_of(teacher), rows, by=by, keep=keep or kept, among=among, cpu=cpu)


def test_elsewhere_everything_is_measured():
    full = effort("smollm2-135m", cpu=False)
    assert (full.method, full.tries, full.light, full.rows.length) == ("retrieval", TRIES, False, 4096)
    assert full.sets == 4 + TRIES * 5
    assert effort("smollm2-135m", cpu=False, by="layers").method == "greedy"


@pytest.mark.parametrize("by", ["layers", "heads"])
def test_a_cpu_measures_as_much_as_it_has_time_for(by):
    light = effort("smollm2-135m", cpu=True, by=by)
    assert light.method == "retrieval"
    assert light.light
    assert light.rows.length == 1024
    assert 0 < light.tries < TRIES
    swaps = light.sets - 4
    assert 0.7 * CPU_FLOPS < light.flops * (4 + swaps / 2) / light.sets <= CPU_FLOPS


def test_of_a_large_model_a_cpu_ranks_once():
    assert effort("qwen3-8b", cpu=True).sets == 4


def test_a_small_choice_is_whole_on_a_cpu():
    assert effort("smollm2-135m", cpu=True, keep=1, by="heads").tries == TRIES
    assert effort("smollm2-135m", cpu=True, keep=1).rows.tokens < effort("smollm2-135m", cpu=False, keep=1).rows.tokens


def test_a_plan_on_a_cpu_tells_its_time(monkeypatch):
    """That of choosing, calibrating and measuring too."""
    for name in ("choice_cost", "plan"):
        monkeypatch.setattr(f"sse_convert.surgery.{name}.forward_flops_per_second", lambda dtype: 1e11)
    teacher = teacher_from_config(model_config("smollm2-135m"), "X/Y")

    def planned(*changes, cpu=True):
        return make_plan(Job.of(load_recipe("smollm2-135m", changes), lambda *_: teacher), cpu=cpu)

    plan, choice = planned(), planned().choice
    assert choice.cpu_hours == pytest.approx(choice.flops / 1e11 / 3600)
    assert "min on this CPU" in choice.line()
    (line,) = (line for line in plan.lines() if line.startswith("calibrating and measuring without a GPU: about "))
    whole = plan.cpu_beside_hours + choice.cpu_hours + sum(stage.cpu_hours for stage in plan.stages)
    assert line.endswith(f"; in all about {time_in_words(whole)}")
    plain = planned("calibrate.enabled=false").cpu_beside_hours
    assert 0 < planned("calibrate.enabled=false", "eval.tokens=1024").cpu_beside_hours < plain < plan.cpu_beside_hours
    assert planned(cpu=False).choice.cpu_hours is planned(cpu=False).cpu_beside_hours is None


@pytest.mark.parametrize(("device", "light"), [("cpu", True), ("meta", False)])
def test_select_takes_it_from_there_and_says_so(monkeypatch, capsys, device, light):
    monkeypatch.setattr(from_recipe, "pick_device", lambda asked: torch.device(device))
    teacher = teacher_from_config(model_config("smollm2-135m"), "X/Y")
    _, settings = from_recipe.settings_for(Job.of(load_recipe("smollm2-135m"), lambda *_: teacher))
    own = effort("smollm2-135m", cpu=light)
    assert (settings.light, settings.tries, settings.method) == (light, own.tries, "retrieval")
    assert (settings.length, settings.tokens, settings.samples) == (
        own.rows.length,
        own.rows.text * own.rows.length,
        own.rows.recall,
    )
    said = "choosing 9 of 90 key-value heads: at most" in capsys.readouterr().err
    assert said == (light and cpu_hours(own, teacher.dtype) >= from_recipe.TOLD)


def test_rows_that_are_asked_for_are_taken(monkeypatch):
    teacher = teacher_from_config(model_config("smollm2-135m"), "X/Y")
    _, settings = from_recipe.settings_for(
        Job.of(load_recipe("smollm2-135m"), lambda *_: teacher), length=2048, device="cpu"
    )
    assert (settings.light, settings.length, settings.samples) == (False, 2048, 16)


@pytest.mark.parametrize(
    ("asked", "passes"), [({}, 12_288), ({"tokens": 1024}, 9216), ({"samples": 2, "tokens": 1024, "length": 256}, 1536)]
)
def test_what_is_told_is_of_the_rows_that_are_asked_for(monkeypatch, capsys, asked, passes):
    monkeypatch.setattr(from_recipe, "pick_device", lambda asked: torch.device("cpu"))
    monkeypatch.setattr(from_recipe, "cpu_hours", lambda effort, dtype: effort.flops / 1e11)
    monkeypatch.setattr(from_recipe, "time_in_words", str)
    teacher = teacher_from_config(model_config("smollm2-135m"), "X/Y")
    from_recipe.settings_for(Job.of(load_recipe("smollm2-135m"), lambda *_: teacher), **asked)
    said = re.search(r"at most (\d+) forward passes over (\S+) tokens, about (\S+) on", capsys.readouterr().err)
    sets, tokens, hours = int(said[1]), int(said[2].replace(",", "")), float(said[3])
    assert tokens == passes
    per_token = forward_flops(geometry_of(teacher), [None] * 30, asked.get("length", 1024))
    assert hours == pytest.approx(sets * tokens * per_token / 1e11)
