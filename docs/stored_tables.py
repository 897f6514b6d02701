"""Tables of experiments whose scripts are gone: `benchmarks/*/tables/NAME.csv` fills the block NAME, cell by cell."""

import csv
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs.examples import ROOT
from docs.markdown import table

MOST = 6
"""columns that fit a page"""


def stored(path: Path) -> str:
    """The table of a CSV file, whose cells are Markdown.

    Raises:
        ValueError: the file has more columns than fit a page.
    """
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in csv.reader(file))
    if len(head) > MOST:
        raise ValueError(f"{path} has {len(head)} columns; {MOST} fit a page")
    return "\n".join(table(head, rows))


BLOCKS: Mapping[str, Callable[[], str]] = {
    path.stem: partial(stored, path) for path in sorted(ROOT.glob("benchmarks/*/tables/*.csv"))
}
