"""Keys that recipes had: the error says what to do, and recipes in old checkpoints are read as they were meant."""

import dataclasses as dc
import json

import pytest

from sse_convert.errors import RecipeError
from sse_convert.mixers import BASIC, BUILT_IN, BY_LAYER, SSEMixer, SSESlidingMixer
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.loader import recipe_from_checkpoint
from sse_convert.recipe.retired import MOVED, RETIRED
from tests.recipe.recipes import small

OLD_SSE = {"qk_rank_on": "shared", "decay_rank": 16, "decay_normalizer": 16.0, "output_norm": "rms", "row_decay": "all"}


def problem_of(path: str) -> str:
    """What is said of a small recipe with one more key."""
    keys = path.removesuffix("{}").replace("mixers.*", "mixers.sse").replace("stages.*", "stages.1").split(".")
    recipe = small(data={**small()["data"], "needles": {}}, eval={}, calibrate={}, train={})
    place = recipe
    for key in keys[:-1]:
        place = place[int(key)] if key.isdigit() else place.setdefault(key, {})
    place[keys[-1]] = {} if path.endswith("{}") else 1
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict(recipe)
    return next(line for line in caught.value.problems if line.startswith(".".join(keys) + ":"))


@pytest.mark.parametrize("path", RETIRED)
def test_a_retired_key_says_what_to_do(path: str) -> None:
    assert problem_of(path).endswith(RETIRED[path])


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_key_says_where_it_is(name: str) -> None:
    assert problem_of(f"mixers.*.{name}") == f"mixers.sse.{name}: is now mixers.sse.advanced.{name}"


def test_few_settings_are_for_everybody() -> None:
    assert {field.name for field in dc.fields(SSESlidingMixer)} == {*BASIC, *MOVED, BY_LAYER}
    assert len(BASIC) <= 9
    (sse,) = recipe_from_dict(small(mixers={"sse": {"advanced": {"balance": "none"}}})).mixers.values()
    assert sse == dc.replace(BUILT_IN["sse"], balance="none")


def test_a_recipe_of_an_old_checkpoint_means_what_it_meant() -> None:
    old = small(layers={"pattern": ["sse", "wide", "sse+sliding", "full"]}, calibrate={"router": "random", "rows": 3})
    old["mixers"] = {"wide": {"kind": "sse", "num_partitions": 16, "gate": {"read": False}, **OLD_SSE}}
    old["train"] = {"spikes": {"zscore": None, "window": 100}, "seed": 3}
    recipe = recipe_from_checkpoint({"format": 1, "recipe": json.loads(json.dumps(old))}, "config.json")
    assert recipe.mixers["sse"] == SSEMixer()
    assert recipe.mixers["sse+sliding"] == SSESlidingMixer()
    assert recipe.mixers["gla"].k_feature_map == "softmax"
    assert (recipe.mixers["wide"].num_partitions, recipe.mixers["wide"].gate.read) == (16, False)
    assert (recipe.calibrate.rows, recipe.train.seed) == (3, 3)
    again = recipe_from_checkpoint({"format": 2, "recipe": recipe.to_dict()}, "config.json")
    assert again == recipe


def test_an_old_recipe_with_a_setting_that_is_gone_is_refused_by_name() -> None:
    old = small(mixers={"sse": {"kind": "sse", "decay_rank": 4}})
    with pytest.raises(RecipeError, match="decay_rank is 4, which was retired"):
        recipe_from_checkpoint({"format": 1, "recipe": old}, "config.json")
