"""What training a recipe costs, as data: memory of a GPU by way of launching, GPU hours, ways that fit, disk, download.

`costs_of` is for whoever has a plan's parts; `Plan.costs` holds its result.
"""

import dataclasses as dc
import functools
from collections.abc import Iterator, Sequence

from sse_convert.checkpoints.safetensors_io import ITEM_BYTES
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.mixers import Mixer
from sse_convert.recipe.schema import Recipe, Stage
from sse_convert.surgery.budget import Geometry, Mixers
from sse_convert.surgery.compatibility import context_problems
from sse_convert.surgery.memory import GIB, GPU_GIB, ONE, USABLE, Processes, StageMemory
from sse_convert.surgery.speed import Beside, MeasuredSpeed, beside_training, gpu_hours, speed_of
from sse_convert.surgery.stage_memory import (
    added_elements,
    compiles_layers,
    stage_memory,
    still_the_teachers,
    trained_parameters,
)

GPUS = (1, 2, 8)
"""numbers of GPUs that are planned for"""
KEPT_CHECKPOINTS = 3
"""training checkpoints on the disk at a time, the one that is being written among them"""
_LORA = "LoRA"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """What one stage costs. Bytes are those of one GPU, at least: with one row at a time unless the recipe says more,
    and activations computed twice unless it forbids that."""

    name: str
    gpu_hours: float
    """of the GPU that was measured, nothing lost to others"""
    measured: MeasuredSpeed
    """what they are estimated from"""
    bytes: dict[str, int]
    """way of launching (1 GPU; DDP; FSDP2 x 2; FSDP2 x 8; context_parallel N x 8; LoRA x 1) -> bytes; what a stage
    cannot have is left out"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """The simplest way to train a recipe on a number of GPUs."""

    gpus: int
    gib: int
    """memory of each GPU"""
    how: str
    """as it is, DDP or FSDP2, with context_parallel and LoRA where it takes those"""
    sharded: bool
    """FSDP2"""
    overrides: tuple[str, ...]
    """what the recipe must be told for it, as `a.b=c`"""
    bytes: int
    """of one GPU in the stage that needs most, at least"""
    gpu_hours: float
    """of training, activations that must be computed twice included"""
    beside: float
    """hours of a run beside training and choosing"""

    @property
    def lora(self) -> bool:
        """Whether the teacher's weights stay as they are, beside LoRA."""
        return _LORA in self.how

    @property
    def hours(self) -> float:
        """On the clock, of a run but for its choice of layers, if several GPUs lose nothing."""
        return self.gpu_hours / self.gpus + self.beside

    def launcher(self) -> str:
        """What starts the processes: the command's beginning."""
        if self.gpus == 1:
            return "sse-convert"
        kind = "--use_fsdp --fsdp_version 2" if self.sharded else "--multi_gpu"
        return f"accelerate launch {kind} --num_processes {self.gpus} -m sse_convert"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a recipe costs."""

    stages: list[StageCost]
    beside: Beside
    """hours of a run beside training and choosing"""
    ways: list[Way]
    """for each number of GPUs and each memory size, where there is one"""
    refused: dict[int, str]
    """number of GPUs -> why there is no way, whatever their memory"""
    weight_bytes: int
    """of the model, which a hub would send"""
    download_bytes: int
    """of these, what is not on this machine"""
    disk_bytes: int
    """a run's folders at their largest, the files of the model not counted"""
    host_bytes: int
    """of the host's memory for each process that reads what the largest stage trains; under FSDP2 that is the first"""

    def way(self, gpus: int, gib: int) -> Way | None:
        """The way for so many GPUs of so much memory; None if nothing fits."""
        return next((way for way in self.ways if (way.gpus, way.gib) == (gpus, gib)), None)

    @property
    def gpu_hours(self) -> float:
        """Of all stages."""
        return sum(stage.gpu_hours for stage in self.stages)


def costs_of(
    recipe: Recipe,
    teacher: Teacher,
    geometry: Geometry,
    mixers: dict[str, Mixer],
    layers: Mixers,
    added: int,
) -> Costs:
    """The costs of a recipe.

    Args:
        recipe: stages and training settings are read.
        teacher: the opened teacher.
        geometry: its sizes.
        mixers: the mixers in use, by name.
        layers: mixer of each layer.
        added: new parameters.
    """
    stages = _Stages(recipe, teacher, geometry, mixers, layers)
    own = _weight_bytes(teacher)
    ways = [way for gpus in GPUS for gib in GPU_GIB if (way := stages.way(gpus, gib)) is not None]
    return Costs(
        stages=[stages.cost(stage) for stage in recipe.stages],
        beside=stages.beside,
        ways=ways,
        refused={gpus: stages.why_not(gpus) for gpus in GPUS if recipe.stages and gpus not in {w.gpus for w in ways}},
        weight_bytes=own,
        download_bytes=own if teacher.files.remote or not teacher.files.shard_bytes else 0,
        disk_bytes=_disk_bytes(recipe, geometry, layers, own, added * ITEM_BYTES[teacher.dtype]),
        host_bytes=_host_bytes(recipe, geometry, layers),
    )


