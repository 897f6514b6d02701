"""Health of the routers: load, entropy, dead partitions."""

from typing import TYPE_CHECKING, Any

from sse_convert.pages.blocks import Block, Figures, Missing, Paragraph, Section, Table
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import analyze_command
from sse_convert.pages.figures.training import last_routers, router_drawings

if TYPE_CHECKING:
    from sse_convert.surgery.inspect import InspectReport


def routers(run: Run) -> Section:
    """What training logged and what the analysis found."""
    blocks: list[Block] = []
    drawings = tuple(router_drawings(run.trained))
    if drawings:
        blocks += [Figures(drawings), _table(last_routers(run.trained), "At the end of training, on its last batch")]
    if run.analysis is not None:
        layers = [layer for layer in run.analysis.data["layers"] if "routing" in layer]
        if layers:
            blocks.append(_table(layers, "In the analysis, on held-out text"))
    return Section(anchor="routers", title="Routers", blocks=tuple(blocks) or (_nothing(run),))


def _nothing(run: Run) -> Block:
    """Why no router was looked at."""
    choosers = None if run.model is None else _choosers(run.model)
    if choosers == set():
        return Paragraph("No layer of this model routes.")
    if choosers == {"keys"}:
        return Paragraph("Partitions are chosen by keys and queries: training logs how evenly, an analysis does not.")
    return Missing("No router was looked at. Training logs them; so does an analysis:", analyze_command(run))


def _choosers(model: "InspectReport") -> set[str]:
    """What chooses partitions in layers with several: `hidden`, `keys`."""
    used = [model.mixers[name] for name in set(model.layers) if name in model.mixers]
    return {mixer.get("router", "hidden") for mixer in used if mixer.get("num_partitions", 1) > 1}


def _table(layers: list[dict[str, Any]], caption: str) -> Table:
    rows = tuple(_row(layer) for layer in layers)
    header = ("layer", "partitions", "smallest load", "largest load", "load entropy", "gate entropy", "dead partitions")
    note = "Loads: 1 is an even share. Entropies: 1 is the largest possible. Dead: under 1% of an even load."
    return Table(caption=caption, header=header, rows=rows, notes=(note,))


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    routing = layer["routing"]
    load = routing["load"]
    even = sum(load) / len(load)
    ends = (f"{end(load) / even:.2f}" if even else "" for end in (min, max))
    entropies = ("" if routing[key] is None else f"{routing[key]:.3f}" for key in ("load_entropy", "gate_entropy"))
    dead = ", ".join(map(str, routing["dead"])) or "none"
    return (str(layer["index"]), str(len(load)), *ends, *entropies, dead)
