"""Tables of the page *Why these recipes*: rates and budgets by the rule."""

from collections.abc import Callable

from docs.markdown import table
from sse_convert.recipe.recommended import (
    LONGEST_ROW,
    ModelSizes,
    measured,
    recommended_stages,
    scaled_rates,
)
from sse_convert.recipe.units import format_count

WIDTHS = (192, 512, 1024, 2048, 4096, 5120)
BUDGETS = (32_000_000, 135_000_000, 600_000_000, 8_000_000_000)


def recipe_rates() -> str:
    """The rates of the first stage by width."""
    stage = measured().stages[0]
    rates = {width: scaled_rates(stage, width) for width in WIDTHS}
    head = ("width", "attention that the teacher has", "what conversion adds")
    return "\n".join(table(head, [(str(w), *(f"{rate:g}" for rate in rates[w].values())) for w in WIDTHS]))


def recipe_budgets() -> str:
    """Tokens, rows and steps by parameters, at a context of 32K."""
    cells = []
    for parameters in BUDGETS:
        sizes = ModelSizes(width=512, parameters=parameters, positions=LONGEST_ROW, full=(True,))
        stages = recommended_stages(sizes)
        shown = [[format_count(stage[key]) for stage in stages] for key in ("tokens", "seq_len", "batch_tokens")]
        cells.append((f"{parameters // 1_000_000:,}M", *(" and ".join(values) for values in shown)))
    return "\n".join(table(("parameters", "tokens", "tokens of a row", "tokens of a step"), cells))


BLOCKS: dict[str, Callable[[], str]] = {
    "recipe-rates": recipe_rates,
    "recipe-budgets": recipe_budgets,
}
