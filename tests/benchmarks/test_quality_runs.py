"""The committed runs of whole models: their plots draw, and the tables of the quality page are what they say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import plot_runs

QUALITY = Path("benchmarks/quality")
RUNS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (QUALITY / "runs").glob("*.json")}
EVALUATED = {"../keep-4-9_seed1": QUALITY / "keep-4-9_seed1.json"}
"""rows of models that were trained by one command and measured by another: the report of `eval`"""
NEEDLES = (("number", 2048), ("number", 8192), ("code", 2048), ("code", 8192))
"""the columns of needles, each with one and eight keys"""


def table_rows() -> dict[str, list[str]]:
    """Cells of the table of whole models by run, for the rows of a single run."""
    text = (QUALITY / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## Whole models") : text.index("## A second teacher")]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {cells[-1]: cells for cells in rows if cells[-1] in RUNS or cells[-1] in EVALUATED}


ROWS = table_rows()


def gaps(run: dict[str, Any]) -> str:
    return ", ".join(f"{gap['gap']:.3f}".replace("-0.000", "0.000") for gap in run["after"]["loss_gaps"])


def divergences(run: dict[str, Any]) -> str:
    return ", ".join(f"{part['kl']:.3f}" for part in run["after"]["student"].get("agreement", []))


def found(run: dict[str, Any], kind: str, length: int) -> str:
    scores = {(n["kind"], n["length"], n["keys"]): n["accuracy"] for n in run["after"]["student"]["needles"]}
    return ", ".join(f"{scores[kind, length, keys]:.0%}" for keys in (1, 8))


@pytest.mark.smoke
def test_most_runs_have_a_row() -> None:
    rest = {name for name in RUNS if name.startswith("keep-") and name not in ROWS}
    assert rest == {f"keep-0-7_seed{seed}" for seed in (1, 2, 3, 4)}  # one row for all of them


def figures(run: dict[str, Any]) -> list[str]:
    return [gaps(run), divergences(run), *(found(run, kind, length) for kind, length in NEEDLES)]


@pytest.mark.parametrize("name", sorted(ROWS.keys() - EVALUATED.keys()))
def test_a_row_is_what_its_run_measured(name: str) -> None:
    cells, run = [re.sub(r"\*", "", cell) for cell in ROWS[name]], RUNS[name]
    layers: list[str] = run["layers"]
    assert cells[0] == (" ".join(str(i) for i, mixer in enumerate(layers) if mixer == "full") or "none")
    assert cells[2] == f"{run['training_tokens'] / 1e6:.0f}M"
    assert cells[3:9] == figures(run)


@pytest.mark.parametrize("name", EVALUATED)
def test_a_row_is_what_its_evaluation_measured(name: str) -> None:
    report = json.loads(EVALUATED[name].read_text(encoding="utf-8"))
    assert [re.sub(r"\*", "", cell) for cell in ROWS[name]][3:9] == figures({"after": report})


def test_the_plots_draw(tmp_path: Path) -> None:
    runs = {name: RUNS[name] for name in ("keep-none", "keep-none_delta", "keep-0-7_window", "keep-4-9_gla")}
    plot_runs.draw(runs, tmp_path / "runs.png")
    plot_runs.draw_frontier(list(runs.values()), tmp_path / "frontier.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("runs.png", "frontier.png"))
