"""What of the plugin needs no vLLM: it is found, and without a vLLM that it knows it says so and no more."""

import importlib
import logging
import sys
import tomllib
import types
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
    assert all(version in caplog.text for version in TESTED)


def test_a_vllm_of_another_make_is_said_and_nothing_breaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sse_convert.serving import vllm as plugin

    def register_families() -> None:
        raise AttributeError("CompilationConfig has no attribute '_attention_ops'")

    for name, values in {
        "vllm": {"__version__": "0.40.1"},
        "sse_convert.serving.vllm.families": {"register_families": register_families},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    with caplog.at_level(logging.WARNING):
        plugin.register_plugin()
    assert f"was tested with vLLM {' and '.join(plugin.TESTED)}, this is 0.40.1" in caplog.text
    assert "_attention_ops" in caplog.text
