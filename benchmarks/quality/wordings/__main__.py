"""Measure retrieval in wordings that training never saw, several parts side by side on one machine.

    python -m benchmarks.quality.wordings --checkpoints ../shared/checkpoints --books out/classic-books --out out/w
    python -m benchmarks.quality.wordings ... --cheap --variants row,teacher,induction   # 9M tokens, no softmax layer
    python -m benchmarks.quality.wordings ... --parts qwen-none-row,llama-teacher        # some of them

A part writes OUT/PART.json when it is finished. The same command again continues what was cut off. At the time limit
trainings save a checkpoint and end. Last comes a table of shares of the teachers' scores (`--table`: only that).
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.quality.wordings import parts, shares
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say

GRACE = 25.0
"""seconds to save a checkpoint at the end"""
TRIES = 3


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--checkpoints", type=Path, required=True, help="folder of both teachers")
    arguments.add_argument("--books", type=Path, required=True, help="folder with train/ and valid/")
    arguments.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    arguments.add_argument("--work", type=Path, help="folder for models (default: OUT/work)")
    arguments.add_argument("--parts", help="names, separated by commas (default: all of --variants)")
    arguments.add_argument("--variants", default="row", help=f"of {', '.join(parts.VARIANTS)}, separated by commas")
    arguments.add_argument("--cheap", action="store_true", help="9M tokens, without softmax layers")
    arguments.add_argument("--jobs", type=int, default=3, help="parts side by side")
    arguments.add_argument("--limit", type=float, default=570, help="seconds for all")
    arguments.add_argument("--part-limit", type=float, default=540, help="seconds for one part")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change all recipes")
    arguments.add_argument("--samples", type=int, help="questions of each task (default: as the targets need)")
    arguments.add_argument("--lengths", default="2048,8192", help="context lengths of the questions")
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    arguments.add_argument("--table", action="store_true", help="show what is finished, run nothing")
    return arguments


class Job:
    """A process that runs one part."""

    def __init__(self, name: str, options: argparse.Namespace, tries: int) -> None:
        self.name, self.tries, self.began = name, tries, time.monotonic()
        command = [sys.executable, "-m", "benchmarks.quality.wordings", *sys.argv[1:], "--one", name]
        with (options.out / f"{name}.log").open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self) -> None:
        """Let it save a checkpoint, then end it."""
        self.tries = TRIES
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run_all(names: list[str], options: argparse.Namespace) -> None:
    """Run parts side by side until all are finished or time is up; one that breaks is tried again."""
    start, jobs = time.monotonic(), []
    waiting = [(name, 1) for name in names if not (options.out / f"{name}.json").exists()]
    while waiting or jobs:
        late = time.monotonic() - start > options.limit - GRACE
        while waiting and len(jobs) < options.jobs and not late:
            name, tries = waiting.pop(0)
            jobs.append(Job(name, options, tries))
        for job in list(jobs):
            seconds = time.monotonic() - job.began
            if late or seconds > options.part_limit:
                job.end()
            if job.process.poll() is None:
                continue
            jobs.remove(job)
            say(
                f"{job.name}: {seconds:.0f} s, status {job.process.returncode}, {time.monotonic() - start:.0f} s in all"
            )
            if job.process.returncode != 0 and job.tries < TRIES:
                waiting.append((job.name, job.tries + 1))
        if late and not jobs:
            say("time is up; the same command continues: " + " ".join(name for name, _ in waiting))
            return
        time.sleep(0.5)


@reporting_errors
def main() -> None:
    options = parser().parse_args()
    hush_libraries()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        from benchmarks.quality.wordings.measure import run

        part, work = parts.parse(options.one), (options.work or options.out / "work")
        lengths = [int(length) for length in options.lengths.split(",")]
        samples = {length: options.samples or part.samples[length] for length in lengths}
        place = parts.Place(options.checkpoints, options.books, work / part.name)
        run(part, place, samples, options.set, options.out / f"{part.name}.json")
        return
    if not options.table:
        chosen = options.parts.split(",") if options.parts else None
        names = chosen or parts.all_parts(options.variants.split(","), cheap=options.cheap)
        for name in names:
            parts.parse(name)
        run_all(names, options)
    say("\n".join(shares.lines(options.out)))


if __name__ == "__main__":
    sys.exit(main())
