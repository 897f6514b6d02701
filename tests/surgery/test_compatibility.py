"""A recipe beside a checkpoint: what must agree is refused by name, with the override that mends it."""

import dataclasses as dc
import json
import shlex

import pytest

from sse_convert.checkpoints.open import CONFIG, open_checkpoint
from sse_convert.errors import CheckpointError, RecipeError
from sse_convert.export.export import export_checkpoint
from sse_convert.mixers import BASIC
from sse_convert.recipe import load_recipe
from sse_convert.surgery.compatibility import TRAINING_ONLY, match_recipe
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from tests.surgery.models import recipe, recipe_file, save_source

BESIDE = {"kind": "sse+sliding", "qk_rank": 4, "window": 4, "sinks": 2}
SLIDING = {"kind": "sliding", "window": 8, "sinks": 1}
LAYERS = {"pattern": ["sse+sliding", "sse+sliding", "sliding", "full"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A teacher and its conversion."""
    folder = tmp_path_factory.mktemp("match")
    save_source(folder / "teacher")
    convert_checkpoint(Job.of(asked(folder)), folder / "converted")
    return folder


def asked(folder, layers=LAYERS, sliding=SLIDING, **settings):
    """A recipe with other settings for the layers that have both branches."""
    return recipe(folder / "teacher", layers=layers, mixers={"sse+sliding": {**BESIDE, **settings}, "sliding": sliding})


def match(folder, **settings):
    return match_recipe(asked(folder, **settings), open_checkpoint(folder / "converted"))


def test_the_recipe_that_made_a_checkpoint_matches(made):
    found = match(made)
    assert found.sse == open_checkpoint(made / "converted").config["sse"]
    assert found.names == LAYERS["pattern"]
    assert found.training == {}


@pytest.mark.parametrize(
    ("setting", "stored"),
    [
        ({"num_partitions": 8}, "4"),
        ({"top_k": 2}, "1"),
        ({"gate": {"write": False}}, "true"),
        ({"update": "delta"}, "gla"),
        ({"k_feature_map": "silu"}, "softmax"),
        ({"qk_rank": 2}, "4"),
        ({"decay": "scalar"}, "gla"),
        ({"state_heads": "query"}, "kv"),
        ({"window": 8}, "4"),
        ({"sinks": 0}, "2"),
    ],
)
def test_structural_settings_are_refused_and_the_fix_mends_them(made, tmp_path, setting, stored):
    ((key, value),) = setting.items()
    key, value = (f"{key}.write", value["write"]) if key == "gate" else (key, value)
    key = key if key in BASIC else f"advanced.{key}"
    with pytest.raises(RecipeError) as caught:
        match(made, **setting)
    spelled = value if isinstance(value, str) else json.dumps(value)
    line = f"mixers.sse+sliding.{key}: {spelled} in the recipe, {stored} in the checkpoint (layers 0, 1)"
    assert caught.value.problems == [line]
    assert line in caught.value.what
    fix = caught.value.fix.split(": ", 1)[1].split(";")[0]
    assert fix == f"--set mixers.sse+sliding.{key}={stored}"
    data = asked(made, **setting).to_dict()
    file = recipe_file(tmp_path / "r.yaml", made / "teacher", layers=LAYERS, mixers=data["mixers"])
    match_recipe(load_recipe(file, [shlex.split(fix)[1]]), open_checkpoint(made / "converted"))


def test_the_fix_has_what_only_training_reads_as_well_and_no_heads(tmp_path):
    """The checkpoint's settings as a recipe gives them: once for layers that differ in heads."""
    layers = {"pattern": ["sse+sliding"], "keep": [3], "overrides": {1: {"full_heads": [0]}}}
    teacher, checkpoint = save_source(tmp_path / "teacher"), tmp_path / "converted"
    convert_checkpoint(Job.of(asked(tmp_path, layers, balance_coef=0.5)), checkpoint)
    file = recipe_file(tmp_path / "r.yaml", teacher, layers=layers, mixers={"sse+sliding": {**BESIDE, "qk_rank": 2}})
    with pytest.raises(RecipeError) as caught:
        match_recipe(load_recipe(file), open_checkpoint(checkpoint))
    assert caught.value.problems == [
        "mixers.sse+sliding.qk_rank: 2 in the recipe, 4 in the checkpoint (layers 0, 1, 2)"
    ]
    sets = shlex.split(caught.value.fix.split(": ", 1)[1].split(";")[0])[1::2]
    assert sets == ["mixers.sse+sliding.qk_rank=4", "mixers.sse+sliding.advanced.balance_coef=0.5"]
    assert match_recipe(load_recipe(file, sets), open_checkpoint(checkpoint)).training == {}


@pytest.mark.parametrize("setting", [{"balance_coef": 0.5}, {"balance": "none"}])
def test_what_only_training_reads_is_taken_from_the_recipe(made, setting):
    ((key, value),) = setting.items()
    found = match(made, **setting)
    assert key in TRAINING_ONLY
    assert found.training == {f"mixers.sse+sliding.advanced.{key}": value}
    assert found.sse["mixers"]["sse+sliding"][key] == value
    stored = open_checkpoint(made / "converted").config["sse"]
    assert {**found.sse, "mixers": stored["mixers"]} == stored


def test_all_differences_at_once(made):
    with pytest.raises(RecipeError) as caught:
        match(made, layers={"pattern": ["sse+sliding", "full", "sliding", "full"]}, window=16, sliding={"window": 4})
    assert caught.value.problems == [
        "mixers.sse+sliding.window: 16 in the recipe, 4 in the checkpoint (layer 0)",
        "layer 1: full in the recipe, sse+sliding in the checkpoint",
        "mixers.sliding.window: 4 in the recipe, 8 in the checkpoint (layer 2)",
        "mixers.sliding.sinks: 4 in the recipe, 1 in the checkpoint (layer 2)",
    ]
    assert "--set" not in caught.value.fix
    assert "sse.recipe" in caught.value.fix


def test_names_and_spelling_do_not_matter(made):
    other = {"both": dict(BESIDE), "near": SLIDING}
    renamed = recipe(made / "teacher", layers={"pattern": ["both", "both", "near", "full"]}, mixers=other)
    found = match_recipe(renamed, open_checkpoint(made / "converted"))
    assert found.sse["layers"] == ["both", "both", "near", "full"]
    assert found.training == {}


def test_two_mixers_under_one_name_of_the_recipe_have_no_override(made):
    files = open_checkpoint(made / "converted")
    sse = files.config["sse"]
    mixers = {**sse["mixers"], "wider": {**sse["mixers"]["sse+sliding"], "num_partitions": 8}}
    config = {**files.config, "sse": {**sse, "layers": ["wider", *sse["layers"][1:]], "mixers": mixers}}
    with pytest.raises(RecipeError) as caught:
        match_recipe(asked(made), dc.replace(files, config=config))
    assert [line.rpartition(" ")[2] for line in caught.value.problems] == ["0)"]
    assert "--set" not in caught.value.fix


def test_what_is_no_converted_checkpoint(made, tmp_path):
    with pytest.raises(CheckpointError, match="is a plain qwen3 checkpoint"):
        match_recipe(asked(made), open_checkpoint(made / "teacher"))
    files = open_checkpoint(made / "converted")
    sse = files.config["sse"]
    newer = {**sse["mixers"], "sliding": {**SLIDING, "depth": 3}}
    with pytest.raises(CheckpointError, match=r"unknown fields \['depth'\]"):
        match_recipe(asked(made), dc.replace(files, config={**files.config, "sse": {**sse, "mixers": newer}}))


def test_export_refuses_another_recipe(made, tmp_path):
    with pytest.raises(RecipeError, match=r"mixers\.sse\+sliding\.window: 8 in the recipe, 4 in the checkpoint"):
        export_checkpoint(Job.of(asked(made, window=8)), made / "converted", tmp_path / "out")
    export_checkpoint(Job.of(asked(made, balance_coef=0.5)), made / "converted", tmp_path / "out")
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["sse"]["layers"] == LAYERS["pattern"]
