"""Which layer is what, and what it keeps of a context."""

from typing import TYPE_CHECKING

from sse_convert.mixers import FULL
from sse_convert.pages.blocks import Block, Fold, LayerMap, Missing, Section, Table
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import run_command
from sse_convert.report import format_cache

if TYPE_CHECKING:
    from sse_convert.surgery.inspect import InspectReport


def layers(run: Run) -> Section:
    """A map of the layers, the settings of their mixers, and a table."""
    blocks: tuple[Block, ...] = (Missing("There is no checkpoint to look at.", run_command(run)),)
    if run.model is not None:
        blocks = (layer_map(run.model), *_settings(run.model), Fold("Layer by layer", (_table(run.model),)))
    return Section(anchor="layers", title="Layers", blocks=blocks)


def layer_map(model: "InspectReport") -> LayerMap:
    """Every layer in order, one colour per mixer.

    Args:
        model: the checkpoint.
    """
    names = [FULL, *dict.fromkeys(name for name in model.layers if name != FULL)]
    return LayerMap(tuple((i, name, names.index(name) % 7) for i, name in enumerate(model.layers)))


def _settings(model: "InspectReport") -> tuple[Fold, ...]:
    """Settings of the mixers in use, one column each."""
    used = [name for name in dict.fromkeys(model.layers) if name in model.mixers]
    keys = dict.fromkeys(key for name in used for key in model.mixers[name])
    rows = tuple((key, *(_shown(model.mixers[name].get(key, "")) for name in used)) for key in keys)
    title = "Settings of the mixers"
    return (Fold(title, (Table(caption=title, header=("setting", *used), rows=rows, words=True),)),) if used else ()


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _table(model: "InspectReport") -> Table:
    rows = tuple(
        (str(i), name, format_cache(constant, growth).replace("grows", "grows with the context"))
        for i, (name, constant, growth) in enumerate(
            zip(model.layers, model.constant_bytes, model.bytes_per_token, strict=True)
        )
    )
    return Table(caption="Layers", header=("layer", "mixer", "cache or state of one sequence"), rows=rows)
