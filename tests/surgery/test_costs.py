import dataclasses as dc
from pathlib import Path

import pytest

from sse_convert import api
from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.recipe import load_recipe, recipe_from_dict
from sse_convert.report import format_bytes, time_in_words
from sse_convert.surgery.costs import GPUS
from sse_convert.surgery.costs_report import cost_lines, fewest_gpus, launch_command, usual_way
from sse_convert.surgery.job import Job
from sse_convert.surgery.memory import GIB, GPU_GIB, USABLE
from sse_convert.surgery.plan import make_plan
from tests.model_configs import config_path, model_config
from tests.surgery import synthetic

MEASURED = Path(__file__).parents[2] / "benchmarks/training"
"""recipes with the layers and stages that were measured"""
NAMES = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "paper-2b", "paper-12b")


def costs_of(name, overrides=(), **changes):
    config = model_config(name, changes)
    fixed = MEASURED / f"{name}.yaml"
    recipe = load_recipe(fixed if fixed.is_file() else name, list(overrides))
    return make_plan(Job.of(recipe, lambda *_: synthetic.teacher_from_config(config, name))).costs


@pytest.fixture(scope="module", params=NAMES)
def planned(request):
    return request.param, costs_of(request.param)


def test_a_way_fits_and_its_command_is_a_recipe_that_plans(planned):
    """Told what a way says, the recipe needs as much, and no simpler way fits."""
    name, costs = planned
    assert costs.ways
    for way in costs.ways:
        assert way.bytes <= way.gib * GIB * USABLE
    way = usual_way(costs, GPUS[-1])
    told = costs_of(name, way.overrides)
    again = told.way(way.gpus, way.gib)
    assert again == dc.replace(way, overrides=(), how=again.how)


def test_more_memory_never_hurts(planned):
    _, costs = planned
    for gpus in GPUS:
        found = [costs.way(gpus, gib) for gib in GPU_GIB]
        fits = [way is not None for way in found]
        assert fits == sorted(fits)
        assert [way.lora for way in found if way] == sorted((way.lora for way in found if way), reverse=True)


def test_lora_is_the_way_out_for_small_machines():
    costs = costs_of("qwen3-8b")
    assert costs.way(1, 48) is None
    one = costs.way(1, 80)
    assert (one.how, one.lora) == ("LoRA", True)
    assert set(one.overrides) == {"stages.distill.train=lora", "stages.uptrain.train=lora"}
    assert costs.way(8, 141).how == "FSDP2"
    for stage in costs.stages:
        assert stage.bytes["LoRA x 1"] < stage.bytes["1 GPU"] < stage.bytes["DDP"]
        assert stage.bytes["context_parallel 8 x 8"] < stage.bytes["FSDP2 x 8"] < stage.bytes["FSDP2 x 2"]


def test_commands_for_one_two_and_eight_gpus():
    costs = costs_of("qwen3-0.6b")
    commands = [launch_command(usual_way(costs, gpus), "sse-convert run qwen3-0.6b --set a=b") for gpus in GPUS]
    launched = "accelerate launch --multi_gpu --num_processes {} -m sse_convert run qwen3-0.6b --set a=b"
    assert commands == ["sse-convert run qwen3-0.6b --set a=b", launched.format(2), launched.format(8)]
    large = costs_of("qwen3-8b")
    assert "--use_fsdp --fsdp_version 2 --num_processes 8" in launch_command(usual_way(large, 8), "sse-convert run r")
    assert fewest_gpus(large).gpus == 8
    assert fewest_gpus(costs).gpus == 1


def test_rows_of_a_step_must_be_dealt_out_evenly():
    costs = costs_of("qwen3-0.6b", ["stages.uptrain.batch_tokens=96K"])
    assert costs.way(1, 80) is not None
    assert costs.way(2, 80).overrides == ("stages.uptrain.context_parallel=2",)


def test_why_there_is_no_way():
    uneven = costs_of("qwen3-0.6b", ["stages.distill.batch_tokens=12K", "stages.distill.context_parallel=1"])
    assert uneven.refused == {}
    config = {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248}
    assert costs_of("qwen3-8b", **config).refused == dict.fromkeys((1, 2, 8), "does not fit 141 GiB each")