def _weight_bytes(teacher: Teacher) -> int:
    return sum(teacher.files.shard_bytes.values()) or teacher.files.parameters * ITEM_BYTES[teacher.dtype]


def way_on(
    recipe: Recipe,
    teacher: Teacher,
    geometry: Geometry,
    mixers: dict[str, Mixer],
    layers: Mixers,
    *,
    gpus: int,
    gib: int,
) -> Way | None:
    """The simplest way to train a recipe on GPUs of any number and memory; None if nothing fits.

    Args:
        recipe: as of `costs_of`, like `teacher`, `geometry`, `mixers` and `layers`.
        teacher: its weights and config.
        geometry: its sizes.
        mixers: by name.
        layers: the mixer of each layer.
        gpus: how many.
        gib: memory of each.
    """
    return _Stages(recipe, teacher, geometry, mixers, layers).way(gpus, gib)


def _disk_bytes(recipe: Recipe, geometry: Geometry, layers: Mixers, own: int, new: int) -> int:
    """The converted checkpoint with a copy of the teacher, calibrated new tensors, each stage's result in float32, as
    FSDP has all of it, the final one, and the training checkpoints of the stage that has most: weights and two moments
    of what is trained."""
    per_stage = _float32_bytes(geometry, layers)
    work = [
        12 * KEPT_CHECKPOINTS * trained_parameters(geometry, layers, stage, recipe.train.lora_rank)
        for stage in recipe.stages
    ]
    return own + new * (1 + recipe.calibrate.enabled) + per_stage * len(work) + max(work, default=0) + own + new


def _float32_bytes(geometry: Geometry, layers: Mixers) -> int:
    """Of the whole student."""
    return 4 * (geometry.parameters + added_elements(geometry, layers))


def _host_bytes(recipe: Recipe, geometry: Geometry, layers: Mixers) -> int:
    """What a process holds before its GPU does: the student in float32, then the teacher as it computes. By then the
    student of a `kl` stage is on the GPU, or where weights are shared out on all of them."""
    student = _float32_bytes(geometry, layers) if recipe.stages else 0
    element = 4 if recipe.train.mixed_precision == "no" else 2

    def teacher(loss: str) -> int:
        return element * geometry.parameters * any(stage.loss == loss for stage in recipe.stages)

    return max(student + teacher("layer_mse"), teacher("kl"))


@dc.dataclass(frozen=True)
class _Fitted:
    """A stage as it fits a GPU."""

    stage: Stage
    """with the context_parallel and the recomputation that it takes"""
    bytes: float


