"""A tiny run, made once: an SSE, a sliding and a full layer, two training stages, an evaluation with needles."""

import json
import os
import shutil

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from sse_convert.data.teacher_samples import CACHE_VARIABLE
from sse_convert.pipeline import run_recipe
from tests.training.conftest import make_llama, make_text, make_tokenizer, recipe_for

STAGE = {"tokens": 256, "batch_tokens": 128}
EVAL = {
    "lengths": [64],
    "tokens": 256,
    "needle": {"lengths": [192, 256], "samples": 5, "keys": [1]},
    "throughput": [32],
}


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The folder that holds `teacher`, `text.txt`, `out` and `out.stages`; not to be changed."""
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("pages")
    make_llama(tie=True).save_pretrained(place / "teacher")
    make_tokenizer().save_pretrained(place / "teacher")
    (place / "text.txt").write_text(make_text(1500))
    text = [{"path": str(place / "text.txt")}]
    recipe = recipe_for(
        place / "teacher",
        place / "text.txt",
        place / "out",
        stages=(("align", STAGE), ("distill", STAGE)),
        calibrate={"rows": 2, "seq_len": 32},
        data={"train": text, "valid": text},
        eval=EVAL,
    )
    os.environ.setdefault(CACHE_VARIABLE, str(place / "cache"))
    run_recipe(recipe)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return place


@pytest.fixture
def place(made, tmp_path):
    """A copy of it to change."""
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def edit():
    """Change a JSON file in place: `edit(path, change)` with a function of its content."""

    def change(path, function):
        data = json.loads(path.read_text())
        function(data)
        path.write_text(json.dumps(data))

    return change
