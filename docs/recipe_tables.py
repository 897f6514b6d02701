"""Tables of the page *Why these recipes*: what was measured, the rule, and its check at several widths."""

import json
from collections.abc import Callable

from benchmarks.quality.widths import figures
from docs.examples import ROOT
from docs.markdown import table
from docs.quality_tables import SEEDS_0_7, divergences, entry, gaps, lines, needles, seeds
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
CHECK = ROOT / "benchmarks" / "quality" / "widths.json"


def recipe_parts() -> str:
    """The measured recipe, and the same without one of its parts."""
    return lines(
        ("changed", "softmax layers"),
        [seeds(), gaps(8192), divergences(8192), needles(8192)],
        [
            entry("nothing: the measured recipe", "0 and 7", runs="wordings_qwen-select-frozentext"),
            entry("16M tokens", "0 and 7", runs="wordings_qwen-select-frozentext-16M"),
            entry("planted rows, answers of the teacher", "0 and 7", runs="wordings_qwen-select-frozenteacher"),
            entry("all weights trained", "0 and 7", runs="wordings_qwen-select-text"),
            entry("all weights, planted rows, answers of the row", "0 and 7", runs="wordings_qwen-select-row"),
            entry("all weights, planted rows in the wording that is asked", "0 and 7", runs=SEEDS_0_7),
            entry("- windows without SSE", "0 and 7", runs="keep-0-7_window_seed0"),
            entry("- five times the rates, three times the tokens", "0 and 7", runs="keep-0-7_26M"),
            entry("- layers that retrieve nothing, 14M tokens", "4 and 9", runs="keep-4-9_14M"),
            entry("- these without the window", "4 and 9", runs="keep-4-9_sse"),
        ],
    )


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


def recipe_widths() -> str:
    """The check of the rule, as far as it ran."""
    if not CHECK.is_file():
        return "Not measured yet."
    found = json.loads(CHECK.read_text(encoding="utf-8"))
    cells = []
    for trial in found["trials"]:
        kl, kl_spread, gap, gap_spread = figures(trial["report"])
        numbers = (f"{kl:.4f} ± {kl_spread:.4f}", f"{gap:.4f} ± {gap_spread:.4f}")
        cells.append((str(trial["width"]), f"{trial['rate']:g}", f"{trial['step']:g}", *numbers))
    head = ("width", "rates, times the rule's", "step, times the measured", "KL", "loss above the teacher")
    conditions = f"{found['hardware']}, commit {found['commit']}."
    return "\n".join([*table(head, cells), "", conditions])


BLOCKS: dict[str, Callable[[], str]] = {
    "recipe-parts": recipe_parts,
    "recipe-rates": recipe_rates,
    "recipe-budgets": recipe_budgets,
    "recipe-widths": recipe_widths,
}