class _Stages:
    """The stages of a recipe under different launches."""

    def __init__(
        self,
        recipe: Recipe,
        teacher: Teacher,
        geometry: Geometry,
        mixers: dict[str, Mixer],
        layers: Mixers,
    ) -> None:
        self._recipe, self._geometry, self._layers = recipe, geometry, layers
        self._problems = functools.partial(context_problems, teacher=teacher, mixers=mixers)
        self._known: dict[tuple[object, ...], StageMemory] = {}
        compiled = sum(compiles_layers(stage, recipe.train) for stage in recipe.stages)
        self.beside = beside_training(recipe, geometry, compiled=compiled)

    def cost(self, stage: Stage) -> StageCost:
        """What a stage costs."""
        found = {name: self._least(asked, processes) for name, asked, processes in self._launches(stage)}
        return StageCost(
            name=stage.name,
            gpu_hours=self._hours(stage),
            measured=speed_of(stage, self._geometry),
            bytes={name: round(n) for name, n in found.items() if n},
        )

    def way(self, gpus: int, gib: int) -> Way | None:
        """The first way that fits: DDP before FSDP2, and LoRA where neither does."""
        adapted = [_with_lora(stage) for stage in self._recipe.stages]
        for stages in (self._recipe.stages, adapted) if adapted != self._recipe.stages else (self._recipe.stages,):
            for processes in (Processes(gpus), Processes(gpus, sharded=True))[: min(gpus, 2)]:
                fitted = [self._fit(stage, processes, gib) for stage in stages]
                if fitted and (whole := [one for one in fitted if one is not None]) == fitted:
                    return self._way(whole, processes, gib)
        return None

    def why_not(self, gpus: int) -> str:
        """Why there is no way for so many GPUs."""
        for stage in self._recipe.stages:
            splits = (dc.replace(stage, context_parallel=parts) for parts in self._splits(stage, gpus))
            if not any(_deals_out(way, Processes(gpus)) for way in (stage, *splits)):
                return f"stage {stage.name}: {_step_rows(stage)} rows of a step cannot be dealt out evenly"
        return f"does not fit {GPU_GIB[-1]} GiB each"

    def _way(self, fitted: Sequence[_Fitted], processes: Processes, gib: int) -> Way:
        given = {stage.name: stage for stage in self._recipe.stages}
        overrides: list[str] = []
        for stage in (one.stage for one in fitted):
            for key in ("train", "context_parallel"):
                if (value := getattr(stage, key)) != getattr(given[stage.name], key):
                    overrides.append(f"stages.{stage.name}.{key}={value}")
        lora = [_LORA] * any(text.endswith(".train=lora") for text in overrides)
        split = ["context_parallel"] * any(one.stage.context_parallel > 1 for one in fitted)
        kind = ["FSDP2" if processes.sharded else "DDP"] * (processes.count > 1)
        return Way(
            gpus=processes.count,
            gib=gib,
            how=", ".join([*kind, *split, *lora]) or "as it is",
            sharded=processes.sharded,
            overrides=tuple(overrides),
            bytes=round(max(one.bytes for one in fitted)),
            gpu_hours=sum(self._hours(one.stage) for one in fitted),
            beside=self.beside.hours,
        )

    def _hours(self, stage: Stage) -> float:
        return gpu_hours(stage, self._geometry, self._layers)

    def _launches(self, stage: Stage) -> Iterator[tuple[str, Stage, Processes]]:
        """The columns of memory: name, stage, processes."""
        most = GPUS[-1]
        if stage.context_parallel == 1:
            yield "1 GPU", stage, ONE
            yield "DDP", stage, Processes(most)
            for gpus in GPUS[1:]:
                yield f"FSDP2 x {gpus}", stage, Processes(gpus, sharded=True)
        if parts := list(self._splits(stage, most)):
            split = dc.replace(stage, context_parallel=parts[-1])
            yield f"context_parallel {parts[-1]} x {most}", split, Processes(most, sharded=True)
        if (adapted := _with_lora(stage)) != stage and stage.context_parallel == 1:
            yield f"{_LORA} x 1", adapted, ONE

    def _least(self, stage: Stage, processes: Processes) -> float:
        """Bytes at least; 0 if its rows cannot be dealt out so."""
        if not _deals_out(stage, processes):
            return 0
        every = (self._memory(stage, again) for again in _recomputations(stage))
        return min(estimate.least(stage.seq_len, _rows(stage), processes) for estimate in every)

    def _fit(self, stage: Stage, processes: Processes, gib: int) -> _Fitted | None:
        """The stage as it fits; rows are split over processes where one GPU does not hold them."""
        splits = self._splits(stage, processes.count) if processes.sharded else []
        asked = [stage] if stage.context_parallel == 1 else []
        for way in (*asked, *(dc.replace(stage, context_parallel=parts) for parts in splits)):
            for again in _recomputations(way) if _deals_out(way, processes) else ():
                estimate = self._memory(way, again)
                if (total := estimate.total(way.seq_len, _rows(way), gib * GIB, processes)) <= gib * GIB * USABLE:
                    twice = (
                        way if again == way.gradient_checkpointing else dc.replace(way, gradient_checkpointing=again)
                    )
                    return _Fitted(twice, total)
        return None

    def _splits(self, stage: Stage, count: int) -> Iterator[int]:
        """Numbers of processes that can hold a row together, the recipe's own alone where it has one."""
        for parts in range(2, count + 1):
            asked = dc.replace(stage, context_parallel=parts)
            own = stage.context_parallel in (1, parts)
            even = count % parts == 0 and stage.seq_len % parts == 0
            if own and even and not self._problems(asked):
                yield parts

    def _memory(self, stage: Stage, checkpointing: bool) -> StageMemory:
        key = (stage.name, stage.train, stage.context_parallel, checkpointing)
        if key not in self._known:
            self._known[key] = self._estimate(stage, checkpointing)
        return self._known[key]

    def _estimate(self, stage: Stage, checkpointing: bool) -> StageMemory:
        train = self._recipe.train
        return stage_memory(
            self._geometry,
            self._layers,
            stage,
            lora_rank=train.lora_rank,
            bf16=train.mixed_precision != "no",
            checkpointing=checkpointing,
            cuda_graphs=train.cuda_graphs is True,
            compiled=compiles_layers(stage, train),
            shared=still_the_teachers(self._recipe.stages, stage),
        )


def _with_lora(stage: Stage) -> Stage:
    """The stage with the teacher's weights frozen beside LoRA, where it trains them."""
    return dc.replace(stage, train="lora") if stage.train == "all" and stage.loss != "layer_mse" else stage


def _rows(stage: Stage) -> int:
    """Rows of the smallest pass."""
    return 1 if stage.micro_batch == "auto" else stage.micro_batch


def _step_rows(stage: Stage) -> int:
    """Rows of an optimizer step."""
    return -(-stage.batch_tokens // stage.seq_len)


def _recomputations(stage: Stage) -> tuple[bool, ...]:
    """Whether activations may be computed twice, once first."""
    asked = stage.gradient_checkpointing
    return (asked,) if asked != "auto" else (False,) if stage.loss == "layer_mse" else (False, True)


def _deals_out(stage: Stage, processes: Processes) -> bool:
    """Whether a step's rows can be dealt out evenly."""
    return _step_rows(stage) % max(1, processes.count // stage.context_parallel) == 0
