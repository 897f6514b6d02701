"""The reference pages leave nothing out."""

import dataclasses as dc
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from typer.main import get_command

import sse_convert
from docs.api_pages import api_pages
from docs.causal_lms import left_out, supported
from docs.examples import ROOT
from docs.markdown import anchor, prose, table
from docs.recipe_reference import recipe_page, recipes_page
from docs.reference import commands_page, errors_page, families_page
from docs.results import demoted, linked_files, result_files, scripts_page, with_targets
from sse_convert.cli.app import app
from sse_convert.cli.runner import EXIT_CODES
from sse_convert.errors import SSEConvertError
from sse_convert.mixers import BUILT_IN
from sse_convert.modeling.arch_spec import SSE_PREFIX, ArchSpec
from sse_convert.modeling.architectures import ARCHITECTURES, IMAGE_TEXT
from sse_convert.recipe.jsonschema import json_schema
from sse_convert.recipe.presets import preset_names

DEFINITIONS = json_schema()["definitions"]
KEYS = recipe_page()
"""the page of all keys, made once"""


def sections(page: str) -> dict[str, str]:
    """Text below each heading of the second level."""
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_key_of_a_recipe_is_there(name: str) -> None:
    keys = [f"| `{key}` |" for key in DEFINITIONS[name]["properties"]]
    assert any(all(key in text for key in keys) for text in sections(KEYS).values())


def test_keys_come_with_type_default_and_meaning() -> None:
    found = sections(KEYS)
    assert "| `sinks` | count | `4` | first tokens of the document that stay visible |" in found["mixers: kind sliding"]
    assert "| `lr` | number or [stages[].lr](#stageslr) | required |" in found["stages[]"]
    assert "| `window`" not in found["mixers: kind sse"]
    assert set(found) >= {f"mixers: kind {kind}" for kind in BUILT_IN} | {"Top level", "data.train[]"}
    assert "&#123;keep: 25%&#125;" in found["layers"]


def test_links_between_sections_have_targets() -> None:
    for page in (KEYS, recipes_page()):
        targets = {anchor(heading) for heading in sections(page)}
        assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= targets


def leaves(command: Any, name: str = "") -> dict[str, Any]:
    commands = getattr(command, "commands", None)
    if commands is None:
        return {name: command}
    return {path: leaf for key, inner in commands.items() for path, leaf in leaves(inner, f"{name} {key}").items()}


@pytest.mark.parametrize(("name", "command"), leaves(get_command(app)).items())
def test_every_command_is_there_with_every_option(name: str, command: Any) -> None:
    text = sections(commands_page())[name.strip()]
    assert f"    sse-convert{name} [OPTIONS]" in text
    for parameter in command.params:
        words = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar]
        for word in words:
            assert re.search(rf"\| `[^`]*{re.escape(word)}(?![\w-])", text), word


def test_every_family_is_there_with_what_is_special_about_it() -> None:
    page = families_page()
    for model_type, spec in ARCHITECTURES.items():
        assert f"| `{model_type}` | `{spec.causal_lm_class}` | `{spec.hybrid_causal_lm}` |" in page
    for model_type, spec in IMAGE_TEXT.items():
        inside = ", ".join(f"`{name}`" for name in spec.text_types)
        assert f"| `{model_type}` | {inside} | `{spec.causal_lm_class}` | `{spec.hybrid_causal_lm}` |" in page
    assert all(f"| `{field.name}` |" in page for field in dc.fields(ArchSpec))
    assert "`qkv: ('qkv_proj',)`; `qkv_layout: blocks`" in page


def test_every_causal_lm_is_there_as_supported_or_with_a_reason() -> None:
    page = families_page()
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *supported()}
    assert [name for name in names if f"`{name}`" not in page and not name.startswith(SSE_PREFIX)] == []
    for groups in left_out().values():
        assert all(f"| {group.reason} | `{group.families[0]}`" in page for group in groups)
        assert f": {sum(len(group.families) for group in groups)}\n" in page


def test_every_exit_code_and_error_is_there() -> None:
    page = errors_page()
    for code, meaning in EXIT_CODES.items():
        assert re.search(rf"^\| {code} \|.*\| {re.escape(meaning)} \|$", page, flags=re.MULTILINE)
    ours = {cls for cls in SSEConvertError.__subclasses__() if cls.__module__ == SSEConvertError.__module__}
    assert all(f"`{cls.__name__}`" in page for cls in ours)


def test_every_packaged_recipe_is_there_in_full() -> None:
    found = sections(recipes_page())
    for name in preset_names():
        assert "recipe_version: 1" in found[name]


def test_public_names_are_there_alone() -> None:
    shown = re.findall(r"^::: (\S+)$", "\n".join(api_pages().values()), flags=re.MULTILINE)
    names = [f"sse_convert.{name}" for name in sse_convert.__all__ if name != "__version__"]
    assert sorted(shown) == sorted([*names, "sse_convert.api", "sse_convert.errors"])


def test_the_page_on_scripts_holds_the_benchmarks() -> None:
    page = scripts_page()
    for path in result_files():
        assert f"](../files/{path.relative_to(ROOT)})" in page
    assert all((ROOT / name).is_file() for name in linked_files())
    assert "benchmarks/kernels/operator_h200.png" in linked_files()
    for readme in ROOT.glob("benchmarks/*/README.md"):
        assert "#" + readme.read_text().partition("\n")[0] in page


def test_links_are_followed_from_where_the_text_is() -> None:
    text = "[a](x.png) [b](../y.json) [c](https://z) [d](#e)"
    assert with_targets(text, Path("benchmarks/q")) == (
        "[a](../files/benchmarks/q/x.png) [b](../files/benchmarks/y.json) [c](https://z) [d](#e)"
    )
    assert with_targets("[card](demo/teacher/README.md)", Path()) == "[card](teacher.md)"


def test_demoting_headings_leaves_code_alone() -> None:
    assert demoted("# A\n```bash\n# comment\n```\n## B\n") == "## A\n```bash\n# comment\n```\n### B\n"


def test_prose_shows_every_character() -> None:
    assert prose("a {b} | `c|{d}`\n  *e*") == "a &#123;b&#125; &#124; `c|{d}` &#42;e&#42;"
    assert table(("a", "b"), [("1", "2")]) == ["| a | b |", "| --- | --- |", "| 1 | 2 |"]
