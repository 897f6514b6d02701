"""Sections to one HTML file that needs nothing else: styles and figures inside, no script, no network."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sse_convert import __version__
from sse_convert.files import replacing
from sse_convert.pages.blocks import Section
from sse_convert.pages.figures.drawing import NARROW

TEMPLATES = Path(__file__).parent / "templates"
_SECRETS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_(hidden)"),
    (re.compile(r"(\w+://)[^/\s@<>]+@"), r"\1(hidden)@"),
)
"""hub tokens, and names and passwords in addresses, should a recipe or a text hold any"""


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as text.

    Args:
        title: heading.
        lead: what it is, under the heading.
        sections: in order.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        title=title,
        lead=lead,
        sections=sections,
        version=__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        narrow=NARROW,
    )
    for pattern, instead in _SECRETS:
        page = pattern.sub(instead, page)
    return page


def write_page(path: Path, page: str) -> int:
    """Write a page under a temporary name, then rename it; an older one is replaced.

    Args:
        path: the file.
        page: its text; what UTF-8 cannot hold becomes a question mark.

    Returns:
        Bytes of the file.

    Raises:
        OutputError: it cannot be written.
    """
    data = page.encode("utf-8", "replace")
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    return len(data)
