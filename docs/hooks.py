"""What MkDocs calls while it builds the site: adds the generated pages, and turns formulas into MathML."""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs import recipe_reference, reference, results
from docs.api_pages import api_pages
from docs.examples import ROOT

GENERATED = {
    "reference/recipe.md": recipe_reference.recipe_page,
    "reference/recipes.md": recipe_reference.recipes_page,
    "reference/commands.md": reference.commands_page,
    "reference/families.md": reference.families_page,
    "reference/errors.md": reference.errors_page,
    results.SCRIPTS: results.scripts_page,
    results.LOG: results.log_page,
    results.TEACHER: results.teacher_page,
}
_FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API pages into the navigation."""
    pages: list[Any] = [{path[len("api/") : -len(".md")]: path} for path in api_pages()]
    assert config.nav is not None
    config.nav.append({"Python API": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the files that the page on scripts links to."""
    pages = {path: make() for path, make in GENERATED.items()} | api_pages()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for name in results.linked_files():
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers show without scripts."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match["tag"] == "div" else "inline"
        return convert(html.unescape(match["tex"]).strip(), display=display)

    return _FORMULA.sub(mathml, content)
