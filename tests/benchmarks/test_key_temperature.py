"""The published figures of the key temperature are those of its README, and its cases are recipes."""

import json
from pathlib import Path

import pytest

from benchmarks.quality.key_temperature import TEACHERS, Case, cases, table
from sse_convert.recipe import load_recipe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "quality"
RUNS = json.loads((FOLDER / "key_temperature.json").read_text(encoding="utf-8"))["runs"]


def test_the_readme_has_its_table() -> None:
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    assert set(table(RUNS)) <= set(lines)


def test_every_case_was_run_with_and_without_the_fit() -> None:
    done = [(Case(**{name: run[name] for name in Case.__slots__}), run["key_scale"]) for run in RUNS]
    assert set(done) == {(case, kind) for case in cases(list(TEACHERS), [0, 1]) for kind in ("none", "fit")}
    assert len(done) == len(set(done))


def test_the_fit_lowers_the_error_that_alignment_starts_from() -> None:
    first = {kind: [run["errors"]["1"] for run in RUNS if run["key_scale"] == kind] for kind in ("none", "fit")}
    assert all(fit < none for fit, none in zip(first["fit"], first["none"], strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize("teacher", TEACHERS)
def test_cases_are_recipes(teacher: str, tmp_path: Path) -> None:
    case = Case(teacher=teacher, k_feature_map="silu", decay=False, seed=3)
    file, changes = case.settings("fit", tmp_path)
    found = load_recipe(ROOT / file, changes)
    assert (found.calibrate.key_scale, found.calibrate.decay, found.train.seed, found.data.seed) == ("fit", False, 3, 3)
    assert {mixer.k_feature_map for mixer in found.mixers.values()} == {"silu"}
    assert [stage.tokens // stage.batch_tokens for stage in found.stages] == [64, 32]
    assert found.export.dir == str(tmp_path / f"{teacher}_silu_False_3_fit")
