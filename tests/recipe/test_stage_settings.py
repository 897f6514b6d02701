"""The training keys that come in groups: what is refused, by name and value, and what they mean by default."""

import pytest

from sse_convert.errors import RecipeError
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.stage_settings import Offline, Rope
from tests.recipe.recipes import small

SIZE = {"name": "s", "tokens": "1M", "seq_len": 512, "lr": 1.0e-3}
ALIGN = {**SIZE, "loss": "layer_mse"}
DISTILL = {**SIZE, "loss": "kl"}
LONG = {**SIZE, "loss": "ce"}


def problems_of(**changes):
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict(small(**changes))
    return caught.value.problems


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ({**ALIGN, "stop": {"windw": 3}}, "stages.0.stop.windw: unknown key; did you mean 'window'?"),
        ({**ALIGN, "stop": {"window": 0}}, "stages.0.stop: window is 0, expected at least 1"),
        ({**ALIGN, "stop": {"improvement": 1.0}}, "stages.0.stop: improvement is 1.0, expected 0 to less than 1"),
        ({**ALIGN, "stop": {"below": -1}}, "stages.0.stop: below is -1.0, expected 0 or more"),
        ({**ALIGN, "stop": {"improvement": None}}, "stages.0.stop: never stops: set improvement or below"),
        ({**ALIGN, "layers_at_once": 0}, "stages.0.layers_at_once: 0 is too small, expected 1 or more"),
        ({**DISTILL, "stop": {}}, "stages.0.stop: is for loss layer_mse, this stage's loss is kl; remove it"),
        ({**LONG, "layers_at_once": 1}, "stages.0.layers_at_once: is for loss layer_mse, this stage's loss is ce"),
        ({**LONG, "offline": {}}, "stages.0.offline: is for loss kl, this stage's loss is ce"),
        ({**DISTILL, "offline": {"top_k": 0}}, "stages.0.offline: top_k is 0, expected at least 1"),
        (
            {**DISTILL, "offline": {"dtype": "float32"}},
            "stages.0.offline.dtype: expected one of float16, bfloat16, got",
        ),
        (
            {**DISTILL, "offline": {}, "hidden_loss": 0.1},
            "stages.0.hidden_loss: needs the teacher's hidden states, which offline does not keep",
        ),
        ({**DISTILL, "rope": {"rope_theta": 1e6}}, "stages.0.rope: is for loss ce, this stage's loss is kl"),
        ({**LONG, "rope": {}}, "stages.0.rope: without rope_type needs rope_theta"),
        ({**LONG, "rope": {"rope_theta": 1}}, "stages.0.rope: rope_theta is 1.0, not over 1"),
        ({**LONG, "rope": {"rope_type": "yran"}}, "stages.0.rope: unknown rope_type 'yran', did you mean 'yarn'?"),
        ({**LONG, "rope": {"rope_type": "yarn"}}, "stages.0.rope: rope_type yarn needs factor"),
        ({**LONG, "rope": {"rope_type": "linear", "factor": 0.5}}, "stages.0.rope: factor is 0.5, expected at least 1"),
        (
            {**LONG, "rope": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}},
            "stages.0.rope: rope_type linear has no beta_fast, remove it",
        ),
        (
            {**LONG, "rope": {"rope_type": "dynamic", "factor": 2.0}},
            "stages.0.rope: rope_type 'dynamic' is not offered: its frequencies depend on the longest row seen so far",
        ),
        ({**LONG, "rope": {"rope_type": "longrope"}}, "stages.0.rope: rope_type 'longrope' is not offered"),
        (
            {**LONG, "rope": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "stages.0.rope: low_freq_factor is 4.0, high_freq_factor 1.0",
        ),
    ],
)
def test_each_problem_of_a_stage(stage, problem):
    found = problems_of(stages=[stage])
    assert len(found) == 1
    assert found[0].startswith(problem)


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        ({"spikes": {"zscore": 0}}, "train.spikes: zscore is 0.0, expected more than 0"),
        ({"spikes": {"window": 4}}, "train.spikes: window is 4, expected at least 8"),
        ({"spikes": {"in_a_row": 0}}, "train.spikes: in_a_row is 0, expected at least 1"),
        ({"spikes": {"total": 0}}, "train.spikes: total is 0, expected at least 1"),
        ({"collapse": {"entropy": 1}}, "train.collapse: entropy is 1.0, expected 0 to less than 1"),
        ({"collapse": {"looks": 0}}, "train.collapse: looks is 0, expected at least 1"),
        ({"collapse": {"action": "stopp"}}, "train.collapse.action: expected one of warn, stop, got text 'stopp'"),
    ],
)
def test_each_problem_of_the_guards(train, problem):
    found = problems_of(train=train)
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_everything_is_off_by_default():
    recipe = recipe_from_dict(small(stages=[ALIGN]))
    stage = recipe.stages[0]
    assert (stage.stop, stage.layers_at_once, stage.offline, stage.rope) == (None, None, None, None)
    assert (recipe.train.spikes.zscore, recipe.train.collapse.action) == (None, "warn")


def test_sizes_and_given_keys():
    assert Offline(top_k=64).bytes_per_token == 388
    assert Rope(rope_theta=5e6).given() == {"rope_theta": 5e6}
