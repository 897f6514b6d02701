"""Runs a few tests with the newest libraries that the registry has, over the packages of this Python.

    .venv/bin/python tools/newest.py [FOLDER]    the environment is in .venv-newest unless FOLDER says otherwise

It is made anew each time, and only what moved is installed; where nothing moved, no test runs twice. torch stays that
of this Python, unless its index of CPU builds is reachable: from elsewhere a new torch is gigabytes of CUDA libraries.
"""

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("transformers", "accelerate", "peft", "tokenizers", "safetensors")
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
TESTS = (
    "tests/modeling/test_cache_handover.py",
    "tests/modeling/test_common.py::TestAllKinds",
    "tests/modeling/test_generate.py::test_assisted_decoding_takes_rejected_tokens_back",
    "tests/modeling/test_generate.py::test_cache_modes_give_the_same_tokens",
    "tests/modeling/test_training.py::test_training_loss_includes_the_balance_loss",
    "tests/surgery/test_convert.py::test_families_through_the_command_line",
    "tests/surgery/test_convert.py::test_remote_code_gives_the_same_logits",
)
"""what converts, loads with and without the package, generates, trains a step, and transformers' own checks"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
VERSIONS = """
import json
from sse_convert.modeling.tried import TRIED, installed_version, newer_than_tried
print(json.dumps([{name: installed_version(name) for name in TRIED}, newer_than_tried()]))
"""


def main(folder: Path) -> int:
    """Make the environment and run the tests: their exit code."""
    venv.create(folder, clear=True)
    (next(folder.glob("lib/python*/site-packages")) / "beneath.pth").write_text(sysconfig.get_path("purelib"))
    python = str(folder / "bin" / "python")
    add_torch(python)
    versions, _ = ask(python)
    if pip(python, "install", "--quiet", "--upgrade", *LIBRARIES, f"torch=={versions['torch']}").returncode:
        say(f"FAILED: pip installs no newest {', '.join(LIBRARIES)} beside torch {versions['torch']}")
        return 1
    versions, newer = ask(python)
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    if versions == ask(sys.executable)[0]:
        say(f"{named} are the newest: all tests run with them")
        return 0
    say(f"with {named}")
    found = pip(python, "index", "versions", "torch", capture_output=True, text=True).stdout
    say(f"the registry's newest torch: {found.partition(chr(10))[0] or 'not known'}")
    subprocess.run([python, "tools/upstream_tests.py"], cwd=ROOT, check=True)
    workers = os.environ.get("WORKERS", "2")
    pytest = [python, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", "-p", "no:warnings", *TESTS]
    code = subprocess.run(pytest, cwd=ROOT, env=ENVIRONMENT).returncode
    if code:
        say(f"FAILED with {', '.join(newer) or 'the versions of constraints.txt'}")
    return code


def add_torch(python: str) -> None:
    """Install a newer CPU build of torch, if their index is reachable."""
    try:
        urllib.request.urlopen(f"{CPU_TORCH}/torch/", timeout=5).close()
    except OSError:
        say(f"torch stays as it is: {CPU_TORCH} is not reachable")
        return
    if pip(python, "install", "--quiet", "--upgrade", "--no-deps", "--index-url", CPU_TORCH, "torch").returncode:
        say(f"torch stays as it is: {CPU_TORCH} gave none")


def ask(python: str) -> tuple[dict[str, str], list[str]]:
    """The versions of an environment's libraries, and which are newer than the tried ones."""
    answer = subprocess.run([python, "-c", VERSIONS], env=ENVIRONMENT, check=True, capture_output=True, text=True)
    versions, newer = json.loads(answer.stdout)
    return versions, newer


def pip(python: str, command: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """This Python's pip, for an environment that has none."""
    here = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    return subprocess.run([*here, command, *arguments], **options)


def say(text: str) -> None:
    """Print a line to stderr."""
    print(f"newest: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv-newest")))
