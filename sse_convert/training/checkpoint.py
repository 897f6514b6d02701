"""Training checkpoints: whole or absent, kept two deep, good for another number of processes.

A checkpoint is a folder `step-000100` with the weights and optimizer states that training changes (torch's distributed
checkpoint format), the random state of each process, and state.json. It is written under a temporary name and renamed.
"""

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
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

from sse_convert.errors import OutputError
from sse_convert.training.objective import Part

KEPT = 2
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""frozen weights are the parent checkpoint's"""


class Checkpoints:
    """The checkpoints of one stage. Every process makes one and calls every method.

    Args:
        folder: where they live.
        accelerator: of the stage.
    """

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        self.folder = folder
        self._accelerator = accelerator
        if accelerator.is_main_process and folder.is_dir():
            for path in folder.glob(".*"):  # what a killed process left
                shutil.rmtree(path, ignore_errors=True)
        accelerator.wait_for_everyone()

    def newest(self) -> dict[str, Any] | None:
        """state.json of the newest checkpoint, or None without one."""
        found = self._all()
        return json.loads((found[-1] / _STATE).read_text(encoding="utf-8")) if found else None

    def newest_path(self) -> Path | None:
        """The newest checkpoint, or None without one."""
        found = self._all()
        return found[-1] if found else None

    def save(self, step: int, parts: list[Part], state: dict[str, Any]) -> None:
        """Write a checkpoint and drop the ones before the last two.

        Args:
            step: optimizer steps done.
            parts: what is trained.
            state: JSON-ready data to keep beside it.

        Raises:
            OutputError: it cannot be written, for example because the disk is full; earlier ones stay.
        """
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f".{final.name}"
        main = self._accelerator.is_main_process
        if main:
            partial.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        with writing(partial), _quiet():
            state_dict_saver.save(_stored(parts), checkpoint_id=str(partial), no_dist=not self._distributed)
            save_file(_random_state(self._accelerator.device), partial / self._random_file())
        self._accelerator.wait_for_everyone()
        if main:
            (partial / _STATE).write_text(json.dumps({**state, "step": step}), encoding="utf-8")
            partial.rename(final)
            for old in self._all()[:-KEPT]:
                old.rename(old.with_name(f".{old.name}"))
                shutil.rmtree(old.with_name(f".{old.name}"))
        self._accelerator.wait_for_everyone()

    def load(self, parts: list[Part]) -> None:
        """Put the newest checkpoint into the parts, and its random state into this process (if there was this one)."""
        path = self._all()[-1]
        stored = _stored(parts)
        with _quiet():
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
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


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
        failures = error.failures.values() if isinstance(error, CheckpointException) else []
        cause = next((failure for failure, _ in failures), error)
        if not isinstance(cause, OSError | RuntimeError | SafetensorError):
            raise cause from None
        raise OutputError(
            f"{folder.parent} cannot be written: {(str(cause).splitlines() or [type(cause).__name__])[0]}",
            expected="room and permission to write",
            fix="free space; then run again, it goes on from the last checkpoint",
        ) from error


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
