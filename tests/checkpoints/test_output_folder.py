import errno
import os

import pytest

from sse_convert.checkpoints import output_folder as output
from sse_convert.checkpoints.output_folder import (
    check_output,
    check_space,
    move_folder,
    new_folder,
    place,
    remove_partial,
)
from sse_convert.errors import OutputError


def test_a_folder_appears_whole(tmp_path):
    with new_folder(tmp_path / "a" / "out") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a" / "out").exists()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    assert (tmp_path / "a" / "out" / "x").read_text() == "1"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("x"), SystemExit(1)])
def test_nothing_is_left_after_a_failure(tmp_path, failure):
    def fill(folder):
        (folder / "x").write_text("1")
        raise failure

    with pytest.raises(type(failure)), new_folder(tmp_path / "out") as folder:
        fill(folder)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_but_not_what_a_living_one_writes(tmp_path):
    dead, other = tmp_path / ".out.1.partial", tmp_path / ".outer.1.partial"
    for path in (dead, other):
        path.mkdir()
        (path / "shard").touch()
    with new_folder(tmp_path / "out") as first:
        assert not dead.exists()
        remove_partial(tmp_path / "out")
        assert first.exists()
    assert sorted(tmp_path.iterdir()) == [other, tmp_path / "out"]


def test_a_folder_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(output, "sync", lambda path: seen.append([path.exists(), (tmp_path / "out").exists()]))
    monkeypatch.setattr(output, "sync_folder", lambda path: seen.append([path, (tmp_path / "out").exists()]))
    with new_folder(tmp_path / "out"):
        pass
    assert seen == [[True, False], [tmp_path, True]]


@pytest.mark.parametrize("other_disk", [False, True])
def test_a_folder_is_moved_whole(tmp_path, monkeypatch, other_disk):
    def rename(self, target):
        if other_disk and self.name == "made":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return os.rename(self, target)

    monkeypatch.setattr(output.Path, "rename", rename)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x").write_text("1")
    move_folder(tmp_path / "made", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert (tmp_path / "out" / "x").read_text() == "1"


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_modes_costs_nothing(tmp_path, monkeypatch, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    for name in ("chmod", "fchmod", "utime"):
        monkeypatch.setattr(os, name, refuse)
    (tmp_path / "made" / "deep").mkdir(parents=True)
    (tmp_path / "made" / "deep" / "x").write_text("1")
    with new_folder(tmp_path / "out") as folder:
        output.copy_folder(tmp_path / "made", folder)
    assert (tmp_path / "out" / "deep" / "x").read_text() == "1"


def test_full_disk(tmp_path):
    with pytest.raises(OutputError, match=r"the disk is full while writing .*out"), new_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_existing_output(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match=r"output folder .*out exists"):
        check_output(tmp_path / "out")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match=r"dangling exists"):
        check_output(tmp_path / "dangling")


def test_unwritable_output(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file is not writable"):
        check_output(tmp_path / "file" / "out")


def test_readonly_parent(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(output.tempfile, "mkdtemp", refuse)
    with pytest.raises(OutputError, match=r"is not writable: Permission denied"):
        check_output(tmp_path / "out")


def test_room_is_checked_before_copying(tmp_path):
    check_space(tmp_path / "out", 1)
    with pytest.raises(OutputError, match=r" has \S+ [kMGT]?B free\n") as error:
        check_space(tmp_path / "out", 1 << 60)
    assert error.value.expected == "1.15e+06 TB"


def test_links_and_copies(tmp_path):
    source = tmp_path / "s"
    source.write_text("data")
    (tmp_path / "symbolic").symlink_to(source)
    assert place(tmp_path / "symbolic", tmp_path / "linked", "hard") == "hard"
    assert place(source, tmp_path / "copied", "copy") == "copy"
    assert (tmp_path / "linked").samefile(source)
    assert not (tmp_path / "linked").is_symlink()
    assert not (tmp_path / "copied").samefile(source)
    assert (tmp_path / "copied").read_text() == "data"


def test_another_file_system_means_a_copy(tmp_path, monkeypatch):
    def cross_device(*args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    (tmp_path / "s").write_text("data")
    monkeypatch.setattr(os, "link", cross_device)
    assert place(tmp_path / "s", tmp_path / "t", "hard") == "copy"
    assert (tmp_path / "t").read_text() == "data"


def test_output_that_appears_meanwhile(tmp_path):
    def someone_else():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("1")

    with pytest.raises(OutputError, match=r"output folder .*out exists"), new_folder(tmp_path / "out"):
        someone_else()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
