import dataclasses as dc

import pytest

from sse_convert.errors import RecipeError
from sse_convert.mixers import BUILT_IN
from sse_convert.recipe import load_recipe, resolve
from sse_convert.recipe.pattern import expand_pattern, layer_range
from sse_convert.recipe.schema import Layers
from tests.recipe.recipes import small, write

MIXERS = ("sse", "gla", "gdn", "sliding")


def short(layers, count):
    """One letter per layer: sse, gla, gdn, window, Full."""
    letters = {"sse": "s", "gla": "g", "gdn": "d", "sliding": "w", "full": "F"}
    return "".join(letters[name] for name in expand_pattern(layers, MIXERS, count))


@pytest.mark.parametrize(
    ("layers", "count", "result"),
    [
        (Layers(pattern=["sse"]), 4, "ssss"),
        (Layers(pattern=["sse", "sliding", "sse", "sliding", "full"]), 12, "swswFswswFsw"),
        (Layers(pattern=["sse*5", "full"]), 13, "sssssFsssssFs"),
        (Layers(pattern=["sse * 2", "full*2"]), 5, "ssFFs"),
        (Layers(pattern=["full", "gla*2"]), 4, "FggF"),
        (Layers(pattern=["sse"], keep=[0, -1]), 5, "FsssF"),
        (Layers(pattern=["sse"], keep=["1-2", "-2--1"]), 6, "sFFsFF"),
        (Layers(pattern=["sse"], keep=["4--1"]), 6, "ssssFF"),
        (Layers(pattern=["sse"], keep=[1], overrides={"0-2": "sliding"}), 5, "wwwss"),
        (Layers(pattern=["sse"], overrides={3: "full", "-1": "gla"}), 5, "sssFg"),
        (Layers(overrides={2: "sse"}), 4, "FFsF"),
        (Layers(pattern=["sse", "gla", "full"]), 2, "sg"),
        (Layers(pattern=["gdn", "gla", "full"]), 5, "dgFdg"),
    ],
)
def test_expansion(layers, count, result):
    assert short(layers, count) == result


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (Layers(pattern=["sse"], keep=[28]), "layers.keep: 28 is out of range, the model has 28 layers"),
        (Layers(pattern=["sse"], keep=[-29]), "layers.keep: -29 is out of range, the model has 28 layers"),
        (Layers(pattern=["sse"], keep=["26-30"]), "layers.keep: 26-30 is out of range, the model has 28 layers"),
        (
            Layers(pattern=["sse"], overrides={40: "full"}),
            "layers.overrides: 40 is out of range, the model has 28 layers",
        ),
        (Layers(pattern=["sse"], keep=["5-3"]), "layers.keep: range 5-3 is empty, layer 5 comes after layer 3"),
        (Layers(pattern=["sse"], keep=["x"]), "layers.keep: 'x' is neither an index nor a range such as 3-5 or -4--1"),
        (Layers(pattern=["sse"], keep=["0--1"]), "layers: all 28 layers stay 'full', so nothing is converted"),
        (Layers(pattern=["full"]), "layers: all 28 layers stay 'full', so nothing is converted"),
    ],
)
def test_what_does_not_fit_the_model(layers, message):
    with pytest.raises(RecipeError) as caught:
        expand_pattern(layers, MIXERS, 28)
    assert message in str(caught.value)


def test_out_of_range_states_the_bound_and_all_problems():
    with pytest.raises(RecipeError) as caught:
        expand_pattern(Layers(pattern=["sse"], keep=[30], overrides={31: "full"}), MIXERS, 28)
    assert caught.value.what.count("out of range") == 2
    assert caught.value.expected == "layer indices from -28 to 27 and defined mixers"


def test_resolve_gives_the_mixers_in_use(tmp_path):
    recipe = load_recipe(
        write(tmp_path, small(mixers={"mine": {"kind": "sse", "update": "gla"}}, layers={"pattern": ["mine", "full"]}))
    )
    assert resolve(recipe, 3) == (["mine", "full", "mine"], {"mine": dc.replace(BUILT_IN["sse"], update="gla")})


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        (7, (7, 7)),
        (-1, (-1, -1)),
        ("7", (7, 7)),
        ("3-5", (3, 5)),
        ("-4--1", (-4, -1)),
        ("4--1", (4, -1)),
        ("x", None),
        ("3-", None),
    ],
)
def test_ranges(key, bounds):
    assert layer_range(key) == bounds
