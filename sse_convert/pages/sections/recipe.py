"""The recipe, as it was resolved."""

from typing import Any

import yaml

from sse_convert.pages.blocks import Block, Code, Fold, Missing, Section, Table
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import run_command
from sse_convert.report import format_number, format_rate


def recipe(run: Run) -> Section:
    """Stages and text as tables, the whole recipe on a click."""
    if run.recipe is None:
        blocks: tuple[Block, ...] = (Missing("This checkpoint carries no recipe.", run_command(run)),)
    else:
        text = yaml.safe_dump(run.recipe, sort_keys=False)
        blocks = (*_stages(run.recipe), Fold("The whole recipe, defaults included", (Code(text),)))
    return Section(anchor="recipe", title="Recipe", blocks=blocks)


def _stages(recipe: dict[str, Any]) -> tuple[Table, ...]:
    rows = tuple(
        (
            stage["name"],
            stage["loss"],
            format_number(stage["tokens"]),
            f"{stage['seq_len']:,}",
            format_rate(stage),
            stage["train"],
        )
        for stage in recipe["stages"]
    )
    header = ("stage", "loss", "tokens", "row length", "learning rate", "trained")
    return (Table(caption="Training stages", header=header, rows=rows),) if rows else ()
