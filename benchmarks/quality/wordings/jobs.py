"""Parts as processes side by side, within a time limit."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from sse_convert.console import say

CUT = 75
"""exit status of a part whose training was ended before its last step, and is saved"""
GRACE = 25.0
"""seconds to save a checkpoint at the end"""
TRIES = 3
EVERY = 60.0
"""seconds between reports of where the parts are"""


def finished(file: Path) -> bool:
    """Whether a part's JSON is there, and not of a training that was cut short."""
    return file.is_file() and "cut" not in json.loads(file.read_text(encoding="utf-8"))


class Job:
    """A process that runs one part.

    Args:
        out: folder of JSON and logs.
        name: of the part.
        arguments: of the command line.
        tries: how often it was started, this one included.
        cut: measure what an ended training left.
    """

    def __init__(self, out: Path, name: str, arguments: list[str], tries: int = 1, *, cut: bool = False) -> None:
        self.name, self.tries, self.cut, self.began = name, tries, cut, time.monotonic()
        self.log = out / f"{name}.log"
        command = [sys.executable, "-m", "benchmarks.quality.wordings", *arguments, "--one", name]
        with self.log.open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(command + ["--cut"] * cut, stdout=log, stderr=log, start_new_session=True)

    def last_line(self) -> str:
        """What it said last."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "")


class Runner:
    """Runs parts until all are finished or time is up; one that breaks is tried again.

    Args:
        out: folder of JSON and logs.
        arguments: of the command line, for the processes of the parts.
        most: parts side by side.
        limit: seconds for all.
        reserve: seconds before the limit at which trainings end, to be measured as they are; 0 measures none.
    """

    def __init__(self, out: Path, arguments: list[str], most: int, limit: float, reserve: float) -> None:
        self._out, self._arguments, self._most, self._limit, self._reserve = out, arguments, most, limit, reserve
        self._start = time.monotonic()
        self._jobs: list[Job] = []
        self._asked = False

    def run(self, names: list[str]) -> None:
        """Run these parts, but for those that are finished."""
        waiting = [(name, 1) for name in names if not finished(self._out / f"{name}.json")]
        told = 0.0
        while waiting or self._jobs:
            if not self._late:
                for name, tries in waiting[: max(0, self._most - len(self._jobs))]:
                    self._jobs.append(Job(self._out, name, self._arguments, tries))
                    waiting.remove((name, tries))
            elif not self._asked:
                self._end_all()
            if self._seconds > self._limit:
                self._kill_all()
            for job in [job for job in self._jobs if job.process.poll() is not None]:
                waiting += self._ended(job)
            if self._late and not self._jobs:
                break
            if self._seconds > told + EVERY:
                told = self._seconds
                say("\n".join(f"{told:.0f} s, {job.name}: {job.last_line()[-100:]}" for job in self._jobs))
            time.sleep(0.5)
        if waiting:
            say("time is up; the same command continues: " + " ".join(name for name, _ in waiting))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def _late(self) -> bool:
        return self._seconds > self._limit - max(self._reserve, GRACE)

    def _end_all(self) -> None:
        """Ask trainings to save and end; what measures goes on."""
        self._asked = True
        for job in self._jobs:
            job.process.send_signal(signal.SIGTERM)

    def _kill_all(self) -> None:
        for job in self._jobs:
            job.process.kill()
            job.process.wait()

    def _ended(self, job: Job) -> list[tuple[str, int]]:
        """Take a process that has ended off the list; what is to be started for its part again."""
        self._jobs.remove(job)
        status = job.process.returncode
        say(f"{job.name}: {time.monotonic() - job.began:.0f} s, status {status}, {self._seconds:.0f} s in all")
        if status == CUT and self._reserve:
            self._jobs.append(Job(self._out, job.name, self._arguments, cut=True))
            return []
        if status == CUT or (status != 0 and (self._late or job.tries < TRIES)):
            return [(job.name, job.tries + 1)]
        return []
