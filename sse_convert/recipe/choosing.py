"""`layers.select`: what is left to choose, what measuring it takes, and the recipe once it is done."""

import dataclasses as dc
from collections.abc import Sequence

from sse_convert.recipe.pattern import OpenChoice, choice_of, expand_pattern
from sse_convert.recipe.schema import Recipe

METHODS = {"layers": "greedy", "heads": "retrieval"}
"""by which they are chosen; the command `select` has others"""
TRIES = 10
"""heads that each may take the place of a kept one"""
SHORTEST = 1024
"""tokens of a probe row where all rows of the recipe are shorter"""
LONGEST = 4096
"""tokens of a probe row at most"""
TEXT_TOKENS = 8192
RECALL_ROWS = 16


@dc.dataclass(frozen=True, slots=True)
class ProbeRows:
    """What every set of layers is measured on."""

    length: int
    """tokens per row"""
    text: int
    """rows of running text"""
    recall: int
    """rows whose answer stands far back"""

    @property
    def tokens(self) -> int:
        """Tokens of a pass."""
        return (self.text + self.recall) * self.length


def is_open(recipe: Recipe) -> bool:
    """Whether layers are still to be chosen."""
    return recipe.layers.select is not None and recipe.layers.select.chosen is None


def open_choice(recipe: Recipe, num_layers: int, heads: Sequence[int] = ()) -> OpenChoice | None:
    """What `layers.select` leaves to choose; None without it, and once layers are chosen. Arguments as of
    `choice_of`.

    Raises:
        RecipeError: the layers do not fit the model, or nothing would be converted.
    """
    select = recipe.layers.select
    if select is None or not is_open(recipe):
        return None
    return choice_of(select, expand_pattern(recipe.layers, recipe.known_mixers, num_layers), heads)


def chosen_recipe(recipe: Recipe, kept: Sequence[int], choice: OpenChoice | None = None) -> Recipe:
    """The recipe with its choice made.

    Args:
        recipe: with `layers.select`.
        kept: units that stay softmax.
        choice: what they are; None for layers.
    """
    assert recipe.layers.select is not None
    by_heads = recipe.layers.select.by == "heads"
    assert choice is not None or not by_heads
    chosen = choice.by_layer(kept) if choice is not None and by_heads else sorted(kept)
    select = dc.replace(recipe.layers.select, chosen=chosen)
    return dc.replace(recipe, layers=dc.replace(recipe.layers, select=select))


def draft_recipe(recipe: Recipe, num_layers: int, heads: Sequence[int] = ()) -> Recipe:
    """The recipe with as many layers chosen, spread evenly, for what any choice has alike; itself without a choice.

    Raises:
        RecipeError: as of `open_choice`.
    """
    choice = open_choice(recipe, num_layers, heads)
    return recipe if choice is None else chosen_recipe(recipe, evenly(choice.units, choice.keep), choice)


def evenly(layers: Sequence[int], keep: int) -> tuple[int, ...]:
    """The last layer of each of `keep` stretches of equal length."""
    return tuple(layers[(i + 1) * len(layers) // keep - 1] for i in range(keep))


def probe_rows(recipe: Recipe, limit: int | None) -> ProbeRows:
    """Rows as long as the recipe's longest, since other layers may find what lies farther back.

    Args:
        recipe: rows of stages and of the needle evaluation are read.
        limit: positions of the model, None without any.
    """
    needle = recipe.eval.needle
    lengths = [stage.seq_len for stage in recipe.stages] + (needle.lengths if needle else [])
    length = min(max(SHORTEST, *lengths, 0), LONGEST, limit or LONGEST)
    return rows_of(length)


def rows_of(length: int) -> ProbeRows:
    """Rows of so many tokens."""
    return ProbeRows(length=length, text=max(1, TEXT_TOKENS // max(1, length)), recall=RECALL_ROWS)


def most_sets(method: str, *, keep: int, among: int, tries: int) -> int:
    """Sets that a method measures, with those of all and of none, and its own pass that looks at attention: one forward
    pass each."""
    if method == METHODS["layers"]:
        return 2 + sum(among - i for i in range(keep))
    return 4 + tries * (keep - keep // 2)
