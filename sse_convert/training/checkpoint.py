"""Training checkpoints: whole or absent, kept two deep, good for another number of processes.

A checkpoint is a folder `step-000100` with the weights and optimizer states that training changes (torch's distributed
checkpoint format), the random state of each process, state.json, the step log up to there, and hashes.json with the
SHA-256 of each of these files. It is written under a temporary name, brought to the disk and renamed. A damaged one is
found by its hashes, and the one before it takes its place.
"""

import contextlib
import json
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from sse_convert.checkpoints.identity import read_sealed, write_sealed
from sse_convert.checkpoints.output_folder import TAKEN
from sse_convert.console import say
from sse_convert.errors import OutputError, TrainingError
from sse_convert.files import digest, sync, sync_folder, write_text
from sse_convert.training.metrics import FILE as LOG
from sse_convert.training.metrics import mended
from sse_convert.training.objective import Part

KEPT = 2
LATE_SECONDS = 120.0
"""since the last checkpoint after which the next step is saved, whatever its number"""
LATE_SHARE = 0.05
"""of the time that may go into such checkpoints; large ones come less often"""
_STATE = "state.json"
_HASHES = "hashes.json"
_NAME = re.compile(r"step-(\d{6,})")
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""frozen weights are the parent checkpoint's"""


class Checkpoints:
    """The checkpoints of one stage. Every process makes one and calls every method.

    Args:
        folder: where they live; a step log in it goes into each.
        accelerator: of the stage.

    Raises:
        TrainingError: there are checkpoints, and all of them are damaged.
    """

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder = folder
        self.beside: dict[str, Any] = {}
        """JSON-ready data that goes into every state.json"""
        self._accelerator = accelerator
        if accelerator.is_main_process:
            _remove_leftovers(folder)
        accelerator.wait_for_everyone()
        self._newest = self._newest_whole()
        self._saved_at, self._save_seconds = time.monotonic(), 0.0

    def due(self, step: int, every: int | Literal["auto"]) -> bool:
        """Whether to save after a step: another so many are done, or the last checkpoint is so long ago that a kill
        would cost too much. Every process must ask after every step."""
        late = self._late()
        return late or (every != "auto" and step // every > self.step // every)

    def _late(self) -> bool:
        limit = max(LATE_SECONDS, self._save_seconds / LATE_SHARE)
        late = torch.tensor(float(time.monotonic() - self._saved_at > limit), device=self._accelerator.device)
        return bool(self._accelerator.reduce(late, "sum"))  # clocks differ

    @property
    def step(self) -> int:
        """Optimizer steps that are saved."""
        return 0 if self._newest is None else _step_of(self._newest)

    def newest(self) -> dict[str, Any] | None:
        """state.json of the newest checkpoint, or None without one."""
        if self._newest is None:
            return None
        state: dict[str, Any] = json.loads((self._newest / _STATE).read_text(encoding="utf-8"))
        return state

    def newest_path(self) -> Path | None:
        """The newest checkpoint, or None without one."""
        return self._newest

    def restore_log(self) -> None:
        """Give the folder the step log that the newest checkpoint has; without one, an empty log."""
        log = b"" if self._newest is None else _log_of(self._newest)
        write_text(self.folder / LOG, (log or b"").decode("utf-8"))

    def save(self, step: int, parts: list[Part], state: dict[str, Any]) -> None:
        """Write a checkpoint and drop the ones before the last two.

        Args:
            step: optimizer steps done.
            parts: what is trained.
            state: JSON-ready data to keep beside it.

        Raises:
            OutputError: it cannot be written, for example because the disk is full; earlier ones stay.
        """
        began = time.monotonic()
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f".{final.name}"
        main = self._accelerator.is_main_process
        if main:
            with _alone(self.folder):
                partial.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        with writing(partial), _quiet():
            state_dict_saver.save(_stored(parts), checkpoint_id=str(partial), no_dist=not self._distributed)
            save_file(_random_state(self._accelerator.device), partial / self._random_file())
            if main:
                (partial / _STATE).write_text(json.dumps({**self.beside, **state, "step": step}), encoding="utf-8")
                if (self.folder / LOG).is_file():
                    shutil.copyfile(self.folder / LOG, partial / LOG)
        self._accelerator.wait_for_everyone()
        with writing(partial):
            self._seal(partial)
        if main:
            with _alone(self.folder):
                partial.rename(final)
            sync_folder(self.folder)
            self._drop(self._all()[:-KEPT])
        self._accelerator.wait_for_everyone()
        self._newest, self._saved_at = final, time.monotonic()
        self._save_seconds = self._saved_at - began

    def drop_others(self) -> None:
        """Remove all checkpoints but the newest."""
        self._drop([path for path in self._all() if path != self._newest])

    def _drop(self, checkpoints: list[Path]) -> None:
        for old in checkpoints:
            old.rename(old.with_name(f".{old.name}"))
            shutil.rmtree(old.with_name(f".{old.name}"))

    def load(self, parts: list[Part]) -> None:
        """Put the newest checkpoint into the parts, and its random state into this process (if there was this one)."""
        path = self._newest
        assert path is not None, "nothing is saved"
        stored = _stored(parts)
        with _quiet(), _unwrapped():
            state_dict_loader.load(stored, checkpoint_id=str(path), no_dist=not self._distributed)
        for part in parts:
            set_state_dict(
                part.module,
                part.optimizer.optimizer,
                model_state_dict=stored[part.name]["model"],
                optim_state_dict=stored[part.name]["optimizer"],
                options=_TRAINED,
            )
        if (random := path / self._random_file()).is_file():
            _set_random_state(load_file(random), self._accelerator.device)

    @property
    def _distributed(self) -> bool:
        return bool(self._accelerator.num_processes > 1)

    def _random_file(self) -> str:
        return f"random-{self._accelerator.process_index}.safetensors"

    def _all(self) -> list[Path]:
        found = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=_step_of)

    def _own(self, files: list[str]) -> list[str]:
        """This process's share of a checkpoint's files."""
        return files[self._accelerator.process_index :: self._accelerator.num_processes]

    def _seal(self, folder: Path) -> None:
        """Bring the files to the disk and write down their hashes, which the processes share out."""
        files = sorted(path.name for path in folder.iterdir())
        for name in self._own(files):
            sync(folder / name)
        hashes = gather_object([(name, digest(folder / name)) for name in self._own(files)])
        if self._accelerator.is_main_process:
            write_sealed(folder / _HASHES, {"files": dict(sorted(hashes))})
        self._accelerator.wait_for_everyone()

    def _newest_whole(self) -> Path | None:
        """The newest checkpoint that is not damaged. Newer, damaged ones are named and removed."""
        damaged: list[Path] = []
        problems: list[str] = []
        for path in reversed(self._all()):
            if not (damage := self._damage(path)):
                self._leave(damaged, problems, path)
                return path
            damaged.append(path)
            problems.append(f"{path} is damaged: {', '.join(damage)}")
        if damaged:
            raise TrainingError(
                "\n  ".join(problems),
                expected="at least one checkpoint as it was written (those of earlier versions have no hashes.json)",
                fix=f"restore these files from a copy, or delete {self.folder}: the stage then starts at its first "
                f"step, and {_step_of(damaged[0])} steps are made again",
            )
        return None

    def _leave(self, damaged: list[Path], problems: list[str], whole: Path) -> None:
        """Say which checkpoints are damaged, and make room for those that will be written again."""
        if self._accelerator.is_main_process:
            for problem in problems:
                say(f"{problem}; going on from {whole.name}")
            for path in damaged:
                shutil.rmtree(path)
        self._accelerator.wait_for_everyone()

    def _damage(self, path: Path) -> list[str]:
        """The files of a checkpoint that are not what was written."""
        sealed = read_sealed(path / _HASHES)
        if sealed is None:
            own = [_HASHES]
        else:
            own = [name for name in self._own(sorted(sealed["files"])) if not _is(path / name, sealed["files"][name])]
            if LOG in sealed["files"] and LOG not in own and _log_of(path) is None:
                own.append(LOG)
        return sorted(set(gather_object(own)))


