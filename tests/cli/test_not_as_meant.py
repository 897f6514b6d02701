"""Text that is none, and values of another type: refused by name, from a shell and from Python."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from sse_convert import api
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DataError, UsageError
from tests.surgery.models import recipe_data, recipe_file, save_source


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_source(tmp_path_factory.mktemp("teacher") / "tiny")


@pytest.fixture
def fails(capsys):
    """Run a command that must fail; its code and what is wrong."""

    def run(*arguments):
        code = run_app(app, [*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)["error"]["what"]

    return run


def test_an_argument_that_is_no_text(fails, teacher):
    text = os.fsdecode(b"w3 \xff w4")
    assert fails("generate", teacher, text) == (2, r"argument b'w3 \xff w4' is no utf-8 text")


def test_without_utf8_the_way_to_it_is_named(teacher):
    found = subprocess.run(
        [sys.executable, "-m", "sse_convert", "generate", str(teacher), "ä"],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2
    assert "fix: set LC_ALL=C.UTF-8" in found.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text(fails, teacher, monkeypatch, command, errors):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), encoding="utf-8", errors=errors))
    arguments = (command, teacher, "-") if command == "generate" else (command, teacher)
    assert fails(*arguments) == (7, "standard input is no UTF-8 text")


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% import 'x' as y %}", "{% for m in %}"])
def test_a_chat_template_that_fails(fails, teacher, tmp_path, monkeypatch, template):
    folder = shutil.copytree(teacher, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w3\n"))
    code, what = fails("chat", folder)
    assert code == 7
    assert what.startswith("this chat: the chat template refuses the conversation: ")


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[]", "3", '"x"', "{"])
def test_a_file_of_another_type_is_found_before_converting(teacher, tmp_path, name, text):
    folder = shutil.copytree(teacher, tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name} (is not a JSON object|cannot be read)"):
        api.convert(recipe_file(tmp_path / "r.yaml", folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_python_hands_over_is_checked(teacher, tmp_path):
    for function, arguments, told in (
        (api.convert, (recipe_data(teacher), tmp_path / "out"), "recipe is dict .*\n.*\n.*recipe_from_dict"),
        (api.plan, (3,), "recipe is int 3\nexpected: Recipe or Path or str"),
        (api.inspect, (None,), "checkpoint is NoneType None"),
        (api.generate, (teacher, b"w3"), "prompt is bytes b'w3'"),
    ):
        with pytest.raises(UsageError, match=told):
            function(*arguments)
    with pytest.raises(UsageError, match=r"overrides is str 'export\.dir=x'"):
        api.plan(recipe_file(tmp_path / "r.yaml", teacher), overrides="export.dir=x")
    with pytest.raises(TypeError, match="missing a required argument"):
        api.plan()


def test_errors_of_text_are_errors_of_data():
    from sse_convert.files import text_from

    with pytest.raises(DataError, match="it is no UTF-8 text"):
        text_from(lambda: "\udcff", "it")
