"""The rule that carries the measured recipe to other sizes."""

import dataclasses as dc
import json
from pathlib import Path

import pytest

from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.data.needle import load_words
from sse_convert.data.recall_rows import crowding
from sse_convert.mixers import changed_settings
from sse_convert.recipe.presets import preset_path
from sse_convert.recipe.recommended import (
    HEADS,
    HEADS_OF_TWO,
    LAYERS,
    NEEDLE_ROW,
    ModelSizes,
    budgets,
    may_train_all,
    recommended_calibration,
    recommended_layers,
    recommended_mixer,
    recommended_needles,
    recommended_stages,
    row_lengths,
    scaled_rates,
    step_tokens,
)
from sse_convert.recipe.schema import Needles
from tests.model_configs import model_config

TEACHER = Path(__file__).parents[2] / "demo" / "teacher"


def sizes(parameters=134_515_008, width=576, weight_size=0.17, positions=8192, heads=(3, 3), full=None):
    full = full or (True,) * len(heads)
    return ModelSizes(
        width=width, weight_size=weight_size, parameters=parameters, positions=positions, full=full, heads=heads
    )


WHOLE_LAYERS = sizes(width=LAYERS.width, heads=(0, 0))


@pytest.mark.parametrize(
    ("heads", "full", "expected"),
    [
        ((3, 3), (True, True), HEADS),
        ((8, 8), (True, True), HEADS),
        ((2, 2), (True, True), HEADS_OF_TWO),
        ((1, 1), (True, True), LAYERS),
        ((0, 0), (True, True), LAYERS),  # refused for full_heads
        ((8, 2), (True, True), HEADS_OF_TWO),
        ((0, 4), (False, True), HEADS),  # windows of the model's own stay
    ],
)
def test_heads_are_kept_where_layers_have_several(heads, full, expected):
    assert sizes(heads=heads, full=full).measured is expected


@pytest.mark.parametrize("measured", [sizes(), WHOLE_LAYERS])
def test_the_measured_model_gets_the_measured_rates(measured):
    for stage in measured.measured.recipe.stages:
        rates = scaled_rates(measured, stage, whole=True)
        assert rates == {group: rate for group, rate in dc.asdict(stage.lr).items() if rate is not None}
        assert step_tokens(stage, stage.tokens, 512) == stage.batch_tokens


@pytest.mark.parametrize("width", [256, 1024, 4096])
def test_beside_layers_rates_fall_as_width_rises(width):
    stage = LAYERS.recipe.stages[0]
    rates = scaled_rates(dc.replace(WHOLE_LAYERS, width=width), stage, whole=False)
    assert rates["mixers"] == pytest.approx(stage.lr.mixers * 512 / width, rel=0.05)
    assert rates["new"] == pytest.approx(stage.lr.new * 512 / width, rel=0.05)


@pytest.mark.parametrize(
    ("size", "width", "of_teacher", "of_new"),
    [
        (0.017, 576, 0.1, 0.1**0.5),
        (0.017, 1152, 0.1, 0.1**0.5 / 2),
        (0.17, 288, 1, 1),  # narrower: none rises
        (1.7, 576, 1, 1),  # larger: none rises
    ],
)
def test_beside_heads_rates_fall_with_the_size_of_the_weights(size, width, of_teacher, of_new):
    stage = HEADS.recipe.stages[0]
    rates = scaled_rates(sizes(weight_size=size, width=width), stage, whole=True)
    expected = {
        "mixers": stage.lr.mixers * of_teacher,
        "rest": stage.lr.rest * of_teacher,
        "new": stage.lr.new * of_new,
    }
    assert rates == {group: pytest.approx(rate, rel=0.05) for group, rate in expected.items()}


@pytest.mark.parametrize(("step", "factor"), [(1 / 32, 32**-0.5), (1 / 4, 1 / 2), (1, 1), (8, 1)])
def test_rates_fall_with_the_root_of_smaller_steps(step, factor):
    stage = HEADS.recipe.stages[0]
    rates = scaled_rates(sizes(), stage, round(step * stage.batch_tokens), whole=True)
    assert rates["new"] == pytest.approx(stage.lr.new * factor, rel=0.05)