def test_hours_of_activations_computed_twice():
    kept, twice = (costs_of("qwen3-0.6b", ["stages.distill.gradient_checkpointing=" + v]) for v in ("false", "true"))
    assert twice.stages[0].gpu_hours > 1.2 * kept.stages[0].gpu_hours
    auto = costs_of("qwen3-0.6b")
    assert auto.way(8, 141).gpu_hours == pytest.approx(auto.gpu_hours)
    assert auto.way(2, 24).gpu_hours > auto.gpu_hours


def test_disk_and_download():
    costs = costs_of("qwen3-0.6b")
    teacher, student = 2 * 596_049_920, 4 * 600_000_000
    assert costs.weight_bytes == pytest.approx(teacher)
    assert costs.disk_bytes == pytest.approx(2 * teacher + 2 * student + 9 * student, rel=0.05)


def test_memory_of_the_host():
    """The student in float32, which has left when a teacher of logits is read, but not when one of layers is."""
    costs = costs_of("qwen3-0.6b")
    student = 4 * 600_000_000
    assert costs.host_bytes == pytest.approx(student, rel=0.05)
    assert costs_of("qwen3-0.6b", ["stages.distill.loss=ce"]).host_bytes == costs.host_bytes
    align = [f"stages.distill.{change}" for change in ("loss=layer_mse", "train=mixers", "lr=0.001")]
    assert costs_of("qwen3-0.6b", align).host_bytes == costs.host_bytes + 2 * 596_049_920
    exact = costs_of("qwen3-0.6b", [*align, "train.mixed_precision=no"])
    assert exact.host_bytes == costs.host_bytes + 4 * 596_049_920
    said = f"{format_bytes(costs.host_bytes)} for each process, with FSDP2 for all of them"
    assert cost_lines(costs, "run r")[-1] == f"host memory while models are read: {said}"


def test_the_next_command_ends_the_plan(tmp_path):
    (tmp_path / "config.json").write_text(config_path("qwen3-0.6b").read_text())
    told = f"model={tmp_path}"
    plan = api.plan("qwen3-0.6b", overrides=[told])
    command = f"sse-convert run qwen3-0.6b --set {told}"
    assert plan.lines()[-1] == f"next, on 1 GPU of 24 GiB or more, once {tmp_path} has the weights: {command}"
    assert plan.to_dict()["next_command"] == command


def test_where_nothing_fits_no_command_is_named(tmp_path):
    (tmp_path / "config.json").write_text(config_path("llama-3.1-405b").read_text())
    plan = api.plan("llama-3.1-8b", overrides=[f"model={tmp_path}"])
    assert plan.costs.ways == []
    assert plan.lines()[-1] == "next: no command, since none of 1, 2, 8 GPUs will do, for the reasons above"


def test_a_recipe_that_run_refuses_says_why(tmp_path):
    (tmp_path / "config.json").write_text(config_path("qwen3-0.6b").read_text())
    plan = api.plan("qwen3-0.6b", overrides=[f"model={tmp_path}", "data.valid=[]"])
    said = "`run` refuses this recipe: eval needs held-out text; add a source or set eval.tokens: 0, no needle"
    assert said in plan.notes
    assert ": sse-convert convert qwen3-0.6b" in plan.lines()[-1]


@pytest.mark.parametrize("calibrate", [False, True])
def test_without_text_the_next_command_converts(tmp_path, calibrate):
    source = synthetic.checkpoint(tmp_path / "m")
    data = {"recipe_version": 1, "model": str(source), "layers": {"pattern": ["sliding", "full"]}}
    data |= {"calibrate": {"enabled": calibrate}, "eval": {"tokens": 0}, "export": {"dir": "out/x"}}
    plan = make_plan(Job.of(recipe_from_dict(data), open_for_planning))
    command = "convert RECIPE -o out/x-converted" if calibrate else "run RECIPE"
    assert plan.lines()[-1] == f"next: sse-convert {command}"
    assert (plan.costs.stages, plan.costs.ways) == ([], [])


@pytest.mark.parametrize(
    ("hours", "words"), [(33.4, "33 h"), (1.25, "1.2 h"), (0.5, "30 min"), (1e-3, "below 1 min"), (1234.5, "1,234 h")]
)
def test_times(hours, words):
    assert time_in_words(hours) == words
