"""Kill whole pipelines at random moments, start them again until they are done, and compare what they made, bit by bit.

    python tools/kill_storm.py --kills 200 [--seed 0] [--only ddp fsdp] [--seconds 600] [--out tools/kill_storm.json]

A storm runs the commands of one scenario on a tiny teacher and sends its processes SIGKILL, SIGTERM or SIGHUP, each to
all of them or to one. Its result must be that of the same commands without signals, file by file; only measured times
may differ. Processes are forked from this one, which has imported everything, so a start takes no seconds.

Storms are added to those on record until there are `--kills`; exit code 1 if one of this call was not equal.
"""

import argparse
import contextlib
import csv
import dataclasses as dc
import hashlib
import json
import os
import platform
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tools" / "kill_storm.json"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
STORM_KILLS = 8
"""most kills of one storm"""
GRACE_SECONDS = 30.0
"""for the processes to end after a signal; then they are killed, as launchers do"""
TIMES = {"seconds", "began", "prefill_tokens_per_second", "decode_tokens_per_second"}
"""measured times in JSON: the only values that may differ"""
_WITH_TIMES = (".json", ".jsonl", ".csv")
GENEROUS_SECONDS = 600.0
"""for a start without signals; longer means that it hangs"""


@dc.dataclass(frozen=True, kw_only=True)
class Scenario:
    """Commands that are run one after the other, each until it is done."""

    commands: tuple[str, ...]
    """arguments of `sse-convert`"""
    processes: int = 1
    fsdp: bool = False


_STEPS = (
    "convert recipe.yaml -o converted",
    "calibrate recipe.yaml -c converted -o calibrated",
    "align recipe.yaml -c calibrated -o aligned",
    "distill recipe.yaml -c aligned -o distilled",
    "uptrain recipe.yaml -c distilled -o uptrained",
    "eval recipe.yaml -c uptrained -o evaluation.json",
    "export recipe.yaml -c uptrained -o exported --evaluation evaluation.json",
)
SCENARIOS = {
    "commands": Scenario(commands=_STEPS),
    "run": Scenario(commands=("run recipe.yaml",)),
    "select": Scenario(commands=("select recipe.yaml -o picked --keep 1 --tokens 1024 --length 384",)),
    "convert": Scenario(commands=_STEPS[:2]),
    "ddp": Scenario(commands=("run recipe.yaml",), processes=2),
    "fsdp": Scenario(commands=("run recipe.yaml",), processes=2, fsdp=True),
}
AT_ONCE = ("convert", "calibrate", "export")


def make_inputs(folder: Path) -> None:
    """A tiny teacher, its text and a recipe with every kind of stage, in a new folder."""
    import torch

    from tests.training.conftest import make_llama, make_text, make_tokenizer, recipe_for

    torch.set_num_threads(1)
    (folder / "text").mkdir(parents=True)
    for i in range(3):
        (folder / "text" / f"{i}.txt").write_text(make_text(2500, seed=i), encoding="utf-8")
    make_llama(tie=True).save_pretrained(folder / "teacher")
    make_tokenizer().save_pretrained(folder / "teacher")
    size = {"tokens": 512, "checkpoint_steps": 1, "micro_batch": 1}
    stages = [("align", size), ("distill", size), ("uptrain", size)]
    recipe = recipe_for(
        "teacher",
        "text",
        "result",
        stages=stages,
        calibrate={"rows": 2, "seq_len": 32},
        data={"train": [{"path": "text"}], "valid": [{"path": "text/2.txt"}]},
        eval={"perplexity": True, "tokens": 128},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()), encoding="utf-8")


def start(folder: Path, command: str, scenario: Scenario) -> list[int]:
    """Fork the processes of a command, each the leader of a group; their numbers."""
    port = _free_port()
    return [_forked(folder, command, scenario, rank, port) for rank in range(scenario.processes)]


