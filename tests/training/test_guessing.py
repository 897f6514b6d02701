"""Every command that chooses, converts, calibrates or trains warns of a teacher that guesses, before it does."""

import dataclasses as dc
import functools

import pytest

from sse_convert import api
from sse_convert.calibration.attention_statistics import Collector
from sse_convert.selection.setup import METHODS
from sse_convert.surgery import convert as surgery
from sse_convert.surgery import guessing
from sse_convert.training import loop
from tests.training.test_resume import Killed, steps_then

GUESSES = "no better than guessing one of 320 tokens"
SELECT = {"layers": {"pattern": ["sse"], "select": {"keep": 1}}}
SMALL = {"length": 512, "tokens": 512, "samples": 2, "device": "cpu"}
CALIBRATE = {"calibrate": {"rows": 2, "seq_len": 32}}


@pytest.fixture
def commands(make, converted, tmp_path):
    """Name -> the call of a command, for a teacher of random weights."""
    out = tmp_path / "made"
    stages = {"align": api.align, "distill": api.distill, "uptrain": api.uptrain}
    return {
        "select": functools.partial(api.select, make(), 1, out, **SMALL),
        "convert": functools.partial(api.convert, make(), out),
        "convert and choose": functools.partial(api.convert, make(**SELECT), out),
        "calibrate": functools.partial(api.calibrate, make(**CALIBRATE), converted, out),
        **{name: functools.partial(stage, make(name), converted, out) for name, stage in stages.items()},
    }


@pytest.fixture
def stopped(monkeypatch):
    """What a command does once it has tried its teacher is refused."""
    stop = steps_then(None, 0, Killed())
    monkeypatch.setattr(surgery, "convert_layers", stop)
    monkeypatch.setattr(Collector, "run", stop)
    monkeypatch.setattr(loop, "_gradients", stop)
    monkeypatch.setitem(METHODS, "greedy", stop)


NAMES = ["select", "convert", "convert and choose", "calibrate", "align", "distill", "uptrain"]


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("name", NAMES)
def test_a_command_warns_first_and_once(commands, capsys, name):
    with pytest.raises(Killed):
        commands[name]()
    assert capsys.readouterr().err.count(GUESSES) == 1


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_said_of_a_teacher_that_predicts(commands, monkeypatch, capsys, name):
    monkeypatch.setattr(guessing, "GUESSED", 2.0)
    with pytest.raises(Killed):
        commands[name]()
    assert "guessing" not in capsys.readouterr().err


def test_a_stage_that_goes_on_or_follows_another_says_it_no_more(commands, make, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            api.uptrain(make(("uptrain", {"checkpoint_steps": 1})), *commands["uptrain"].args[1:])
    capsys.readouterr()
    api.uptrain(make(("uptrain", {"checkpoint_steps": 1})), *commands["uptrain"].args[1:])
    api.uptrain(make("uptrain"), tmp_path / "made", tmp_path / "more")
    assert "guessing" not in capsys.readouterr().err


def test_conversion_needs_neither_text_nor_tokenizer(make, teacher_folder, tmp_path, capsys):
    asked = make(data={"train": [{"path": str(tmp_path / "absent.txt")}]})
    api.convert(asked, tmp_path / "made")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (teacher_folder / name).is_file()
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in teacher_folder.iterdir():
        if "token" not in path.name:
            (bare / path.name).symlink_to(path)
    api.convert(dc.replace(make(), model=str(bare)), tmp_path / "again")
    assert "guessing" not in capsys.readouterr().err
