"""Loss spikes and NaN are left out and bounded, collapsed routers are named, bfloat16 keeps float32 masters."""

import math
import random

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from sse_convert.errors import TrainingError
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.training import loop, loss_spikes
from sse_convert.training.loss_spikes import SpikeWatch
from sse_convert.training.metrics import read
from sse_convert.training.objective import Objective
from sse_convert.training.router_collapse import CollapseWatch, load_spread
from tests.training.conftest import losses
from tests.training.test_resume import same, steps_then

SPIKES = {"spikes": 8.0}


@pytest.fixture
def short(monkeypatch):
    """Few steps are enough to judge by."""
    monkeypatch.setattr(loss_spikes, "WINDOW", 8)


def test_zscore_is_that_of_a_normal_distribution(monkeypatch):
    monkeypatch.setattr(loss_spikes, "WINDOW", 2001)
    rng = random.Random(0)
    watch = SpikeWatch(4.0)
    for _ in range(2001):
        watch.accept(rng.gauss(3.0, 0.2))
    assert watch.zscore(3.0 + 0.6) == pytest.approx(3.0, abs=0.15)
    assert watch.verdict(3.0 + 0.7) is None
    assert watch.verdict(3.0 + 0.9) == "loss spike"
    assert watch.verdict(-100.0) is None
    assert watch.verdict(math.inf) == watch.verdict(math.nan) == "not finite"


def test_nothing_is_judged_before_the_window_is_full_nor_without_zscore(short):
    watch = SpikeWatch(4.0)
    for i in range(8):
        assert watch.verdict(100.0 * (i + 1)) is None
        watch.accept(1.0)
    assert watch.zscore(1.0) == 0
    assert watch.verdict(1.1) == "loss spike"  # equal losses are taken to vary by a thousandth
    assert watch.verdict(1.003) is None
    off = SpikeWatch(None)
    off.accept(1.0)
    assert off.losses == []
    assert off.verdict(1e9) is None


def test_text_of_another_kind_scores_as_a_spike():
    """Why no limit is the default: one row in 25 with a loss of its own does not move the median deviation."""
    rng = random.Random(0)
    watch = SpikeWatch(20.0)
    for i in range(100):
        watch.accept(rng.gauss(4.0 if i % 25 == 0 else 1.8, 0.08))
    assert watch.verdict(4.0) == "loss spike"
    assert watch.verdict(2.0) is None


def test_spread_of_a_load():
    assert load_spread([0.25] * 4, 1) == pytest.approx(1.0)
    assert load_spread([1.0, 0.0, 0.0, 0.0], 1) == 0.0
    assert load_spread([0.5, 0.5, 0.0, 0.0], 2) == pytest.approx(0.0)
    assert load_spread([0.5, 0.5, 0.0, 0.0], 1) == pytest.approx(0.5)
    assert load_spread([0.5, 0.5], 2) == 1.0


