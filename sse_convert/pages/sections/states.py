"""What the states look like inside, from an analysis."""

from sse_convert.analysis.plot import figures
from sse_convert.pages.blocks import Block, Figures, Missing, Paragraph, Section, board_table
from sse_convert.pages.board import make_board
from sse_convert.pages.collect import Analysis, Run
from sse_convert.pages.commands import analyze_command
from sse_convert.pages.figures.drawing import Drawing, untitled
from sse_convert.pages.scores import analysis_measures

ABOUT = {
    "routing": "Load of each partition by layer, and the entropy of load and gate.",
    "tokens": "Tokens that set each partition apart, by layer.",
    "branches": "Size of the partitions' and of the shared partition's output, by layer.",
    "output_error": "Squared error of each layer's output as a part of its teacher's power.",
    "memory": "Attention distance of the teacher's heads beside half-lives of the student's channels, by layer.",
}
"""for readers who cannot see the figures"""


def states(run: Run) -> Section:
    """Means over layers, and the figures of `analyze`."""
    if run.analysis is None:
        blocks: tuple[Block, ...] = (Missing("The states were not analysed.", analyze_command(run)),)
    else:
        c = run.analysis.data["conditions"]
        text = f"{c['tokens']:,} tokens of {c['text']} in rows of {c['length']:,}; {c['device']}, {c['dtype']}."
        board = make_board([("student", analysis_measures(run.analysis))])
        drawings = tuple(_drawings(run.analysis))
        blocks = (Paragraph(text), board_table(board, "Means over the layers"), Figures(drawings))
    return Section(anchor="states", title="States", blocks=blocks)


def _drawings(analysis: Analysis) -> list[Drawing]:
    return [
        Drawing(name=f"analysis-{name}", title=untitled(figure), about=ABOUT[name], figure=figure)
        for name, figure in figures(analysis.data["layers"])
    ]
