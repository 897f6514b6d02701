import dataclasses as dc
import json
from pathlib import Path

import pytest

from sse_convert.recipe import load_recipe, recipe_from_dict
from sse_convert.recipe.overrides import apply_overrides
from sse_convert.recipe.schema import Stage
from sse_convert.surgery.job import Job
from sse_convert.surgery.new_recipe import new_recipe
from sse_convert.surgery.plan import make_plan
from sse_convert.surgery.speed import (
    MEASURED,
    beside_training,
    gpu_hours,
    measured_line,
    measured_speeds,
    nearest_speed,
    speed_of,
    training_flops,
)
from sse_convert.surgery.wanted_recipe import Machine, Wanted
from tests.model_configs import model_config
from tests.surgery.synthetic import teacher_from_config
from tests.surgery.test_memory import geometry
from tools.measured_speed import packaged

REAL = Path(__file__).parents[2] / "benchmarks/real"
CODER = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""Qwen2.5-Coder-0.5B-Instruct, as `dequantize` writes it"""


def test_the_package_has_what_the_benchmark_measured():
    assert json.loads(MEASURED.read_text()) == packaged()


def test_hours_are_tokens_by_flops_at_the_measured_speed():
    stage = Stage(name="s", loss="ce", tokens=10**9, seq_len=4096, lr=1e-3)
    measured = next(speed for speed in measured_speeds()["ce"] if (speed.hidden_size, speed.seq_len) == (1024, 2**15))
    scale = training_flops(stage, geometry(), [None, None]) / measured.flops_per_token
    expected = 10**9 * scale / measured.tokens_per_second / 3600
    assert gpu_hours(stage, geometry(), [None, None]) == pytest.approx(expected)


def test_a_shape_measured_on_two_gpus_counts_for_each_of_them():
    two = next(speed for speed in measured_speeds()["kl"] if speed.gpus == 2)
    assert two.flops_per_second == two.tokens_per_second * two.flops_per_token / 2


@pytest.mark.parametrize(
    ("hidden_size", "shape"),
    [
        (64, "smollm2-135m"),
        (760, "smollm2-135m"),
        (780, "qwen3-0.6b"),
        (1400, "qwen3-0.6b"),
        (1500, "qwen3-1.7b"),
        (2560, "qwen3-1.7b"),
        (8192, "qwen3-8b"),
    ],
)
def test_the_nearest_width_counts(hidden_size, shape):
    for whole in (True, False):
        assert nearest_speed("kl", hidden_size, 4096, whole=whole, experts=False).shape == shape


def test_of_one_width_what_trained_as_much_counts():
    for hidden_size in (1024, 4096):
        for whole in (True, False):
            assert nearest_speed("kl", hidden_size, 2**17, whole=whole, experts=False).whole is whole
    stage = Stage(name="s", loss="kl", tokens=10**9, seq_len=4096, lr=1e-3, train="mixers")
    speed = next(speed for speed in measured_speeds()["kl"] if not speed.whole)
    expected = 10**9 * training_flops(stage, geometry(), [None, None]) / speed.flops_per_second / 3600
    assert gpu_hours(stage, geometry(), [None, None]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hidden_size", "seq_len", "found"),
    [(1024, 4096, ("qwen3-0.6b", 2**15)), (1400, 2**16 + 1, ("qwen3-0.6b", 2**17)), (5120, 4096, ("qwen3-8b", 2**17))],
)
def test_of_one_width_the_nearest_rows_count(hidden_size, seq_len, found):
    speed = nearest_speed("ce", hidden_size, seq_len, whole=True, experts=False)
    assert (speed.shape, speed.seq_len) == found


def test_what_hours_come_from_is_named():
    every = [speed for some in measured_speeds().values() for speed in some]
    said = measured_line([*every, *every]).replace("\n", " ")
    for speed in every:
        assert said.count(f"{speed.loss} {speed.tokens_per_second:,.0f} of {speed.shape}") == 1
    assert "of qwen3-8b at 4K, 2 x NVIDIA H200" in said
    assert "of qwen3-8b at 4K, converted layers alone, NVIDIA H200" in said
    assert "of qwen3-30b-a3b with 12 of 48 layers at 4K, converted layers alone, NVIDIA H100" in said
    assert measured_line(every[:1]).count(" of smollm2-") == 1


def test_what_a_run_takes_beside_its_steps():
    """Stages after the first compile less; nothing is compiled, calibrated or measured that nobody asks for."""
    recipe = load_recipe("smollm2-135m-heads")
    none, one, two = (beside_training(recipe, geometry(), compiled=compiled) for compiled in range(3))
    assert (none.compiling, none.calibrating, none.all_else) == (0, one.calibrating, one.all_else)
    assert 0 < two.compiling - one.compiling < one.compiling
    assert two.hours == two.compiling + two.calibrating + two.evaluating + two.all_else
    bare = load_recipe("smollm2-135m-heads", ["calibrate.enabled=false", "eval={tokens: 0}"])
    assert beside_training(bare, geometry(), compiled=2).hours == two.compiling + two.all_else


def test_measuring_twice_as_many_needles_takes_twice_as_long():
    hours = [
        beside_training(
            load_recipe("smollm2-135m-heads", ["eval.tokens=0", f"eval.needle.samples={samples}"]),
            geometry(),
            compiled=0,
        ).evaluating
        for samples in (100, 200)
    ]
    assert 0 < hours[1] == pytest.approx(2 * hours[0])


def test_a_real_run_took_as_long_as_is_reckoned():
    """SmolLM2 with six heads and states on an H200, by `run`: converted, calibrated, 64M tokens, evaluated, exported.
    The speed of the first stage's steps is that run's own."""
    models = json.loads((REAL / "digits_smollm2.json").read_text())["models"]
    (run,) = (model for model in models if model.get("command", "").startswith("sse-convert run"))
    teacher = teacher_from_config(model_config("smollm2-135m"), "smollm2-135m")
    tokens = [f"stages.{i}.tokens={stage['tokens']}" for i, stage in enumerate(run["stages"])]
    recipe = load_recipe("smollm2-135m-heads", tokens)
    way = make_plan(Job.of(recipe, lambda *_: teacher)).costs.way(1, 141)
    assert way.hours * 3600 == pytest.approx(run["seconds"], rel=0.2)


def test_a_real_run_of_the_coder_took_as_long_as_is_reckoned():
    """Twelve heads and states, 24M tokens, 500 needles of 4K and of 32K, as `recipes new` wrote it."""
    report = json.loads((REAL / "coder_rates.json").read_text())
    teacher = teacher_from_config(CODER, "coder")
    new = new_recipe(teacher, Wanted(model="coder", name="coder", title="coder", command="coder"), Machine(1, 141))
    tokens = [f"stages.{name}.tokens={count}" for name, (count, _) in report["tokens"].items()]
    data, _ = apply_overrides(new.data, [*tokens, "eval.needle.samples=500"])
    plan = make_plan(Job.of(recipe_from_dict(data, "coder"), lambda *_: teacher))
    way = plan.costs.way(1, 141)
    planned = way.gpu_hours + plan.choice.gpu_hours + way.beside
    assert planned * 3600 == pytest.approx(report["runs"][0]["seconds"]["whole"], rel=0.2)


def test_the_speed_of_a_stage_is_that_of_its_loss_and_of_what_it_trains():
    for loss, train, measured in (("kl", "mixers", "kl"), ("kl", "all", "kl"), ("layer_mse", "mixers", "kl")):
        stage = Stage(name="s", loss=loss, tokens=10**9, seq_len=4096, lr=1e-3, train=train)
        found = speed_of(stage, geometry())
        assert (found.loss, found.whole, found.experts) == (measured, train == "all", False)


def test_a_mixture_of_experts_is_as_fast_as_the_nearest_that_was_measured():
    mixture = dc.replace(geometry(), has_experts=True)
    stage = Stage(name="s", loss="kl", tokens=10**9, seq_len=4096, lr=1e-3, train="mixers")
    assert speed_of(stage, mixture).shape == "qwen3-30b-a3b"
    assert nearest_speed("kl", 2900, 4096, whole=False, experts=True).shape == "gpt-oss-20b"
    text = nearest_speed("ce", 1024, 2**15, whole=True, experts=True)
    assert (text.shape, text.experts) == ("qwen3-0.6b", False)
