"""What a stage leaves to the machine: rows of a pass, gradient checkpointing, compilation.

Chosen before anything is loaded, from the estimate of `surgery/stage_memory.py` and the GPU's free memory, and kept in
the work folder, so that a continued stage has the same passes. A step's means do not depend on them.
"""

import dataclasses as dc
from typing import Any

import torch
from accelerate import Accelerator

from sse_convert.checkpoints.teacher import source_view
from sse_convert.compat import compile_error
from sse_convert.errors import DependencyError
from sse_convert.mixers import FULL
from sse_convert.recipe.schema import Stage, Train
from sse_convert.report import counted
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.memory import USABLE, Processes, cpu_rows, even_parts, most_rows
from sse_convert.surgery.stage_memory import compiles_layers, stage_memory, still_the_teachers
from sse_convert.training.sharding import is_sharded
from sse_convert.training.stage_job import StageJob

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
        kept = "activations computed twice" if self.gradient_checkpointing else "activations kept"
        return f"passes of {counted(self.micro_batch, 'row')}, {kept}, {'compiled' if self.compile else 'not compiled'}"


@dc.dataclass(frozen=True, slots=True)
class Fit:
    """How a stage can be laid out on its processes."""

    ready: StageJob
    """with `auto` where the recipe has that"""

    def choose(self, before: dict[str, Any] | None) -> Chosen:
        """The choices of this start; every process must call it.

        Args:
            before: those of an earlier start, as plain data. They hold for as many processes as they were made for.
        """
        processes = self.ready.accelerator.num_processes
        if before is not None and before["processes"] == processes:
            return self._with_explicit(Chosen(**before))
        train, gpu = self.ready.train, self.ready.accelerator.device.type == "cuda"
        compiled = (gpu or train.compile != "auto") and compiles_layers(self.ready.stage, train)
        rows, checkpointing = self._passes(compiled)
        return self._with_explicit(
            Chosen(micro_batch=rows, gradient_checkpointing=checkpointing, compile=compiled, processes=processes)
        )

    def otherwise(self, chosen: Chosen, error: BaseException) -> Chosen | None:
        """What to try after the first step failed; None if nothing is left to the machine that could mend it."""
        if not isinstance(error, torch.OutOfMemoryError):
            return dc.replace(chosen, compile=False) if chosen.compile and self.ready.train.compile == "auto" else None
        if self.ready.stage.micro_batch == "auto" and chosen.micro_batch > 1:
            fewer = [n for n in even_parts(self._rows) if n <= chosen.micro_batch // 2]
            return dc.replace(chosen, micro_batch=fewer[-1])
        free = self.ready.stage.gradient_checkpointing == "auto" and self.ready.stage.loss != "layer_mse"
        return dc.replace(chosen, gradient_checkpointing=True) if free and not chosen.gradient_checkpointing else None

    @property
    def _rows(self) -> int:
        """Rows of a step on each process."""
        return self.ready.schedule.rows // self.ready.place.ranks

    def _with_explicit(self, chosen: Chosen) -> Chosen:
        stage, compiled = self.ready.stage, self.ready.train.compile
        rows, twice = stage.micro_batch, stage.gradient_checkpointing
        return Chosen(
            micro_batch=chosen.micro_batch if rows == "auto" else rows,
            gradient_checkpointing=chosen.gradient_checkpointing if twice == "auto" else twice,
            compile=chosen.compile if compiled == "auto" else compiled,
            processes=chosen.processes,
        )

    def _passes(self, compiled: bool) -> tuple[int, bool]:
        """Rows of a pass, and whether activations are computed twice: only where too few rows fit otherwise."""
        stage, memory = self.ready.stage, gpu_memory(self.ready.accelerator)
        length, rows = stage.seq_len // stage.context_parallel, self._rows
        if memory is None:
            return cpu_rows(length, rows), False
        asked = stage.gradient_checkpointing
        ways = [asked] if asked != "auto" else [False] if stage.loss == "layer_mse" else [False, True]
        wanted = stage.micro_batch if stage.micro_batch != "auto" else min(ENOUGH_TOKENS // length, rows)
        most = [self._most(way, compiled, *memory) for way in ways]
        if most[0] >= max(1, wanted) or most[0] == most[-1] > 0:
            return most[0], ways[0]
        return max(1, most[-1]), ways[-1]

    def _most(self, checkpointing: bool, compiled: bool, gpu_bytes: int, free: int) -> int:
        ready, match, stage, train = self.ready, self.ready.match, self.ready.stage, self.ready.train
        estimate = stage_memory(
            geometry_of(source_view(ready.files)),
            [None if name == FULL else match.mixers[name] for name in match.names],
            stage,
            lora_rank=train.lora_rank,
            bf16=ready.accelerator.mixed_precision != "no",
            checkpointing=checkpointing,
            cuda_graphs=train.cuda_graphs,
            compiled=compiled,
            shared=still_the_teachers(ready.job.recipe.stages, stage),
        )
        processes = Processes(ready.accelerator.num_processes, is_sharded(ready.accelerator))
        return most_rows(estimate, stage.seq_len, self._rows, gpu_bytes, free * USABLE, processes)


def gpu_memory(accelerator: Accelerator) -> tuple[int, int] | None:
    """Bytes of this process's GPU and those free, the least of all processes; None without one."""
    device = accelerator.device
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    every = accelerator.gather(torch.tensor([[total, free + kept]], device=device))
    return int(every[:, 0].min()), int(every[:, 1].min())
