"""Memory and speed by length."""

from sse_convert.pages.blocks import Block, Figures, Missing, Paragraph, Section, board_table
from sse_convert.pages.board import make_board
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import eval_command
from sse_convert.pages.figures.evaluation import resource_drawings
from sse_convert.pages.scores import CACHE, DECODE, PREFILL, RATIO, cache_measures
from sse_convert.pages.sections.quality import evaluation_board


def resources(run: Run) -> Section:
    """Cache and state by formula, prefill and decoding as measured."""
    blocks: list[Block] = []
    evaluation = run.student
    if evaluation is None:
        board = make_board([("this model", cache_measures(run))])
        blocks.append(Missing("Speed was not measured.", eval_command(run, run.out)))
    else:
        board = evaluation_board([evaluation]).only(CACHE, PREFILL, DECODE, RATIO)
        blocks.append(Figures(tuple(resource_drawings(evaluation))))
    if board.rows:
        blocks.append(board_table(board, "Memory by formula, speed of one sequence as measured"))
    if evaluation is not None:
        c = evaluation.data["conditions"]
        if evaluation.data["student"]["speed"]:
            machine = ", ".join(f"{key} {c[key]}" for key in ("device", "threads", "dtype", "torch") if c.get(key))
            blocks.append(Paragraph(f"Measured on: {machine}."))
        else:
            what = "Speed was not measured. Set eval.throughput in the recipe, for example [2K, 8K], then:"
            blocks.append(Missing(what, eval_command(run, run.out)))
    return Section(anchor="resources", title="Memory and speed", blocks=tuple(blocks))
