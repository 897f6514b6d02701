"""Pages of the Python API: one for each module or subpackage of `sse_convert`, filled by mkdocstrings."""

import pkgutil
from pathlib import Path

from docs.examples import ROOT

PACKAGE = "sse_convert"
NOT_SHOWN = ("sse_convert.__main__", "sse_convert.cli.app")
"""`cli` is the page of commands"""


def api_pages() -> dict[str, str]:
    """Markdown of each page, by its address."""
    pages = {}
    for module in pkgutil.iter_modules([str(ROOT / PACKAGE)], f"{PACKAGE}."):
        if module.name not in NOT_SHOWN:
            parts = [f"::: {module.name}\n    options:\n      heading_level: 1"]
            parts += [f"::: {name}" for name in (_below(module.name) if module.ispkg else ())]
            pages[f"api/{module.name.partition('.')[2]}.md"] = "\n\n".join([*parts, ""])
    return pages


def _below(package: str) -> list[str]:
    """All modules of a package, by path alone: nothing is imported."""
    folder = ROOT / Path(*package.split("."))
    modules = []
    for module in pkgutil.iter_modules([str(folder)], f"{package}."):
        if module.name not in NOT_SHOWN:
            modules += [module.name, *(_below(module.name) if module.ispkg else ())]
    return modules
