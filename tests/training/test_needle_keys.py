"""A stage's own number of needles: its rows, and what they decide, are those of a recipe that has that many for all."""

from itertools import islice

import numpy as np
import pytest

from sse_convert.errors import TrainingError
from sse_convert.training.inputs import stage_reader

LENGTH = 448


@pytest.fixture
def planted(make, text_folder):
    """A recipe whose rows all carry as many needles as `keys`, or as the stage says."""

    def build(keys, **own):
        needles = {"share": 1.0, "kinds": ["number"], "keys": keys}
        stage = {"seq_len": LENGTH, "tokens": 2 * LENGTH, "batch_tokens": 2 * LENGTH, **own}
        return make(("distill", stage), data={"train": [{"path": str(text_folder)}], "needles": needles})

    return build


def rows(recipe, checkpoint):
    return [row.input_ids for row in islice(stage_reader(recipe, recipe.stages[0], checkpoint).rows(), 4)]


def test_rows_have_as_many_needles_as_the_stage_says(planted, converted, tokenizer):
    own, all_two, all_one = (rows(r, converted) for r in (planted([1], needle_keys=[2]), planted([2]), planted([1])))
    count = [tokenizer.decode(row).count("One of the special magic numbers for") for row in own]
    assert count == [2, 2, 2, 2]
    assert all(np.array_equal(a, b) for a, b in zip(own, all_two, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(own, all_one, strict=True))


@pytest.mark.parametrize("offline", [False, True])
def test_a_folder_with_other_needles_is_refused(planted, train, tmp_path, offline):
    """A stage's result, and the teacher's predictions on disk."""
    cache = {"offline": {"top_k": 8, "dir": str(tmp_path / "cache")}} if offline else {}
    train("distill", "first", recipe=planted([1], needle_keys=[2], **cache))
    train("distill", "second" if offline else "first", recipe=planted([2], **cache))
    with pytest.raises(TrainingError, match=r"data\.needles\.keys was \[2\], is \[1\]"):
        train("distill", "third" if offline else "first", recipe=planted([1], **cache))
