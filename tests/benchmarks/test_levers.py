"""Levers of distillation, in miniature."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.quality import levers
from benchmarks.quality.lever_patches import AVERAGED, Average, late_positions_count_more, position_weights
from benchmarks.quality.levers import LEVERS
from sse_convert.modeling.head import Head
from sse_convert.recipe.schema import Stage
from sse_convert.training.losses import linear_kl

KL = {"loss": "kl", "tokens": "1K", "seq_len": 64, "batch_tokens": 128, "lr": 1e-2, "train": "mixers"}
STAGES = [{**KL, "name": "distill"}, {**KL, "name": "long", "seq_len": 128}]
TINY = [
    "layers.pattern=[sse, full]",
    "eval.lengths=[64]",
    "eval.tokens=512",
    "eval.throughput=[]",
    "eval.needle=null",
    "train.compile=false",
]
CPU = torch.device("cpu")


def command(given, tmp_path, stages, *names):
    changes = [*TINY, f"stages={json.dumps(stages)}"]
    sets = [part for change in changes for part in ("--set", change)]
    places = ["--out", str(tmp_path / "levers.json"), "--work", str(tmp_path / "work")]
    return ["--recipe", str(given), *sets, *places, "--levers", *names]


@pytest.mark.smoke
def test_levers_are_trained_alike_but_for_one_thing(given, tmp_path):
    same = ["as it is", "last weights averaged", "fewer needles at the end"]
    names = [*same, "late positions count more", "longer rows earlier"]
    assert levers.main(command(given, tmp_path, STAGES, *names[:2])) == 0
    two = json.loads((tmp_path / "levers.json").read_text())["trials"]
    assert levers.main(command(given, tmp_path, STAGES, *names)) == 0
    trials = json.loads((tmp_path / "levers.json").read_text())["trials"]
    assert trials[:2] == two, "what is measured is not measured again"
    assert [trial["lever"] for trial in trials] == names
    divergences = [trial["kl"]["64"] for trial in trials]
    assert len(set(divergences)) == len(names), "a lever changed nothing"
    tokens = [trial["tokens"] for trial in trials]
    assert tokens == [[1024, 1024]] * 4 + [[614, 1434]]
    begun = {path.parent.name for path in (tmp_path / "work").glob("*/first")}
    assert begun == {"as-it-is-0", "late-positions-count-more-0", "longer-rows-earlier-0"}, (
        "what changes the last stage goes on from one"
    )


def test_other_stages_are_refused(given, tmp_path, capsys):
    assert levers.main(command(given, tmp_path, [{**STAGES[0], "loss": "ce"}], "as it is")) == 2
    assert "stages of loss ce" in capsys.readouterr().err


def test_rates_are_scaled(given, tmp_path):
    options = levers.parser().parse_args(command(given, tmp_path, STAGES, "as it is"))
    twice = levers._with(levers.trial(options, "as it is", 0).first, LEVERS["16 partitions, twice the rates"])
    assert [stage.lr for stage in twice.stages] == [2e-2, 2e-2]


def test_weights_grow_with_the_place_and_are_one_on_average():
    weights = position_weights(12, 4, CPU)[:, 0]
    assert weights.mean() == pytest.approx(1.0)
    assert weights[:4].tolist() == sorted(weights[:4].tolist())
    assert torch.equal(weights[:4], weights[8:])


def test_gradients_of_late_tokens_count_more_and_the_loss_stays():
    torch.manual_seed(0)
    head = Head(weight=torch.randn(11, 5), bias=None)
    teacher, start = torch.randn(8, 5), torch.randn(8, 5)

    def loss_and_gradient():
        hidden = start.clone().requires_grad_()
        loss = linear_kl(hidden, head, teacher, head)
        loss.backward()
        return loss.detach(), hidden.grad

    stage = Stage(name="distill", loss="kl", tokens=8, seq_len=4, lr=1e-3, train="mixers")
    plain, gradient = loss_and_gradient()
    with late_positions_count_more(stage):
        same, weighted = loss_and_gradient()
    assert torch.equal(plain, same)
    torch.testing.assert_close(weighted, gradient * position_weights(8, 4, CPU))
    assert torch.equal(loss_and_gradient()[1], gradient)


def test_the_last_weights_are_averaged():
    module = nn.Linear(1, 1, bias=False)
    objective = SimpleNamespace(parts=[SimpleNamespace(module=module)])
    steps = 10
    average = Average(steps)
    for step in range(steps):
        module.weight.data.fill_(float(step))
        average.add(objective)
    assert average.count == round(AVERAGED * steps)
    average.put(objective)
    assert module.weight.item() == pytest.approx(8.5)
