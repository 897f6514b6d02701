"""The blocks of generated figures: markers are found, and files hold what the generators print."""

import pytest

from docs import tables
from docs.examples import ROOT
from docs.markdown import MOST_COLUMNS, shown

FILES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in tables.files()}


@pytest.mark.parametrize("name", FILES)
def test_blocks_are_what_their_generators_print(name: str) -> None:
    assert FILES[name] == tables.filled(FILES[name]), "if the new figures are right: python -m docs.tables"


def test_the_readme_has_its_figure_and_tables() -> None:
    assert tables.names(FILES["README.md"]) == ["figure", "real-first", "speed"]
    assert (ROOT / "docs/pages/assets/gains.png").is_file()


def test_every_block_stands_in_some_file() -> None:
    assert {name for text in FILES.values() for name in tables.names(text)} == set(tables.BLOCKS)


@pytest.mark.parametrize("name", tables.BLOCKS)
def test_a_table_fits_a_page(name: str) -> None:
    rows = [line for line in tables.BLOCKS[name]().splitlines() if line.startswith("| ")]
    assert all(line.count(" | ") < MOST_COLUMNS for line in rows)


def test_a_table_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="7 columns, 6 fit a page"):
        shown(dict.fromkeys("abcdefg", str), [1])


def test_a_block_is_replaced_and_the_rest_stays() -> None:
    text = tables.filled("before\n<!-- speed -->\nold\n<!-- /speed -->\nafter")
    assert text == f"before\n<!-- speed -->\n{tables.BLOCKS['speed']()}\n<!-- /speed -->\nafter"


@pytest.mark.parametrize("text", ["<!-- speed -->\n", "<!-- /speed -->", "<!-- quality -->\n<!-- /speed -->"])
def test_markers_without_partner_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="do not match"):
        tables.filled(text)


def test_unknown_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no generated block is called"):
        tables.filled("<!-- speeds -->\n<!-- /speeds -->")
