"""Keys that were retired: a recipe's are named, a checkpoint's are read where layers still do the same."""

import copy
import re

import pytest

from sse_convert.errors import RecipeError
from sse_convert.mixers import BUILT_IN, mixer_from_dict, mixer_to_dict
from sse_convert.mixers import RETIRED as RETIRED_OF_MIXERS
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.retired import RETIRED
from tests.recipe.recipes import small


@pytest.mark.parametrize("key", RETIRED)
def test_a_key_says_what_to_do(key):
    data, (*section, name) = copy.deepcopy(small()), key.split(".")
    part = data.setdefault(section[0], {}) if section else data
    (part[0] if isinstance(part, list) else part)[name] = 1
    with pytest.raises(RecipeError, match=re.escape(f"{name}: was retired; {RETIRED[key]}")):
        recipe_from_dict(data)


def test_a_recipe_that_was_written_out_is_read_where_nobody_set_them():
    """As `to_dict` of an earlier version wrote it, beside the steps of a run."""
    written = recipe_from_dict(small()).to_dict()
    old = copy.deepcopy(written)
    old |= {"controls": []}
    old["layers"] |= {"ratio": None}
    old["eval"] |= {"generation": None, "perplexity": True}
    old["train"] |= {"keep": "last", "lora": {"rank": 16, "alpha": 32.0, "targets": None}}
    for stage in old["stages"]:
        stage |= {"clip": 1.0, "teacher": None}
    for mixer in old["mixers"].values():
        mixer["advanced"] = {**mixer.get("advanced", {}), "shared_params": True, "shared_queries": False}
    assert recipe_from_dict(old) == recipe_from_dict(written)


@pytest.mark.parametrize("name", RETIRED_OF_MIXERS)
def test_a_mixer_of_a_recipe_says_what_layers_have(name):
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict({**small(), "mixers": {"sse": {"advanced": {name: 1}}}})
    (problem,) = caught.value.problems
    assert problem.startswith(f"mixers.sse.advanced.{name}: was retired, layers have ")
    assert problem.endswith("; remove it")


@pytest.mark.parametrize("name", RETIRED_OF_MIXERS)
def test_a_checkpoint_is_read_where_layers_do_the_same(name):
    stored = mixer_to_dict(BUILT_IN["sse"])
    assert mixer_from_dict({**stored, name: RETIRED_OF_MIXERS[name]}) == BUILT_IN["sse"]
    with pytest.raises(ValueError, match=f"{name} is 77, which was retired .* with its own code"):
        mixer_from_dict({**stored, name: 77})


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"balance": "bias"}, "balance is 'bias'"),
        ({"decay": "none"}, "decay is 'none'"),
        ({"gate": {"write": True, "read": True, "renormalise": True}}, "gate.renormalise is True"),
    ],
)
def test_a_checkpoint_with_a_retired_value_says_what_to_do(setting, told):
    with pytest.raises(ValueError, match=rf"{told}, which was retired .* with its own code"):
        mixer_from_dict({**mixer_to_dict(BUILT_IN["sse"]), **setting})


def test_a_gate_as_checkpoints_have_it_is_read():
    stored = mixer_to_dict(BUILT_IN["sse"])
    gate = {**stored["gate"], "renormalise": False}
    assert mixer_from_dict({**stored, "gate": gate}) == BUILT_IN["sse"]
