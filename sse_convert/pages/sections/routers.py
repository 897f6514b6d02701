"""Health of the routers: load, entropy, dead partitions."""

from typing import TYPE_CHECKING, Any

from sse_convert.pages.blocks import Block, Figures, Missing, Paragraph, Section, Table
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import run_command
from sse_convert.pages.figures.training import last_routers, router_drawings

if TYPE_CHECKING:
    from sse_convert.surgery.inspect import InspectReport


def routers(run: Run) -> Section:
    """What training logged."""
    blocks: list[Block] = []
    drawings = tuple(router_drawings(run.trained))
    if drawings:
        blocks += [Figures(drawings), _table(last_routers(run.trained), "At the end of training, on its last batch")]
    return Section(anchor="routers", title="Routers", blocks=tuple(blocks) or (_nothing(run),))


def _nothing(run: Run) -> Block:
    """Why no router was looked at."""
    if run.model is not None and not _routes(run.model):
        return Paragraph("No layer of this model routes.")
    return Missing("No router was looked at. Training logs them:", run_command(run))


def _routes(model: "InspectReport") -> bool:
    """Whether a layer has several partitions."""
    return any(model.mixers.get(name, {}).get("num_partitions", 1) > 1 for name in model.layers)


def _table(layers: list[dict[str, Any]], caption: str) -> Table:
    rows = tuple(_row(layer) for layer in layers)
    header = ("layer", "partitions", "smallest load", "largest load", "load entropy", "dead partitions")
    note = "Loads: 1 is an even share. Entropy: 1 is the largest possible. Dead: under 1% of an even load."
    return Table(caption=caption, header=header, rows=rows, notes=(note,))


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    load = layer["load"]
    even = sum(load) / len(load)
    ends = (f"{end(load) / even:.2f}" if even else "" for end in (min, max))
    dead = ", ".join(map(str, layer["dead"])) or "none"
    return (str(layer["index"]), str(len(load)), *ends, f"{layer['entropy']:.3f}", dead)
