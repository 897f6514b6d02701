"""Costs as a person reads them, and the commands that they lead to."""

import shlex

from sse_convert.report import counted, format_bytes, table, time_in_words
from sse_convert.surgery.costs import GPUS, Costs, Way
from sse_convert.surgery.memory import GIB, GPU_GIB
from sse_convert.surgery.speed import Beside, measured_line

USUAL_GIB = (80, 141)
"""memory of the GPUs that commands are chosen for, the first that is enough"""


def launch_command(way: Way, command: str) -> str:
    """The command line of a way.

    Args:
        way: how to launch, and what the recipe is told for it.
        command: runs the recipe in one process, beginning with `sse-convert`.
    """
    sets = [part for text in way.overrides for part in ("--set", text)]
    return " ".join([way.launcher(), command.removeprefix("sse-convert "), *([shlex.join(sets)] if sets else [])])


def usual_way(costs: Costs, gpus: int) -> Way | None:
    """The way for a number of GPUs of the usual memory, with the least memory that it takes; None if nothing fits."""
    chosen = next((way for gib in USUAL_GIB if (way := costs.way(gpus, gib)) is not None), None)
    if chosen is None:
        return None
    return least_memory(costs, chosen)


def least_memory(costs: Costs, way: Way) -> Way:
    """The same way on GPUs of the least usual memory that it takes."""
    same = [w for w in costs.ways if (w.gpus, w.how, w.overrides) == (way.gpus, way.how, way.overrides)]
    return min([*same, way], key=lambda way: way.gib)


def fewest_gpus(costs: Costs) -> Way | None:
    """The way on the fewest GPUs that needs no LoRA, or else with it; None if nothing fits or there is no training."""
    found = [way for gpus in GPUS if (way := usual_way(costs, gpus)) is not None]
    return next((way for way in found if not way.lora), found[0] if found else None)


def gpus_in_words(way: Way) -> str:
    """Number and memory of a way's GPUs."""
    return f"{counted(way.gpus, 'GPU')} of {way.gib} GiB or more"


def cost_lines(costs: Costs, command: str) -> list[str]:
    """Memory by way of launching, what fits, hours, commands, disk and download."""
    if not costs.stages:
        return ["", *_storage_lines(costs)]
    training = ["", *_memory_lines(costs), "", *_fitting_lines(costs), "", *_command_lines(costs, command)]
    return [*training, "", *_storage_lines(costs)]


def _memory_lines(costs: Costs) -> list[str]:
    columns = list(dict.fromkeys(name for stage in costs.stages for name in stage.bytes))
    rows = [
        (stage.name, time_in_words(stage.gpu_hours), *(_gib(stage.bytes.get(name)) for name in columns))
        for stage in costs.stages
    ]
    return [
        "time on one GPU, with activations computed once; GiB of each at least, by way of launching (rows one at a",
        "time, activations computed twice; times of ways that need that are longer):",
        *table(("stage", "time", *columns), rows),
        *measured_line(stage.measured for stage in costs.stages).splitlines(),
        *_beside_lines(costs.beside),
    ]


def _beside_lines(beside: Beside) -> list[str]:
    parts = {
        "compiling": beside.compiling,
        "calibrating": beside.calibrating,
        "evaluating": beside.evaluating,
        "all else": beside.all_else,
    }
    said = ", ".join(f"{hours * 3600:.0f} s {name}" for name, hours in parts.items() if round(hours * 3600))
    return [
        f"a run takes about {time_in_words(beside.hours)} beside its steps and its choice: {said}",
        "(as measured of SmolLM2 on an H200; evaluating by FLOPs, as steps)",
    ]


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f}"


def _fitting_lines(costs: Costs) -> list[str]:
    rows = [(str(gpus), *(_cell(costs.way(gpus, gib)) for gib in GPU_GIB)) for gpus in GPUS]
    return [
        "the simplest way that fits, and its time (if several GPUs lose nothing to each other; two were tried):",
        *table(("GPUs", *(f"of {gib} GiB" for gib in GPU_GIB)), rows),
    ]


def _cell(way: Way | None) -> str:
    return "-" if way is None else f"{way.how} ({time_in_words(way.hours)})"


def _command_lines(costs: Costs, command: str) -> list[str]:
    lines = []
    for gpus in GPUS:
        if (way := usual_way(costs, gpus)) is None:
            lines.append(f"{counted(gpus, 'GPU')}: {costs.refused[gpus]}")
        else:
            lines.append(f"{gpus_in_words(way)}: {launch_command(way, command)}")
    return lines


def _storage_lines(costs: Costs) -> list[str]:
    lines = [
        f"download: {format_bytes(costs.download_bytes)} of {format_bytes(costs.weight_bytes)} weights; disk: "
        f"{format_bytes(costs.disk_bytes)} at most for the folders of a run"
    ]
    if costs.stages:
        lines.append(
            f"host memory while models are read: {format_bytes(costs.host_bytes)} for each process, with FSDP2 for all "
            "of them"
        )
    return lines
