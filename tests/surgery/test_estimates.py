"""The memory that `plan` estimates against every peak that was measured, on GPUs and on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks.training.estimates import NEAR, rows
from sse_convert.recipe import load_recipe
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from tests.model_configs import model_config
from tests.surgery.synthetic import teacher_from_config

ROWS = rows()
ON_CPU = json.loads((Path(__file__).parents[2] / "benchmarks" / "training" / "cpu_peaks.json").read_text())["settings"]


@pytest.mark.parametrize("name", ON_CPU)
def test_the_estimate_of_a_cpu_is_near_what_was_measured(name):
    stages = f"stages={json.dumps([ON_CPU[name]['stage']])}"
    teacher = teacher_from_config(model_config("smollm2-135m"), "smollm2")
    plan = make_plan(Job.of(load_recipe("smollm2-135m-heads", [stages]), lambda *_: teacher), cpu=True)
    assert plan.stages[0].cpu_bytes == pytest.approx(ON_CPU[name]["peak_bytes"], rel=0.2)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_estimate_is_near_what_was_measured(row):
    assert row.estimated == pytest.approx(row.measured, rel=NEAR)


def test_the_speed_of_stages_as_they_run_by_themselves_is_near_what_was_measured():
    """Short stages are not compiled, and are slower; GPU hours are those of long ones."""
    found = [row for row in ROWS if row.name.startswith("qwen3-") and not row.name.endswith("-eager")]
    assert {row.record["recipe"] for row in found} == {"qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"}
    for row in found:
        assert row.estimated_tokens_per_second == pytest.approx(row.tokens_per_second, rel=0.25), row.name


def test_shapes_and_losses_that_were_measured():
    assert {"kl", "ce"} <= {row.record["stage"]["loss"] for row in ROWS}
    assert len(ROWS) >= 3
    assert all(row.record["commit"] for row in ROWS)
