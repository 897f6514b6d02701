"""The versions that this was tried with: one place says them, and what is newer is warned of once."""

import re
import warnings
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from sse_convert import api
from sse_convert.doctor import diagnose
from sse_convert.modeling import tried
from sse_convert.modeling.remote_code import remote_code
from sse_convert.modeling.tried import TRIED, newer_than_tried, warn_of_newer
from tests.modeling.tiny import tiny_model, tiny_source
from tests.surgery.models import recipe_file, save_teacher

PINS = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers had been tried with an older version alone."""
    monkeypatch.setitem(tried.TRIED, "transformers", "5.16.9")
    warn_of_newer.cache_clear()


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "not tried with" in str(each.message)]


def test_they_are_the_pinned_ones() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", PINS, re.MULTILINE))
    assert {name: pinned[name] for name in TRIED} == TRIED


@pytest.mark.usefixtures("newer")
def test_a_newer_one_is_warned_of_once_on_loading(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    (message,) = said(caught)
    assert re.search(r"transformers [\d.]+ \(tried up to 5\.16\.9\)", message)


@pytest.mark.usefixtures("newer")
def test_a_newer_one_is_warned_of_once_on_converting(tmp_path: Path) -> None:
    teacher = save_teacher(tiny_source("qwen3"), tmp_path / "teacher")
    recipe = recipe_file(tmp_path / "recipe.yaml", teacher)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("once", "twice"):
            api.convert(recipe, tmp_path / name)
    assert len(said(caught)) == 1


@pytest.mark.usefixtures("newer")
def test_the_doctor_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report = diagnose()
    (found,) = report.newer
    assert found.startswith("transformers ")
    assert f"not tried: {found}" in report.lines()
    assert any("torch" in line and f"(tried up to {TRIED['torch']})" in line for line in report.lines())


def test_builds_and_what_is_missing_are_not_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": f"{TRIED['torch']}+cpu", "transformers": "5.17.0", "peft": None}
    monkeypatch.setattr(tried, "installed_version", installed.get)
    assert newer_than_tried() == []
    installed["transformers"] = "99.0.0.dev0"
    assert newer_than_tried() == [f"transformers 99.0.0.dev0 (tried up to {TRIED['transformers']})"]


def test_the_code_of_a_checkpoint_warns_too() -> None:
    assert any(name.endswith("modeling_tried.py") for name in remote_code())
