"""What a stage leaves to the machine: rows of a pass, gradient checkpointing, compilation, CUDA graphs.

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
NARROW = 1024
"""width of a model from which steps no longer wait for launches; steps with graphs were measured below it alone"""


def failures() -> tuple[type[Exception], ...]:
    """Errors that other choices can mend, those of memory in any step, others in the first."""
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
    cuda_graphs: bool = False

    def applied(self, stage: Stage, train: Train) -> tuple[Stage, Train]:
        """Settings without `auto`."""
        twice = self.gradient_checkpointing
        settled = dc.replace(stage, micro_batch=self.micro_batch, gradient_checkpointing=twice)
        return settled, dc.replace(train, compile=self.compile, cuda_graphs=self.cuda_graphs)

    def line(self) -> str:
        """The choices for a person."""
        kept = "activations computed twice" if self.gradient_checkpointing else "activations kept"
        graphs = ", as CUDA graphs" if self.cuda_graphs else ""
        compiled = "compiled" if self.compile else "not compiled"
        return f"passes of {counted(self.micro_batch, 'row')}, {kept}, {compiled}{graphs}"


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
        graphs = train.cuda_graphs is True or self._records(compiled)
        rows, checkpointing = self._passes(compiled, graphs)
        return self._with_explicit(
            Chosen(
                micro_batch=rows,
                gradient_checkpointing=checkpointing,
                compile=compiled,
                processes=processes,
                cuda_graphs=graphs,
            )
        )

    def otherwise(self, chosen: Chosen, error: BaseException) -> Chosen | None:
        """What to try after a step failed; None if nothing is left to the machine that could mend it."""
        if not isinstance(error, torch.OutOfMemoryError):
            return dc.replace(chosen, compile=False) if chosen.compile and self.ready.train.compile == "auto" else None
        if chosen.cuda_graphs and self.ready.train.cuda_graphs == "auto":
            return dc.replace(chosen, cuda_graphs=False)
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
        graphs = self.ready.train.cuda_graphs
        return Chosen(
            micro_batch=chosen.micro_batch if rows == "auto" else rows,
            gradient_checkpointing=chosen.gradient_checkpointing if twice == "auto" else twice,
            compile=chosen.compile if compiled == "auto" else compiled,
            processes=chosen.processes,
            cuda_graphs=chosen.cuda_graphs if graphs == "auto" else graphs,
        )

    def _records(self, compiled: bool) -> bool:
        """Whether `auto` records passes: where launches are what a step waits for, and enough rows still fit."""
        ready, stage, memory = self.ready, self.ready.stage, gpu_memory(self.ready.accelerator)
        if memory is None or ready.train.cuda_graphs != "auto" or stage.gradient_checkpointing is True:
            return False
        if stage.loss != "kl" or ready.accelerator.num_processes > 1:
            return False
        narrow = geometry_of(source_view(ready.files)).dims.hidden < NARROW
        return narrow and self._most(False, compiled, True, *memory) >= max(1, self._wanted)

    @property
    def _wanted(self) -> int:
        """Rows of a pass that keep a GPU busy, or those of the recipe."""
        stage = self.ready.stage
        length = stage.seq_len // stage.context_parallel
        return stage.micro_batch if stage.micro_batch != "auto" else min(ENOUGH_TOKENS // length, self._rows)

    def _passes(self, compiled: bool, graphs: bool) -> tuple[int, bool]:
        """Rows of a pass, and whether activations are computed twice: only where too few rows fit otherwise."""
        stage, memory = self.ready.stage, gpu_memory(self.ready.accelerator)
        if memory is None:
            return cpu_rows(stage.seq_len // stage.context_parallel, self._rows), False
        asked = stage.gradient_checkpointing
        ways = [asked] if asked != "auto" else [False] if stage.loss == "layer_mse" else [False, True]
        most = [self._most(way, compiled, graphs, *memory) for way in ways]
        if most[0] >= max(1, self._wanted) or most[0] == most[-1] > 0:
            return most[0], ways[0]
        return max(1, most[-1]), ways[-1]

    def _most(self, checkpointing: bool, compiled: bool, graphs: bool, gpu_bytes: int, free: int) -> int:
        ready, match, stage, train = self.ready, self.ready.match, self.ready.stage, self.ready.train
        estimate = stage_memory(
            geometry_of(source_view(ready.files)),
            [None if name == FULL else match.mixers[name] for name in match.names],
            stage,
            lora_rank=train.lora_rank,
            bf16=ready.accelerator.mixed_precision != "no",
            checkpointing=checkpointing,
            cuda_graphs=graphs,
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
