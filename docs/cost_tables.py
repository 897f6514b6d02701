"""Tables of the page on costs, from what `plan` works out and from the peaks that were measured."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.training.estimates import Row, rows
from docs.markdown import shown
from sse_convert.recipe import load_recipe
from sse_convert.report import format_bytes, format_number
from sse_convert.surgery.costs_report import time_in_words
from sse_convert.surgery.job import Job
from sse_convert.surgery.memory import GIB
from sse_convert.surgery.plan import make_plan
from sse_convert.surgery.plan_report import Plan
from sse_convert.surgery.speed import measured_line
from tests.model_configs import model_config
from tests.surgery.synthetic import teacher_from_config
from tools.measured_speed import SOURCES

QWEN3_32B = {"num_hidden_layers": 64, "max_window_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600}
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3-0.6b", {}),
    "Qwen3-1.7B": ("qwen3-1.7b", {}),
    "Qwen3-4B": ("qwen3-4b", {}),
    "Qwen3-8B": ("qwen3-8b", {}),
    "Qwen3-14B": ("qwen3-14b", {}),
    "Qwen3-32B": ("qwen3-14b", QWEN3_32B),
    "gpt-oss-20b": ("gpt-oss-20b", {}),
    "Qwen3-30B-A3B": ("qwen3-30b-a3b", {}),
}
"""model -> recipe, and what its configuration has instead of that of the recipe's own model"""
MACHINES = ((1, 24), (1, 80), (8, 80), (8, 141))
"""number of GPUs, GiB of each"""


@functools.cache
def planned(model: str) -> Plan:
    """The plan of a model by its configuration alone."""
    name, changes = MODELS[model]
    return make_plan(Job.of(load_recipe(name), lambda *_: teacher_from_config(model_config(name, changes), model)))


def machines() -> str:
    """Models by machines: the way that fits, hours on the clock, memory of a GPU at least."""
    columns: dict[str, Callable[[str], str]] = {
        "model, recipe": lambda model: f"{model}, `{MODELS[model][0]}`",
        "tokens, GPU hours": _tokens_and_hours,
        **{f"{gpus} x {gib} GB": functools.partial(_way, gpus=gpus, gib=gib) for gpus, gib in MACHINES},
    }
    speeds = (stage.measured for model in MODELS for stage in planned(model).costs.stages)
    return f"{shown(columns, MODELS)}\n\n{' '.join(measured_line(speeds).split())}."


def _tokens_and_hours(model: str) -> str:
    plan = planned(model)
    return f"{format_number(sum(stage.tokens for stage in plan.stages))}, {plan.costs.gpu_hours:,.0f}"


def _way(model: str, *, gpus: int, gib: int) -> str:
    way = planned(model).costs.way(gpus, gib)
    return "does not fit" if way is None else f"{way.how}: {time_in_words(way.hours)}, {way.bytes / GIB:.0f} GiB"


def launches() -> str:
    """Models by ways of launching: memory of a GPU at least, in the stage that needs most; disk and download."""

    def need(model: str, *ways: str) -> str:
        stages = planned(model).costs.stages
        found = [[stage.bytes[way] for stage in stages if way in stage.bytes] for way in ways]
        return ", ".join(f"{max(sizes) / GIB:.0f}" if sizes else "-" for sizes in found)

    columns: dict[str, Callable[[str], str]] = {
        "model": str,
        "1 GPU, DDP": lambda model: need(model, "1 GPU", "DDP"),
        "FSDP2 x 2, x 8": lambda model: need(model, "FSDP2 x 2", "FSDP2 x 8"),
        "context_parallel 8 x 8": lambda model: need(model, "context_parallel 8 x 8"),
        "download": lambda model: format_bytes(planned(model).costs.weight_bytes),
        "disk of a run": lambda model: format_bytes(planned(model).costs.disk_bytes),
    }
    return shown(columns, MODELS)


def peaks() -> str:
    """Estimates beside measured peaks."""
    columns: dict[str, Callable[[Row], str]] = {
        "recipe, loss": lambda row: f"{row.record['recipe']}, {_loss(row)}",
        "a pass": lambda row: row.passes,
        "estimated, GiB": lambda row: f"{row.estimated / GIB:.1f}",
        "measured, GiB": lambda row: f"{row.measured / GIB:.1f}",
        "apart": lambda row: f"{row.estimated / row.measured - 1:+.0%}",
        "commit": lambda row: row.record["commit"],
    }
    return shown(columns, rows())


def speeds() -> str:
    """Steps of long stages, beside those that GPU hours are scaled from: as measured and as estimated."""
    return "\n".join(
        f"- `{row.record['recipe']}`, {_loss(row)}, {row.passes}: {row.tokens_per_second:,.0f} tokens/s measured, "
        f"{row.estimated_tokens_per_second:,.0f} estimated ({row.record['commit']})."
        for row in rows()
        if row.as_long and row.name not in {name for names in SOURCES.values() for name in names}
    )


def _loss(row: Row) -> str:
    return row.record["stage"]["loss"] + {"mixers": ", converted layers alone", "lora": ", LoRA"}.get(row.train, "")


BLOCKS: dict[str, Callable[[], str]] = {
    "costs": machines,
    "cost-launches": launches,
    "cost-peaks": peaks,
    "cost-speeds": speeds,
}
