"""The plan as data and as the tables a person reads."""

import dataclasses as dc
import shlex
from collections import Counter
from typing import Any

from sse_convert.mixers import Mixer, SSEMixer, mixer_to_dict
from sse_convert.recipe.units import format_count
from sse_convert.report import format_bytes, format_number, table, time_in_words
from sse_convert.surgery.costs import GPUS, Costs
from sse_convert.surgery.costs_report import cost_lines, fewest_gpus, gpus_in_words, launch_command
from sse_convert.surgery.memory import GIB, GPU_GIB

CPU_HOURS = 24
"""of training, up to which a plan offers the CPU"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """One layer of the plan."""

    index: int
    """layer index"""
    source: str
    """the teacher's layer: full, sliding with its window, or linear, which stays as it is and is not counted"""
    mixer: str
    """name of the new mixer, or full"""
    added_parameters: int
    """elements of the new tensors"""
    bytes_per_token: int
    """cache growth per token of context, 0 for a constant state"""
    constant_bytes: int
    """state or window bytes of one sequence, whatever its length"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceRow:
    """What `layers.select` leaves to choose, and what choosing takes."""

    keep: int
    """how many stay softmax"""
    among: list[int]
    """numbers of what there is to choose from"""
    what: str
    """what is chosen, in words"""
    passes: int
    """forward passes of the model with others replaced in each"""
    tokens: int
    """of each pass"""
    flops: float
    """of all passes, counted as the teacher's"""
    gpu_hours: float
    """of the GPU that was measured (see `surgery/speed.py`)"""
    cpu_hours: float | None = None
    """on this machine's CPU; None where it is not asked"""
    bytes: int
    """weights on the one device that chooses"""

    def line(self) -> str:
        """The choice for a person."""
        here = "" if (self.cpu_hours or 0) < 1 / 60 else f", about {time_in_words(self.cpu_hours or 0)} on this CPU"
        costs = f"{format_number(self.flops)} FLOPs ({time_in_words(self.gpu_hours)} on one GPU{here})"
        return (
            f"to be chosen: {self.keep} of {len(self.among)} {self.what} stay; at most {self.passes} forward passes "
            f"over {self.tokens:,} tokens, {costs}, with {format_bytes(self.bytes)} of weights on one device"
        )


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class CacheRow:
    """Cache and state bytes of one sequence at one length, and forward FLOPs of a token of it."""

    length: int
    teacher_bytes: int
    hybrid_bytes: int
    teacher_flops: float
    hybrid_flops: float


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """One training stage of the plan."""

    name: str
    loss: str
    tokens: int
    steps: int
    seq_len: int
    flops: float
    """all tokens, teacher passes and recomputation included"""
    trained_parameters: int
    memory_bytes: int
    """one GPU, at the recipe's seq_len, micro_batch and checkpointing; the least that is needed where those are auto"""
    cpu_bytes: int | None = None
    """of this machine's memory, where it computes on its CPU"""
    cpu_hours: float | None = None
    """of this machine's CPU, about"""
    longest: dict[str, dict[str, int]]
    """GPU memory in GiB -> tokens of the longest row that fits, plain and with gradient checkpointing"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class NextStep:
    """What to do after planning."""

    weights_missing_in: str
    """folder or repository that holds a config.json alone; empty where there are weights"""
    converted: str | None
    """folder for `convert`, where `run` lacks text; None where it can be run"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The result of planning."""

    model: str
    revision: str | None
    model_type: str
    recipe_hash: str
    mixers: dict[str, Mixer]
    """mixers in use, by name"""
    layers: list[LayerRow]
    """where layers are to be chosen, some choice of as many"""
    choice: ChoiceRow | None
    """None where the recipe names the layers"""
    parameters: int
    """of the teacher"""
    active_parameters: int
    """of these, what a token meets: all, but for experts that it is not sent to"""
    active_bytes: int
    """what is read of them to generate a token: all but an input embedding that is not the head as well"""
    added_parameters: int
    new_shard_bytes: int
    cache: list[CacheRow]
    """at the teacher's context first, then at shorter lengths"""
    break_even: int | None
    """shortest length from which the hybrid's cache is no larger than the teacher's"""
    stages: list[StageRow]
    cpu_beside_hours: float | None
    """of this machine's CPU, for calibrating and measuring; None where it is to run on GPUs"""
    costs: Costs
    """memory by way of launching, GPU hours, disk, download"""
    notes: list[str]
    next_step: NextStep
    command: str = "sse-convert run RECIPE"
    """what runs the recipe in one process"""

    @property
    def warnings(self) -> list[str]:
        """A cache that is larger than the teacher's at the model's own context, with what makes it smaller."""
        own, sse = self.cache[0], [mixer for mixer in self.mixers.values() if isinstance(mixer, SSEMixer)]
        ways = "fewer num_partitions, " * any(mixer.num_partitions > 1 for mixer in sse)
        ways += "state_heads: kv, " * any(mixer.state_heads == "query" for mixer in sse) + "fewer converted layers"
        return [
            f"the cache of {format_count(own.length)} tokens, the whole context, is larger than the teacher's: "
            f"{format_bytes(own.hybrid_bytes)} for {format_bytes(own.teacher_bytes)}; smaller with {ways}"
        ] * (own.hybrid_bytes > own.teacher_bytes)

    @property
    def layer_names(self) -> list[str]:
        """Mixer name of each layer."""
        return [row.mixer for row in self.layers]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        data = dc.asdict(self)
        data["mixers"] = {name: mixer_to_dict(mixer) for name, mixer in self.mixers.items()}
        data["warnings"] = self.warnings
        data["next_command"] = self.next_command()
        return data

    def next_command(self) -> str:
        """The command to give now: on the fewest GPUs, of 80 GiB where those are enough; that of one process where
        nothing fits."""
        if self.next_step.converted is not None:
            return f"{self.command.replace(' run ', ' convert ', 1)} -o {shlex.quote(self.next_step.converted)}"
        chosen = fewest_gpus(self.costs)
        return self.command if chosen is None else launch_command(chosen, self.command)

    def lines(self) -> list[str]:
        """The plan for a person."""
        share = self.added_parameters / self.parameters
        counts = Counter(self.layer_names)
        told = [f"warning: {text}" for text in self.warnings] + [f"note: {text}" for text in self.notes]
        return [
            f"{self.model}: {self.model_type}, {len(self.layers)} layers, {format_number(self.parameters)} parameters"
            + self._active(),
            f"becomes {', '.join(f'{count} {name}' for name, count in counts.items())}; adds "
            f"{format_number(self.added_parameters)} parameters ({share:.2%}, {format_bytes(self.new_shard_bytes)})",
            *([] if self.choice is None else [self.choice.line()]),
            "",
            *self._layer_table(),
            "",
            "cache and state of one sequence:",
            *self._cache_table(),
            self._break_even_line(),
            *self._stage_lines(),
            *cost_lines(self.costs, self.command),
            *(["", *told] if told else []),
            "",
            self._next_line(),
        ]

    def _next_line(self) -> str:
        where = self.next_step.weights_missing_in
        way = fewest_gpus(self.costs)
        if way is None and self.costs.stages and not self.next_step.converted:
            return f"next: no command, since none of {', '.join(map(str, GPUS))} GPUs will do, for the reasons above"
        hours = [row.cpu_hours for row in self.stages if row.cpu_hours is not None]
        here = "here or " * (0 < sum(hours) < CPU_HOURS)
        on = "" if way is None or self.next_step.converted else f", {here}on {gpus_in_words(way)}"
        return f"next{on}{f', once {where} has the weights' if where else ''}: {self.next_command()}"

    def _active(self) -> str:
        if self.active_parameters == self.parameters:
            return ""
        read = format_bytes(self.active_bytes)
        return f", {format_number(self.active_parameters)} of them active ({read} read per token)"

    def _layer_table(self) -> list[str]:
        """One line for each layer; where layers are to be chosen, for all that are alike, the first column counting."""
        header = (
            "layer" if self.choice is None else "layers",
            "teacher",
            "becomes",
            "new parameters",
            "cache per token",
        )
        alike = Counter(dc.replace(row, index=0) for row in self.layers)
        counted = [(str(row.index), row) for row in self.layers]
        if self.choice is not None:
            counted = [(str(count), row) for row, count in alike.items()]
        return table(
            (*header, "constant"),
            [
                (
                    first,
                    row.source,
                    row.mixer,
                    format_number(row.added_parameters),
                    format_bytes(row.bytes_per_token),
                    format_bytes(row.constant_bytes),
                )
                for first, row in counted
            ],
        )

    def _cache_table(self) -> list[str]:
        rows = [
            (
                format_count(row.length),
                format_bytes(row.teacher_bytes),
                format_bytes(row.hybrid_bytes),
                f"{row.hybrid_bytes / row.teacher_bytes:.1%}",
                format_number(row.teacher_flops),
                format_number(row.hybrid_flops),
            )
            for row in self.cache
        ]
        return table(("length", "teacher", "hybrid", "ratio", "teacher FLOPs/token", "hybrid FLOPs/token"), rows)

    def _break_even_line(self) -> str:
        if self.break_even is None:
            return "the cache never becomes smaller than the teacher's"
        return f"no larger than the teacher's from {self.break_even:,} tokens on"

    def _stage_lines(self) -> list[str]:
        if not self.stages:
            return []
        gpus = [str(gib) for gib in GPU_GIB]
        rows = [
            (
                row.name,
                row.loss,
                format_number(row.tokens),
                f"{row.steps:,}",
                f"{row.seq_len:,}",
                format_number(row.flops),
                f"{row.memory_bytes / GIB:.1f} GiB",
                *(_longest(row.longest[gib]) for gib in gpus),
            )
            for row in self.stages
        ]
        header = ("stage", "loss", "tokens", "steps", "seq_len", "FLOPs", "memory", *(f"{gib} GiB" for gib in gpus))
        return [
            "",
            "stages, with the estimated memory on one GPU (at least, where micro_batch and gradient_checkpointing are",
            "auto, which take what there is) and the longest row that fits GPUs of these sizes, plain /",
            "with gradient checkpointing (a row stays on one GPU, but where context_parallel splits it):",
            *table(header, rows),
            *self._cpu_lines(),
        ]

    def _cpu_lines(self) -> list[str]:
        """The same of this machine, without a GPU."""
        if self.cpu_beside_hours is None:
            return []
        beside, chosen = self.cpu_beside_hours, 0.0 if self.choice is None else self.choice.cpu_hours or 0.0
        whole = beside + chosen + sum(row.cpu_hours or 0.0 for row in self.stages)
        return [
            *(
                f"{row.name} without a GPU: {row.cpu_bytes / GIB:.1f} GiB, {_about(row.cpu_hours)} on this CPU"
                for row in self.stages
                if row.cpu_bytes is not None and row.cpu_hours is not None
            ),
            f"calibrating and measuring without a GPU: {_about(beside)}; in all {_about(whole)}",
        ]


def _about(hours: float) -> str:
    words = time_in_words(hours)
    return words if words.startswith("below") else f"about {words}"


def _longest(tokens: dict[str, int]) -> str:
    return " / ".join(map(_length, tokens.values()))


def _length(tokens: int) -> str:
    """Tokens in units of 1024, rounded down: 98304 -> 96K."""
    if tokens >= 1 << 20:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}K" if tokens >= 1 << 10 else "-"
