"""What a run has left on disk, as one object. Reads small files and headers, never weights."""

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.checkpoints.identity import STAGE_FILE, read_stage_record
from sse_convert.checkpoints.open import CONFIG, STAGES, stages_folder
from sse_convert.checkpoints.provenance import UNTRAINED, read_provenance
from sse_convert.errors import UsageError
from sse_convert.evaluation.report import EVALUATION_FILE, EvalReport
from sse_convert.results.stored_evaluation import read_evaluation
from sse_convert.training import metrics

if TYPE_CHECKING:
    from sse_convert.surgery.inspect import InspectReport

RECIPE = "recipe.yaml"
"""the resolved recipe: in a finished run's folder of steps, and without local paths in an exported model"""
WORK = ".work"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """A step of a run, finished or not."""

    name: str
    """convert, calibrate, a stage's name, eval or export"""
    folder: Path
    """what it made; for an unfinished step, its work folder"""
    record: dict[str, Any] | None
    """content of stage.json, None for an unfinished step"""
    metrics: tuple[dict[str, Any], ...] = ()
    """one record per optimizer step"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything known about a run, or about a checkpoint alone."""

    name: str
    """of its folder"""
    out: Path
    """folder of the finished model"""
    steps: tuple[RunStep, ...]
    """in order"""
    model: "InspectReport | None"
    """the newest checkpoint"""
    evaluation: EvalReport | None
    """of the result, None where nothing was measured"""

    @property
    def trained(self) -> tuple[RunStep, ...]:
        """The training stages."""
        return tuple(step for step in self.steps if step.name not in ("select", *UNTRAINED, "eval", "export"))


def collect(path: str | Path) -> Run:
    """Read a run.

    Args:
        path: `export.dir` of the recipe, the `.stages` folder beside it, or any checkpoint folder.

    Raises:
        UsageError: there is no run and no checkpoint.
        CheckpointError: one of its files is damaged or of another version.
    """
    from sse_convert.surgery.inspect import inspect_checkpoint

    out = _out(Path(path))
    root = stages_folder(out)
    steps = steps_in(root) or _own_step(out)
    checkpoint = _checkpoint(out, steps)
    if checkpoint is None and not steps:
        raise _no_run(Path(path), root)
    return Run(
        name=out.name,
        out=out,
        steps=steps,
        model=None if checkpoint is None else inspect_checkpoint(checkpoint),
        evaluation=_evaluation(out, steps),
    )


def _out(path: Path) -> Path:
    path = path.expanduser()
    path = path if path.name not in ("", "..") else path.resolve()
    return path.with_name(path.name.removesuffix(STAGES)) if path.name not in ("", STAGES) else path


def _no_run(path: Path, root: Path) -> UsageError:
    if path.is_dir() and (inside := sorted(path.glob(f"*{STAGES}"))):
        fix = f"give {inside[0].with_name(inside[0].name.removesuffix(STAGES))}"
    else:
        fix = "make one with `sse-convert run RECIPE`"
    found = "is a file" if path.is_file() else "holds no run" if path.exists() or root.exists() else "does not exist"
    return UsageError(
        f"{path} {found}",
        expected="the folder of a run (export.dir of its recipe, or its .stages), or a checkpoint",
        fix=fix,
    )


def steps_in(root: Path) -> tuple[RunStep, ...]:
    """The steps of a run, finished or not.

    Args:
        root: the `.stages` folder.

    Raises:
        CheckpointError: a file is damaged.
    """
    folders = sorted(path for path in root.glob("[0-9][0-9]-*") if path.is_dir())
    finished = {path.name for path in folders if (path / STAGE_FILE).is_file()}
    return tuple(_step(path) for path in folders if path.name.removesuffix(WORK) not in finished - {path.name})


def _own_step(folder: Path) -> tuple[RunStep, ...]:
    """The step that made a checkpoint outside a run."""
    if not (folder / STAGE_FILE).is_file():
        return ()
    provenance = read_provenance(folder)
    return (dc.replace(_step(folder), name=folder.name if provenance is None else provenance.stage),)


def _step(folder: Path) -> RunStep:
    records = metrics.read(folder / metrics.FILE)
    return RunStep(
        name=folder.name.removesuffix(WORK)[3:],
        folder=folder,
        record=read_stage_record(folder) if (folder / STAGE_FILE).is_file() else None,
        metrics=tuple(records),
    )


def _checkpoint(out: Path, steps: tuple[RunStep, ...]) -> Path | None:
    candidates = [out, *(step.folder for step in reversed(steps) if step.record is not None)]
    return next((folder for folder in candidates if (folder / CONFIG).is_file()), None)


def _evaluation(out: Path, steps: tuple[RunStep, ...]) -> EvalReport | None:
    folders = [*(step.folder for step in steps if step.name == "eval"), out]
    return next((read_evaluation(path) for f in folders if (path := f / EVALUATION_FILE).is_file()), None)
