"""The page as text: escaped, complete in itself, without secrets, and in the wheel."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sse_convert.errors import OutputError
from sse_convert.pages.blocks import (
    Code,
    Fold,
    LayerMap,
    Missing,
    Paragraph,
    Sample,
    Samples,
    Section,
    Table,
    Tile,
    Tiles,
)
from sse_convert.pages.render import TEMPLATES, render, write_page

NASTY = "<script>alert('x')</script> & \"quoted\" {{ 7 * 7 }}"
BLOCKS = (
    Paragraph(NASTY),
    Code(NASTY),
    Missing(NASTY, NASTY),
    Table(caption=NASTY, header=("", NASTY), rows=((NASTY,), (NASTY, NASTY)), notes=(NASTY,)),
    Tiles((Tile(NASTY, NASTY, NASTY),)),
    LayerMap(((0, NASTY, 1),)),
    Samples((Sample(NASTY, ((NASTY, NASTY),)),)),
    Fold(NASTY, (Paragraph(NASTY),)),
)


def page(*blocks):
    return render("title", "lead", [Section(anchor="one", title="One", blocks=blocks)])


class Reader(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.kind)
def test_what_comes_from_data_stays_text(block):
    read = Reader(page(block))
    assert "script" not in read.tags
    assert NASTY in read.text


def test_a_page_asks_for_nothing():
    read = Reader(page(*BLOCKS))
    assert "link" not in [tag for tag in read.tags if tag == "script"]
    loads = [value for tag, name, value in read.attributes if name == "src" or (tag == "link" and name == "href")]
    assert loads == ["data:,"]
    assert not re.search(r"@import|url\(\s*['\"]?http", page(*BLOCKS))


def test_sections_have_anchors():
    read = Reader(page(Paragraph("x")))
    assert ("section", "id", "one") in read.attributes
    assert ("a", "href", "#one") in read.attributes


def test_secrets_are_hidden():
    token = "hf_" + "a1B2" * 8
    text = page(Code(f"{token} https://me:secret@host/books"), Paragraph(token))
    assert token not in text
    assert "secret" not in text
    assert "https://(hidden)@host/books" in text


def test_environment_does_not_enter(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "do-not-show-this")
    assert "do-not-show-this" not in page(*BLOCKS)


def test_a_page_appears_whole_and_replaces(tmp_path):
    path = tmp_path / "new" / "page.html"
    assert write_page(path, "old") == 3
    write_page(path, "half a surrogate: \ud800")
    assert path.read_text() == "half a surrogate: ?"
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]
    with pytest.raises(OutputError, match="cannot be written"):
        write_page(path / "below" / "page.html", "x")


def test_templates_are_in_the_wheel():
    pytest.importorskip("hatchling")
    from hatchling.builders.wheel import WheelBuilder

    root = Path(__file__).resolve().parents[2]
    files = {file.distribution_path for file in WheelBuilder(str(root)).recurse_included_files()}
    wanted = {f"sse_convert/pages/templates/{path.name}" for path in TEMPLATES.iterdir()}
    assert len(wanted) == 3
    assert wanted <= files
