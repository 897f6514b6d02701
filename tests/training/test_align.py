"""Alignment: groups of layers give what all at once give, layers stop early, and what is aligned is left alone."""

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from sse_convert.errors import HardwareError
from sse_convert.recipe.stage_settings import EarlyStop
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.training import align, loop
from sse_convert.training.align import layer_groups
from sse_convert.training.early_stop import LayerStops
from sse_convert.training.metrics import WITHOUT_WINDOW, read
from sse_convert.training.setup import make_accelerator
from sse_convert.training.stage_inputs import check_stage
from tests.training.conftest import losses
from tests.training.test_resume import Killed, same, steps_then

STEADY = {"warmup": 0.0, "min_lr": 1.0, "checkpoint_steps": 2}
"""a learning rate that does not depend on the length of the stage"""


def layer(folder, index):
    state = load_file(folder / "model.safetensors")
    return {name: value for name, value in state.items() if name.startswith(f"model.layers.{index}.self_attn.")}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def errors(folder, index):
    return [record[f"error_{index}"] for record in read(folder / "metrics.jsonl") if f"error_{index}" in record]


def test_groups_of_layers():
    assert layer_groups([0, 2, 3, 5], None) == [[0, 2, 3, 5]]
    assert layer_groups([0, 2, 3, 5], 3) == [[0, 2, 3], [5]]
    assert layer_groups([0, 2], 9) == [[0, 2]]
    assert layer_groups([], None) == []


def test_one_layer_at_a_time_gives_what_all_at_once_give(train):
    together, whole = train("align", "together")
    alone, report = train("align", "alone", layers_at_once=1)
    assert same(together, alone)
    for i in (0, 1):
        assert errors(together, i) == errors(alone, i)
    assert report.details["layers"] == whole.details["layers"]
    assert (whole.steps, report.steps) == (6, 12)
    assert report.loss_first == pytest.approx(whole.loss_first)
    assert report.loss_last == pytest.approx(whole.loss_last)
    assert [record["step"] for record in read(alone / "metrics.jsonl")] == list(range(1, 13))


def test_windows_beside_sse_are_left_out_at_the_same_steps_in_groups_and_after_a_stop(
    train, make, tmp_path, monkeypatch
):
    mixer = {"qk_rank": 4, "window": 8, "sinks": 1, "branch_dropout": 0.5}
    beside = {"layers": {"pattern": ["sse+sliding", "sse+sliding", "full"]}, "mixers": {"sse+sliding": mixer}}
    recipes = [
        make(("align", {"checkpoint_steps": 2, **own}), calibrate={"seq_len": 32}, **beside)
        for own in ({}, {"layers_at_once": 1})
    ]
    convert_checkpoint(recipes[0], tmp_path / "beside")
    start = {"checkpoint": tmp_path / "beside"}
    together, report = train("align", "together", recipe=recipes[0], **start)
    alone, _ = train("align", "alone", recipe=recipes[1], **start)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train("align", "stopped", recipe=recipes[0], **start)
    stopped, _ = train("align", "stopped", recipe=recipes[0], **start)
    assert same(together, alone)
    assert same(together, stopped)
    records = read(together / "metrics.jsonl")
    without = [record for record in records if 0 in record.get(WITHOUT_WINDOW, [])]
    kept = [record for record in records if record not in without]
    assert without
    assert kept
    assert min(record["error_0"] for record in without) > max(record["error_0"] for record in kept)
    assert report.details["layers"]["0"]["after"] == kept[-1]["error_0"]
    assert report.details["layer_steps"] == 2 * len(records)


def test_only_the_layers_of_a_group_are_held(train, monkeypatch):
    held = []
    real = align.Align._teacher_calls

    def calls(self, batch):
        found = real(self, batch)
        held.append((sorted(found), [part.name for part in self.parts]))
        return found

    monkeypatch.setattr(align.Align, "_teacher_calls", calls)
    train("align", layers_at_once=1)
    assert {tuple(layers) for layers, _ in held} == {(0,), (1,)}
    assert all(len(parts) <= 1 for _, parts in held)


@pytest.mark.parametrize("stopped_after", [6, 9])
def test_groups_interrupted_and_continued(train, monkeypatch, stopped_after, capsys, tmp_path):
    whole, _ = train("align", "whole", layers_at_once=1, checkpoint_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, stopped_after, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train("align", "stopped", layers_at_once=1, checkpoint_steps=2)
    assert "of 12 steps are saved" in capsys.readouterr().err
    folder, _ = train("align", "stopped", layers_at_once=1, checkpoint_steps=2)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)
    assert not (tmp_path / "stopped.work").exists()


