"""Tables of the page *Why these recipes*: rates and budgets by the rule."""

import dataclasses as dc
from collections.abc import Callable

from docs.markdown import table
from sse_convert.recipe.recommended import (
    HEADS,
    LAYERS,
    LONGEST_ROW,
    MEASURED_SIZE,
    Measured,
    ModelSizes,
    recommended_stages,
    scaled_rates,
)
from sse_convert.recipe.units import format_count

BUDGETS = (32_000_000, 135_000_000, 600_000_000, 8_000_000_000)
RULES = {"heads": HEADS, "layers": LAYERS}
"""what is kept -> what was measured"""
RATES = (
    ("heads", 576, 0.17),
    ("heads", 896, 0.018),
    ("heads", 1024, 0.02),
    ("heads", 4096, 0.02),
    ("layers", 512, 0.02),
    ("layers", 1024, 0.02),
    ("layers", 4096, 0.02),
)
"""what is kept, width, root mean square of the weights"""


def recipe_rates() -> str:
    """The rates of the first stage: beside layers by width, beside heads by the size of weights."""
    head = ("kept", "width", "size of weights", "the teacher's attention", "its other weights", "what is new")
    return "\n".join(table(head, [_rates(*row) for row in RATES]))


def _rates(kept: str, width: int, size: float) -> list[str]:
    measured = RULES[kept]
    sizes = dc.replace(_sizes(0, measured), width=width, weight_size=size)
    rates = scaled_rates(sizes, measured.recipe.stages[0], whole=measured.by_heads)
    shown = [f"{rates[group]:g}" if group in rates else "-" for group in ("mixers", "rest", "new")]
    return [kept, str(width), f"{size:g}" if measured.by_heads else "any", *shown]


def recipe_budgets() -> str:
    """Tokens, rows and steps by parameters, at a context of 32K."""
    cells = [
        (f"{parameters // 1_000_000:,}M", kept, *_budget(parameters, measured))
        for parameters in BUDGETS
        for kept, measured in RULES.items()
    ]
    return "\n".join(table(("parameters", "kept", "tokens", "tokens of a row", "tokens of a step"), cells))


def _budget(parameters: int, measured: Measured) -> list[str]:
    stages = recommended_stages(_sizes(parameters, measured))
    shown = [[format_count(stage[key]) for stage in stages] for key in ("tokens", "seq_len", "batch_tokens")]
    return [" and ".join(values) for values in shown]


def _sizes(parameters: int, measured: Measured) -> ModelSizes:
    """Of a model of the measured width."""
    return ModelSizes(
        width=measured.width,
        weight_size=MEASURED_SIZE,
        parameters=parameters,
        positions=LONGEST_ROW,
        full=(True,),
        heads=(8 if measured.by_heads else 0,),
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "recipe-rates": recipe_rates,
    "recipe-budgets": recipe_budgets,
}
