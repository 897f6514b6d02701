"""Random damages to the files of a run, and whether `verify` names every damaged file or resuming mends it.

    python tools/damage_run.py --count 300 --out tools/damage_run.json

Makes a tiny run once (convert, calibrate, one stage, eval, export), and a stage that was killed in its third step.
A damage is done to a copy of one step, which a process forked from this one then verifies, or of what the killed stage
left, which it continues. It is named when the error has the file's name in it, mended when the stage ends with the bits
of one that was never killed, and harmless by promise when verify is silent about a file that people may edit. Anything
else is a failure.
"""

import argparse
import dataclasses as dc
import functools
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sse_convert import api
from sse_convert.checkpoints.manifest import EDITABLE
from sse_convert.checkpoints.safetensors_io import TensorInfo, read_header
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.errors import SSEConvertError
from sse_convert.files import digest, write_json
from sse_convert.recipe import Recipe
from sse_convert.training import loop

FINE = ("named", "mended by resuming", "harmless by promise")
STAGE = {
    "name": "distill",
    "loss": "kl",
    "tokens": 256,
    "seq_len": 32,
    "batch_tokens": 64,
    "micro_batch": 2,
    "lr": 0.001,
    "checkpoint_steps": 1,
}
Judge = Callable[[Path, str], tuple[str, str]]
"""says of a folder with a damaged file what came of it: the verdict, and the message where that is bad"""


@dc.dataclass(frozen=True)
class Outcome:
    """One damage and what verify said of it."""

    step: str
    kind: str
    file: str
    verdict: str
    """one of FINE, silent, not named, or the exception that came through"""
    message: str = ""
    """where the verdict is a failure"""


@dc.dataclass(frozen=True)
class Subject:
    """A folder whose copies are damaged."""

    folder: Path
    judge: Judge


def make_run(folder: Path) -> dict[str, Subject]:
    """Convert, calibrate, train, measure and export a tiny model, and kill a stage; what was written, by name."""
    from tests.surgery.models import recipe, save_source

    save_source(folder / "teacher", "llama")
    (folder / "text.txt").write_text(" ".join(f"w{i * 7 % 90 + 3}" for i in range(4000)), encoding="utf-8")
    text = [{"path": str(folder / "text.txt")}]
    settings: dict[str, Any] = {
        "stages": [STAGE],
        "data": {"train": text, "valid": text},
        "eval": {"perplexity": True, "tokens": 128},
        "export": {"dir": str(folder / "out")},
    }
    asked = recipe(folder / "teacher", **settings)
    api.run(asked)
    inside = sorted((folder / "out.stages").iterdir())
    steps = {path.name: path for path in inside if path.is_dir() and path.suffix != ".work"}
    in_a_fork(lambda: _killed(asked, steps["01-calibrate"], folder / "killed"))
    resumed = functools.partial(_resumed, asked, steps["01-calibrate"], _weights(steps["02-distill"]))
    found = {f"out.stages/{name}": Subject(path, verdict_of) for name, path in steps.items()}
    return {
        "out": Subject(folder / "out", verdict_of),
        **found,
        "killed.work": Subject(folder / "killed.work", resumed),
    }


def _killed(recipe: Recipe, checkpoint: Path, out: Path) -> None:
    """Run the stage in this process, which ends without a word in the third step."""
    gradients, calls = loop._gradients, itertools.count()

    def dying(*args: Any) -> Any:
        if next(calls) == 2:
            os._exit(1)
        return gradients(*args)

    loop._gradients = dying
    api.distill(recipe, checkpoint, out)


def _resumed(recipe: Recipe, checkpoint: Path, expected: dict[str, str], work: Path, name: str) -> tuple[str, str]:
    """Continue a killed stage whose file `name` was damaged."""
    out = work.with_suffix("")
    try:
        api.distill(recipe, checkpoint, out)
    except SSEConvertError as error:
        return ("named", "") if Path(name).name in str(error) else ("not named", str(error))
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        found = _weights(out)
        shutil.rmtree(out, ignore_errors=True)
    return ("mended by resuming", "") if found == expected else ("silent", "the weights are others")


def _weights(folder: Path) -> dict[str, str]:
    return {path.name: digest(path) for path in folder.glob("*.safetensors")}


def damage(folder: Path, kind: str, chance: random.Random) -> str | None:
    """Damage one file of a folder; its name, or None where nothing there can be damaged so."""
    wanted, change = DAMAGES[kind]
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    if not (found := [name for name in files if wanted(name) and (folder / name).stat().st_size]):
        return None
    name = chance.choice(found)
    before = (folder / name).read_bytes()
    change(folder / name, chance)
    changed = not (folder / name).is_file() or (folder / name).read_bytes() != before
    return name if changed else None


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def _append(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 64)))


def _rename(path: Path, chance: random.Random) -> None:
    path.rename(path.with_name(f"{chance.randrange(1000)}-{path.name}"))


def _swap(path: Path, chance: random.Random) -> None:
    """Exchange the data of two tensors of one size, of this shard or of two shards of the folder."""
    ours = list(read_header(path).values())
    one = chance.choice([info for info in ours if info.nbytes])
    others = [info for shard in sorted(path.parent.glob("*.safetensors")) for info in read_header(shard).values()]
    other = chance.choice([info for info in others if info.nbytes == one.nbytes])
    data = {info: _data(path.parent, info) for info in (one, other)}
    for info, bytes_of in ((one, other), (other, one)):
        with (path.parent / info.shard).open("r+b") as file:
            file.seek(info.start)
            file.write(data[bytes_of])


