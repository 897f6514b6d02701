"""The trial of tiles: what runs on which shapes, under which launches, and what its table says."""

import pytest

pytest.importorskip("triton")

from benchmarks.kernels import tile_trial
from benchmarks.kernels.tile_trial import ROWS, SHAPES, TILES, candidates, case_of, table, tiles
from sse_convert.kernels.triton import problem
from sse_convert.kernels.triton.config import LARGE

SIZES = (128, 128, 1, False, LARGE, False)


def test_every_name_is_known() -> None:
    assert {shape for shape, _ in ROWS} <= SHAPES.keys()
    assert {shape for shapes, _ in TILES.values() for shape in shapes} <= SHAPES.keys()


@pytest.mark.parametrize("shape", SHAPES)
def test_other_tiles_are_tried_of_todays_operator_alone(shape: str) -> None:
    operators = {"before": case_of, "after": tile_trial.milliseconds}
    found = candidates(shape, operators)
    assert list(found)[:2] == ["before", "after"]
    assert all(operator is operators["after"] for name, (operator, _) in found.items() if name != "before")
    assert candidates(shape, {"before": case_of}) == {"before": (case_of, {})}


@pytest.mark.parametrize("changes", [changes for _, changes in TILES.values()], ids=list(TILES))
def test_tiles_change_launches_for_a_while(changes: dict[str, dict[str, int]]) -> None:
    pinned = problem.config_for(*SIZES)
    with tiles(changes):
        changed = problem.config_for(*SIZES)
        for name, new in changes.items():
            assert all(getattr(getattr(changed, name), field) == value for field, value in new.items())
    assert changed != pinned
    assert problem.config_for(*SIZES) == pinned


def test_the_table_shows_kernels_that_changed() -> None:
    ms = {"before": {"forward": 2.0, "both": 4.0}, "after": {"forward": 1.0, "both": 3.0}, "walk": "OutOfResources"}
    kernels = {"before": {"scan": 100.0, "finish": 9.0}, "after": {"scan": 100.5, "finish": 7.0}}
    lines = table([{"shape": "paper", "tokens": 64, "rows": 2, "ms": ms, "kernels_us": kernels}]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["before", "2.000", "4.000"], ["after", "1.000", "3.000"], ["walk", "OutOfResources"], ["finish", "9.0", "7.0"]
    ]  # fmt: skip
