"""`compare`: several runs, checkpoints or evaluations in one table."""

import dataclasses as dc
from collections.abc import Iterator, Sequence
from pathlib import Path

from sse_convert.errors import UsageError
from sse_convert.evaluation.report import EVALUATION_FILE, EvalReport
from sse_convert.results.board import Board, make_board
from sse_convert.results.collect import Run, collect
from sse_convert.results.scores import (
    DECODE,
    PREFILL,
    Measure,
    cache_measures,
    model_measures,
    relative_measures,
    run_measures,
    teacher_name,
)
from sse_convert.results.stored_evaluation import read_evaluation

TIMES = (PREFILL, DECODE)


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSource:
    """One thing to compare."""

    run: Run | None
    """a run or checkpoint; None for an evaluation file"""
    evaluation: EvalReport | None
    """what was measured, None where nothing was"""

    def teachers(self) -> Iterator[str]:
        """Folder name of the model it was made from, as far as it is known; of a run, and of its evaluation."""
        if self.evaluation is not None:
            yield Path(self.evaluation.teacher.name).name
        if self.run is not None and self.run.model is not None and self.run.model.base_model:
            yield Path(self.run.model.base_model).name

    def measures(self) -> Iterator[Measure]:
        """Everything known of it."""
        if self.run is not None:
            yield from run_measures(self.run)
        if self.evaluation is not None:
            yield from relative_measures(self.evaluation)
            yield from model_measures(self.evaluation, self.evaluation.student)
        elif self.run is not None:
            yield from cache_measures(self.run)


def compare_runs(sources: Sequence[str | Path]) -> Board:
    """Set runs, checkpoints and evaluations side by side.

    Figures that were measured on other text, with other samples or another teacher stand in rows of their own.
    Arguments and errors as of `api.compare`.
    """
    if len(sources) < 2:
        raise UsageError(
            f"nothing to set beside {sources[0]}" if sources else "nothing to compare",
            expected="at least two runs, checkpoints or evaluation files",
            fix="name another one",
        )
    names = labels([str(source) for source in sources])
    found = [read_source(source) for source in sources]
    board = _board(names, found)
    if not any(sum(cell is not None for cell in row.cells[-len(names) :]) > 1 for row in board.rows):
        raise UsageError(
            f"{', '.join(names)} have no figure in common",
            expected="runs with the same text and lengths in `eval`",
            fix="evaluate them with the same recipe settings (`sse-convert eval`)"
            + "".join(f"\n  {note}" for note in board.notes),
        )
    return board


def read_source(source: str | Path) -> ComparedSource:
    """A run, a checkpoint, or a JSON file of `eval`.

    Raises:
        UsageError: it does not exist or holds nothing of this.
        CheckpointError: a file is damaged or of another version.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return ComparedSource(run=None, evaluation=read_evaluation(path))
    run = collect(path)
    return ComparedSource(run=run, evaluation=run.evaluation)


def labels(sources: Sequence[str]) -> list[str]:
    """Names that tell paths apart: the last parts of each, as many as are needed.

    Raises:
        UsageError: the same one twice.
    """
    paths = [Path(source).expanduser().resolve() for source in sources]
    paths = [path.parent if path.name == EVALUATION_FILE else path for path in paths]
    twice = [str(path) for path in paths if paths.count(path) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is given twice", expected="different runs", fix="leave one out")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _board(names: Sequence[str], sources: Sequence[ComparedSource]) -> Board:
    """One column per source, and the teacher's in front where all have the same.

    Each evaluation timed the teacher anew, so of several no one time stands for all; the ratios do.
    """
    columns = [(name, [*source.measures()]) for name, source in zip(names, sources, strict=True)]
    measured = [source.evaluation for source in sources if source.evaluation is not None]
    one_size = len({teacher_name(evaluation) for evaluation in measured}) == 1
    if one_size and len({name for source in sources for name in source.teachers()}) == 1:
        teacher = [m for evaluation in measured for m in model_measures(evaluation, evaluation.teacher)]
        columns.insert(0, ("teacher", [m for m in teacher if len(measured) == 1 or m.quantity not in TIMES]))
    return make_board(columns)
