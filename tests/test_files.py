import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from sse_convert import api
from sse_convert.errors import OutputError
from sse_convert.files import check_result, digest, held, replacing, sync, write_json

WRITERS = [
    lambda path: api.evaluate("qwen3-0.6b", "a", out=path),
]
RECIPE_WRITERS = [
    lambda path: api.recipes_new("a", path),
    lambda path: api.recipes_copy("qwen3-0.6b", path),
]


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    write_json(path, {"old": 1})
    with contextlib.suppress(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert json.loads(path.read_text()) == {"old": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["report.json"]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, sync, seen = tmp_path / "deep" / "report.json", os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append(path.exists()), sync(handle)))
    write_json(path, {"new": float("nan")})
    assert seen == [False, True]  # the file without its name, then the folder with it
    assert json.loads(path.read_text()) == {"new": None}


def test_a_full_disk_is_an_output_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"report\.json cannot be written: No space left on device"):
        write_json(tmp_path / "report.json", {})
    assert not list(tmp_path.iterdir())


def test_the_digest_is_that_of_the_content(tmp_path):
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    assert digest(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_all_that_lies_in_a_folder_is_synced_before_the_folder(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").touch()
    seen = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(os.readlink(f"/proc/self/fd/{handle}")))
    sync(tmp_path)
    assert seen == [str(tmp_path / "deep" / "file"), str(tmp_path / "deep"), str(tmp_path)]


def test_what_a_killed_process_left_is_removed_but_not_what_a_living_one_writes(tmp_path):
    dead, alive = (tmp_path / f".report.json.{i}.tmp" for i in "12")
    dead.touch()
    alive.touch()
    with held(alive) as ours:
        assert ours
        write_json(tmp_path / "report.json", {})
    assert sorted(tmp_path.iterdir()) == [alive, tmp_path / "report.json"]


@pytest.mark.parametrize("name", ["recipe.yaml", "text.txt", "page.JSON", "page.json"])
def test_a_result_takes_no_file_of_another_kind(tmp_path, name):
    path = tmp_path / name
    check_result(path)
    path.write_text("mine")
    if name.lower().endswith(".json"):
        check_result(path)
        return
    with pytest.raises(OutputError, match=rf"{name} exists and is no \.json file"):
        check_result(path)
    for write in WRITERS:
        with pytest.raises(OutputError, match="exists and is no"):
            write(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("write", [*WRITERS, *RECIPE_WRITERS])
def test_where_a_result_goes_is_tried_before_anything_else(tmp_path, monkeypatch, write, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(OutputError, match=f"result cannot be written: {os.strerror(number)}"):
        write(tmp_path / "result")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", WRITERS)
def test_a_result_in_a_place_that_cannot_be_is_refused_first(tmp_path, write):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot be written: (Not a directory|File exists)"):
        write(tmp_path / "file" / "result")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"cannot be written: Is a directory|exists and is no"):
        write(tmp_path / "folder")
