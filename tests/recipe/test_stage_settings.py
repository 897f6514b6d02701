"""The training keys that come in groups: what is refused, by name and value, and what they mean by default."""

import pytest

from sse_convert.errors import RecipeError
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.stage_settings import Rope
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
        ({**DISTILL, "rope": {"rope_theta": 1e6}}, "stages.0.rope: is for loss ce, this stage's loss is kl"),
        ({**LONG, "rope": {}}, "stages.0.rope: is empty, give it a rope_theta or a factor"),
        ({**LONG, "rope": {"rope_theta": 1}}, "stages.0.rope.rope_theta: 1.0 is too small, expected more than 1"),
        ({**LONG, "rope": {"factor": 0.5}}, "stages.0.rope.factor: 0.5 is too small, expected 1 or more"),
        ({**LONG, "rope": {"rope_type": "yarn", "factor": 4}}, "stages.0.rope.rope_type: was retired; a factor alone"),
    ],
)
def test_each_problem_of_a_stage(stage, problem):
    found = problems_of(stages=[stage])
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_everything_is_off_by_default():
    recipe = recipe_from_dict(small(stages=[ALIGN]))
    stage = recipe.stages[0]
    assert stage.rope is None


def test_given_keys():
    assert Rope(rope_theta=5e6).given() == {"rope_theta": 5e6}
