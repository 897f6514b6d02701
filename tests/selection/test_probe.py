"""The rows that layers are judged by."""

import dataclasses as dc
import random
import re

import numpy as np
import pytest
import torch

from sse_convert.data.rows import RowReader
from sse_convert.data.teacher_samples import TeacherSamples
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Source
from sse_convert.selection.probe import make_probe
from sse_convert.selection.recall_probes import NAMES, copy_rows
from sse_convert.surgery.job import Job
from tests.selection.conftest import TEXT


def test_text_and_needles(probe, tokenizer):
    assert probe.text.ids.shape == (2, 256)
    assert bool(probe.text.asked.all())
    needle = probe.recall["needle"]
    assert needle.ids.shape == (6, 256)
    for ids, asked in zip(needle.ids, needle.asked, strict=True):
        answer = tokenizer.decode(ids[1:][asked])
        before = tokenizer.decode(ids[: -int(asked.sum())])
        assert f"is:{answer}" in before  # the planted sentence
        assert before.endswith("is:")
        assert before.count("One of the special magic numbers") == 4


@pytest.mark.parametrize("kind", ["ruler", "table", "numbered", "facts"])
def test_answers_of_every_kind_stand_in_the_row(probe, tokenizer, kind):
    rows = probe.recall[kind]
    assert rows.ids.shape == (6, 256)
    for ids, asked in zip(rows.ids, rows.asked, strict=True):
        (value,) = re.findall(r"\d+", tokenizer.decode(ids[1:][asked]))[:1]
        assert value in tokenizer.decode(ids[: -int(asked.sum())])


def test_kinds_are_tried_in_order(probe):
    assert list(probe.recall) == list(NAMES)


def test_copies_come_again():
    draw = random.Random(0)
    haystack = [draw.randrange(500) for _ in range(3000)]
    rows = copy_rows(random.Random(1), haystack, 5, 200)
    size = int(rows.asked[0].sum()) + 1
    assert size == 32
    for ids, asked in zip(rows.ids.tolist(), rows.asked, strict=True):
        assert asked.nonzero()[:, 0].tolist() == list(range(200 - size, 199))
        passage = ids[-size:]
        start = next(i for i in range(200 - size) if ids[i : i + size] == passage)
        assert start + size <= 100
        assert len(set(passage)) == size
    assert torch.equal(rows.ids, copy_rows(random.Random(1), haystack, 5, 200).ids)


def test_one_token_cannot_be_copied():
    with pytest.raises(DataError, match="all tokens of the text are the same"):
        copy_rows(random.Random(1), [7] * 300, 1, 200)


def test_too_little_text(recipe):
    with pytest.raises(DataError, match="rows of 256 tokens"):
        make_probe(Job.of(recipe), [Source(path=str(TEXT))], tokens=256 * 40, length=256, samples=1)


def test_training_text_is_sampled_once(recipe, tokenizer, tmp_path, monkeypatch):
    """What layers are chosen by is what training reads, so that the teacher samples it for both."""
    monkeypatch.setenv("SSE_CONVERT_CACHE", str(tmp_path))
    sampled = []
    monkeypatch.setattr(TeacherSamples, "_sample", lambda own: sampled.append(1) or [np.arange(100, 190)] * own._rows)
    source = Source(kind="teacher", rows=40, length=90)
    recipe = dc.replace(recipe, data=dc.replace(recipe.data, train=[source], valid=[source]))
    job = Job.of(recipe)
    make_probe(job, [source], tokens=256, length=256, samples=1)
    next(RowReader([source], tokenizer, 128, recipe.data.seed, teacher=job.sampler).rows())
    assert len(sampled) == 1
