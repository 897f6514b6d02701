"""What a page is made of, as data; `templates/` says how each kind looks."""

import dataclasses as dc
from collections import Counter
from typing import ClassVar

from sse_convert.pages.board import Board
from sse_convert.pages.figures.drawing import Drawing


@dc.dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dc.dataclass(frozen=True, slots=True)
class Code:
    """Text as it is: commands, a recipe."""

    kind: ClassVar[str] = "code"
    text: str


@dc.dataclass(frozen=True, slots=True)
class Missing:
    """What is not there, and the command that makes it."""

    kind: ClassVar[str] = "missing"
    what: str
    command: str


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table; the first column names the rows, and a row of one cell is a heading for those below."""

    kind: ClassVar[str] = "table"
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    words: bool = False
    """cells hold words, which stand to the left, and not figures"""


@dc.dataclass(frozen=True, slots=True)
class Figures:
    """Figures beside each other where there is room."""

    kind: ClassVar[str] = "figures"
    drawings: tuple[Drawing, ...]


@dc.dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure."""

    label: str
    value: str
    note: str


@dc.dataclass(frozen=True, slots=True)
class Tiles:
    """Headline figures."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dc.dataclass(frozen=True, slots=True)
class LayerMap:
    """Layers in order: (index, name, number of the colour)."""

    kind: ClassVar[str] = "layers"
    layers: tuple[tuple[int, str, int], ...]


@dc.dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and how each model goes on: (model, text)."""

    prompt: str
    texts: tuple[tuple[str, str], ...]


@dc.dataclass(frozen=True, slots=True)
class Samples:
    """Texts side by side."""

    kind: ClassVar[str] = "samples"
    samples: tuple[Sample, ...]


@dc.dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that open on a click."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: tuple["Block", ...]


Block = Paragraph | Code | Missing | Table | Figures | Tiles | LayerMap | Samples | Fold


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading with an anchor, and what stands under it."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]

    @property
    def missing(self) -> Missing | None:
        """What the section lacks altogether."""
        first = self.blocks[0] if self.blocks else None
        return first if isinstance(first, Missing) else None


def board_table(board: Board, caption: str) -> Table:
    """A board as a table: a quantity with several rows is their heading.

    Args:
        board: rows and notes.
        caption: what it shows.
    """
    rows: list[tuple[str, ...]] = []
    sizes = Counter(row.quantity for row in board.rows)
    before = ""
    for row in board.rows:
        alone = sizes[row.quantity] == 1
        if not alone and row.quantity != before:
            rows.append((row.quantity,))
        before = row.quantity
        name = ", ".join(filter(None, (row.quantity, row.setting))) if alone else row.setting
        mark = f" [{row.mark}]" if row.mark else ""
        rows.append((name + mark, *("\N{EN DASH}" if cell is None else cell.text for cell in row.cells)))
    return Table(caption=caption, header=("", *board.columns), rows=tuple(rows), notes=board.notes)
