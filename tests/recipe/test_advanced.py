"""Settings of mixers for experts stand under `advanced`, and where they do not the error says so."""

import dataclasses as dc

import pytest

from sse_convert.errors import RecipeError
from sse_convert.mixers import BASIC, BUILT_IN, BY_LAYER, SSESlidingMixer
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.build import FOR_EXPERTS
from tests.recipe.recipes import small


@pytest.mark.parametrize("name", FOR_EXPERTS)
def test_a_setting_for_experts_says_where_it_belongs(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict(small(mixers={"sse": {"kind": "sse", name: 1}}))
    assert caught.value.problems == [f"mixers.sse.{name}: belongs to mixers.sse.advanced"]


def test_few_settings_are_for_everybody() -> None:
    assert {field.name for field in dc.fields(SSESlidingMixer)} == {*BASIC, *FOR_EXPERTS, BY_LAYER}
    assert len(BASIC) <= 9
    (sse,) = recipe_from_dict(small(mixers={"sse": {"advanced": {"balance": "none"}}})).mixers.values()
    assert sse == dc.replace(BUILT_IN["sse"], balance="none")
