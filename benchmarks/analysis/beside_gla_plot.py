"""States of SSE beside those of GLA, layer by layer: entropy, likeness of rows, untouched rows, memory, routing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {"SSE": ("#0072b2", "o"), "GLA": ("#d55e00", "s")}
"""colour and marker"""
PANELS = (
    ("entropy of singular values", ("entropy", "stacked"), None),
    ("likeness of rows, |cos|", ("similarity", "within"), None),
    ("rows left alone", ("row_sparsity", "sparse"), None),
    ("receptive field, tokens", ("receptive_field", "sparse"), "mean"),
)
"""title, path of the value, and the key below it"""


def draw(report: dict[str, Any], png: Path) -> None:
    """Four panels of quantities, one of memory beside the teacher's attention, one of routing.

    Args:
        report: what `beside_gla` writes; the models with the most training are drawn.
        png: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    trained = max(own["tokens"] for own in report["models"])
    models = {own["model"]: own["layers"] for own in report["models"] if own["tokens"] == trained}
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.2))
    for axis, (title, path, key) in zip(axes.flat, PANELS, strict=False):
        _lines(axis, models, path, key)
        axis.set(title=title)
        axis.set_ylim(bottom=0)
    _memory(axes[1, 1], models)
    _routing(axes[1, 2], models.get("SSE", []))
    for axis in axes.flat:
        axis.title.set_fontsize(9)
        axis.grid(alpha=0.25)
        axis.set_xlabel("layer", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    own = report["environment"]
    figure.suptitle(
        f"conversions of one teacher, {trained:,} tokens of training; {own['device']}, commit {own['commit']}",
        fontsize=8,
    )
    figure.tight_layout()
    with replacing(png) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def _lines(axis: "Axes", models: dict[str, Any], path: tuple[str, str], key: str | None) -> None:
    for name, layers in models.items():
        colour, marker = STYLES[name]
        found = [layer[path[0]][path[1]] for layer in layers]
        y = found if key is None else [own[key] for own in found]
        axis.plot([layer["index"] for layer in layers], y, marker + "-", color=colour, markersize=4, label=name)


def _memory(axis: "Axes", models: dict[str, Any]) -> None:
    layers = next(iter(models.values()))
    for layer in layers:
        distances = layer["attention"]["distance"]
        axis.plot([layer["index"]] * len(distances), distances, ".", color="#999999", zorder=1)
    _lines(axis, models, ("half_life", "sparse"), "median")
    if "SSE" in models:
        y = [layer["half_life"]["shared"]["median"] for layer in models["SSE"]]
        axis.plot(
            [layer["index"] for layer in models["SSE"]], y, "o:", color="#56b4e9", markersize=4, label="SSE, shared"
        )
    axis.set(title="half-lives, tokens; dots: the teacher's attention", yscale="log")
    axis.set_ylim(top=8 * axis.get_ylim()[1])  # room for the legend
    axis.legend(fontsize=7, ncols=3)


def _routing(axis: "Axes", layers: list[dict[str, Any]]) -> None:
    for layer in layers:
        load = layer["routing"]["load"]
        axis.plot([layer["index"]] * len(load), [share / sum(load) for share in load], "o", color=STYLES["SSE"][0])
    axis.set(title="share of the tokens by partition of SSE", ylim=(0, 1))
