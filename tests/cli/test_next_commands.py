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
    (folder / "my text.txt").write_text("He came to the harbor.")
    report = api.convert(recipe_file(folder / "r.yaml", folder / "my model"), folder / "my hybrid")
    assert typed(report.lines()[-1]) == ["sse-convert", "verify", str(folder / "my hybrid")]
    return folder


def test_recipes(place):
    for report in (
        api.recipes_copy("qwen3-0.6b", place / "copied.yaml"),
        api.recipes_new(place / "my model", place / "new.yaml", text=[place]),
    ):
        assert typed(report.lines()[-1])[-1] == str(report.to_dict()["path"])
    assert typed((place / "new.yaml").read_text())[-1] == str(place / "new.yaml")


def test_export(place):
    for chats, command in ((False, "generate"), (True, "chat")):
        of_files = {"shards": {}, "files": [], "evaluated": False, "lent": 0, "destroyed": False}
        report = ExportReport(out=place / "done", parameters=1, dtype="bfloat16", chats=chats, **of_files)
        words = typed(report.lines()[-1].partition(", or ")[0])
        assert words[:3] == ["sse-convert", command, str(place / "done")]


def test_errors(place):
    error = quantised(open_checkpoint(place / "my model"), "fp8")
    assert typed(error.fix)[2] == str(place / "my model")
    for name, fix in {"my hybrid": ["sse-convert", "verify"], "my model": ["download"]}.items():
        empty = place / f"{name} without weights"
        empty.mkdir()
        (empty / "config.json").write_text((place / name / "config.json").read_text())
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(empty)
        words = shlex.split(caught.value.fix)
        assert words[: len(fix)] == fix
        assert fix == ["download"] or words[-1] == str(empty)
