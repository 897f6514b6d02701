"""Looks at held-out text: what they say, and that they change nothing."""

import dataclasses as dc
import itertools
import json

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from sse_convert.data.rows import stack
from sse_convert.errors import DataError, RecipeError
from sse_convert.evaluation.agreement import Comparison, TeacherStates
from sse_convert.evaluation.perplexity import held_out_loss, make_windows
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe import recipe_from_dict
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.training import held_out, loop
from sse_convert.training.held_out import HeldOut, Looks, held_out_rows
from sse_convert.training.setup import make_accelerator
from sse_convert.training.stage_job import settle
from tests.training.conftest import losses, make_text
from tests.training.test_resume import Killed, same, steps_then

NAMES = ["align", "distill", "uptrain"]
STEP = 2048


@pytest.fixture
def watched(make, train, text_folder):
    """Runs a stage of six steps with held-out text; other arguments as of `train`."""

    def run(name, out="result", *, settings=None, **stage):
        data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
        recipe = make((name, {"checkpoint_steps": 2, **stage}), data=data, train=settings or {"validate_every": 128})
        return train(name, out, recipe=recipe)

    return run


def looks_of(folder, key="valid_loss"):
    return [record.get(key) for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.parametrize("name", NAMES)
def test_training_is_the_same_with_and_without(watched, name):
    plain, _ = watched(name, "plain", settings={"validate_every": None})
    folder, report = watched(name)
    assert losses(folder) == losses(plain)
    assert losses(folder, "grad_norm") == losses(plain, "grad_norm")
    assert same(folder, plain)
    assert None not in looks_of(folder)
    assert looks_of(plain) == [None] * 6
    judged = "valid_kl" if name == "distill" else "valid_loss"
    first, last = ({"step": step, "value": looks_of(folder, judged)[step - 1]} for step in (1, 6))
    assert (report.held_out["first"], report.held_out["last"]) == (first, last)
    assert any(line.startswith(f"held-out {'KL' if name == 'distill' else 'loss'} ") for line in report.lines())


def test_random_numbers_are_left_alone(make, train, text_folder, tmp_path, monkeypatch):
    """Dropout makes the curve depend on each random number."""
    plain_mlp = LlamaMLP.forward

    def dropping(self, x):
        return torch.nn.functional.dropout(plain_mlp(self, x), 0.2)

    monkeypatch.setattr(LlamaMLP, "forward", dropping)
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
    convert_checkpoint(Job.of(make("uptrain")), tmp_path / "model")
    curves = []
    for every in (None, 128):
        recipe = make("uptrain", data=data, train={"validate_every": every})
        folder, _ = train("uptrain", f"every-{every}", recipe=recipe, checkpoint=tmp_path / "model")
        curves.append((losses(folder), [record for record in looks_of(folder) if record is not None], folder))
    (plain, none, one), (seen, looks, other) = curves
    assert plain == seen
    assert same(one, other)
    assert (len(none), len(looks)) == (0, 6)


@pytest.mark.parametrize("name", NAMES[:2])
def test_continued_across_a_look(watched, monkeypatch, name):
    whole, _ = watched(name, "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, Killed()))
        with pytest.raises(Killed):
            watched(name, "stopped")
    folder, report = watched(name, "stopped")
    for key in ("loss", "valid_loss"):
        assert losses(folder, key) == losses(whole, key)
    assert same(folder, whole)
    assert report.held_out["first"]["step"] == 1


def test_another_seed_trains_on_rows_in_another_order_and_looks_at_the_same(make, converted, text_folder, tmp_path):
    data = {name: [{"path": str(text_folder)}] for name in ("train", "valid")}

    def rows(seed):
        recipe = make(("distill", {"tokens": 512}), data=data, train={"seed": seed, "validate_every": 128})
        stage = recipe.stages[0]
        ready = settle(Job.of(recipe), stage, converted, tmp_path / "unused", make_accelerator(recipe.train))
        trained = [row.input_ids.tolist() for row in itertools.islice(ready.reader.rows(), 4)]
        return trained, stack(held_out_rows(ready, Looks.of(recipe, stage)))["input_ids"].tolist()

    trained, looked_at = rows(0)
    assert rows(0) == (trained, looked_at)
    other, still = rows(1)
    assert other != trained
    assert still == looked_at


def test_figures_are_those_of_an_evaluation(make, train, converted, teacher_folder, tokenizer, tmp_path):
    """On packed rows, whose first tokens are not predicted, by a stage that moves nothing."""
    text = tmp_path / "documents.jsonl"
    text.write_text("\n".join(json.dumps({"text": make_text(12, seed=i)}) for i in range(60)))
    sources = [{"path": str(text)}]
    still = {"lr": 1e-30, "tokens": 128 * 20, "checkpoint_steps": 20}
    recipe = make(("distill", still), data={"train": sources, "valid": sources})
    folder, _ = train("distill", recipe=recipe)
    looks = Looks.of(recipe, recipe.stages[0])
    ready = settle(Job.of(recipe), recipe.stages[0], converted, tmp_path / "unused", make_accelerator(recipe.train))
    rows = stack(held_out_rows(ready, looks))
    assert (rows["position_ids"][:, 1:] == 0).any()
    windows = make_windows(rows["input_ids"], tokenizer, rows["position_ids"])
    states = TeacherStates()
    held_out_loss(load_pretrained(teacher_folder), windows, watch=states)
    watch = Comparison(windows, states)
    loss = held_out_loss(load_pretrained(converted), windows, watch=watch).loss
    assert looks_of(folder)[0] == pytest.approx(loss, rel=1e-5)
    assert looks_of(folder, "valid_kl")[0] == pytest.approx(watch.result().kl, rel=1e-5)


def test_text_that_gets_worse_is_warned_of(watched, monkeypatch, capsys):
    values = iter([5.0, 1.0, 4.0, 4.1, 4.2, 4.0])
    real = HeldOut._sums
    monkeypatch.setattr(HeldOut, "_sums", lambda self: real(self) | {"loss": next(values), "tokens": 1.0})
    _, report = watched("uptrain", "result")
    told = capsys.readouterr().err
    assert "warning: uptrain: held-out loss was 1.0000 at step 2 and is 4.2000 at step 5, worse in 3 looks" in told
    assert report.held_out["best"] == {"step": 2, "value": 1.0}
    assert report.lines()[1] == "held-out loss 5.0000 at step 1 -> 4.0000, best 1.0000 at step 2"
    assert "uptrain: held-out loss was 1.0000 at step 2 and ended at 4.0000; lower tokens or lr, or add text" in (
        report.warnings()
    )


def test_looks_are_few(make, text_folder):
    valid = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder)}]}

    def looks(steps, data=valid, step=STEP, **train):
        size = {"seq_len": 32, "batch_tokens": step}
        recipe = make(("uptrain", {**size, "tokens": step * steps}), data=data, train=train)
        return Looks.of(recipe, recipe.stages[0])

    found = looks(150)
    assert found == Looks(8, 9, 37)
    assert [step for step in range(1, 35) if found.due(step, last=step == 34)] == [1, 8, 16, 24, 32, 34]
    assert sum(found.due(step, last=step == 150) for step in range(1, 151)) * found.rows * 32 <= 0.02 * 150 * STEP
    short = looks(16, step=64)
    assert [step for step in range(1, 17) if short.due(step, last=step == 16)] == [1, 16]
    assert looks(100_000) == Looks(5000, held_out.MOST_ROWS, 25_000)
    assert looks(1000, validate_every=STEP * 30).every == 30
    assert looks(1000, validate_every=None) is None
    assert looks(1000, data={"train": valid["train"]}) is None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"validate_every": "1M"}, "train.validate_every: needs held-out text"),
    ],
)
def test_looks_need_text(make, train, message):
    plain = make("uptrain").to_dict()
    with pytest.raises(RecipeError, match=message):
        recipe_from_dict({**plain, "train": train})


