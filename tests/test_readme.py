"""What the README tells people to type exists."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from sse_convert.cli.app import app
from sse_convert.recipe import load_recipe
from sse_convert.recipe.presets import preset_names
from tests.test_rooms import ROOMS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_its_recipe_loads(tmp_path):
    for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert load_recipe(path).stages


def test_its_commands_exist():
    commands = get_command(app).commands
    used = set(re.findall(r"sse[-_]convert (?!.*=)([a-z]+)", README)) - {"is", "and"}
    assert {"plan", "run", "push"} <= used
    assert used <= set(commands)


def test_its_recipes_and_paths_exist():
    for name in re.findall(r"sse[-_]convert (?:plan|run) ([a-z0-9.-]+)", README):
        assert name in preset_names()
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("target", ["demo", "test"])
def test_its_make_targets_exist(target):
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_quick_names_tests_that_exist():
    ways = (ROOT / "Makefile").read_text().partition("\nWAYS = ")[2].partition("\nQUICK")[0]
    named = re.findall(r"'?([a-z_/]+\.py)::(\w+)", ways)
    assert len(named) == 4
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), name


def test_the_tree_is_that_of_the_folders():
    """Every package stands in it, in the order in which they may import each other, and nothing that does not exist."""
    section = CONTRIBUTING.partition("\n## The code\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^    (\S+) +\S", section, flags=re.MULTILINE)
    assert [entry for entry in entries if not (ROOT / entry).exists()] == []
    rooms = [Path(entry).stem for entry in entries if entry.startswith("sse_convert/")]
    assert rooms == sorted(rooms, key=ROOMS.index)
    assert {path.parent.name for path in ROOT.glob("sse_convert/*/__init__.py")} <= set(rooms)


def prose(text):
    """The paragraphs of a page without code, tables, comments and addresses of links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    text = "\n".join(line for line in text.split("\n") if not line.startswith(("    ", "|", "!!!")))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=[-#*] |\d+\. )", text)]


@pytest.mark.parametrize("page", ["README.md", "docs/pages/index.md"])
def test_it_is_short(page):
    paragraphs = prose((ROOT / page).read_text(encoding="utf-8"))
    assert sum(len(part.split()) for part in paragraphs) <= 900
    sentences = [one for part in paragraphs for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\[*])", part)]
    assert [sentence for sentence in sentences if len(sentence.split()) > 30] == []
