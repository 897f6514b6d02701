"""The results page: the README's sections on results, and what the folders of `benchmarks/` say and hold."""

import json
import os
import re
from pathlib import Path
from typing import Any

from docs.examples import ROOT
from docs.markdown import table

SECTIONS = ("Results", "Speed", "The demo")
"""of the README"""
TEACHER = "results/teacher.md"
"""page of the demo teacher's card"""
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")


def results_page() -> str:
    """Sections of the README, the result files with the commands that made them, and the benchmarks' own pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [
        "# Results",
        "",
        "What was measured, with the command, hardware and commit of every figure. This page is put together from the",
        "README and from the folders of `benchmarks/` when the site is built.",
        "",
        '!!! gpu "The benchmarks need a GPU unless they say otherwise"',
        "    Tests check that the scripts and options on this page exist; they do not run them.",
        "",
    ]
    lines += [with_targets(section(readme, name), Path()) for name in SECTIONS]
    lines += [
        "## Files",
        "",
        *table(("file", "commit", "hardware", "command"), [_row(path) for path in result_files()]),
    ]
    for path in sorted(ROOT.glob("benchmarks/*/README.md")):
        lines += ["", with_targets(demoted(path.read_text(encoding="utf-8")), path.parent.relative_to(ROOT))]
    return "\n".join(lines) + "\n"


def teacher_page() -> str:
    """The card of the demo's teacher."""
    text = (ROOT / "demo/teacher/README.md").read_text(encoding="utf-8")
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)


def result_files() -> list[Path]:
    """JSON files of the benchmarks, sorted."""
    return sorted(ROOT.glob("benchmarks/**/*.json"))


def linked_files() -> list[str]:
    """Files of the checkout that the results page links to, relative to its root."""
    return sorted({*re.findall(r"\]\(files/([^)]+)\)", results_page())})


def section(text: str, name: str) -> str:
    """The part of a Markdown text under one heading of the second level, heading included.

    Raises:
        ValueError: there is no such heading.
    """
    found = re.search(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"the README has no section {name!r}, which the results page includes")
    return found[0]


def demoted(text: str) -> str:
    """Markdown with every heading one level lower; code is left alone."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else re.sub(r"^#", "##", part, flags=re.MULTILINE) for part in parts)


def with_targets(text: str, folder: Path) -> str:
    """The text with its links to files of the checkout as links to their copies in the site.

    Args:
        text: Markdown.
        folder: where the text comes from, relative to the checkout.
    """

    def target(link: re.Match[str]) -> str:
        path = os.path.normpath(folder / link[1])
        return f"]({TEACHER})" if path == "demo/teacher/README.md" else f"](files/{path})"

    return _LINK.sub(target, text)


def _row(path: Path) -> tuple[str, ...]:
    name = path.relative_to(ROOT)
    result = json.loads(path.read_text(encoding="utf-8"))
    environment: dict[str, Any] = result.get("environment", {})
    hardware = result.get("hardware") or environment.get("device") or environment.get("cpu") or ""
    command = result.get("command") or environment.get("command")
    return (
        f"[{name.relative_to('benchmarks')}](files/{name})",
        str(result.get("commit") or environment.get("commit") or ""),
        str(hardware),
        f"`{command}`" if command else "see below",
    )
