from pathlib import Path

import pytest

from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.recipe.loader import recipe_or_model
from sse_convert.recipe.schema import Source
from sse_convert.selection.probe import make_probe
from sse_convert.surgery.job import Job

ROOT = Path(__file__).parents[2]
TEACHER = ROOT / "demo" / "teacher"
TEXT = ROOT / "LICENSE"
RETRIEVES = 4
"""the layer of the demo's teacher that retrieves, by demo/knock_out.py"""


@pytest.fixture(scope="session")
def recipe():
    return recipe_or_model(TEACHER, ["mixers.sliding.window=32"])


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(TEACHER)


@pytest.fixture(scope="session")
def probe(recipe):
    return make_probe(Job.of(recipe), [Source(path=str(TEXT))], tokens=512, length=256, samples=6)
