"""Code that a teacher, a folder or a task file carries is neither run nor copied, unless the user says so."""

import ast
import json
import os
import sys
from contextvars import copy_context
from pathlib import Path

import pytest

import sse_convert
from sse_convert.checkpoints.auxiliary_files import auxiliary_files
from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DataError
from sse_convert.evaluation.harness import _refuse_functions
from sse_convert.export.export import export_checkpoint
from sse_convert.export.push import check_folder
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.trust import OPTION, trust_code, trusts_code
from tests.surgery.models import recipe, save_source

EVIL = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""
CARRIED = ("tokenizer_evil.py", "tokenizer.pkl", "evil.py", "vocab.pkl", "id_rsa", "tokenizer_secret.txt", ".env")


@pytest.fixture
def marker(tmp_path):
    """A file that exists once code of the teacher has run."""
    return tmp_path / "ran"


@pytest.fixture
def teacher(tmp_path, marker):
    """A teacher with code beside its weights, and configuration that names it."""
    folder = save_source(tmp_path / "teacher")
    for name in CARRIED:
        (folder / name).write_text(EVIL.format(marker=str(marker)))
    for name, key, value in (
        ("tokenizer_config.json", "auto_map", {"AutoTokenizer": [None, "tokenizer_evil.EvilTokenizer"]}),
        ("tokenizer_config.json", "tokenizer_class", "EvilTokenizer"),
        ("config.json", "custom_pipelines", {"evil": {"impl": "evil.Pipeline"}}),
        ("config.json", "auto_map", {"AutoModelForCausalLM": "evil.Model"}),
    ):
        edit(folder / name, key, value)
    return folder


def edit(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


@pytest.fixture
def exported(teacher, tmp_path):
    """The teacher, converted and exported."""
    made = recipe(teacher, layers={"pattern": ["sliding", "full"]}, mixers={})
    convert_checkpoint(Job.of(made), tmp_path / "hybrid")
    export_checkpoint(Job.of(made), tmp_path / "hybrid", tmp_path / "out")
    return tmp_path / "out"


def test_every_auto_class_is_told_whether_to_run_code() -> None:
    """`from_pretrained` of a class that transformers picks asks the user, on a terminal, unless it is told."""
    untold = []
    for path in Path(sse_convert.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            of_auto = isinstance(node.func.value, ast.Name) and node.func.value.id.startswith("Auto")
            if of_auto and node.func.attr == "from_pretrained":
                told = {word.arg: ast.unparse(word.value) for word in node.keywords}.get("trust_remote_code")
                untold += [] if told == "trusts_code()" else [f"{path.name}:{node.lineno}"]
    assert untold == []


def test_the_code_of_a_tokenizer_runs_only_when_trusted(teacher, marker, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    assert type(load_tokenizer(teacher)).__name__ != "EvilTokenizer"
    assert not marker.exists()
    monkeypatch.setattr(sys, "path", [*sys.path])
    copy_context().run(lambda: (trust_code(), load_tokenizer(teacher)))
    assert marker.exists()
    assert not trusts_code()


def test_nothing_that_runs_travels(exported, marker):
    names = {path.name for path in exported.rglob("*")}
    assert names.isdisjoint(CARRIED)
    assert "LICENSE" in names
    assert "tokenizer.json" in names
    assert "chat_template.jinja" in names
    for name in ("config.json", "tokenizer_config.json"):
        assert "evil" not in (exported / name).read_text()
    assert not marker.exists()


def test_links_that_leave_a_folder_are_not_followed(tmp_path):
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("{}")
    (folder / "tokenizer.json").symlink_to(secret)
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").symlink_to(folder / "vocab.json")
    assert auxiliary_files(folder) == ["merges.txt", "vocab.json"]


def test_links_of_a_hub_cache_are_followed(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "ab").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(os.path.relpath(blobs / "ab", snapshot))
    assert auxiliary_files(snapshot) == ["tokenizer.json"]
    shared = tmp_path / "blobs" / "cd" / "cdef"
    shared.parent.mkdir(parents=True)
    shared.write_text("{}")
    (blobs / "12").symlink_to(shared)
    (snapshot / "vocab.json").symlink_to(os.path.relpath(blobs / "12", snapshot))
    (snapshot / "merges.txt").symlink_to(shared)
    assert auxiliary_files(snapshot) == ["tokenizer.json", "vocab.json"]


def test_push_sends_what_export_wrote_and_nothing_else(exported, tmp_path):
    sent = check_folder(exported)
    assert {"config.json", "README.md", "sse_code/modeling_sse.py", "tokenizer.json"} <= sent.keys()
    (tmp_path / "secret").write_text("token")
    for name in ("notes.txt", ".netrc", "id_rsa"):
        (exported / name).write_text("token")
    (exported / "LICENSE-2").symlink_to(tmp_path / "secret")
    assert check_folder(exported) == sent


def test_tampered_code_is_not_pushed(exported):
    path = exported / "sse_code" / "modeling_sse.py"
    path.write_text(path.read_text() + "\nimport os\n")
    with pytest.raises(CheckpointError, match="modeling_sse"):
        check_folder(exported)


def test_task_files_with_functions_need_the_option(tmp_path):
    (tmp_path / "own.yaml").write_text("task: own\ndoc_to_text: !function utils.text\n")
    with pytest.raises(DataError, match="--trust-remote-code"):
        _refuse_functions(tmp_path)


def test_the_option_stands_before_the_command(monkeypatch, capsys):
    said = []
    monkeypatch.setattr("sse_convert.cli.app.trust_code", lambda: said.append(True))
    assert run_app(app, ["doctor", "--json"]) == 0
    assert said == []
    assert run_app(app, [OPTION, "doctor", "--json"]) == 0
    assert said == [True]
    capsys.readouterr()
