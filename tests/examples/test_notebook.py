"""The notebook is one (format 4, for Colab), holds no outputs typed by hand, and runs from first cell to last."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from docs.examples import Workplace
from sse_convert.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK: dict[str, Any] = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
INSTALLATION = [cell for cell in CODE if "installation" in cell["metadata"].get("tags", [])]
RUN_HERE = [cell for cell in CODE if cell not in INSTALLATION]
SHELL = """
import shlex
from pathlib import Path
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app

def shell(line):
    program, *arguments = shlex.split(line)
    assert program == "sse-convert", line
    assert run_app(app, arguments) == 0, line
"""


def text_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def as_python(cell: dict[str, Any]) -> str:
    """A cell as IPython reads it: a file, or Python with lines for the shell."""
    first, _, rest = text_of(cell).partition("\n")
    rest = rest.replace("tokens: 5K", "tokens: 1K").replace("samples: 10", "samples: 5")
    if first.startswith("%%writefile "):
        return f"Path({first.split()[1]!r}).write_text({rest!r})"
    lines = text_of(cell).replace("input_ids[0].split(512)", "input_ids[0, :1024].split(256)").splitlines()
    assert not [line for line in lines if line.startswith("%")], "a magic that this test does not know"
    return "\n".join(f"shell({line[1:]!r})" if line.startswith("!") else line for line in lines)


def test_it_is_a_notebook_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert "colab.research.google.com/github/" in text_of(NOTEBOOK["cells"][0])


def test_only_the_installation_is_not_run() -> None:
    (cell,) = INSTALLATION
    assert re.fullmatch(r'REPOSITORY = "\S+"\n!git clone .*\n%cd .*\n%pip install .*\.', text_of(cell))


def test_its_links_exist() -> None:
    for cell in NOTEBOOK["cells"]:
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text_of(cell)):
            assert (ROOT / "examples" / target).is_file(), target


def test_it_shows_the_whole_way() -> None:
    lines = [line[1:] for cell in RUN_HERE for line in text_of(cell).splitlines() if line.startswith("!")]
    shown = [shlex.split(line)[1] for line in lines]
    assert {"plan", "convert", "verify", "run", "generate", "push"} <= set(shown) <= set(get_command(app).commands)


@pytest.mark.slow
def test_every_cell_runs_in_order(tmp_path: Path, sampled: Path) -> None:
    workplace = Workplace(tmp_path, sampled)
    cells = (f"# cell {cell['id']}\n{as_python(cell)}" for cell in RUN_HERE)
    (workplace.folder / "cells.py").write_text("\n".join([SHELL, *cells]), encoding="utf-8")
    told = workplace.run("python cells.py")
    for part in (
        "distill (kl): loss ",
        "nats above the teacher's",
        "SSEQwen3ForCausalLM 'She looked at the",
        "would upload ",
    ):
        assert part in told
    assert (workplace.folder / "out" / "notebook" / "README.md").is_file()
