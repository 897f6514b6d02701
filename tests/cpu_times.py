"""A pytest plugin: CPU seconds of every test, its fixtures and its child processes, whatever else the machine does.

    python -m pytest -p tests.cpu_times --cpu-times out/times.jsonl tests/docs
    python -m tests.cpu_times out/times.jsonl

Use it in one process, without `-n`.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, required=True, help="append a JSON line for each test to this file")


def cpu_seconds() -> float:
    """Of this process, of the children it has waited for, and of those still running with theirs."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in processes)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    start = cpu_seconds()
    try:
        return (yield)
    finally:
        seconds = round(cpu_seconds() - start, 3)
        with item.config.getoption("--cpu-times").open("a") as file:
            file.write(json.dumps({"test": item.nodeid, "seconds": seconds}) + "\n")


def folder(test: str) -> str:
    """The folder of a test's file below `tests/`, or the file itself if it lies there."""
    parts = test.split("::")[0].split("/")[1:]
    return "/".join(parts[:-1]) or parts[0]


def summary(path: Path) -> dict[str, tuple[int, float]]:
    """Of every folder, how many tests ran and their CPU seconds."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for line in path.read_text().splitlines():
        record = json.loads(line)
        count, seconds = found[folder(record["test"])]
        found[folder(record["test"])] = (count + 1, seconds + record["seconds"])
    return dict(found)


if __name__ == "__main__":
    folders = summary(Path(sys.argv[1]))
    for name, (count, seconds) in sorted(folders.items(), key=lambda entry: -entry[1][1]):
        print(f"{seconds:8.1f} s  {count:5d} tests  {name}")
    print(f"{sum(s for _, s in folders.values()):8.1f} s  {sum(n for n, _ in folders.values()):5d} tests  all")
