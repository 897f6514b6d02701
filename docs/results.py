"""The page on scripts and files of results: what the folders of `benchmarks/` say and hold."""

import json
import os
import re
from pathlib import Path
from typing import Any

from docs.examples import PAGES, ROOT
from docs.markdown import table

SCRIPTS = "results/scripts.md"
"""page of the benchmarks' scripts and files"""
LOG = "results/log.md"
"""page of what was tried"""
TEACHER = "results/teacher.md"
"""page of the demo teacher's card"""
PAGE_OF = {"demo/teacher/README.md": TEACHER, "benchmarks/LOG.md": LOG}
"""files of the checkout that are pages of the site"""
_LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")


def scripts_page() -> str:
    """The result files with the commands that made them, and the benchmarks' own pages."""
    lines = [
        "# Scripts and files",
        "",
        "Every script with its options, and every raw file with its commit, hardware and command. This page is put",
        "together from the folders of `benchmarks/` when the site is built.",
        "",
        '!!! gpu "The benchmarks need a GPU unless they say otherwise"',
        "    Tests check that the scripts and options on this page exist; they do not run them.",
        "",
        "## Files",
        "",
        *table(("file", "commit", "hardware", "command"), [_row(path) for path in result_files()]),
        "",
        "CSV files, and the commits of scripts that are gone, stand below with their folders.",
    ]
    for path in sorted(ROOT.glob("benchmarks/*/README.md")):
        lines += ["", with_targets(demoted(path.read_text(encoding="utf-8")), path.parent.relative_to(ROOT))]
    return "\n".join(lines) + "\n"


def teacher_page() -> str:
    """The card of the demo's teacher."""
    text = (ROOT / "demo/teacher/README.md").read_text(encoding="utf-8")
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)


def log_page() -> str:
    """What was tried."""
    return (ROOT / "benchmarks/LOG.md").read_text(encoding="utf-8")


def result_files() -> list[Path]:
    """JSON files of the benchmarks, sorted."""
    return sorted(ROOT.glob("benchmarks/**/*.json"))


def linked_files() -> list[str]:
    """Files of the checkout that this page and hand-written ones beside it link to, relative to the checkout's root."""
    pages = [scripts_page(), *(path.read_text(encoding="utf-8") for path in PAGES.glob("results/*.md"))]
    return sorted({*re.findall(r"\]\(\.\./files/([^)]+)\)", "\n".join(pages))})


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
        return f"]({Path(page).name})" if (page := PAGE_OF.get(path)) else f"](../files/{path})"

    return _LINK.sub(target, text)


def _row(path: Path) -> tuple[str, ...]:
    name = path.relative_to(ROOT)
    result = json.loads(path.read_text(encoding="utf-8"))
    environment: dict[str, Any] = result.get("environment", {})
    hardware = result.get("hardware") or environment.get("device") or environment.get("cpu") or ""
    command = result.get("command") or environment.get("command")
    return (
        f"[{name.relative_to('benchmarks')}](../files/{name})",
        str(result.get("commit") or environment.get("commit") or ""),
        str(hardware),
        f"`{command}`" if command else "see below",
    )
