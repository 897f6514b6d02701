"""The rule that carries the measured recipe to other sizes."""

import json

import pytest

from sse_convert.mixers import changed_settings
from sse_convert.recipe.presets import preset_path
from sse_convert.recipe.recommended import (
    MEASURED_WIDTH,
    ModelSizes,
    budgets,
    measured,
    recommended_layers,
    recommended_mixer,
    recommended_stages,
    row_lengths,
    scaled_rates,
    step_tokens,
)


def test_at_the_measured_width_the_rates_are_the_measured_ones():
    for stage in measured().stages:
        assert scaled_rates(stage, MEASURED_WIDTH) == {"mixers": stage.lr.mixers, "new": stage.lr.new}
        assert step_tokens(stage, stage.tokens, 512) == stage.batch_tokens


def test_rates_fall_as_width_rises():
    stage = measured().stages[0]
    for group, rate in {"mixers": stage.lr.mixers, "new": stage.lr.new}.items():
        assert scaled_rates(stage, 8 * MEASURED_WIDTH)[group] == pytest.approx(rate / 8, rel=0.05)
        assert scaled_rates(stage, MEASURED_WIDTH // 2)[group] == pytest.approx(2 * rate, rel=0.05)


def test_steps_grow_with_the_root_of_the_tokens():
    stage = measured().stages[0]
    assert step_tokens(stage, 16 * stage.tokens, 512) == 4 * stage.batch_tokens
    assert step_tokens(stage, stage.tokens, 32768) == 8 * 32768  # eight rows


def test_rows_and_budgets():
    assert row_lengths(131072) == (4096, 32768)
    assert row_lengths(40960, longest=16384) == (4096, 16384)
    assert row_lengths(8192) == (2048, 8192)
    assert row_lengths(2048) == (512, 2048)
    assert budgets(30_000_000_000) == (600_000_000, 200_000_000)
    assert budgets(134_515_008) == (400_000_000, 130_000_000)


def test_a_tiny_model_trains_a_step_at_least():
    stages = recommended_stages(ModelSizes(width=32, parameters=1000, positions=512, full=(True, True)))
    assert all(stage["tokens"] >= stage["batch_tokens"] for stage in stages)


def test_layers_without_full_attention_stay():
    assert recommended_layers([True] * 6) == {"pattern": ["sse+sliding"], "select": {"keep": "25%"}}
    assert recommended_layers([False, True] * 3)["pattern"] == ["full", "sse+sliding"]
    assert recommended_layers([True, False, False])["pattern"] == ["sse+sliding", "full", "full"]


def test_the_mixer_is_the_measured_one_but_for_its_heads():
    own = changed_settings(measured().mixers["sse+sliding"])
    assert recommended_mixer() == {**own, "state_heads": "kv"}


@pytest.mark.shared
def test_the_measured_width_is_that_of_the_measured_model():
    config = preset_path("qwen3-8b").parent.parent / measured().model / "config.json"
    if not config.is_file():
        pytest.skip("needs the checkpoints in ../shared")
    assert json.loads(config.read_text())["hidden_size"] == MEASURED_WIDTH