def _data(folder: Path, info: TensorInfo) -> bytes:
    with (folder / info.shard).open("rb") as file:
        file.seek(info.start)
        return file.read(info.nbytes)


def _edit_json(path: Path, chance: random.Random) -> None:
    """Give one value of a JSON file another one of its kind."""
    data = json.loads(path.read_text(encoding="utf-8"))
    places = list(_leaves(data))
    owner, key = chance.choice(places)
    value = owner[key]
    owner[key] = (
        (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else f"{value}x"
    )
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _leaves(data: Any) -> list[tuple[Any, Any]]:
    """Every owner and key of a value that is neither a mapping nor a list."""
    items = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    own = [(data, key) for key, value in items if not isinstance(value, dict | list)]
    return own + [place for _, value in items for place in _leaves(value)]


def _edit_code(path: Path, chance: random.Random) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines.insert(chance.randrange(len(lines) + 1), "import this\n")
    path.write_text("".join(lines), encoding="utf-8")


def _any(name: str) -> bool:
    return bool(name)


def _is_code(name: str) -> bool:
    return name.endswith(".py")


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors")


def _is_settings(name: str) -> bool:
    return name.endswith("config.json")


def _is_tokenizer(name: str) -> bool:
    return name in ("tokenizer.json", "tokenizer_config.json")


Change = Callable[[Path, random.Random], None]
DAMAGES: dict[str, tuple[Callable[[str], bool], Change]] = {
    "byte flipped": (_any, _flip),
    "byte of a shard flipped": (_is_shard, _flip),
    "truncated": (_any, _truncate),
    "emptied": (_any, lambda path, _: path.write_bytes(b"") and None),
    "deleted": (_any, lambda path, _: path.unlink()),
    "renamed": (_any, _rename),
    "bytes appended": (_any, _append),
    "tensors swapped": (_is_shard, _swap),
    "config edited": (_is_settings, _edit_json),
    "tokenizer edited": (_is_tokenizer, _edit_json),
    "code edited": (_is_code, _edit_code),
}
"""kind -> which files, and what is done to one"""


def verdict_of(folder: Path, name: str) -> tuple[str, str]:
    """What verify says of a folder with the damaged file `name`: the verdict, and its message if that is bad."""
    try:
        api.verify(folder)
    except SSEConvertError as error:
        return ("named", "") if name in str(error) else ("not named", str(error))
    except Exception as error:
        return type(error).__name__, str(error)
    return ("harmless by promise" if name in EDITABLE else "silent", "")


def in_a_fork(action: Callable[[], Any]) -> Any:
    """What an action returns in a process forked from this one, which may hang, crash or change its state."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(writer, "w") as pipe:
            json.dump(action(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else ("crash", f"exit status {status}")


def try_damages(subjects: dict[str, Subject], count: int, seed: int, place: Path) -> list[Outcome]:
    """Damage copies of the subjects, kinds in turn, until `count` damages were done."""
    chance = random.Random(seed)
    outcomes: list[Outcome] = []
    kinds = list(DAMAGES)
    turn = 0
    while len(outcomes) < count:
        kind, step = kinds[turn % len(kinds)], chance.choice(list(subjects))
        copy = place / f"{turn:05d}.work"
        shutil.copytree(subjects[step].folder, copy)
        if (name := damage(copy, kind, chance)) is not None:
            verdict, message = in_a_fork(functools.partial(subjects[step].judge, copy, name))
            outcomes.append(Outcome(step, kind, name, verdict, message))
            turn += 1
        shutil.rmtree(copy, ignore_errors=True)
    return outcomes


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts, and every outcome that is a failure."""
    return {
        "damages": len(outcomes),
        "verdicts": dict(Counter(outcome.verdict for outcome in outcomes).most_common()),
        "kinds": {kind: dict(Counter(o.verdict for o in outcomes if o.kind == kind)) for kind in DAMAGES},
        "steps": dict(sorted(Counter(outcome.step for outcome in outcomes).items())),
        "failures": [dc.asdict(outcome) for outcome in outcomes if outcome.verdict not in FINE],
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "sse_convert") else "")


@reporting_errors
def main() -> None:
    """Make the run, damage it, write what came of it; fails if a damage was silent or not named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="damages to do")
    parser.add_argument("--seed", type=int, default=0, help="of what is damaged, and how")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a fork has no other threads
    hush_libraries()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        subjects = make_run(Path(place) / "run")
        found = summary(try_damages(subjects, asked.count, asked.seed, Path(place)))
    about = {"command": " ".join(["python", *sys.argv]), "commit": _commit(), "seed": asked.seed}
    write_json(asked.out, {**about, "seconds": round(time.monotonic() - started, 1), **found})
    print(json.dumps(found["verdicts"]))
    if found["failures"]:
        raise SystemExit(f"{len(found['failures'])} damages were not named: see {asked.out}")


if __name__ == "__main__":
    sys.exit(main())
