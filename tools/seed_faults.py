"""Seed the faults of tests/faults.yaml one at a time in a copy of the checkout, and see whether their tests fail.

    python tools/seed_faults.py [--only kernels/triton] [--new] [--out tests/faults.json]

By hand, before cases of tests go. A fault that the code has moved on from is stale: mend its entry, or take it out.
Results of faults that are not tried again are kept in the output file; exit code 1 if one of the tried was not caught.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  what follows need not import it again, nor the next
import transformers  # noqa: F401
import yaml

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests" / "faults.yaml"
TESTS_FAILED = 1
"""pytest's exit code"""
MOST_CPU_SECONDS = 60
"""after which the tests of a fault are taken to hang"""

Fault = dict[str, Any]


def faults() -> list[Fault]:
    """All: `file`, `old` text that it holds once, `new` text, `tests` of which one must fail, `match` (pytest's -k)."""
    found: list[Fault] = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    return found


def seeded(text: str, fault: Fault) -> str:
    """A file's text with the fault.

    Raises:
        ValueError: the old text is not there, or several times.
    """
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['file']} holds {text.count(fault['old'])} times, expected once: {fault['old']}")
    return text.replace(fault["old"], fault["new"])


def copy_checkout(folder: Path) -> Path:
    """Copy what git tracks, with changes that are not committed."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def run_pytest(arguments: list[str], checkout: Path, said: Path) -> None:
    """In a process of its own, which begins with the libraries imported: pytest on the package of a checkout.

    Args:
        arguments: of pytest.
        checkout: folder.
        said: file that what it prints goes to.
    """
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(checkout)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS))
    os.environ["PYTHONPATH"] = str(checkout)
    sys.path.insert(0, str(checkout))
    sys.dont_write_bytecode = True
    sys.exit(int(pytest.main(arguments)))


def attempt(fault: Fault, checkout: Path) -> dict[str, Any]:
    """Seed a fault, run its tests up to the first failure, and take the fault out again."""
    path = checkout / fault["file"]
    sound = path.read_text(encoding="utf-8")
    path.write_text(seeded(sound, fault), encoding="utf-8")
    arguments = ["-q", "-x", "-p", "no:cacheprovider", *fault["tests"]]
    arguments += ["-k", fault["match"]] if "match" in fault else []
    said = checkout / "said.txt"
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(arguments, checkout, said))
    try:
        process.start()
        process.join()
    finally:
        path.write_text(sound, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said.read_text(encoding="utf-8"), re.MULTILINE)
    if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {**fault, "outcome": "caught", "failed": f"no end within {MOST_CPU_SECONDS} CPU seconds"}
    outcome = {0: "missed", TESTS_FAILED: "caught"}.get(process.exitcode or 0, f"pytest ended with {process.exitcode}")
    return {**fault, "outcome": outcome, "failed": failed[1] if failed else None}


def tried_or_stale(fault: Fault, checkout: Path) -> dict[str, Any]:
    """What its tests say, or that the code has moved on from it."""
    try:
        return attempt(fault, checkout)
    except (ValueError, FileNotFoundError) as error:
        return {**fault, "outcome": "stale", "failed": str(error)}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose file's path holds this text")
    parser.add_argument("--new", action="store_true", help="only faults without a result in the output file")
    parser.add_argument("--out", type=Path, default=FAULTS.with_suffix(".json"), help="file of results")
    arguments = parser.parse_args()
    before = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else []
    results = {(r["file"], r["old"], r["new"]): r for r in before}
    tried = [fault for fault in faults() if arguments.only in fault["file"]]
    if arguments.new:
        tried = [fault for fault in tried if (fault["file"], fault["old"], fault["new"]) not in results]
    with tempfile.TemporaryDirectory() as folder:
        checkout = copy_checkout(Path(folder))
        for fault in tried:
            result = results[fault["file"], fault["old"], fault["new"]] = tried_or_stale(fault, checkout)
            print(f"{result['outcome']:8} {fault['file']}: {fault['new'].strip()}", flush=True)
            known = [(f["file"], f["old"], f["new"]) for f in faults()]
            kept = [results[key] for key in known if key in results]
            arguments.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return int(any(results[f["file"], f["old"], f["new"]]["outcome"] != "caught" for f in tried))


if __name__ == "__main__":
    sys.exit(main())
