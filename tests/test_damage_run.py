"""The tool that damages a finished run: one damage of each kind, and what it calls a failure."""

import runpy
import shutil
from pathlib import Path

import pytest

from sse_convert import api
from sse_convert.errors import VerificationError

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "damage_run.py"))


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """The folders of a finished run and of a killed stage; tests damage copies."""
    return TOOL["make_run"](tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def folders(subjects):
    return {name: subject.folder for name, subject in subjects.items()}


@pytest.mark.experiment
def test_a_damage_of_each_kind_is_named(subjects, tmp_path):
    kinds = TOOL["DAMAGES"]
    found = TOOL["summary"](TOOL["try_damages"](subjects, len(kinds), 1, tmp_path))
    assert found["failures"] == []
    assert set(found["kinds"]) == set(kinds)
    assert all(sum(verdicts.values()) == 1 for verdicts in found["kinds"].values())


def test_a_damaged_checkpoint_of_a_killed_stage_is_mended(subjects, tmp_path):
    killed = {"killed.work": subjects["killed.work"]}
    found = TOOL["summary"](TOOL["try_damages"](killed, 3, 2, tmp_path))
    assert found["failures"] == []
    assert found["verdicts"]["mended by resuming"] > 0


def test_what_is_harmless_and_what_is_not(folders, tmp_path):
    """An edited card is; a damage that is not named, or that ends in a traceback, is a failure."""
    copy = Path(shutil.copytree(folders["out"], tmp_path / "out"))
    (copy / "README.md").write_text("mine")
    assert TOOL["verdict_of"](copy, "README.md") == ("harmless by promise", "")
    assert TOOL["verdict_of"](copy, "config.json") == ("silent", "")
    (copy / "tokenizer.json").unlink()
    verdict, message = TOOL["verdict_of"](copy, "config.json")
    assert (verdict, "tokenizer.json is missing" in message) == ("not named", True)
    outcome = TOOL["Outcome"]("out", "deleted", "tokenizer.json", verdict, message)
    assert len(TOOL["summary"]([outcome])["failures"]) == 1


def test_all_steps_of_a_run(folders, tmp_path):
    root = folders["out"].with_name("out.stages")
    checks = api.verify(root).checks
    assert [check.name for check in checks if check.name.endswith(": files")] == [
        f"{path.name}: files" for path in sorted(root.iterdir()) if path.is_dir() and path.suffix != ".work"
    ]
    damaged = Path(shutil.copytree(root, tmp_path / "x.stages"))
    (damaged / "03-eval" / "evaluation.json").write_text("{}")
    (damaged / "01-calibrate" / "config.json").unlink()
    (damaged / "04-export" / "manifest.json").unlink()
    with pytest.raises(VerificationError) as error:
        api.verify(damaged)
    told = error.value.what.splitlines()
    assert [line.split(": ")[0] for line in told if not line.startswith("opening")] == [
        "01-calibrate",
        "03-eval",
        "04-export",
    ]
    assert "03-eval: files: evaluation.json has 2 bytes" in told[2]
    assert told[3] == "04-export: files: manifest.json is missing, though stage.json says that it was written"
