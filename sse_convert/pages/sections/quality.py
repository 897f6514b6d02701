"""What is left of the teacher's quality: losses, needles, shares, with intervals."""

from collections.abc import Sequence
from pathlib import Path

from sse_convert.pages.blocks import Block, Figures, Missing, Paragraph, Section, board_table
from sse_convert.pages.board import Board, make_board
from sse_convert.pages.collect import STUDENT, UNTRAINED, UNTRAINED_LABEL, Evaluation, Run
from sse_convert.pages.commands import eval_command
from sse_convert.pages.figures.evaluation import curves, heat_maps
from sse_convert.pages.scores import (
    BITS,
    DIVERGENCE,
    GAP,
    LOSS,
    NEEDLES,
    SHARE,
    TASKS,
    TOP1,
    model_measures,
    relative_measures,
)

QUALITY = (LOSS, GAP, BITS, DIVERGENCE, TOP1, NEEDLES, SHARE, TASKS)
ABOUT = (
    "Intervals are 95%: of losses over windows, of needles after Wilson, of shares from both needle intervals (taken "
    "as independent, so rather too wide). The gap is paired window by window."
)


def quality(run: Run, beside: Sequence[Evaluation]) -> Section:
    """The retention table: the teacher, earlier steps that were evaluated, the result, and other models.

    Args:
        run: the run.
        beside: evaluations of other models.
    """
    evaluations = (*run.evaluations, *beside)
    blocks: list[Block] = []
    if evaluations:
        board = evaluation_board(evaluations).only(*QUALITY)
        table = board_table(board, "Beside the teacher, on the same text and needles")
        blocks += [table, Paragraph(ABOUT), Figures(tuple(curves(run.evaluations or evaluations)))]
    if run.student is None:
        blocks.insert(0, Missing("The result was not evaluated.", eval_command(run, run.out)))
    elif (step := _untrained(run)) is not None:
        blocks.append(Missing("The untrained conversion was not evaluated.", eval_command(run, step)))
    return Section(anchor="quality", title="Quality", blocks=tuple(blocks))


def needles(run: Run) -> Section:
    """Heat maps of depth by length, the teacher beside the student."""
    drawings = () if run.student is None else tuple(heat_maps(run.student))
    what = (
        "No needles were planted. Set eval.needle in the recipe, for example {lengths: [2K, 8K], keys: [1, 8]}, then:"
    )
    block = Figures(drawings) if drawings else Missing(what, eval_command(run, run.out))
    return Section(anchor="needles", title="Needles by depth and length", blocks=(block,))


def evaluation_board(evaluations: Sequence[Evaluation]) -> Board:
    """Teacher and students side by side.

    Args:
        evaluations: at least one.
    """
    result_first = sorted(evaluations, key=lambda found: found.label != STUDENT)
    teacher = [measure for found in result_first for measure in model_measures(found, "teacher")]
    students = [(e.label, [*model_measures(e, "student"), *relative_measures(e)]) for e in evaluations]
    return make_board([("teacher", teacher), *students])


def _untrained(run: Run) -> Path | None:
    """The checkpoint that training started from, if it was not evaluated."""
    if any(found.label == UNTRAINED_LABEL for found in run.evaluations):
        return None
    return next((step.folder for step in reversed(run.steps) if step.name in UNTRAINED and step.record), None)