def test_the_measured_model_gets_its_recipe():
    own = HEADS.recipe
    stages = recommended_stages(sizes(), least=1, whole=True)
    for stage, measured in zip(stages, own.stages, strict=True):
        assert "train" not in stage
        assert {key: stage[key] for key in ("tokens", "seq_len", "batch_tokens", "optimizer", "warmup", "min_lr")} == {
            key: getattr(measured, key)
            for key in ("tokens", "seq_len", "batch_tokens", "optimizer", "warmup", "min_lr")
        }
        assert stage["lr"] == dc.asdict(measured.lr)
    assert own.mixers == recommended_mixer(8192, HEADS) == {}  # the built-in mixer
    assert recommended_calibration(sizes()) == {"rows": 2, "seq_len": 4096}
    assert Needles(**recommended_needles(sizes(), 2048)) == own.data.needles


@pytest.mark.parametrize(
    ("shortest", "keys"), [(512, [1, 8]), (1024, [1, 8, 16]), (2048, [1, 8, 32]), (4096, [1, 8, 32])]
)
def test_rows_have_room_for_their_needles(shortest, keys):
    needles = Needles(**recommended_needles(sizes(), shortest))
    assert needles.keys == keys
    assert crowding(shortest, needles, load_tokenizer(TEACHER), load_words()) is None


def test_weights_are_trained_as_measured_or_converted_layers_alone():
    assert may_train_all(sizes())
    assert not may_train_all(sizes(heads=(1, 1)))
    for stage in recommended_stages(sizes()):
        assert stage["train"] == "mixers"
        assert "rest" not in stage["lr"]


def test_steps_grow_with_the_root_of_the_tokens():
    stage = LAYERS.recipe.stages[0]
    assert step_tokens(stage, 16 * stage.tokens, 512) == 4 * stage.batch_tokens
    assert step_tokens(stage, stage.tokens, 32768) == 8 * 32768  # eight rows


def test_rows_and_budgets():
    assert row_lengths(131072) == (4096, 32768)
    assert row_lengths(40960, longest=16384) == (4096, 16384)
    assert row_lengths(8192) == (2048, 8192)
    assert row_lengths(2048) == (512, 2048)
    assert budgets(sizes(30_000_000_000)) == (600_000_000, 200_000_000)
    assert budgets(sizes(134_515_008, heads=(1, 1))) == (400_000_000, 130_000_000)
    assert budgets(sizes(134_515_008)) == (14_000_000, 6_000_000)


def test_a_tiny_model_trains_a_step_at_least():
    stages = recommended_stages(sizes(parameters=1000, width=32, positions=512))
    assert all(stage["tokens"] >= stage["batch_tokens"] for stage in stages)


@pytest.mark.parametrize(("heads", "shortest"), [((1, 1), 2048), ((3, 3), NEEDLE_ROW // 2)])
def test_nothing_is_planted_beside_whole_layers_or_in_rows_too_short(heads, shortest):
    assert recommended_needles(sizes(heads=heads), shortest) == {}


def test_layers_without_full_attention_stay():
    assert recommended_layers([True] * 6) == {"pattern": ["sse+sliding"], "select": {"keep": "25%"}}
    assert recommended_layers([True] * 6, HEADS)["select"] == {"keep": "10%", "by": "heads"}
    assert recommended_layers([False, True] * 3)["pattern"] == ["full", "sse+sliding"]
    assert recommended_layers([True, False, False])["pattern"] == ["sse+sliding", "full", "full"]


def test_the_mixer_beside_whole_layers_is_the_measured_one_but_for_its_heads():
    own = changed_settings(LAYERS.recipe.mixers["sse+sliding"])
    assert recommended_mixer() == {**own, "state_heads": "kv"}


@pytest.mark.parametrize(("positions", "window"), [(512, 64), (2048, 128), (8192, 128), (32768, 512), (131072, 512)])
def test_beside_heads_windows_grow_with_rows(positions, window):
    assert recommended_mixer(positions, HEADS).get("window", 128) == window
    assert recommended_mixer(positions, LAYERS).get("window", 128) == min(window, 128)


@pytest.mark.shared
def test_the_measured_width_is_that_of_the_measured_model():
    config = preset_path("qwen3-8b").parent.parent / LAYERS.recipe.model / "config.json"
    if not config.is_file():
        pytest.skip("needs the checkpoints in ../shared")
    assert json.loads(config.read_text())["hidden_size"] == LAYERS.width
    assert model_config("smollm2-135m")["hidden_size"] == HEADS.width
