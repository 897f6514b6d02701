"""The script that drives served layers on a GPU, dry: tiny shapes on the CPU."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.serving import layer

pytestmark = pytest.mark.experiment


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(out=out, seconds=3000.0, shape="tiny")


@pytest.mark.smoke
def test_served_layers_equal_the_package_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "MIXERS", {name: layer.MIXERS[name] for name in ("recipe", "sliding")})
    monkeypatch.setattr(layer, "STATES", {"float32": torch.float32})
    parts = layer.Parts(options(tmp_path / "out.json"), torch.device("cpu"))
    parts.run("equal", layer.equal)
    rows = json.loads((tmp_path / "out.json").read_text())["parts"]["equal"]
    assert len(rows) == len(layer.MIXERS)
    assert all(row["ok"] for row in rows)


@pytest.mark.slow
def test_the_other_parts_run(tmp_path: Path) -> None:
    parts = layer.Parts(options(tmp_path / "out.json"), torch.device("cpu"))
    for name, part in (("prefill", layer.prefill_layers), ("requests", layer.requests)):
        parts.run(name, part)
        assert not [row for row in parts.report["parts"][name] if "stopped" in row]
    models = {row["model"]: row for row in parts.report["parts"]["requests"]}
    assert list(models) == ["teacher", "recipe", "large"]
    assert models["teacher"]["times_requests"] == 1


def test_sizes_of_requests() -> None:
    """By hand, at Qwen3-0.6B's shape: a softmax layer at 32k has 128 MiB, a row of the recipe's mixer 9."""
    config = layer.subject("0.6b").config
    layouts = layer.layouts(28)
    assert layouts["recipe"].count("full") == 7
    full = layer._computed(config, ["full"] * 28, 2**15)
    assert full["request_mib_float32"] == full["request_mib_bfloat16"] == 28 * 128
    found = layer._computed(config, layouts["recipe"], 2**15)
    ring = 2 * 132 * 8 * 128 * 2 / 2**20
    kinds = {kind: layouts["recipe"].count(kind) for kind in ("recipe", "sliding")}
    assert found["request_mib_float32"] == 7 * 128 + kinds["recipe"] * (8.5 + ring) + kinds["sliding"] * ring


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    parts = layer.Parts(options(tmp_path / "out.json"), torch.device("cpu"))

    def late(parts: layer.Parts) -> None:
        layer._too_late()

    parts.run("decode", late)
    assert parts.report["parts"]["decode"] == [{"stopped": "TimeoutError: the part's time is over"}]