def test_killed_while_a_group_is_written(train, monkeypatch):
    whole, _ = train("align", "whole", layers_at_once=1)
    with monkeypatch.context() as patch:
        patch.setattr(align, "save_file", steps_then(align.save_file, 1, Killed()))
        with pytest.raises(Killed):
            train("align", "stopped", layers_at_once=1)
    folder, _ = train("align", "stopped", layers_at_once=1)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)


def test_groups_are_refused_under_fsdp(make, tmp_path):
    recipe = make(("align", {"layers_at_once": 1}))
    accelerator = make_accelerator(recipe.train, tmp_path)
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(HardwareError, match="layers_at_once under FSDP"):
        check_stage(recipe, recipe.stages[0], accelerator)


def test_when_layers_stop():
    stops = LayerStops(EarlyStop(window=2, improvement=0.1, below=0.01))
    falling = [1.0, 0.9, 0.8, 0.7, 0.69, 0.68]  # means 0.95, 0.75, 0.685: 21%, then 9% lower
    dropping = [1.0, 1.0, 0.001, 0.001]
    found = []
    for step, error in enumerate(falling, 1):
        others = {4: dropping[step - 1]} if step <= 4 else {}
        found.append(stops.look(step, {3: error, **others}))
    assert found == [[], [], [], [4], [], [3]]
    assert stops.stopped[4] == {"step": 4, "error": pytest.approx(0.001), "why": "below 0.01"}
    assert stops.stopped[3] == {"step": 6, "error": pytest.approx(0.685), "why": "no improvement"}
    assert LayerStops(None).look(1, {0: 0.0}) == []


def test_a_stopped_layer_keeps_its_weights_and_the_others_go_on(train):
    short, report = train("align", "short", tokens=256, **STEADY)
    level = {i: sum(errors(short, i)) / 2 for i in (0, 1)}
    easy, hard = sorted(level, key=level.get)
    stop = {"window": 2, "improvement": None, "below": sum(level.values()) / 2}
    free, _ = train("align", "free", **STEADY)
    folder, report = train("align", "early", stop=stop, **STEADY)
    assert equal(layer(folder, easy), layer(short, easy))
    assert not equal(layer(folder, easy), layer(free, easy))
    assert equal(layer(folder, hard), layer(free, hard))
    stopped = report.details["layers"][str(easy)]["stopped"]
    assert stopped == {"step": 2, "error": pytest.approx(level[easy]), "why": f"below {stop['below']:g}"}
    assert "stopped" not in report.details["layers"][str(hard)]
    records = read(folder / "metrics.jsonl")
    assert records[1]["stopped"] == {str(easy): stopped}
    assert f"error_{easy}" not in records[2]
    assert records[2]["loss"] == pytest.approx((level[easy] + records[2][f"error_{hard}"]) / 2)
    assert (report.details["layer_steps"], report.details["layer_steps_planned"]) == (8, 12)
    assert "stopped at step 2" in "\n".join(report.lines())
    assert "8 of 12 layer steps made" in "\n".join(report.lines())


@pytest.mark.parametrize("at_once", [None, 1])
def test_the_stage_ends_when_all_layers_have_stopped(train, at_once):
    folder, report = train("align", stop={"window": 2, "below": 1e6}, layers_at_once=at_once, checkpoint_steps=4)
    assert report.steps == (2 if at_once is None else 4)
    assert [len(errors(folder, i)) for i in (0, 1)] == [2, 2]


def test_early_stop_interrupted_and_continued(train, monkeypatch):
    settings = {"stop": {"window": 2, "improvement": 0.9}, **STEADY, "tokens": 1024}
    whole, report = train("align", "whole", **settings)
    assert report.steps == 4
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train("align", "stopped", **settings)
    folder, report = train("align", "stopped", **settings)
    assert losses(folder) == losses(whole)
    assert report.steps == 4
    assert same(folder, whole)


def test_what_is_aligned_is_judged_on_held_out_text(train, make, text_folder):
    data = {"train": [{"path": str(text_folder / "0.txt")}], "valid": [{"path": str(text_folder / "5.txt")}]}
    _, report = train("align", "measured", recipe=make(("align", {"tokens": 128, "skip_below": 1e-9}), data=data))
    layers = report.details["layers"]
    assert all(layer["held_out"] != layer["before"] for layer in layers.values())
    held_out = [layer["held_out"] for layer in layers.values()]
    low = min(layers, key=lambda i: layers[i]["held_out"])
    recipe = make(("align", {"tokens": 128, "skip_below": sum(held_out) / 2}), data=data)
    _, report = train("align", "judged", recipe=recipe)
    assert report.details["skipped"] == [int(low)]
    assert report.details["layers"][low]["held_out"] == layers[low]["held_out"]