def test_text_too_short_for_a_row_is_said(make, train, text_folder, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(short)}]}
    _, report = train("uptrain", recipe=make(("uptrain", {"tokens": 128}), data=data))
    assert report.held_out == {}
    assert "uptrain: no looks at held-out text: the held-out text is shorter than one row" in capsys.readouterr().err


def test_without_text_on_one_process_there_are_no_looks_on_any(watched, monkeypatch, capsys):
    monkeypatch.setattr(held_out, "gather_object", lambda own: [*own, "the hub cannot be reached"])
    _, report = watched("uptrain", settings={"validate_every": "auto"}, tokens=128)
    assert report.held_out == {}
    assert "uptrain: no looks at held-out text: the hub cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["align", "uptrain"])
def test_text_without_a_token_to_predict_is_no_best(watched, monkeypatch, capsys, name):
    class Masked(held_out.RowReader):
        def rows(self, start=None):
            for row in super().rows(start):
                yield dc.replace(row, labels=np.full_like(row.labels, held_out.IGNORED))

    monkeypatch.setattr(held_out, "RowReader", Masked)
    _, report = watched(name, settings={"validate_every": "auto"}, tokens=128)
    assert report.held_out == {}
    assert "no looks at held-out text: the held-out text has no token to predict" in capsys.readouterr().err
    with pytest.raises(DataError, match="no token to predict"):
        watched(name, "asked", tokens=128)


def test_a_figure_that_is_not_finite_is_no_best(watched, monkeypatch):
    values = iter([3.0, float("nan"), float("inf"), 2.0, 4.0, float("nan")])
    real = HeldOut._sums
    monkeypatch.setattr(HeldOut, "_sums", lambda self: real(self) | {"loss": next(values), "tokens": 1.0})
    folder, report = watched("uptrain")
    assert looks_of(folder) == [3.0, None, None, 2.0, 4.0, None]
    assert (report.held_out["best"], report.held_out["last"]["step"]) == ({"step": 4, "value": 2.0}, 5)
    assert "held-out loss 3.0000 at step 1 -> 4.0000, best 2.0000 at step 4" in report.lines()


@pytest.mark.parametrize(
    "values", [[1.0, 2.0, 3.0, 2.5, 2.4, 2.3], [1.0, 2.0, 3.0, 4.0, 1.0, 1.1], [5.0, 1.0, 1.002, 1.004, 1.006, 1.008]]
)
def test_getting_worse_at_first_or_by_little_is_not_warned_of(watched, monkeypatch, capsys, values):
    given, real = iter(values), HeldOut._sums
    monkeypatch.setattr(held_out, "SETTLED", 0.5)
    monkeypatch.setattr(HeldOut, "_sums", lambda self: real(self) | {"loss": next(given), "tokens": 1.0})
    watched("uptrain")
    assert "worse in" not in capsys.readouterr().err
