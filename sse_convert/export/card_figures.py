"""The pictures of a model card: quality, speed, training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sse_convert.results.collect import STAGES, steps_in
from sse_convert.results.figures.drawing import Drawing, styled
from sse_convert.results.figures.evaluation import curves, heat_maps
from sse_convert.results.figures.training import loss_curves

FOLDER = "figures"


def write_pictures(evaluation: dict[str, Any] | None, checkpoint: Path, folder: Path) -> list[tuple[str, str]]:
    """Draw quality and speed from the evaluation, and training from the run that the checkpoint belongs to.

    Args:
        evaluation: JSON form of an `EvalReport`, or None.
        checkpoint: a step of a run; anything else has no training to show.
        folder: gets a folder of PNG files.

    Returns:
        Path in `folder` and description of each.
    """
    written = []
    with styled():
        for drawing in _drawings(evaluation, checkpoint):
            (folder / FOLDER).mkdir(exist_ok=True)
            name = f"{FOLDER}/{drawing.name}.png"
            drawing.write_png(folder / name)
            written.append((name, f"{drawing.title}. {drawing.about}"))
    return written


def _drawings(evaluation: dict[str, Any] | None, checkpoint: Path) -> Iterator[Drawing]:
    if evaluation is not None:
        yield from curves(evaluation)
        yield from heat_maps(evaluation)
    if checkpoint.parent.name.endswith(STAGES):
        yield from loss_curves([step for step in steps_in(checkpoint.parent) if step.metrics])
