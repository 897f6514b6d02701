"""Streams that are closed, full or cut off."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-", "| true", "2>&1 | true"])
def test_streams_may_be_closed(closed):
    shell = f"set -o pipefail; {sys.executable} -m sse_convert recipes list {closed}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_behind_stdout_is_said():
    command = f"{sys.executable} -m sse_convert recipes list > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 8
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m sse_convert recipes schema | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")
