"""Growing a trained checkpoint, in miniature."""

import json

import pytest

from benchmarks.paper import growth
from sse_convert.evaluation.perplexity import HeldOutLoss


@pytest.fixture
def small(monkeypatch):
    """Two ways of growing instead of ten."""
    names = ("N = 8", "k = 2")
    monkeypatch.setattr(growth, "WAYS", {name: growth.WAYS[name] for name in names})
    monkeypatch.setattr(growth, "TRAINED", names)


def held_out(loss, windows=4):
    return HeldOutLoss(64, windows, 10 * windows, loss, None, 0.0, (), (10 * loss,) * windows, (10,) * windows)


@pytest.mark.parametrize(
    ("losses", "outcomes"),
    [
        ((2.0, 2.001), ("holds", "undecided")),
        ((1.9, 1.901), ("holds", "holds")),
        ((2.1, 2.1), ("fails", "fails")),
        ((1.9, 2.1), ("undecided", "undecided")),
    ],
)
def test_verdicts_of_made_up_losses(losses, outcomes):
    """The control's losses are 2 and 2.002."""
    runs = {growth.CONTROL: [held_out(2.0), held_out(2.002)], "N = 8": [held_out(loss) for loss in losses]}
    found = growth.verdicts(runs)
    assert (found["recovers"], found["gains"]) == outcomes
    assert found["ways"][0]["better_by"] == pytest.approx(2.001 - sum(losses) / 2)


@pytest.mark.smoke
def test_everything_that_is_trained_is_grown_first():
    assert set(growth.TRAINED) <= set(growth.WAYS)


def test_growth_from_start_to_end(given, small, tmp_path, capsys):
    out = tmp_path / "growth.json"
    stage = "tokens: 256, seq_len: 64, lr: 1.0e-3, batch_tokens: 128"
    stages = f"stages=[{{name: align, loss: layer_mse, {stage}}}, {{name: distill, loss: kl, {stage}}}]"
    few = ["stages.0.tokens=256", "stages.1.tokens=256", "eval.tokens=512", "eval.throughput=[]"]
    sets = [part for text in (stages, *few) for part in ("--set", text)]
    assert growth.main(["--recipe", str(given), "--out", str(out), "--seeds", "1", *sets]) == 0
    report = json.loads(out.read_text())
    assert list(report["ways"]) == ["N = 8", "k = 2"]
    assert report["ways"]["N = 8"]["change"]["kl"] > 0
    assert list(report["trained"]) == [growth.CONTROL, "N = 8", "k = 2"]
    (run,) = report["trained"]["N = 8"]["runs"]
    assert list(run["in_use"]) == ["0"]
    assert 0 <= run["in_use"]["0"] <= 1
    assert report["trained"]["k = 2"]["runs"][0]["in_use"] == {}
    assert report["verdicts"]["recovers"] == "undecided"
    assert out.with_suffix(".png").stat().st_size > 0
    assert "recovers: undecided" in capsys.readouterr().err


def test_at_least_one_seed(given, tmp_path, capsys):
    assert growth.main(["--recipe", str(given), "--out", str(tmp_path / "x.json"), "--seeds", "0"]) == 2
    assert "seeds is 0" in capsys.readouterr().err
