"""Steps that are not finite are left out and bounded, collapsed routers named; bfloat16 keeps float32 masters."""

import math

import pytest
import torch
from safetensors.torch import load_file

from sse_convert.errors import TrainingError
from sse_convert.modeling.router import RoutedLayer
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.training import left_out, loop
from sse_convert.training.metrics import read
from sse_convert.training.router_watch import RouterWatch, gradient_norm, load_spread, router_parameters
from tests.modeling.tiny import SSE, tiny_model
from tests.surgery.models import tokens


def test_spread_of_a_load():
    assert load_spread([0.25] * 4, 1) == pytest.approx(1.0)
    assert load_spread([1.0, 0.0, 0.0, 0.0], 1) == 0.0
    assert load_spread([0.5, 0.5, 0.0, 0.0], 2) == pytest.approx(0.0)
    assert load_spread([0.5, 0.5, 0.0, 0.0], 1) == pytest.approx(0.5)
    assert load_spread([0.5, 0.5], 2) == 1.0


def test_collapse_needs_looks_in_a_row():
    watch = RouterWatch(None)
    spreads = (0.1, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert [watch.collapsed({0: spread, 1: 0.9}) for spread in spreads] == [[]] * 6 + [[0]] * 2


def test_router_parameters_are_all_that_choose():
    model = tiny_model("qwen3", ("sse", "full", "sse", "full"), {"sse": SSE}).train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    wanted = {name: weight for name, weight in model.named_parameters() if name.endswith("sse_router.weight")}
    assert len(wanted) == 2
    found = router_parameters(model)
    assert {id(weight) for weight in found} == {id(weight) for weight in wanted.values()}
    assert all(weight.grad.abs().max() > 0 for weight in found)
    together = torch.cat([weight.grad.flatten() for weight in found]).norm()
    torch.testing.assert_close(gradient_norm(found), together)


@pytest.fixture
def broken(monkeypatch):
    """Makes the gradients of chosen steps NaN."""

    def install(chosen):
        real, calls = loop._gradients, []

        def gradients(objective, batches, schedule):
            found = real(objective, batches, schedule)
            calls.append(1)
            if chosen(len(calls)):
                for parameter in objective.parts[0].module.parameters():
                    parameter.grad.fill_(math.nan)
            return found

        monkeypatch.setattr(loop, "_gradients", gradients)

    return install


def test_a_step_that_is_not_finite_is_left_out_and_reported(train, broken, capsys):
    broken({10}.__contains__)
    folder, report = train("uptrain", tokens=128 * 12)
    records = read(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "left_out" in record] == [10]
    assert [len(records), report.steps, report.skipped_steps] == [12, 12, 1]
    assert report.left_out == [{"step": 10, "loss": records[9]["loss"], "why": "not finite"}]
    assert records[10]["loss"] < 2 * records[8]["loss"]
    assert "1 step left out (not finite)" in report.lines()[0]
    assert "not finite, weights left as they are" in capsys.readouterr().err


def test_too_many_end_the_stage_and_name_the_checkpoint(train, broken, tmp_path, monkeypatch):
    monkeypatch.setattr(left_out, "IN_A_ROW", 2)
    broken(lambda n: n > 8)
    with pytest.raises(TrainingError, match="2 steps in a row were") as caught:
        train("uptrain", tokens=128 * 20, checkpoint_steps=4)
    assert f"last good checkpoint is {tmp_path / 'result.work' / 'step-000008'}" in caught.value.fix


def test_a_collapsed_router_is_named(make, train, tmp_path, monkeypatch, capsys):
    """Whatever tokens say, partition 2 is chosen."""
    chosen = RoutedLayer.router_logits

    def skewed(self, x):
        logits = chosen(self, x)
        return logits + 100.0 * torch.eye(4)[2].to(logits)

    monkeypatch.setattr(RoutedLayer, "router_logits", skewed)
    recipe = make(("distill", {"tokens": 128 * 41}), layers={"pattern": ["sse", "full", "full"]})
    convert_checkpoint(Job.of(recipe), tmp_path / "collapsed")
    folder, report = train("distill", recipe=recipe, checkpoint=tmp_path / "collapsed")
    found = {record["step"]: record["collapsed"] for record in read(folder / "metrics.jsonl") if "collapsed" in record}
    assert found == {41: [0]}
    assert report.collapsed == [
        "layer 0: router collapsed at step 41, 100% of its load is on one partition of 4; lower the mixers' lr, "
        "or balance more: raise balance_coef"
    ]
    assert report.collapsed[0] in report.lines()
    assert capsys.readouterr().err.count("router collapsed") == 1


def test_healthy_routers_are_not_named(train):
    folder, report = train("distill", tokens=128 * 21)
    assert report.collapsed == []
    assert not [record for record in read(folder / "metrics.jsonl") if "collapsed" in record]


def test_bf16_has_float32_masters(train, make, monkeypatch):
    """Autocast alone is bf16: weights, AdamW's moments and the result are float32, so updates below 2^-9 are kept."""
    seen = []
    real = loop._stepped

    def spy(objective, *args):
        result = real(objective, *args)
        for part in objective.parts:
            seen.extend(parameter.dtype for parameter in part.module.parameters())
            seen.extend(v.dtype for s in part.optimizer.state.values() for v in s.values() if torch.is_tensor(v))
        return result

    monkeypatch.setattr(loop, "_stepped", spy)
    recipe = make(("distill", {"tokens": 128, "lr": 1e-6}), train={"mixed_precision": "bf16"})
    folder, report = train("distill", recipe=recipe)
    assert set(seen) == {torch.float32}
    state = load_file(folder / "model.safetensors")
    assert {value.dtype for value in state.values()} == {torch.float32}
    weight = state["model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())
    assert report.loss_first > 0
