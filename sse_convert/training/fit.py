"""What a stage leaves to the machine: rows of a pass, gradient checkpointing, compilation.

Chosen before anything is loaded, from the estimate of `surgery/stage_memory.py` and the GPU's free memory, and kept in
the work folder, so that a continued stage has the same passes. A step's means do not depend on them.
"""

import dataclasses as dc
from typing import Any

import torch
from accelerate import Accelerator

from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.checkpoints.teacher import source_view
from sse_convert.compat import compile_error
from sse_convert.errors import DependencyError
from sse_convert.mixers import FULL
from sse_convert.recipe.schema import Stage, Train
from sse_convert.surgery.compatibility import Match
from sse_convert.surgery.memory import USABLE, Processes, cpu_rows, even_parts, most_rows
from sse_convert.surgery.plan import geometry_of
from sse_convert.surgery.stage_memory import compiles_layers, stage_memory
from sse_convert.training.schedule import Schedule
from sse_convert.training.sharding import is_sharded

FILE = "chosen.json"
ENOUGH_TOKENS = 8192
"""tokens of a pass that keep a GPU busy; where fewer fit, activations are computed twice and more rows fit"""


def failures() -> tuple[type[Exception], ...]:
    """Errors of a first step that other choices can mend."""
    return torch.OutOfMemoryError, compile_error(), DependencyError


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The choices of a stage, those of its recipe among them."""

    micro_batch: int
    """rows of a pass"""
    gradient_checkpointing: bool
    compile: bool
    processes: int
    """that it was chosen for"""

    def applied(self, stage: Stage, train: Train) -> tuple[Stage, Train]:
        """Settings without `auto`."""
        twice = self.gradient_checkpointing
        settled = dc.replace(stage, micro_batch=self.micro_batch, gradient_checkpointing=twice)
        return settled, dc.replace(train, compile=self.compile)

    def line(self) -> str:
        """The choices for a person."""
        rows = "1 row" if self.micro_batch == 1 else f"{self.micro_batch} rows"
        kept = "activations computed twice" if self.gradient_checkpointing else "activations kept"
        return f"passes of {rows}, {kept}, {'compiled' if self.compile else 'not compiled'}"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How a stage can be laid out on its processes.

    Args:
        stage: with `auto` where the recipe has that.
        train: likewise.
        accelerator: of the stage.
        files: the converted checkpoint.
        match: its layers.
        shared: frozen matrices are still those of the model itself, and exist once.
    """

    stage: Stage
    train: Train
    accelerator: Accelerator
    files: CheckpointFiles
    match: Match
    shared: bool = False

    def choose(self, before: dict[str, Any] | None) -> Chosen:
        """The choices of this start; every process must call it.

        Args:
            before: those of an earlier start, as plain data. They hold for as many processes as they were made for.
        """
        if before is not None and before["processes"] == self.accelerator.num_processes:
            return self._with_explicit(Chosen(**before))
        compiled = self._compiled()
        rows, checkpointing = self._passes(compiled)
        return self._with_explicit(
            Chosen(
                micro_batch=rows,
                gradient_checkpointing=checkpointing,
                compile=compiled,
                processes=self.accelerator.num_processes,
            )
        )

    def otherwise(self, chosen: Chosen, error: BaseException) -> Chosen | None:
        """What to try after the first step failed; None if nothing is left to the machine that could mend it."""
        if not isinstance(error, torch.OutOfMemoryError):
            return dc.replace(chosen, compile=False) if chosen.compile and self.train.compile == "auto" else None
        if self.stage.micro_batch == "auto" and chosen.micro_batch > 1:
            fewer = [n for n in even_parts(self._rows) if n <= chosen.micro_batch // 2]
            return dc.replace(chosen, micro_batch=fewer[-1])
        free = self.stage.gradient_checkpointing == "auto" and self.stage.loss != "layer_mse"
        return dc.replace(chosen, gradient_checkpointing=True) if free and not chosen.gradient_checkpointing else None

    @property
    def _rows(self) -> int:
        """Rows of a step on each process."""
        return Schedule.of(self.stage).rows // (int(self.accelerator.num_processes) // self.stage.context_parallel)

    def _with_explicit(self, chosen: Chosen) -> Chosen:
        rows, twice, compiled = self.stage.micro_batch, self.stage.gradient_checkpointing, self.train.compile
        return Chosen(
            micro_batch=chosen.micro_batch if rows == "auto" else rows,
            gradient_checkpointing=chosen.gradient_checkpointing if twice == "auto" else twice,
            compile=chosen.compile if compiled == "auto" else compiled,
            processes=chosen.processes,
        )

    def _compiled(self) -> bool:
        """Whether layers are compiled: as asked, or where it pays, on a GPU."""
        gpu = self.accelerator.device.type == "cuda"
        return (gpu or self.train.compile != "auto") and compiles_layers(self.stage, self.train)

    def _passes(self, compiled: bool) -> tuple[int, bool]:
        """Rows of a pass, and whether activations are computed twice: only where too few rows fit otherwise."""
        memory = gpu_memory(self.accelerator)
        length, rows = self.stage.seq_len // self.stage.context_parallel, self._rows
        if memory is None:
            return cpu_rows(length, rows), False
        asked = self.stage.gradient_checkpointing
        ways = [asked] if asked != "auto" else [False] if self.stage.loss == "layer_mse" else [False, True]
        wanted = self.stage.micro_batch if self.stage.micro_batch != "auto" else min(ENOUGH_TOKENS // length, rows)
        most = [self._most(way, compiled, *memory) for way in ways]
        if most[0] >= max(1, wanted) or most[0] == most[-1] > 0:
            return most[0], ways[0]
        return max(1, most[-1]), ways[-1]

    def _most(self, checkpointing: bool, compiled: bool, gpu_bytes: int, free: int) -> int:
        geometry = geometry_of(source_view(self.files))
        mixers = [None if name == FULL else self.match.mixers[name] for name in self.match.names]
        estimate = stage_memory(
            geometry,
            mixers,
            self.stage,
            lora_rank=self.train.lora_rank,
            bf16=self.accelerator.mixed_precision != "no",
            checkpointing=checkpointing,
            cuda_graphs=self.train.cuda_graphs,
            compiled=compiled,
            shared=self.shared,
        )
        sharded = is_sharded(self.accelerator)
        processes = Processes(self.accelerator.num_processes, sharded)
        return most_rows(estimate, self.stage.seq_len, self._rows, gpu_bytes, free * USABLE, processes)


def gpu_memory(accelerator: Accelerator) -> tuple[int, int] | None:
    """Bytes of this process's GPU and those free, the least of all processes; None without one."""
    device = accelerator.device
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    every = accelerator.gather(torch.tensor([[total, free + kept]], device=device))
    return int(every[:, 0].min()), int(every[:, 1].min())
