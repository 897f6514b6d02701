import errno
import json
import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from sse_convert.checkpoints import run_lock as locking
from sse_convert.checkpoints.run_lock import LOCK, run_lock
from sse_convert.errors import TrainingError


def left_by(folder, host, age=0.0):
    """The lock file of a run that was killed, last touched `age` seconds ago."""
    now = os.stat(folder).st_mtime
    (folder / LOCK).write_text(json.dumps({"host": host, "process": 4321, "began": now - 7200}))
    os.utime(folder / LOCK, (now - age, now - age))


def test_a_second_run_is_told_who_runs(tmp_path):
    with run_lock(tmp_path):
        with pytest.raises(TrainingError, match="another run writes to it") as caught, run_lock(tmp_path):
            pass
        assert f"process {os.getpid()} on {socket.gethostname()}, begun 0:00:0" in caught.value.what
    assert list(tmp_path.iterdir()) == []
    with run_lock(tmp_path):
        pass


def test_a_run_that_is_refused_leaves_no_lock(tmp_path, capsys):
    with pytest.raises(TrainingError, match="other inputs"), run_lock(tmp_path):
        raise TrainingError("other inputs")
    assert list(tmp_path.iterdir()) == []
    with run_lock(tmp_path):
        pass
    assert capsys.readouterr().err == ""


def test_the_lock_of_a_killed_run_is_recognised(tmp_path, capsys):
    left_by(tmp_path, socket.gethostname())
    with run_lock(tmp_path):
        pass
    told = capsys.readouterr().err
    assert f"process 4321 on {socket.gethostname()}, begun 2:00:0" in told
    assert "has ended without finishing" in told


def test_a_run_on_another_machine_that_gives_signs_of_life_is_left_alone(tmp_path, monkeypatch):
    left_by(tmp_path, "elsewhere", age=5)
    monkeypatch.setattr(locking.time, "sleep", lambda seconds: os.utime(tmp_path / LOCK))
    with pytest.raises(TrainingError, match="process 4321 on elsewhere"), run_lock(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("age", [0, 7200])
def test_a_run_on_another_machine_without_signs_of_life_has_ended(tmp_path, monkeypatch, capsys, age):
    left_by(tmp_path, "elsewhere", age)
    monkeypatch.setattr(locking, "QUIET_SECONDS", 0.02)
    monkeypatch.setattr(locking, "_POLL_SECONDS", 0.01)
    with run_lock(tmp_path):
        pass
    told = capsys.readouterr().err
    assert ("waiting" in told) == (age == 0)
    assert "process 4321 on elsewhere" in told


def test_a_run_gives_signs_of_life(tmp_path, monkeypatch):
    touched = threading.Event()
    monkeypatch.setattr(locking, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(locking.os, "utime", lambda path: touched.set())
    with run_lock(tmp_path):
        assert touched.wait(10)


def test_damage_to_a_lock_file_stops_nobody(tmp_path):
    for content in (b"", b"\xff", b"[]", b'{"host": 1}', b'{"host": 1, "process": "x", "began": {}}'):
        (tmp_path / LOCK).write_bytes(content)
        with run_lock(tmp_path):
            pass


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def without_locks(monkeypatch, request):
    def flock(handle, operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    monkeypatch.setattr(locking, "SETTLE_SECONDS", 0.0)


def test_a_living_run_is_left_alone_where_the_file_system_knows_no_locks(tmp_path, without_locks):
    with run_lock(tmp_path):
        with pytest.raises(TrainingError, match=f"another run writes to it: process {os.getpid()}"), run_lock(tmp_path):
            pass
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["gone", "not reaped", "its number is another's now", "no number", "too large"])
def test_a_killed_run_is_recognised_where_the_file_system_knows_no_locks(tmp_path, without_locks, capsys, what):
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()
    process.stdout.close()
    if what == "not reaped":
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
    number = {"its number is another's now": os.getpid(), "no number": -1, "too large": 10**30}.get(what, process.pid)
    began = psutil.Process().create_time() - 60
    (tmp_path / LOCK).write_text(json.dumps({"host": socket.gethostname(), "process": number, "began": began}))
    with run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert "has ended without finishing" in capsys.readouterr().err
    process.wait()


def test_of_runs_that_begin_at_once_without_locks_one_goes_on(tmp_path, without_locks, monkeypatch):
    monkeypatch.setattr(locking.time, "sleep", lambda seconds: left_by(tmp_path, "elsewhere"))
    with pytest.raises(TrainingError, match="process 4321 on elsewhere"), run_lock(tmp_path):
        pass
    assert json.loads((tmp_path / LOCK).read_text())["host"] == "elsewhere"


def test_a_lock_file_that_its_holder_removes_is_made_anew(tmp_path, monkeypatch):
    real, calls = locking.fcntl.flock, []

    def flock(handle, operation):
        calls.append(1)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()  # by a run that ends just now
        return real(handle, operation)

    monkeypatch.setattr(locking.fcntl, "flock", flock)
    with run_lock(tmp_path):
        assert len(calls) == 2
        with pytest.raises(TrainingError), run_lock(tmp_path):
            pass
