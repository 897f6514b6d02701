"""`layers.select`: how many layers are chosen, among which, and what a recipe is before and after."""

import pytest

from sse_convert.errors import RecipeError
from sse_convert.recipe import load_recipe, resolve
from sse_convert.recipe.choosing import chosen_recipe, draft_recipe, most_sets, open_choice, probe_rows
from sse_convert.recipe.schema import Layers, Select
from tests.recipe.recipes import small, write


def recipe_of(tmp_path, layers, **more):
    return load_recipe(write(tmp_path, small(layers=layers, **more)))


@pytest.mark.parametrize(
    ("layers", "count", "among", "keep"),
    [
        ({"select": {"keep": 2}}, 5, (0, 1, 2, 3, 4), 2),
        ({"select": {"keep": "25%"}}, 28, tuple(range(28)), 7),
        ({"select": {"keep": "25%"}}, 30, tuple(range(30)), 8),
        ({"select": {"keep": "1%"}}, 6, tuple(range(6)), 1),
        ({"pattern": ["full", "sse"], "select": {"keep": "50%"}}, 8, (1, 3, 5, 7), 2),
        ({"pattern": ["sse"], "keep": [0], "overrides": {2: "full"}, "select": {"keep": 1}}, 4, (1, 3), 1),
    ],
)
def test_what_is_to_be_chosen(tmp_path, layers, count, among, keep):
    choice = open_choice(recipe_of(tmp_path, layers), count)
    assert (choice.among, choice.keep) == (among, keep)


def test_nothing_is_open_without_select_or_once_chosen(tmp_path):
    assert open_choice(recipe_of(tmp_path, {"pattern": ["sse"]}), 4) is None
    recipe = recipe_of(tmp_path, {"select": {"keep": 1, "chosen": [2]}})
    assert open_choice(recipe, 4) is None
    assert resolve(recipe, 4)[0] == ["sse+sliding", "sse+sliding", "full", "sse+sliding"]


def test_the_rest_is_sse_beside_a_window_where_no_pattern_says_otherwise(tmp_path):
    recipe = chosen_recipe(recipe_of(tmp_path, {"select": {"keep": 1}}), (3,))
    assert recipe.layers == Layers(select=Select(keep=1, chosen=[3]))
    assert resolve(recipe, 4)[0] == ["sse+sliding"] * 3 + ["full"]
    assert load_recipe(write(tmp_path, recipe.to_dict())) == recipe


def test_a_draft_keeps_as_many(tmp_path):
    recipe = recipe_of(tmp_path, {"pattern": ["full", "sse"], "select": {"keep": 2}})
    assert resolve(draft_recipe(recipe, 8), 8)[0] == ["full", "sse", "full", "full", "full", "sse", "full", "full"]
    fixed = recipe_of(tmp_path, {"pattern": ["sse"]})
    assert draft_recipe(fixed, 8) is fixed


HEADS = (3, 0, 3, 3)
"""that can be kept of four layers: the second has a window already"""


def test_heads_are_chosen_among_those_that_can_be_kept(tmp_path):
    recipe = recipe_of(tmp_path, {"pattern": ["sse+sliding"], "keep": [3], "select": {"keep": "50%", "by": "heads"}})
    choice = open_choice(recipe, 4, HEADS)
    assert (choice.keep, choice.units) == (3, (0, 1, 2, 6, 7, 8))
    chosen = chosen_recipe(recipe, (8, 0, 6), choice)
    assert chosen.layers.select.chosen == {0: [0], 2: [0, 2]}
    names, mixers = resolve(chosen, 4)
    assert names == ["sse+sliding@0", "sse+sliding", "sse+sliding@0,2", "full"]
    assert [mixers[name].full_heads for name in names[:3]] == [(0,), (), (0, 2)]
    read_again = load_recipe(write(tmp_path, chosen.to_dict()))
    assert resolve(read_again, 4) == (names, mixers)
    assert resolve(draft_recipe(recipe, 4, HEADS), 4)[0].count("full") == 1


def test_a_layer_of_which_all_heads_are_chosen_is_a_softmax_layer(tmp_path):
    recipe = recipe_of(tmp_path, {"select": {"keep": 4, "by": "heads"}})
    chosen = chosen_recipe(recipe, (0, 6, 7, 8), open_choice(recipe, 4, HEADS))
    assert chosen.layers.select.chosen == {0: [0], 2: "full"}
    read_again = load_recipe(write(tmp_path, chosen.to_dict()))
    assert resolve(read_again, 4)[0] == ["sse+sliding@0", "sse+sliding", "full", "sse+sliding"]


