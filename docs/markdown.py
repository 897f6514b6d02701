"""Pieces of Markdown."""

import re
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table; cells are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def prose(text: str) -> str:
    """Plain text, with code between backticks, as Markdown that shows every character, also in a table."""
    parts = " ".join(text.split()).split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"[{}<>|*_]", lambda c: f"&#{ord(c[0])};", parts[i])
    return "`".join(parts)


def anchor(heading: str) -> str:
    """Address of a heading in its page, as the toc extension makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
