"""The published comparison of layer selection says what its page says, and draws."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import collect
from benchmarks.quality.select_layers import draw


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return collect.reports()["select_layers"]


def test_every_method_but_uniform_keeps_the_layer_that_retrieves(data: dict[str, Any]) -> None:
    kept = {choice["method"]: choice["kept"] for choice in data["choose"]["choices"]}
    assert all((7 in layers) == (method != "uniform") for method, layers in kept.items())


def test_the_choice_beats_uniform_and_random_sets_on_other_rows(data: dict[str, Any]) -> None:
    sets = data["compare"]["sets"]
    (chosen,) = (entry for entry in sets if entry["name"].startswith("greedy"))
    others = [entry for entry in sets if entry["name"] in ("uniform", "random", "none")]
    assert sum(entry["name"] == "random" for entry in others) >= 8
    assert {len(entry["kept"]) for entry in others if entry["name"] != "none"} == {len(chosen["kept"])}
    for entry in others:
        assert chosen["text_kl"] < entry["text_kl"]
        assert chosen["recall_loss"] < entry["recall_loss"]
        assert chosen["recall_accuracy"] >= entry["recall_accuracy"]


@pytest.mark.smoke
def test_it_was_made_and_compared_on_different_text(data: dict[str, Any]) -> None:
    assert data["compare"]["text"] not in data["choose"]["conditions"]["text"]
    assert len(data["commit"]) >= 7
    assert "+" not in data["commit"]


def test_the_plot(data: dict[str, Any], tmp_path: Path) -> None:
    draw(data, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
