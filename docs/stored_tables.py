"""Tables of experiments whose scripts are gone: `benchmarks/*/tables/NAME.csv` fills the block NAME, cell by cell."""

import csv
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path

from docs.examples import ROOT
from docs.markdown import shown


def stored(path: Path) -> str:
    """The table of a CSV file, whose cells are Markdown."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in csv.reader(file))
    return shown({name: itemgetter(i) for i, name in enumerate(head)}, rows)


BLOCKS: Mapping[str, Callable[[], str]] = {
    path.stem: partial(stored, path) for path in sorted(ROOT.glob("benchmarks/*/tables/*.csv"))
}