def _log_of(checkpoint: Path) -> bytes | None:
    """The step log of a checkpoint, mended; None where records are missing, empty where it has none."""
    log = checkpoint / LOG
    return mended(log.read_bytes(), _step_of(checkpoint)) if log.is_file() else b""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Turn what happens where two runs save one step into an error.

    Raises:
        TrainingError: another run writes to the folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise TrainingError(
            f"{folder}: another run writes to it",
            expected="one run at a time",
            fix="end the other run; then run again, it goes on from the last checkpoint",
        ) from error


def _is(path: Path, expected: str) -> bool:
    """Whether a file can be read and has this digest."""
    try:
        return digest(path) == expected
    except OSError:
        return False


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left: half a checkpoint, half a file."""
    for path in folder.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """The whole state dict of a prepared module on the CPU, without wrappers' prefixes.

    Every process must call it; all but the main one get {}.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_model_state_dict(module, options=options)
    return dict(state)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the ways in which torch and safetensors report a failed write into one error, and remove the folder.

    Raises:
        OutputError: `folder` could not be written.
        KeyboardInterrupt: torch wraps Ctrl-C like any other error; it comes out as itself.
    """
    try:
        yield
    except (CheckpointException, SafetensorError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        cause = _cause(error)
        if not isinstance(cause, OSError | RuntimeError | SafetensorError):
            raise cause from None
        raise OutputError(
            f"{folder.parent} cannot be written: {(str(cause).splitlines() or [type(cause).__name__])[0]}",
            expected="room and permission to write",
            fix="free space; then run again, it goes on from the last checkpoint",
        ) from error


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Let what went wrong in any process come out as itself: a signal, or the error of a file."""
    try:
        yield
    except CheckpointException as error:  # a BaseException, which nobody expects
        raise _cause(error) from None


def _cause(error: BaseException) -> BaseException:
    """What torch wrapped, if it did."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else []
    return next((failure for failure, _ in failures), error)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that one process saves as one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _stored(parts: list[Part]) -> dict[str, Any]:
    stored = {}
    for part in parts:
        model, optimizer = get_state_dict(part.module, part.optimizer.optimizer, options=_TRAINED)
        stored[part.name] = {"model": model, "optimizer": optimizer}
    return stored


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
