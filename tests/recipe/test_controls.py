import dataclasses as dc
import re

import pytest

from sse_convert.mixers import BUILT_IN, FIXED, SlidingMixer, SSEMixer, SSESlidingMixer
from sse_convert.recipe import Recipe, load_recipe, recipe_from_dict, resolve
from sse_convert.recipe.choosing import draft_recipe
from sse_convert.recipe.controls import CONTROLS, MEANING, TO_BEAT, control_recipes
from sse_convert.recipe.presets import preset_names
from tests.recipe.recipes import small

MIXED = {"pattern": ["sse", "sliding", "full"]}
CE = {"name": "long", "loss": "ce", "tokens": 65536, "seq_len": 512, "lr": 0.001}


def controls(num_layers=6, positions=32768, **changes):
    recipe = recipe_from_dict(small(**changes))
    return recipe, control_recipes(recipe, num_layers, positions)


def layers_of(recipe):
    return resolve(recipe, 6)[0]


def test_every_control_has_the_same_text_and_budget():
    recipe, found = controls(controls=["gla", "window"])
    assert tuple(found) == CONTROLS == ("teacher_tuned", "window", "window_trained", "gla", "pure_sse")
    assert set(MEANING) == set(CONTROLS)
    assert "teacher_tuned" not in TO_BEAT
    for name in ("window_trained", "gla", "pure_sse"):
        control = found[name]
        assert (control.stages, control.data, control.train) == (recipe.stages, recipe.data, recipe.train)
        assert control.export.dir == f"out/x.controls/{name}"
        assert control.controls == []
        assert recipe_from_dict(control.to_dict()) == control  # a recipe that anyone could have written


def test_layers_of_each_control():
    _, found = controls(layers=MIXED, mixers={"sliding": {"window": 64, "sinks": 2}})
    assert layers_of(found["window"]) == ["sliding", "sliding", "full"] * 2
    assert layers_of(found["window_trained"]) == layers_of(found["window"])
    assert resolve(found["window"], 6)[1] == {"sliding": SlidingMixer(window=64, sinks=2)}
    assert layers_of(found["gla"]) == ["sse-gla", "sliding", "full"] * 2
    assert layers_of(found["pure_sse"]) == ["sse"] * 6
    assert found["window"].stages == []
    assert [found[name].calibrate.enabled for name in ("window", "window_trained", "gla")] == [False, False, True]


def test_a_teacher_of_a_stage_gives_the_model_itself_something_to_learn():
    taught = {**CE, "name": "taught", "loss": "kl", "teacher": "someone/larger"}
    own = {**CE, "name": "own", "loss": "kl"}
    _, found = controls(stages=[own, taught])
    assert [stage.name for stage in found["teacher_tuned"].stages] == ["taught"]


@pytest.mark.parametrize(("lengths", "possible"), [([512], True), ([768], True), ([512, 1024], False), ([], True)])
def test_an_untrained_control_knows_the_teacher_s_positions_alone(lengths, possible):
    longer = {**CE, "name": "longer", "seq_len": 1024, "rope": {"rope_theta": 1e6}}
    _, found = controls(positions=768, stages=[CE, longer], eval={"lengths": lengths})
    assert isinstance(found["window_trained"], Recipe)
    assert isinstance(found["window"], Recipe) == possible
    if not possible:
        assert found["window"].startswith("untrained it has the teacher's positions")


def test_a_recipe_without_window_gets_the_usual_one():
    _, found = controls()
    assert resolve(found["window"], 6)[1] == {"sliding": SlidingMixer(window=128, sinks=4)}


def test_gla_keeps_what_it_shares_with_sse():
    settings = {"num_partitions": 8, "state_heads": "query", "advanced": {"rope": "keep"}}
    _, found = controls(mixers={"sse": settings})
    (gla,) = resolve(found["gla"], 6)[1].values()
    assert gla == dc.replace(BUILT_IN["gla"], k_feature_map="l2", state_heads="query", rope="keep")


