"""Generated blocks of the README and of hand-written pages: what stands between `<!-- name -->` and `<!-- /name -->`.

    python -m docs.tables        # write them anew

Figures come from the CSV and JSON files of `benchmarks/`, and `plan`. Tests compare.
"""

import csv
import re
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path

from docs import (
    cost_tables,
    quantised_table,
    readme_tables,
    real_tables,
    recipe_tables,
    serving_tables,
    speed_tables,
    training_tables,
)
from docs.examples import ROOT, page_paths
from docs.markdown import shown, table
from sse_convert.doctor import SUPPORTED
from sse_convert.modeling.tried import TRIED


def stored(path: Path) -> str:
    """The table of an experiment whose script is gone: a CSV file named as its block, whose cells are Markdown."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in csv.reader(file))
    return shown({name: itemgetter(i) for i, name in enumerate(head)}, rows)


def tried() -> str:
    """Each library, the lowest version that is served, and the newest one tried, for the page *Work with a hub*."""
    lowest = {name: ".".join(map(str, low)) for name, (low, _) in SUPPORTED.items()}
    rows = [(name, lowest.get(name, ""), version) for name, version in TRIED.items()]
    return "\n".join(table(("library", "from", "tried up to"), rows))


BLOCKS: Mapping[str, Callable[[], str]] = {
    **{path.stem: partial(stored, path) for path in sorted(ROOT.glob("benchmarks/*/tables/*.csv"))},
    **readme_tables.BLOCKS,
    **real_tables.BLOCKS,
    **speed_tables.BLOCKS,
    **training_tables.BLOCKS,
    **quantised_table.BLOCKS,
    **cost_tables.BLOCKS,
    **recipe_tables.BLOCKS,
    **serving_tables.BLOCKS,
    "tried": tried,
}
_BLOCK = re.compile(r"<!-- (?P<name>[a-z0-9-]+) -->\n.*?<!-- /(?P=name) -->", re.DOTALL)
_MARKER = re.compile(r"<!-- /?([a-z0-9-]+) -->")


def files() -> list[Path]:
    """Files that may have blocks: the README and the hand-written pages."""
    return [ROOT / "README.md", *page_paths()]


def names(text: str) -> list[str]:
    """Names of the blocks of a text, in order.

    Raises:
        ValueError: a marker has no partner, or names no block.
    """
    found = [match["name"] for match in _BLOCK.finditer(text)]
    if _MARKER.findall(text) != [name for name in found for _ in range(2)]:
        raise ValueError(f"markers of blocks that do not match, or lie within each other: {_MARKER.findall(text)}")
    if unknown := set(found) - BLOCKS.keys():
        raise ValueError(f"no generated block is called {sorted(unknown)}; there are {sorted(BLOCKS)}")
    return found


def filled(text: str) -> str:
    """The text with every block as its generator prints it.

    Raises:
        ValueError: a marker has no partner, or names no block.
    """
    names(text)
    return _BLOCK.sub(lambda match: _block(match["name"]), text)


def _block(name: str) -> str:
    return f"<!-- {name} -->\n{BLOCKS[name]()}\n<!-- /{name} -->"


def main() -> None:
    """Command line."""
    for path in files():
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"wrote the blocks of {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
