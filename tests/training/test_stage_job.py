"""Stages and evaluation beside the checkpoint they are given: structure is refused, training settings are taken."""

import json

import pytest

from sse_convert.errors import RecipeError, TrainingError
from sse_convert.evaluation import evaluate as evaluation
from sse_convert.recipe import recipe_from_dict
from sse_convert.surgery.job import Job
from sse_convert.training import attempt, stage_job
from tests.training.conftest import MIXERS, losses
from tests.training.running import run_alone

SHORT = {"tokens": 128}
WINDOW = {"qk_rank": 4, "window": 8, "sinks": 1}
BESIDE = {"layers": {"pattern": ["sse+sliding", "sse+sliding", "full"]}, "calibrate": {"seq_len": 32}}


def sse(**changes):
    return {**MIXERS, "sse": {**MIXERS["sse"], **changes}}


def stored(folder, name="sse"):
    return json.loads((folder / "config.json").read_text())["sse"]["mixers"][name]


@pytest.mark.parametrize("name", ["align", "distill", "uptrain"])
def test_a_stage_refuses_other_layers_before_it_loads_anything(make, converted, tmp_path, monkeypatch, name):
    for module, function in ((attempt, "load_student"), (attempt, "load_teacher"), (stage_job, "tokenizer_of")):
        monkeypatch.setattr(module, function, lambda *args, **kwargs: pytest.fail("must not load"))
    for changes, message in (
        ({"mixers": sse(num_partitions=8)}, r"mixers\.sse\.num_partitions: 8 in the recipe, 4 in the checkpoint"),
        ({"layers": {"pattern": ["sse", "sse", "full"]}}, "layer 1: sse in the recipe, sliding in the checkpoint"),
    ):
        recipe = make((name, SHORT), **changes)
        with pytest.raises(RecipeError, match=message):
            run_alone(recipe, recipe.stages[0], converted, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_eval_refuses_other_layers_before_it_measures(make, converted, monkeypatch):
    monkeypatch.setattr(evaluation, "Evaluator", lambda *args: pytest.fail("must not measure"))
    with pytest.raises(
        RecipeError, match=r"fix: go on with the checkpoint's settings: --set mixers\.sliding\.window=8"
    ):
        evaluation.evaluate_checkpoint(Job.of(make(mixers={**MIXERS, "sliding": {"window": 4, "sinks": 1}})), converted)


def test_training_settings_are_those_of_the_recipe(train, make, tmp_path):
    train("distill", "plain", recipe=make(("distill", SHORT)))
    heavy = make(("distill", SHORT), mixers=sse(balance_coef=0.1))
    folder, _ = train("distill", "heavy", recipe=heavy)
    assert stored(tmp_path / "plain")["balance_coef"] == 0.01
    assert stored(folder)["balance_coef"] == 0.1
    balance = [losses(tmp_path / name, "balance")[0] for name in ("plain", "heavy")]
    assert balance[1] == pytest.approx(10 * balance[0])
    assert train("distill", "heavy", recipe=heavy)[1].already_done
    with pytest.raises(TrainingError, match=r"mixers\.sse\.advanced\.balance_coef was 0\.1, is 'unset'"):
        train("distill", "heavy", recipe=make(("distill", SHORT)))


def test_a_stage_may_be_renamed(make, train, converted):
    first, _ = train("uptrain", recipe=make(("uptrain", {**SHORT, "name": "one"})))
    again = recipe_from_dict(make(("uptrain", {**SHORT, "name": "two"})).to_dict())
    assert run_alone(again, again.stages[0], converted, first).already_done


@pytest.fixture
def planted(make, text_folder):
    """A recipe whose rows of 448 tokens all carry as many needles as `keys` says."""

    def build(keys):
        needles = {"share": 1.0, "kinds": ["uuid"], "forms": {"numbered": 1.0}, "keys": keys}
        data = {"train": [{"path": str(text_folder)}], "needles": needles}
        return make(("distill", {"seq_len": 448, "tokens": 896, "batch_tokens": 896}), data=data)

    return build


def test_a_folder_with_other_needles_is_refused(planted, train):
    train("distill", "first", recipe=planted([2]))
    with pytest.raises(TrainingError, match=r"data\.needles\.keys was \[2\], is \[1\]"):
        train("distill", "first", recipe=planted([1]))


@pytest.mark.parametrize(
    ("keys", "said"), [([1], ""), ([1, 16], "with 16 needles (numbered, uuid) has room for 4 of them")]
)
def test_needles_that_do_not_fit_are_told(planted, train, capsys, keys, said):
    train("distill", recipe=planted(keys))
    told = [line for line in capsys.readouterr().err.splitlines() if "needles" in line]
    assert told == ([f"distill: a row of 448 tokens {said}"] if said else [])
