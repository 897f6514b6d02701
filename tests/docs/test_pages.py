"""Every command and snippet of the pages is run, or, where it needs what a test machine lacks, checked for parsing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from docs.examples import PAGES, Block, Workplace, agrees, blocks, commands, page_paths
from docs.parsing import check
from docs.results import scripts_page
from sse_convert.cli.app import app
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.presets import preset_names, preset_text

LANGUAGES = {"console", "python", "yaml", "json"}
TASKS = "tasks/"
"""where pages put files of the lm-evaluation-harness, whose YAML is no recipe"""
TRAINERS = ("llamafactory/", "axolotl/")
"""where pages put files of other trainers; `test_train_on.py` checks them"""
SLOW = {"tutorial.md", "guide/evaluate.md"}
TEXTS = {str(path.relative_to(PAGES)): path.read_text(encoding="utf-8") for path in page_paths()}
RECIPE: dict[str, Any] = {
    "recipe_version": 1,
    "model": "any",
    "layers": {"pattern": ["sse"]},
    "export": {"dir": "out"},
    "stages": [{"name": "align", "loss": "layer_mse", "tokens": 100000, "seq_len": 512, "lr": 1.0}],
    "data": {"train": [{"path": "texts"}]},
}
"""what snippets of recipes are completed with"""


def blocks_of(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{name}-{block.line}")
        for name, text in TEXTS.items()
        for block in blocks(text)
        if block.language == language
    ]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TEXTS])
def test_the_page_does_what_it_shows(name: str, tmp_path: Path, sampled: Path) -> None:
    place = Workplace(tmp_path, sampled)
    for block in blocks(TEXTS[name]):
        if block.title is not None:
            place.write(block)
        elif block.language == "python" and block.is_run_here:
            place.run_script(block)
        elif block.language == "console" and block.is_run_here:
            for command in commands(block.body):
                printed = place.run(command.text, fails="fails" in block.classes)
                assert agrees(command.output, printed, block.classes), (
                    f"{name}, line {block.line}: {command.text}\nshown:\n{command.output}\nprinted:\n{printed}\n"
                    f"If this is right: python -m docs.refresh {name}"
                )


@pytest.mark.parametrize("block", blocks_of("console"))
def test_commands_that_are_not_run_parse(block: Block) -> None:
    for command in commands(block.body):
        if not block.is_run_here:
            check(command.text)
        if not block.is_run:
            assert command.output == "", "nobody can say whether this output is right"


@pytest.mark.parametrize("block", blocks_of("yaml"))
def test_recipes_load(block: Block) -> None:
    if (block.title or "").startswith(TRAINERS):
        assert yaml.safe_load(block.body)["trust_remote_code"] is True
    elif (block.title or "").startswith(TASKS):
        assert yaml.safe_load(block.body)["task"] == Path(block.title or "").stem
    else:
        assert recipe_from_dict({**RECIPE, **yaml.safe_load(block.body)})


@pytest.mark.parametrize("block", blocks_of("json"))
def test_lines_of_json_parse(block: Block) -> None:
    assert all(json.loads(line) for line in block.body.splitlines())


def test_blocks_are_of_kinds_that_are_tested() -> None:
    for name, text in TEXTS.items():
        found = list(blocks(text))
        assert {block.language for block in found} <= LANGUAGES, name
        assert text.count("```") == 2 * len(found), f"{name} has a block that is not recognised"


@pytest.mark.parametrize("name", TEXTS)
def test_commands_in_running_text_exist(name: str) -> None:
    for command in re.findall(r"`sse-convert ([a-z]+)[^`\n]*`", TEXTS[name]):
        assert command in get_command(app).commands


def test_commands_of_the_page_on_scripts_parse() -> None:
    text = scripts_page().replace("\\\n", " ")
    found = re.findall(r"^ *((?:python|pip|sse-convert|accelerate) .*)$", text, flags=re.MULTILINE)
    assert len(found) > 10
    for command in found:
        check(command)


@pytest.mark.parametrize("name", preset_names())
def test_commands_in_packaged_recipes_parse(name: str) -> None:
    for command in re.findall(
        r"^# [\w ]+: +((?:sse-convert|accelerate) .*?)(?:  .*| \(.*)?$", preset_text(name), re.MULTILINE
    ):
        check(command)
