"""The recipe, as it was resolved."""

from typing import Any

import yaml

from sse_convert.pages.blocks import Block, Code, Fold, Missing, Section, Table
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import run_command
from sse_convert.report import format_number, format_rate


def recipe(run: Run) -> Section:
    """Stages that took place as a table, the whole recipe on a click."""
    if run.recipe is None:
        blocks: tuple[Block, ...] = (Missing("This checkpoint carries no recipe.", run_command(run)),)
    else:
        text = yaml.safe_dump(run.recipe, sort_keys=False)
        blocks = (*_stages(_trained(run, run.recipe)), Fold("The whole recipe, defaults included", (Code(text),)))
    return Section(anchor="recipe", title="Recipe", blocks=blocks)


def _trained(run: Run, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages that the checkpoint has behind it, as far as it says so."""
    stages: list[dict[str, Any]] = recipe["stages"]
    origin = None if run.model is None else run.model.provenance
    return stages if origin is None else origin.took_place(stages)


def _stages(stages: list[dict[str, Any]]) -> tuple[Table, ...]:
    rows = tuple(
        (
            stage["name"],
            stage["loss"],
            format_number(stage["tokens"]),
            f"{stage['seq_len']:,}",
            format_rate(stage),
            stage["train"],
        )
        for stage in stages
    )
    header = ("stage", "loss", "tokens", "row length", "learning rate", "trained")
    return (Table(caption="Training stages that took place", header=header, rows=rows),) if rows else ()