def _forked(folder: Path, command: str, scenario: Scenario, rank: int, port: int) -> int:
    if pid := os.fork():
        with contextlib.suppress(OSError):  # the child may have been first
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(folder.with_name(f"{folder.name}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        os.environ["SSE_CONVERT_CACHE"] = str(folder / "cache")
        if scenario.processes > 1:
            _as_launched(scenario, rank, port)
        code = _run(command)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(command: str) -> int:
    from sse_convert.cli.app import app
    from sse_convert.cli.runner import run_app

    return run_app(app, shlex.split(command))


def _as_launched(scenario: Scenario, rank: int, port: int) -> None:
    """What `accelerate launch` tells a process; gloo on the CPU."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(scenario.processes),
        "LOCAL_WORLD_SIZE": str(scenario.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if scenario.fsdp:
        from tests.training.launched import fresh_accelerate

        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        fresh_accelerate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(pids: Sequence[int], seconds: float) -> list[int | None]:
    """Exit codes of processes as far as they end in time: negative after a signal, None for one that still runs."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while True:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if len(codes) == len(pids) or time.monotonic() > end:
            return [codes.get(pid) for pid in pids]
        time.sleep(0.005)


def send(pids: Sequence[int], number: int, who: Sequence[int], grace: float) -> list[int]:
    """Send a signal to some of the processes, which run; kill what has not ended after a while. Their exit codes."""
    for i in who:
        os.killpg(pids[i], number)
    codes = wait(pids, grace)
    left = [pid for pid, code in zip(pids, codes, strict=True) if code is None]
    for pid in left:
        os.killpg(pid, signal.SIGKILL)
    late = iter(wait(left, GENEROUS_SECONDS))
    return [next(late) if code is None else code for code in codes]  # type: ignore[misc]


@dc.dataclass
class Storm:
    """One scenario, its signals and what came of it."""

    scenario: str
    seed: int
    number: int
    commit: str
    kills: Counter[str] = dc.field(default_factory=Counter)
    codes: Counter[str] = dc.field(default_factory=Counter)
    """exit codes of the processes that were sent a signal, by signal"""
    different: list[str] = dc.field(default_factory=list)
    """files that are not what they are without signals, and processes that ended as none should"""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The storm as plain data."""
        found = {field.name: getattr(self, field.name) for field in dc.fields(self)}
        return found | {
            "kills": dict(self.kills),
            "codes": dict(self.codes),
            "seconds": round(self.seconds, 1),
            "equal": not self.different,
        }


ALLOWED = {
    "SIGKILL": {-9, 0},
    "SIGTERM": {143, -15, 0},
    "SIGHUP": {129, -1, 0},
}
"""exit codes of a single process by signal; 0 if it was about to end, the signal's own before it listens"""


def run_storm(storm: Storm, place: Path, seconds: float, kills: int) -> None:
    """Run a scenario in `place` with some signals, until it is done.

    Args:
        storm: filled in.
        place: a folder with the inputs.
        seconds: that the scenario takes by itself.
        kills: signals to send; fewer where it is done before.
    """
    scenario = SCENARIOS[storm.scenario]
    rng = random.Random(f"{storm.seed} {storm.scenario} {storm.number}")
    for command in scenario.commands:
        while True:
            pids = start(place, command, scenario)
            more = storm.kills.total() < kills
            codes = wait(pids, rng.uniform(0, 0.4 * seconds) if more else GENEROUS_SECONDS)
            if None not in codes:
                if set(codes) != {0}:
                    storm.different.append(f"{command}: exit codes {codes} without a signal")
                    return
                break
            if not more:
                send(pids, signal.SIGKILL, range(len(pids)), GENEROUS_SECONDS)
                storm.different.append(f"{command}: hangs")
                return
            _strike(storm, pids, codes, rng)
            if storm.different:
                return
            if _made(place, command):
                break


def _made(place: Path, command: str) -> bool:
    """Whether a command that makes one folder at once came to do so; started again it would refuse."""
    words = command.split()
    return words[0] in AT_ONCE and (place / words[words.index("-o") + 1]).exists()


def _strike(storm: Storm, pids: list[int], codes: list[int | None], rng: random.Random) -> None:
    """Send one signal, and note what the processes make of it."""
    number = rng.choice((signal.SIGKILL, *SIGNALS))  # half of them cannot be noticed
    running = [i for i, code in enumerate(codes) if code is None]
    who = running if rng.random() < 0.5 else [rng.choice(running)]
    alone = len(pids) == 1
    found = send([pids[i] for i in running], number, [running.index(i) for i in who], GRACE_SECONDS if alone else 5.0)
    storm.kills[number.name] += 1
    for code in found:
        storm.codes[f"{number.name} {code}"] += 1
        if alone and code not in ALLOWED[number.name]:
            storm.different.append(f"exit code {code} after {number.name}")


def snapshot(folder: Path) -> dict[str, str]:
    """Digest of every file of a result by its path, without measured times."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(_content(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def _content(path: Path) -> bytes:
    if path.suffix not in _WITH_TIMES:
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines()))
    else:
        rows = [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    if path.name == "manifest.json":
        rows = [{name: record for name, record in rows[0]["files"].items() if Path(name).suffix not in _WITH_TIMES}]
    return json.dumps([_timeless(row) for row in rows], sort_keys=True).encode()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        sealed = "tool_version" in value  # its seal covers the times
        return {k: _timeless(v) for k, v in value.items() if k not in TIMES and not (sealed and k == "sha256")}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Files that are missing, new or different."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


@dc.dataclass
class Places:
    """Folders for the scenarios, and what each gives without signals."""

    root: Path
    made: dict[str, tuple[dict[str, str], float]] = dc.field(default_factory=dict)

    def fresh(self, name: str) -> Path:
        """A folder with the inputs; the same path each time, since results hold paths."""
        inputs, place = self.root / "inputs", self.root / name
        if not inputs.exists():
            pid = os.fork()
            if not pid:
                make_inputs(inputs)
                os._exit(0)
            assert wait([pid], GENEROUS_SECONDS) == [0], "the tiny teacher cannot be made"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(inputs, place)
        return place

    def expected(self, name: str) -> tuple[dict[str, str], float]:
        """What a scenario gives without signals, and the seconds it takes."""
        if name not in self.made:
            place, began = self.fresh(name), time.monotonic()
            storm = Storm(name, 0, 0, "")
            run_storm(storm, place, 0.0, 0)
            assert not storm.different, f"{name}: {storm.different}; see {place}.log"
            self.made[name] = snapshot(place), time.monotonic() - began
        return self.made[name]

    def storm(self, name: str, seed: int, number: int, kills: int) -> Storm:
        """One storm of at most so many kills."""
        expected, seconds = self.expected(name)
        storm = Storm(name, seed, number, commit())
        place, began = self.fresh(name), time.monotonic()
        run_storm(storm, place, seconds / len(SCENARIOS[name].commands), kills)
        storm.different += differences(expected, snapshot(place)) if not storm.different else []
        storm.seconds = time.monotonic() - began
        return storm


def preload() -> None:
    """Import what the commands need, so that forked processes have it; starts no threads."""
    import datasets  # noqa: F401

    import sse_convert.pipeline
    import sse_convert.selection.select
    from tests.training import launched  # noqa: F401

    assert sse_convert.pipeline.__file__.startswith(str(ROOT)), f"runs {sse_convert.pipeline.__file__}"


def commit() -> str:
    """Of this checkout, with a plus where files have changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "sse_convert")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def summary(storms: list[dict[str, Any]]) -> dict[str, Any]:
    """Kills by signal and storms that were equal, of each scenario and of all."""

    def total(chosen: list[dict[str, Any]]) -> dict[str, Any]:
        kills: Counter[str] = sum((Counter(storm["kills"]) for storm in chosen), Counter())
        return {
            "storms": len(chosen),
            "equal": sum(storm["equal"] for storm in chosen),
            "kills": kills.total(),
            **{number.name: kills[number.name] for number in SIGNALS},
        }

    names = [name for name in SCENARIOS if any(storm["scenario"] == name for storm in storms)]
    return {"all": total(storms)} | {name: total([s for s in storms if s["scenario"] == name]) for name in names}


def numbers(storms: list[dict[str, Any]], names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Scenarios in turn, the one with the fewest kills first, each with the number of its next storm."""
    while True:
        kills = {name: sum(sum(s["kills"].values()) for s in storms if s["scenario"] == name) for name in names}
        name = min(names, key=lambda name: kills[name])
        yield name, sum(storm["scenario"] == name for storm in storms)


def main() -> int:
    """Add storms to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="on record at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no storm begins")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    sys.path.insert(0, str(ROOT))
    storms = json.loads(options.out.read_text(encoding="utf-8"))["storms"] if options.out.is_file() else []
    if storms and summary(storms)["all"]["kills"] >= options.kills:
        return 0
    preload()
    before, end = len(storms), time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="storm-", ignore_cleanup_errors=True) as folder:
        places = Places(Path(folder))
        for name, number in numbers(storms, options.only):
            left = options.kills - summary(storms)["all"]["kills"]
            if left <= 0 or time.monotonic() > end:
                break
            storm = places.storm(name, options.seed, number, min(STORM_KILLS, left)).to_dict()
            storms.append(storm)
            record(options.out, storms)
            print(json.dumps(storm), flush=True)
            if not storm["equal"]:
                shutil.copytree(places.root / name, Path(tempfile.mkdtemp(prefix=f"storm-{name}-")), dirs_exist_ok=True)
                shutil.copy(places.root / f"{name}.log", Path(tempfile.gettempdir()) / f"storm-{name}.log")
    print(json.dumps(summary(storms), indent=1))
    return int(not all(storm["equal"] for storm in storms[before:]))


def record(out: Path, storms: list[dict[str, Any]]) -> None:
    """Write all storms, with where and how."""
    from sse_convert.files import write_json

    data = {
        "command": shlex.join(["python", "tools/kill_storm.py", *sys.argv[1:]]),
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "summary": summary(storms),
        "storms": storms,
    }
    write_json(out, data)


if __name__ == "__main__":
    sys.exit(main())
