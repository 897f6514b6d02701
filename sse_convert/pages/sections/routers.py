"""Health of the routers: load, entropy, dead partitions."""

from typing import Any

from sse_convert.pages.blocks import Block, Figures, Missing, Paragraph, Section, Table
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import analyze_command
from sse_convert.pages.figures.training import last_routers, router_drawings


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
    if not blocks and run.model is not None and not _routed(run.model.mixers):
        blocks.append(Paragraph("No layer of this model routes."))
    elif not blocks:
        blocks.append(
            Missing("No router was looked at. Training logs them; so does an analysis:", analyze_command(run))
        )
    return Section(anchor="routers", title="Routers", blocks=tuple(blocks))


def _routed(mixers: dict[str, Any]) -> bool:
    return any(mixer.get("num_partitions", 1) > 1 for mixer in mixers.values())


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
