"""Pieces of Markdown."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
MOST_COLUMNS = 6
"""of a table, that fit a page"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table; cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def shown(columns: Mapping[str, Callable[[T], str]], rows: Iterable[T]) -> str:
    """A table by its declaration: the heading of each column, and its cell of a row.

    Raises:
        ValueError: there are more columns than fit a page.
    """
    if len(columns) > MOST_COLUMNS:
        raise ValueError(f"{len(columns)} columns, {MOST_COLUMNS} fit a page: {list(columns)}")
    return "\n".join(table(list(columns), [[cell(row) for cell in columns.values()] for row in rows]))


def prose(text: str) -> str:
    """Plain text, with code between backticks, as Markdown that shows every character, also in a table."""
    parts = " ".join(text.split()).split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"[{}<>|*_]", lambda c: f"&#{ord(c[0])};", parts[i])
    return "`".join(parts)


def anchor(heading: str) -> str:
    """Address of a heading in its page, as the toc extension makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
