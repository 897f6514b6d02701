"""Commands that are printed to be typed can be typed, whatever the folder is called."""

import shlex

import pytest

from sse_convert import api
from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.checkpoints.teacher import quantised
from sse_convert.errors import CheckpointError
from sse_convert.export.export import ExportReport
from sse_convert.modeling.auto import load_pretrained
from tests.surgery.models import recipe_file, save_source


def typed(text):
    """The words of the command in a text."""
    line = next(line for line in text.splitlines() if "sse-convert " in line)
    return shlex.split(line[line.index("sse-convert ") :])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a space in its name, and a model in it."""
    folder = tmp_path_factory.mktemp("has") / "a space"
    save_source(folder / "my model")
    return folder


def test_recipes(place):
    for report in (
        api.recipes_copy("qwen3-0.6b", place / "copied.yaml"),
        api.recipes_new(place / "my model", place / "new.yaml", text=[place]),
    ):
        assert typed(report.lines()[-1])[-1] == str(report.to_dict()["path"])
    assert typed((place / "new.yaml").read_text())[-1] == str(place / "new.yaml")


def test_conversion_and_export(place):
    report = api.convert(recipe_file(place / "r.yaml", place / "my model"), place / "my hybrid")
    assert typed(report.lines()[-1]) == ["sse-convert", "verify", str(place / "my hybrid")]
    report = ExportReport(
        out=place / "done", parameters=1, dtype="bfloat16", shards={}, files=[], evaluated=False, destroyed=False
    )
    assert str(place / "done") in typed(report.lines()[-1])


def test_errors(place):
    error = quantised(open_checkpoint(place / "my model"), "fp8")
    assert typed(error.fix)[2] == str(place / "my model")
    (place / "empty").mkdir()
    (place / "empty" / "config.json").write_text((place / "my model" / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(place / "empty")
    assert typed(caught.value.fix)[-1] == str(place / "empty")
