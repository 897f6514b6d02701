"""Do two commits compute the same, to the bit? One tiny checkpoint of every model family and mixer setting says.

    python tools/compare_commits.py OLD NEW [--json FILE] [--folder FOLDER]

OLD and NEW are commits of this repository or folders with a checkout. The checkpoints of compared_checkpoints.yaml are
made once, by OLD, but for retired ones that it does not know; then both compute logits, tokens and a training step
with them, each in a process of its own. Ends with 1 if a case differs, or is refused and not listed there as retired; a
listed one may also train otherwise, where only training read the key. Takes a minute or two on one core.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

TOOLS = Path(__file__).resolve().parent
PASS = ("equal", "retired")


@contextlib.contextmanager
def checkout(name: str) -> Iterator[Path]:
    """The folder of a checkout: given as one, or a worktree of a commit for as long as it is needed."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _git(TOOLS, "worktree", "add", "--quiet", "--detach", str(tree), name)
        try:
            yield tree
        finally:
            _git(TOOLS, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _commit(tree: Path) -> str:
    changed = _git(tree, "status", "--porcelain", "--untracked-files=no", "--", "sse_convert")
    return _git(tree, "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def _run(tree: Path, *arguments: str | Path) -> None:
    """tiny_checkpoints.py with a checkout's code, on one thread."""
    settings = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TOOLS / "tiny_checkpoints.py"), *map(str, arguments)]
    subprocess.run(command, check=True, env={**os.environ, **settings})


def compare(old: Path, new: Path, retired: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Case name -> its verdict (equal, different, refused or retired) with the reasons.

    Args:
        old: what the older commit computed: `CASE.safetensors`, or `CASE.json` with an error.
        new: the same of the newer commit.
        retired: the keys that the newer commit must name where it refuses a case.
    """
    names = sorted({path.stem for folder in (old, new) for path in folder.iterdir()})
    return {name: _compare_case(old / name, new / name, retired.get(name, [])) for name in names}


def _compare_case(old: Path, new: Path, retired: list[str]) -> dict[str, Any]:
    first, second = (_results(path) for path in (old, new))
    if isinstance(first, str):
        return {"verdict": "refused", "why": f"by the older commit: {first}"}
    if isinstance(second, str):
        complaint = second.partition("expected")[0]  # what follows is a list of keys that are known
        named = retired and all(key in complaint for key in retired)
        return {"verdict": "retired" if named else "refused", "why": second}
    differences = {
        name: _difference(first.get(name), second.get(name))
        for name in sorted(first.keys() | second.keys())
        if not _same_bits(first.get(name), second.get(name))
    }
    trains = all(name == "loss" or name.startswith("gradient.") for name in differences)
    verdict = ("retired" if retired and trains else "different") if differences else "equal"
    return {"verdict": verdict, "tensors": len(first), **({"differences": differences} if differences else {})}


def _results(path: Path) -> dict[str, Tensor] | str:
    if (stored := path.with_name(f"{path.name}.safetensors")).is_file():
        return load_file(stored)
    error = path.with_name(f"{path.name}.json")
    return str(json.loads(error.read_text(encoding="utf-8"))["error"]) if error.is_file() else "nothing was computed"


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _difference(a: Tensor | None, b: Tensor | None) -> float | str:
    """The largest absolute difference, or what is not alike."""
    if a is None or b is None:
        return "missing in the older" if a is None else "missing in the newer"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    return float((a.double() - b.double()).abs().max())


def _row(name: str, case: dict[str, Any]) -> str:
    differences = case.get("differences", {})
    told = ", ".join(f"{key} {value}" for key, value in list(differences.items())[:3])
    why = str(case.get("why", "")).splitlines()[:1]
    return f"{name:32} {case['verdict']:10} {told or ''.join(why)}".rstrip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit or folder that makes the checkpoints")
    parser.add_argument("new", help="commit or folder to compare with it")
    parser.add_argument("--json", type=Path, help="also write the verdicts to this file")
    parser.add_argument("--folder", type=Path, help="new folder that keeps checkpoints and results")
    return parser.parse_args()


def main() -> int:
    """Compare, print a row for each case, and count."""
    arguments = _arguments()
    listed = yaml.safe_load((TOOLS / "compared_checkpoints.yaml").read_text(encoding="utf-8"))
    if unknown := sorted(listed["retired"].keys() - listed["mixers"].keys()):
        raise SystemExit(f"compared_checkpoints.yaml: retired names no case: {unknown}")
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(checkout(name)) for name in (arguments.old, arguments.new)]
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        _run(trees[0], "make", folder / "checkpoints")
        for tree, name in zip(trees, ("old", "new"), strict=True):
            _run(tree, "compute", folder / "checkpoints", folder / name)
        cases = compare(folder / "old", folder / "new", listed["retired"])
        commits = [_commit(tree) for tree in trees]
    if arguments.json:
        report = {"old": commits[0], "new": commits[1], "torch": torch.__version__, "cases": cases}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(_row(name, case) for name, case in cases.items()))
    counts = Counter(case["verdict"] for case in cases.values())
    print(f"{commits[0]} and {commits[1]}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    return int(any(case["verdict"] not in PASS for case in cases.values()))


if __name__ == "__main__":
    raise SystemExit(main())