def test_heads_of_single_layers(tmp_path):
    layers = {"pattern": ["sse+sliding"], "overrides": {"1-2": {"full_heads": [1]}, -1: "sliding"}}
    names, mixers = resolve(recipe_of(tmp_path, layers), 4)
    assert names == ["sse+sliding", "sse+sliding@1", "sse+sliding@1", "sliding"]
    assert mixers["sse+sliding@1"].full_heads == (1,)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"pattern": ["sse"], "overrides": {1: {"full_heads": [0]}}}, "beside mixer 'sse', which has no window"),
        ({"pattern": ["sse+sliding"], "keep": [1], "overrides": {1: {"full_heads": [0]}}}, "all of whose heads are"),
        ({"select": {"keep": 2, "by": "heads", "chosen": {0: [1]}}}, "names 1 head, and keep is 2"),
        ({"select": {"keep": 1, "by": "heads", "chosen": {9: [1]}}}, "layer 9 gets no mixer"),
        ({"select": {"keep": 1, "by": "heads", "chosen": [1]}}, "which heads stay softmax is [1], and by is heads"),
        ({"select": {"keep": 1, "chosen": {1: [1]}}}, "which heads stay softmax is {1: [1]}, and by is layers"),
        ({"select": {"keep": 1, "by": "heads"}}, "which heads stay softmax is not chosen yet"),
    ],
)
def test_heads_that_cannot_be_kept(tmp_path, layers, message):
    with pytest.raises(RecipeError) as error:
        resolve(recipe_of(tmp_path, layers), 4)
    assert message in str(error.value)


def test_a_model_whose_heads_cannot_be_told_apart(tmp_path):
    recipe = recipe_of(tmp_path, {"select": {"keep": 1, "by": "heads"}})
    with pytest.raises(RecipeError, match="no head of this model can be kept"):
        open_choice(recipe, 4, (0, 0, 0, 0))
    with pytest.raises(RecipeError, match="12 heads would get a mixer, so nothing is converted"):
        open_choice(recipe_of(tmp_path, {"select": {"keep": 12, "by": "heads"}}), 4, (3, 3, 3, 3))


def test_unchosen_layers_have_no_mixer_yet(tmp_path):
    with pytest.raises(RecipeError, match="which 2 of 8 layers stay softmax is not chosen yet") as error:
        resolve(recipe_of(tmp_path, {"select": {"keep": 2}}), 8)
    assert "sse-convert run" in error.value.fix


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({"keep": 8}, "layers.select.keep is 8, and 8 layers would get a mixer, so nothing is converted"),
        ({"keep": "99%"}, "layers.select.keep is 99%, and 8 layers would get a mixer, so nothing is converted"),
        ({"keep": 2, "chosen": [1]}, "layers.select.chosen: names 1 layer, and keep: 2 asks for 2"),
        ({"keep": 1, "chosen": [9]}, "layers.select.chosen: layer 9 is none of those to choose from: 0, 1, 2"),
    ],
)
def test_what_does_not_fit_the_model(tmp_path, select, message):
    recipe = recipe_of(tmp_path, {"select": select})
    with pytest.raises(RecipeError) as error:
        resolve(recipe, 8)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({}, "layers.select.keep: required key is missing"),
        ({"keep": 0}, "0 is too small, expected 1 or more"),
        ({"keep": "0%"}, "expected a number, or a share such as 25%"),
        ({"keep": "100%"}, "expected a number, or a share such as 25%"),
        ({"keep": "a few"}, "expected a number, or a share such as 25%"),
        ({"keep": 0.25}, "got number 0.25"),
        ({"keep": 1, "chosen": [2, 2]}, "layer 2 is named twice"),
        ({"keep": 1, "chosen": [-1]}, "-1 is too small"),
        ({"kept": 2}, "did you mean 'keep'?"),
    ],
)
def test_what_makes_no_sense(tmp_path, select, message):
    with pytest.raises(RecipeError) as error:
        recipe_of(tmp_path, {"select": select})
    assert message in str(error.value)


def test_greedy_measures_every_set_once():
    assert most_sets("greedy", keep=1, among=6, tries=0) == 7 + 1  # none, six alone; and all, the teacher
    assert most_sets("greedy", keep=2, among=6, tries=0) == 1 + 6 + 5 + 1


def test_rows_are_as_long_as_the_longest_of_the_recipe(tmp_path):
    def length(seq_len, needle=(), limit=100_000):
        stages = [{"name": "a", "loss": "kl", "tokens": "1M", "seq_len": seq_len, "lr": 1e-3}]
        more = {"eval": {"needle": {"lengths": list(needle)}}} if needle else {}
        data = {"train": [{"path": "x.txt"}]}
        return probe_rows(recipe_of(tmp_path, {"select": {"keep": 1}}, stages=stages, data=data, **more), limit).length

    assert length(2048) == 2048
    assert length(512, needle=[512, 1024]) == 1024
    assert length(512) == 1024
    assert length(512, limit=600) == 600
    assert length(32768) == 4096
