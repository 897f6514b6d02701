"""A stage's own number of needles: its rows, and what they decide, are those of a recipe that has that many for all."""

import re
from itertools import islice

import numpy as np
import pytest

from sse_convert.errors import RecipeError, TrainingError
from sse_convert.pipeline import run_recipe
from sse_convert.recipe import recipe_from_dict
from sse_convert.training.stage_inputs import stage_reader

LENGTH = 448
SIZE = {"seq_len": LENGTH, "tokens": 2 * LENGTH, "batch_tokens": 2 * LENGTH}


@pytest.fixture
def planted(make, text_folder):
    """A recipe whose rows all carry as many needles as `keys`, or as the stage says."""

    def build(keys, **own):
        needles = {"share": 1.0, "kinds": ["uuid"], "forms": {"numbered": 1.0}, "keys": keys}
        data = {"train": [{"path": str(text_folder)}], "needles": needles}
        calibrate = {"rows": 2, "seq_len": LENGTH}
        return make(
            ("distill", {**SIZE, **own}), ("uptrain", {**SIZE, "needle_keys": [3]}), data=data, calibrate=calibrate
        )

    return build


def rows(recipe, checkpoint, stage=0):
    return [row.input_ids for row in islice(stage_reader(recipe, recipe.stages[stage], checkpoint).rows(), 4)]


def needles_in(row, tokenizer):
    return len(set(re.findall(r"[0-9a-f]{8}-[-0-9a-f]{27}", tokenizer.decode(row))))


def test_rows_have_as_many_needles_as_the_stage_says(planted, converted, tokenizer):
    own, all_two, all_one = (rows(r, converted) for r in (planted([1], needle_keys=[2]), planted([2]), planted([1])))
    assert [needles_in(row, tokenizer) for row in own] == [2, 2, 2, 2]
    assert [needles_in(row, tokenizer) for row in all_one] == [1, 1, 1, 1]
    assert [needles_in(row, tokenizer) for row in rows(planted([1]), converted, stage=1)] == [3, 3, 3, 3]
    assert all(np.array_equal(a, b) for a, b in zip(own, all_two, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(own, all_one, strict=True))


def test_a_folder_with_other_needles_is_refused(planted, train):
    train("distill", "first", recipe=planted([1], needle_keys=[2]))
    train("distill", "first", recipe=planted([2]))
    with pytest.raises(TrainingError, match=r"data\.needles\.keys was \[2\], is \[1\]"):
        train("distill", "first", recipe=planted([1]))


def test_calibration_with_other_needles_is_refused(planted):
    """It reads `data.needles`, which no stage of this recipe does."""
    run_recipe(planted([1], needle_keys=[2]))
    with pytest.raises(TrainingError, match=r"01-calibrate(.|\n)*data\.needles\.keys was \[1\], is \[3\]"):
        run_recipe(planted([3], needle_keys=[2]))


def test_a_stage_that_plants_nothing_is_refused_by_its_number(planted):
    settings = planted([1]).to_dict()
    settings["data"]["needles"]["share"] = 0.0
    with pytest.raises(RecipeError, match=r"stages\.1\.needle_keys: no row is planted"):
        recipe_from_dict(settings)


@pytest.mark.parametrize(
    ("keys", "said"), [([1], ""), ([1, 16], "with 16 needles (numbered, uuid) has room for 4 of them")]
)
def test_needles_that_do_not_fit_are_told(planted, train, capsys, keys, said):
    train("distill", recipe=planted(keys))
    told = [line for line in capsys.readouterr().err.splitlines() if "needles" in line]
    assert told == ([f"distill: a row of {LENGTH} tokens {said}"] if said else [])