def test_collapse_needs_looks_in_a_row():
    watch = CollapseWatch("warn")
    spreads = (0.1, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert [watch.look({0: spread, 1: 0.9}) for spread in spreads] == [[]] * 6 + [[0]] * 2


@pytest.fixture
def jump(monkeypatch):
    """Multiplies loss and gradients of chosen steps."""

    def install(chosen, factor=1e4):
        real, calls = loop._gradients, []

        def gradients(objective, batches, schedule):
            values, tokens = real(objective, batches, schedule)
            calls.append(1)
            if chosen(len(calls)):
                values["loss"] *= factor
                for parameter in objective.parts[0].module.parameters():
                    parameter.grad.mul_(factor)
            return values, tokens

        monkeypatch.setattr(loop, "_gradients", gradients)

    return install


def test_a_spike_is_left_out_and_reported(short, train, make, jump, capsys):
    jump({10}.__contains__)
    folder, report = train("uptrain", recipe=make(("uptrain", {"tokens": 128 * 12}), train=SPIKES))
    records = read(folder / "metrics.jsonl")
    assert [record["step"] for record in records if "left_out" in record] == [10]
    assert records[9]["zscore"] > 100
    assert records[9]["grad_norm"] > 1e3
    assert [len(records), report.steps, report.skipped_steps] == [12, 12, 1]
    assert report.left_out == [{"step": 10, "loss": records[9]["loss"], "why": "loss spike"}]
    assert records[10]["loss"] < 2 * records[8]["loss"]
    assert "1 steps left out (loss spike)" in report.lines()[0]
    assert "loss spike, weights left as they are" in capsys.readouterr().err


def test_watching_changes_nothing_without_spikes(short, train, make):
    plain, _ = train("uptrain", "plain", tokens=128 * 10)
    watched, report = train("uptrain", "watched", recipe=make(("uptrain", {"tokens": 128 * 10}), train=SPIKES))
    assert report.skipped_steps == 0
    assert losses(plain) == losses(watched)
    assert same(plain, watched)


def test_too_many_spikes_end_the_stage_and_name_the_checkpoint(short, train, make, jump, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_spikes, "IN_A_ROW", 2)
    jump(lambda n: n > 8)
    recipe = make(("uptrain", {"tokens": 128 * 20, "checkpoint_steps": 4}), train=SPIKES)
    with pytest.raises(TrainingError, match="2 steps in a row were") as caught:
        train("uptrain", recipe=recipe)
    assert f"last good checkpoint is {tmp_path / 'result.work' / 'step-000008'}" in caught.value.fix


def test_spikes_interrupted_and_continued(short, train, make, monkeypatch):
    """With a low bar, ordinary steps are left out."""
    recipe = make(
        ("uptrain", {"tokens": 128 * 16, "checkpoint_steps": 5, "lr": 1e-4}),
        train={"spikes": 0.5},
    )
    whole, report = train("uptrain", "whole", recipe=recipe)
    assert report.skipped_steps > 0
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 12, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train("uptrain", "stopped", recipe=recipe)
    folder, again = train("uptrain", "stopped", recipe=recipe)
    assert losses(folder) == losses(whole)
    assert again.left_out == report.left_out
    assert same(folder, whole)


@pytest.fixture
def collapsed(make, tmp_path):
    """A converted checkpoint whose router sends everything to partition 2, by a bias that is never moved."""

    def build(collapse):
        mixers = {"sse": {"qk_rank": 4, "balance": "bias", "balance_coef": 0.0}}
        layers = {"pattern": ["sse", "full", "full"]}
        recipe = make(("distill", {"tokens": 128 * 41}), mixers=mixers, layers=layers, train={"collapse": collapse})
        convert_checkpoint(recipe, tmp_path / "collapsed")
        path = next((tmp_path / "collapsed").glob("sse-*.safetensors"))
        state = load_file(path)
        name = next(name for name in state if name.endswith("sse_router_bias"))
        state[name] = torch.tensor([0.0, 0.0, 100.0, 0.0]).to(state[name])
        path.unlink()
        save_file(state, path, metadata={"format": "pt"})
        return recipe, tmp_path / "collapsed"

    return build


def test_a_collapsed_router_is_named(train, collapsed, capsys):
    recipe, checkpoint = collapsed("warn")
    folder, report = train("distill", recipe=recipe, checkpoint=checkpoint)
    found = {record["step"]: record["collapsed"] for record in read(folder / "metrics.jsonl") if "collapsed" in record}
    assert found == {41: [0]}
    assert report.collapsed == [
        "layer 0: router collapsed at step 41, 100% of its load is on partition 2; raise its mixer's balance_coef, "
        "use balance: bias, or lower the mixers' lr"
    ]
    assert report.collapsed[0] in report.lines()
    assert capsys.readouterr().err.count("router collapsed") == 1


def test_a_collapsed_router_ends_the_stage_where_the_recipe_says_so(train, collapsed):
    recipe, checkpoint = collapsed("stop")
    with pytest.raises(TrainingError, match="layer 0: router collapsed at step 41") as caught:
        train("distill", recipe=recipe, checkpoint=checkpoint)
    assert "no checkpoint was written yet" in caught.value.fix


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


def scaled(monkeypatch, scale):
    """Gives every accelerator a gradient scaler, as mixed_precision: fp16 does on a GPU."""
    real = Objective.__init__

    def with_scaler(self, accelerator):
        real(self, accelerator)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)

    def unscale(self, optimizer):
        self.scaler.unscale_(optimizer.optimizer)

    monkeypatch.setattr(Objective, "__init__", with_scaler)
    monkeypatch.setattr(Accelerator, "unscale_gradients", unscale)


def test_a_gradient_scaler_gives_the_same_steps(short, train, make, monkeypatch, jump):
    """Scaled by a power of two nothing changes; a spike leaves the scaler ready for the next step."""
    jump({9}.__contains__)
    recipe = make(("uptrain", {"tokens": 128 * 10}), train=SPIKES)
    plain, _ = train("uptrain", "plain", recipe=recipe)
    scaled(monkeypatch, 2.0**10)
    jump({9}.__contains__)
    folder, report = train("uptrain", "scaled", recipe=recipe)
    assert [step["step"] for step in report.left_out] == [9]
    torch.testing.assert_close(torch.tensor(losses(folder)), torch.tensor(losses(plain)), rtol=1e-6, atol=0)
    assert losses(folder, "grad_norm")[8] == pytest.approx(losses(plain, "grad_norm")[8], rel=1e-5)


def test_an_overflow_lowers_the_scale_and_is_left_out(train, make, monkeypatch):
    scaled(monkeypatch, 2.0**127)
    folder, report = train("uptrain", recipe=make(("uptrain", {"tokens": 128 * 12})))
    assert report.left_out[0]["why"] == "not finite"
    assert 0 < report.skipped_steps < 10
    assert all(math.isfinite(loss) for loss in losses(folder))
