"""What training did, stage by stage."""

from typing import Any

from sse_convert.pages.blocks import Block, Figures, Fold, Missing, Section, Table
from sse_convert.pages.collect import Run, RunStep
from sse_convert.pages.commands import run_command
from sse_convert.pages.figures.training import loss_curves
from sse_convert.report import format_number


def training(run: Run) -> Section:
    """Loss curves, a table of the stages, errors of each layer."""
    stages = run.trained
    blocks: list[Block] = []
    if not stages:
        blocks.append(Missing("No training stage has been run.", run_command(run)))
    else:
        blocks += [Figures(tuple(loss_curves(stages))), _table(stages)]
        blocks += [_layers(step) for step in stages if _errors(step)]
    return Section(anchor="training", title="Training", blocks=tuple(blocks))


def _table(stages: tuple[RunStep, ...]) -> Table:
    header = ("stage", "loss", "tokens", "steps", "first", "last", "held-out", "tokens/s", "steps left out")
    return Table(caption="Stages", header=header, rows=tuple(_row(step) for step in stages))


def _row(step: RunStep) -> tuple[str, ...]:
    if step.record is None:
        done = step.metrics[-1] if step.metrics else {"tokens": 0, "step": 0}
        return (f"{step.name} (unfinished)", "", format_number(done["tokens"]), f"{done['step']:,}", "", "", "", "", "")
    r = step.record["report"]
    speed = f"{r['tokens'] / r['seconds']:,.0f}" if r["seconds"] else ""
    losses = ("" if r[key] is None else f"{r[key]:.4g}" for key in ("loss_first", "loss_last"))
    return (
        step.name,
        r["loss"],
        format_number(r["tokens"]),
        f"{r['steps']:,}",
        *losses,
        _held_out(r.get("held_out") or {}),
        speed,
        str(r["skipped_steps"]),
    )


def _held_out(found: dict[str, Any]) -> str:
    """Last figure on held-out text, and the best where that is another."""
    last, best = found.get("last"), found.get("best")
    if last is None:
        return ""
    text = f"{last['value']:.4g}"
    return text if best in (None, last) else f"{text} (best {best['value']:.4g} at step {best['step']:,})"


def _errors(step: RunStep) -> dict[str, dict[str, float]]:
    """Error of each layer before and after, of a stage that trains layers apart."""
    found: dict[str, dict[str, float]] = ((step.record or {}).get("report", {}).get("details") or {}).get("layers", {})
    return found


def _layers(step: RunStep) -> Fold:
    rows = tuple((i, *(_number(e[key]) for key in ("before", "after"))) for i, e in _errors(step).items())
    title = f"{step.name}: error of each layer, as a part of its teacher's power"
    return Fold(title, (Table(caption=title, header=("layer", "before", "after"), rows=rows),))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
