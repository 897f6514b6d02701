"""Keys that were retired: a recipe's are named, a checkpoint's are read where layers still do the same."""

import pytest

from sse_convert.errors import RecipeError
from sse_convert.mixers import BUILT_IN, RETIRED, mixer_from_dict, mixer_to_dict
from sse_convert.recipe import recipe_from_dict
from tests.recipe.recipes import small


@pytest.mark.parametrize("name", RETIRED)
def test_a_mixer_of_a_recipe_says_what_layers_have(name):
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict({**small(), "mixers": {"sse": {"advanced": {name: 1}}}})
    (problem,) = caught.value.problems
    assert problem.startswith(f"mixers.sse.advanced.{name}: was retired, layers have ")
    assert problem.endswith("; remove it")


@pytest.mark.parametrize("name", RETIRED)
def test_a_checkpoint_is_read_where_layers_do_the_same(name):
    stored = mixer_to_dict(BUILT_IN["sse"])
    assert mixer_from_dict({**stored, name: RETIRED[name]}) == BUILT_IN["sse"]
    with pytest.raises(ValueError, match=f"{name} is 77, which was retired .* with its own code"):
        mixer_from_dict({**stored, name: 77})
