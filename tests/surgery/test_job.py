"""A job opens its model once, when it is asked for it, whatever recipes it gets."""

import dataclasses as dc

import pytest

from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import CheckpointError
from sse_convert.recipe import recipe_from_dict
from sse_convert.surgery.job import Job
from tests.modeling.tiny import tiny_source


@pytest.fixture
def recipe(tmp_path):
    tiny_source("llama").save_pretrained(tmp_path / "teacher")
    data = {"recipe_version": 1, "model": str(tmp_path / "teacher"), "layers": {"pattern": ["sse"]}}
    return recipe_from_dict({**data, "export": {"dir": str(tmp_path / "out")}})


def test_a_model_is_opened_once_and_when_it_is_asked_for(recipe):
    opened = []
    job = Job.of(recipe, lambda model, revision: opened.append((model, revision)) or open_teacher(model, revision))
    other = dc.replace(job, recipe=dc.replace(recipe, layers=dc.replace(recipe.layers, keep=[0])))
    assert job.sampler.fingerprint() == job.identity
    assert opened == []
    assert other.teacher() is job.teacher()
    assert other.geometry() is job.geometry()
    assert other.files() is job.files() is other.sampler.files()
    assert opened == [(recipe.model, None)]


def test_a_model_that_is_not_there_is_missed_when_it_is_asked_for(recipe):
    job = Job.of(dc.replace(recipe, model=f"{recipe.model}-gone"))
    for ask in (job.teacher, job.files, job.geometry):
        with pytest.raises(CheckpointError, match="does not exist"):
            ask()
