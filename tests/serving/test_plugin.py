"""What of the plugin needs no vLLM: it is found, and without a vLLM that it knows it says so and no more."""

import importlib
import logging
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_entry_point_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["sse_convert"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert any(need.startswith("vllm") for need in project["optional-dependencies"]["vllm"])


def test_no_vllm_is_said_and_nothing_breaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from sse_convert.serving.vllm import TESTED, register_plugin

    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING):
        register_plugin()
    assert "sse-convert cannot serve with this vLLM" in caplog.text
    assert TESTED in caplog.text
