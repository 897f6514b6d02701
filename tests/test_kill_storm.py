"""A small storm: the record says what came of it, and a second call adds to it."""

import json
import os
import random
from pathlib import Path

import pytest

from docs import warm
from tools import kill_storm

ROOT = Path(__file__).parent.parent


def storm(out, tmp_path, *arguments):
    log = tmp_path / "log"
    command = ["tools/kill_storm.py", "--only", "convert", "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    assert warm.run(command, ROOT, environment, log, log, timeout=300) == 0, log.read_text()[-3000:]
    return json.loads(out.read_text())


def test_a_storm_ends_with_the_bits_of_a_run_without_it(tmp_path):
    record = storm(tmp_path / "record.json", tmp_path, "--kills", "3", "--seed", "1")
    (made,) = record["storms"]
    assert made["equal"]
    assert made["different"] == []
    assert sum(made["kills"].values()) == record["summary"]["all"]["kills"] == 3
    assert record["summary"]["convert"]["equal"] == 1
    assert storm(tmp_path / "record.json", tmp_path, "--kills", "3")["storms"] == record["storms"]  # all there


def test_a_difference_is_found_and_times_are_none(tmp_path):
    for name, loss, seconds, byte in (("a", 1.0, 2.0, b"1"), ("b", 1.0, 3.0, b"1"), ("c", 1.5, 2.0, b"2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps({"loss": loss, "seconds": seconds}) + "\n")
        (folder / "scores.csv").write_text(f"score,seconds,bytes\n{loss},{seconds},5\n")
        (folder / "weights").write_bytes(byte)
    a, b, c = (kill_storm.snapshot(tmp_path / name) for name in "abc")
    assert kill_storm.differences(a, b) == []
    assert kill_storm.differences(a, c) == ["metrics.jsonl", "scores.csv", "weights"]
    assert kill_storm.differences(a, {}) == sorted(a)


@pytest.mark.parametrize(("found", "wrong"), [(-9, []), (143, ["exit code 143 after SIGKILL"])])
def test_an_exit_code_that_no_signal_gives_is_a_failure(monkeypatch, found, wrong):
    monkeypatch.setattr(kill_storm, "send", lambda *arguments: [found])
    monkeypatch.setattr(kill_storm, "SIGNALS", (kill_storm.signal.SIGKILL,))
    storm = kill_storm.Storm("convert", 0, 0, "")
    kill_storm._strike(storm, [1], [None], random.Random(0))
    assert storm.different == wrong