def test_several_sse_mixers_stay_apart():
    mixers = {"sse": {"state_heads": "kv"}, "wide": {"kind": "paper", "num_partitions": 16}}
    _, found = controls(layers={"pattern": ["sse", "wide", "full"]}, mixers=mixers)
    assert layers_of(found["gla"]) == ["sse-gla", "wide-gla", "full"] * 2
    used = resolve(found["gla"], 6)[1]
    assert [used[name].k_feature_map for name in ("sse-gla", "wide-gla")] == ["l2", "softmax"]
    assert layers_of(found["pure_sse"]) == ["sse", "wide", "sse"] * 2
    assert isinstance(resolve(found["pure_sse"], 6)[1]["wide"], SSEMixer)


def test_a_window_beside_sse_is_in_every_control():
    mixers = {"sse+sliding": {"window": 32, "sinks": 1}}
    _, found = controls(layers={"pattern": ["sse+sliding", "sse", "full"]}, mixers=mixers)
    assert layers_of(found["window"]) == ["sse+sliding-window", "sliding", "full"] * 2
    assert resolve(found["window"], 6)[1] == {
        "sse+sliding-window": SlidingMixer(window=32, sinks=1),
        "sliding": SlidingMixer(),
    }
    gla = resolve(found["gla"], 6)[1]["sse+sliding-gla"]
    assert gla == SSESlidingMixer(**FIXED["gla"], window=32, sinks=1, k_feature_map="l2", state_heads="query")
    assert layers_of(found["pure_sse"]) == ["sse+sliding", "sse", "sse+sliding"] * 2


def test_the_tuned_teacher_runs_the_stages_that_teach_it_something():
    recipe, found = controls(stages=[*small()["stages"], CE, {**CE, "name": "last", "train": "mixers"}])
    tuned = found["teacher_tuned"]
    assert layers_of(tuned) == ["full"] * 6
    assert [(stage.name, stage.train) for stage in tuned.stages] == [("long", "all"), ("last", "all")]
    assert not tuned.calibrate.enabled
    assert recipe.stages[-1].train == "mixers"


@pytest.mark.parametrize(
    ("share", "answers", "teaches"), [(0.5, "row", True), (0.5, "teacher", False), (0, "row", False)]
)
def test_answers_of_the_row_teach_the_teacher_in_stages_of_kl(share, answers, teaches):
    data = {**small()["data"], "needles": {"share": share, "answers": answers}}
    tuned = controls(data=data)[1]["teacher_tuned"]
    assert isinstance(tuned, str) != teaches
    assert not teaches or [stage.loss for stage in tuned.stages] == ["kl"]


def test_what_is_said_of_a_teacher_without_training_gives_it_some():
    align, kl = small()["stages"]
    stages = [align, kl, {**kl, "name": "second"}]
    said = controls(stages=stages)[1]["teacher_tuned"]
    named = [int(i) for i in re.findall(r"--set stages\.(\d)\.loss=ce", said)]
    assert said.startswith("no stage of loss ce, and KL to itself gives the teacher no gradient")
    again = [{**stage, "loss": "ce"} if i in named else stage for i, stage in enumerate(stages)]
    assert [stage.name for stage in controls(stages=again)[1]["teacher_tuned"].stages] == [kl["name"], "second"]


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({}, {"teacher_tuned": "no stage of loss ce"}),
        ({"stages": [], "data": {}}, {"teacher_tuned": "no stage", "window_trained": "no training stages"}),
        ({"layers": {"pattern": ["sse"]}}, {"teacher_tuned": "no stage", "pure_sse": "nothing to replace"}),
        (
            {"layers": {"pattern": ["gla", "full"]}, "mixers": {}},
            {"teacher_tuned": "no stage", "gla": "nothing to replace", "pure_sse": "nothing to replace"},
        ),
        (
            {"layers": {"pattern": ["sliding", "full"]}, "mixers": {}},
            dict.fromkeys(CONTROLS[1:], "nothing to replace") | {"teacher_tuned": "no stage"},
        ),
    ],
)
def test_controls_that_cannot_be_have_a_reason(changes, absent):
    _, found = controls(**changes)
    reasons = {name: control for name, control in found.items() if isinstance(control, str)}
    assert reasons.keys() == absent.keys()
    assert all(text in reasons[name] for name, text in absent.items())


@pytest.mark.parametrize("name", preset_names())
def test_every_packaged_recipe_has_controls(name):
    recipe = draft_recipe(load_recipe(name), 40)
    for control in control_recipes(recipe, 40, 32768).values():
        if not isinstance(control, str) and control.layers.pattern != ["full"]:
            assert recipe_from_dict(control.to_dict()) == control
