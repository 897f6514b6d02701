"""Alignment: layers stop early, each by itself."""

import pytest
import torch
from safetensors.torch import load_file

from sse_convert.training import early_stop, loop
from sse_convert.training.early_stop import LayerStops
from sse_convert.training.metrics import read
from tests.training.conftest import losses
from tests.training.test_resume import same, steps_then

STEADY = {"warmup": 0.0, "min_lr": 1.0, "checkpoint_steps": 2}
"""a learning rate that does not depend on the length of the stage"""


def layer(folder, index):
    state = load_file(folder / "model.safetensors")
    return {name: value for name, value in state.items() if name.startswith(f"model.layers.{index}.self_attn.")}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def errors(folder, index):
    return [record[f"error_{index}"] for record in read(folder / "metrics.jsonl") if f"error_{index}" in record]


@pytest.fixture(autouse=True)
def _short_window(monkeypatch):
    monkeypatch.setattr(early_stop, "WINDOW", 2)


def test_when_layers_stop():
    stops = LayerStops(0.1)
    falling = [1.0, 0.9, 0.8, 0.7, 0.69, 0.68]  # means 0.95, 0.75, 0.685: 21%, then 9% lower
    level = [1.0, 1.0, 1.0, 0.9]
    found = []
    for step, error in enumerate(falling, 1):
        others = {4: level[step - 1]} if step <= 4 else {}
        found.append(stops.look(step, {3: error, **others}))
    assert found == [[], [], [], [4], [], [3]]
    assert stops.stopped[4] == {"step": 4, "error": pytest.approx(0.95), "why": "no improvement"}
    assert stops.stopped[3] == {"step": 6, "error": pytest.approx(0.685), "why": "no improvement"}
    assert LayerStops(None).look(1, {0: 0.0}) == []


def test_a_stopped_layer_keeps_its_weights_and_the_others_go_on(train):
    short, report = train("align", "short", tokens=512, **STEADY)
    before, after = ({i: sum(errors(short, i)[part]) / 2 for i in (0, 1)} for part in (slice(2), slice(2, 4)))
    better = {i: 1 - after[i] / before[i] for i in (0, 1)}
    slow, fast = sorted(better, key=better.get)
    stop = max(0.0, sum(better.values()) / 2)
    free, _ = train("align", "free", **STEADY)
    folder, report = train("align", "early", stop=stop, **STEADY)
    assert equal(layer(folder, slow), layer(short, slow))
    assert not equal(layer(folder, slow), layer(free, slow))
    stopped = report.details["layers"][str(slow)]["stopped"]
    assert stopped == {"step": 4, "error": pytest.approx(after[slow]), "why": "no improvement"}
    records = read(folder / "metrics.jsonl")
    assert records[3]["stopped"] == {str(slow): stopped}
    assert f"error_{slow}" not in records[4]
    assert records[4]["loss"] == pytest.approx((after[slow] + records[4][f"error_{fast}"]) / 2)
    assert errors(folder, fast)[:5] == errors(free, fast)[:5]
    assert "stopped at step 4" in "\n".join(report.lines())
    made = sum(len(errors(folder, i)) for i in (0, 1))
    assert f"{made} of 12 layer steps made" in "\n".join(report.lines())


def test_the_stage_ends_when_all_layers_have_stopped(train):
    folder, report = train("align", stop=0.99, checkpoint_steps=4)
    assert report.steps == 4
    assert [len(errors(folder, i)) for i in (0, 1)] == [4, 4]


def test_early_stop_interrupted_and_continued(train, monkeypatch):
    settings = {"stop": 0.9, **STEADY, "tokens": 1024}
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
