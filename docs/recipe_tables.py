"""Tables of the page *Why these recipes*: rates and budgets by the rule."""

from collections.abc import Callable

from docs.markdown import table
from sse_convert.recipe.recommended import (
    HEADS,
    LAYERS,
    LONGEST_ROW,
    Measured,
    ModelSizes,
    recommended_stages,
    scaled_rates,
)
from sse_convert.recipe.units import format_count

WIDTHS = (192, 512, 1024, 2048, 4096, 5120)
BUDGETS = (32_000_000, 135_000_000, 600_000_000, 8_000_000_000)
RULES = {"heads": HEADS, "layers": LAYERS}
"""what is kept -> what was measured"""


def recipe_rates() -> str:
    """The rates of the first stage by width."""
    head = ("width", *(f"{kept}: {of}" for kept in RULES for of in ("the teacher's attention", "what is new")))
    return "\n".join(table(head, [(str(width), *_rates(width)) for width in WIDTHS]))


def _rates(width: int) -> list[str]:
    found: list[str] = []
    for measured in RULES.values():
        rates = scaled_rates(measured, measured.recipe.stages[0], width, whole=False)
        found += [f"{rate:g}" for rate in rates.values()]
    return found


def recipe_budgets() -> str:
    """Tokens, rows and steps by parameters, at a context of 32K."""
    cells = [
        (f"{parameters // 1_000_000:,}M", kept, *_budget(parameters, measured))
        for parameters in BUDGETS
        for kept, measured in RULES.items()
    ]
    return "\n".join(table(("parameters", "kept", "tokens", "tokens of a row", "tokens of a step"), cells))


def _budget(parameters: int, measured: Measured) -> list[str]:
    heads = 8 if measured.by_heads else 0
    sizes = ModelSizes(width=512, parameters=parameters, positions=LONGEST_ROW, full=(True,), heads=(heads,))
    stages = recommended_stages(sizes)
    shown = [[format_count(stage[key]) for stage in stages] for key in ("tokens", "seq_len", "batch_tokens")]
    return [" and ".join(values) for values in shown]


BLOCKS: dict[str, Callable[[], str]] = {
    "recipe-rates": recipe_rates,
    "recipe-budgets": recipe_budgets,
}
