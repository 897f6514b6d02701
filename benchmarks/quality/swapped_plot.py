"""Needles by variant with their intervals, and the loss gap."""

from pathlib import Path
from typing import Any

from sse_convert.files import replacing


def draw(report: dict[str, Any], png: Path) -> None:
    """One panel per needle setting and one of loss gaps; a point per variant and seed.

    Args:
        report: what `swapped_layers` writes, with at least one variant.
        png: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    entries = report["variants"]
    names = list(dict.fromkeys(entry["name"] for entry in entries))
    kinds = list(dict.fromkeys((n["kind"], n["keys"]) for n in entries[0]["needles"]))
    figure, axes = plt.subplots(
        1, len(kinds) + 1, figsize=(3.2 * (len(kinds) + 1), 0.6 + 0.45 * len(names) + 1), sharey=True
    )
    for axis, (kind, keys) in zip(axes, kinds, strict=False):
        for entry in entries:
            for found in entry["needles"]:
                if (found["kind"], found["keys"]) == (kind, keys):
                    _point(axis, names.index(entry["name"]), found, report)
        axis.set(title=f"{kind}, {keys} key{'s' if keys > 1 else ''}", xlabel="needles found", xlim=(-0.03, 1.03))
    for entry in entries:
        for text in entry["text"]:
            axes[-1].plot(text["gap"], names.index(entry["name"]), "o", color=_colour(text["length"], report))
    axes[-1].set(title="loss above the teacher", xlabel="nats per token")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    lengths = report["settings"]["phases"][1:]
    handles = [
        plt.Line2D([], [], marker="o", ls="", color=_colour(p["length"], report), label=f"{p['length']:,} tokens")
        for p in lengths
    ]  # type: ignore[attr-defined]
    figure.legend(handles=handles, fontsize=7, loc="upper left")
    own = report["environment"]
    swapped = report["settings"]["layers"]
    layers = f"layer{'s' if len(swapped) > 1 else ''} {' '.join(map(str, swapped))}"
    figure.suptitle(f"{layers} swapped, all else frozen; {own['device']}, commit {own['commit']}", fontsize=8)
    figure.tight_layout()
    with replacing(png) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def _point(axis: Any, row: int, found: dict[str, Any], report: dict[str, Any]) -> None:
    errors = [[found["accuracy"] - found["low"]], [found["high"] - found["accuracy"]]]
    axis.errorbar(found["accuracy"], row, xerr=errors, fmt="o", capsize=2, color=_colour(found["length"], report))


def _colour(length: int, report: dict[str, Any]) -> str:
    lengths = [phase["length"] for phase in report["settings"]["phases"]]
    return f"C{lengths.index(length) - 1}"
