"""What a stage leaves to the machine: chosen from memory, repeated by the next start, mended where it fails."""

import dataclasses as dc
import json
import weakref

import pytest
import torch

from sse_convert.compat import compile_error
from sse_convert.errors import HardwareError
from sse_convert.surgery import memory
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.job import Job
from sse_convert.surgery.memory import USABLE
from sse_convert.surgery.stage_memory import stage_memory
from sse_convert.training import fit, uptrain
from sse_convert.training.fit import Chosen, Fit
from sse_convert.training.losses import linear_cross_entropy
from sse_convert.training.setup import make_accelerator
from sse_convert.training.stage_job import StageJob, settle
from sse_convert.training.uptrain import Uptrain
from tests.training.conftest import losses

AUTO = {"micro_batch": "auto", "batch_tokens": 512, "tokens": 1024}
MIB = 1 << 20


@pytest.fixture
def fitted(make, converted, tmp_path, monkeypatch):
    """A fit of a stage on a GPU with so many bytes free, or on the CPU."""

    def build(free=None, stage="uptrain", train=None, **settings):
        recipe = make((stage, {**AUTO, **settings}), train=train or {})
        memory = None if free is None else (1 << 30, int(free))
        monkeypatch.setattr(fit, "gpu_memory", lambda accelerator: memory)
        accelerator = make_accelerator(recipe.train)
        return Fit(settle(Job.of(recipe), recipe.stages[0], converted, tmp_path / "unused", accelerator))

    return build


def needed(own, rows, *, checkpointing, bf16=False, cuda_graphs=False):
    """Bytes that must be free for a pass of these rows."""
    ready = own.ready
    mixers = [ready.match.mixers.get(name) for name in ready.match.names]
    geometry = geometry_of(fit.source_view(ready.files))
    shared = fit.still_the_teachers(ready.job.recipe.stages, ready.stage)
    how = {"bf16": bf16, "checkpointing": checkpointing, "cuda_graphs": cuda_graphs, "shared": shared}
    estimate = stage_memory(geometry, mixers, ready.stage, lora_rank=ready.train.lora_rank, **how)
    return estimate.total(ready.stage.seq_len, rows, 1 << 30) / USABLE


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_as_many_rows_as_fit(fitted, rows, monkeypatch):
    monkeypatch.setattr(fit, "ENOUGH_TOKENS", 1)
    free = needed(fitted(), rows, checkpointing=False) + 1
    chosen = fitted(free).choose(None)
    assert (chosen.micro_batch, chosen.gradient_checkpointing) == (rows, False)


def test_activations_are_computed_twice_only_where_too_few_rows_fit(fitted, monkeypatch):
    monkeypatch.setattr(fit, "ENOUGH_TOKENS", 64)  # two rows
    one, two = (needed(fitted(), rows, checkpointing=False) for rows in (1, 2))
    assert fitted(two + 1).choose(None).gradient_checkpointing is False
    assert needed(fitted(), 7, checkpointing=True) > one
    seven = fitted(one + 1, batch_tokens=7 * 32)
    assert seven.choose(None).gradient_checkpointing is False, "one row fits either way, and seven do not"
    monkeypatch.setattr(fit, "ENOUGH_TOKENS", 512)
    eight = needed(fitted(), 8, checkpointing=True)
    assert needed(fitted(), 2, checkpointing=False) < eight < needed(fitted(), 4, checkpointing=False)
    short = fitted(eight + 1).choose(None)
    assert (short.micro_batch, short.gradient_checkpointing) == (8, True)
    assert fitted(eight + 1, gradient_checkpointing=False).choose(None).micro_batch == 2
    assert fitted(1000).choose(None) == Chosen(micro_batch=1, gradient_checkpointing=True, compile=False, processes=1)
    assert fitted(1000, "align").choose(None).gradient_checkpointing is False


@pytest.mark.parametrize("narrow", [True, False])
def test_graphs_are_recorded_where_they_leave_room_for_enough_rows(fitted, monkeypatch, narrow):
    """Narrow models wait for launches. A recording takes a second set of activations."""
    monkeypatch.setattr(fit, "ENOUGH_TOKENS", 64)  # two rows
    monkeypatch.setattr(fit, "NARROW", 1024 if narrow else 1)
    two = needed(fitted(stage="distill"), 2, checkpointing=False, cuda_graphs=True) + 1
    chosen = fitted(two, "distill").choose(None)
    assert (chosen.cuda_graphs, chosen.gradient_checkpointing) == (narrow, False)
    assert chosen.micro_batch >= 2
    assert fitted(two - 2, "distill").choose(None).cuda_graphs is False
    for settings in ({"stage": "uptrain"}, {"stage": "distill", "gradient_checkpointing": True}):
        assert fitted(two, **settings).choose(None).cuda_graphs is False
    assert fitted(stage="distill").choose(None).cuda_graphs is False, "on a CPU"
    assert fitted(two, "distill", train={"cuda_graphs": False}).choose(None).cuda_graphs is False
    assert fitted(1000, "distill", train={"cuda_graphs": True}).choose(None).cuda_graphs is True, (
        "the stage says why not"
    )


def test_a_stage_that_began_without_graphs_goes_on_without(fitted):
    before = {"micro_batch": 2, "gradient_checkpointing": False, "compile": False, "processes": 1}
    assert fitted(1 << 30, "distill").choose(before).cuda_graphs is False


def test_what_exists_once_leaves_room_for_rows(fitted, monkeypatch):
    monkeypatch.setattr(fit, "ENOUGH_TOKENS", 1)

    def own(free=None, *, shared):
        monkeypatch.setattr(fit, "still_the_teachers", lambda *_: shared)
        ready = fitted(free, "distill", train={"mixed_precision": "bf16", "cuda_graphs": False}).ready
        return Fit(dc.replace(ready, stage=dc.replace(ready.stage, train="mixers")))

    free = needed(own(shared=True), 16, checkpointing=False, bf16=True) + 1
    once, twice = (own(free, shared=shared).choose(None).micro_batch for shared in (True, False))
    assert twice < once == 16


def test_a_cpu_takes_small_passes(fitted, monkeypatch):
    assert fitted().choose(None).micro_batch == 16
    monkeypatch.setattr(memory, "CPU_TOKENS", 100)
    assert fitted().choose(None) == Chosen(micro_batch=2, gradient_checkpointing=False, compile=False, processes=1)


def test_what_the_recipe_says_stands(fitted):
    stated = fitted(1000, micro_batch=4, gradient_checkpointing=False, train={"compile": True})
    chosen = stated.choose({"micro_batch": 2, "gradient_checkpointing": True, "compile": False, "processes": 1})
    assert chosen == Chosen(micro_batch=4, gradient_checkpointing=False, compile=True, processes=1)
    assert stated.otherwise(chosen, torch.OutOfMemoryError()) is None
    assert stated.otherwise(chosen, compile_error()()) is None


def test_another_number_of_processes_chooses_anew(fitted):
    before = {"micro_batch": 1, "gradient_checkpointing": True, "compile": False, "processes": 1}
    assert fitted().choose(before).micro_batch == 1
    assert fitted().choose({**before, "processes": 2}).micro_batch == 16


def test_less_is_tried_after_a_failure(fitted):
    own = fitted()
    chosen = Chosen(micro_batch=16, gradient_checkpointing=False, compile=True, processes=1)
    tried = []
    while chosen is not None:
        tried.append((chosen.micro_batch, chosen.gradient_checkpointing))
        chosen = own.otherwise(chosen, torch.OutOfMemoryError())
    assert tried == [(16, False), (8, False), (4, False), (2, False), (1, False), (1, True)]


@pytest.mark.parametrize("graphs", ["auto", True])
def test_graphs_that_nobody_asked_for_are_the_first_to_go(fitted, graphs):
    own = fitted(stage="distill", train={"cuda_graphs": graphs})
    chosen = Chosen(micro_batch=8, gradient_checkpointing=False, compile=True, processes=1, cuda_graphs=True)
    less = own.otherwise(chosen, torch.OutOfMemoryError())
    assert (less.cuda_graphs, less.micro_batch) == ((False, 8) if graphs == "auto" else (True, 4))


def failing(monkeypatch, error, times):
    """Let passes of more than so many rows fail; returns the rows of all passes."""
    seen = []
    real = Uptrain.backward

    def backward(self, batch, **arguments):
        seen.append(len(batch["input_ids"]))
        found = real(self, batch, **arguments)
        if len(seen) <= times:
            raise error
        return found

    monkeypatch.setattr(Uptrain, "backward", backward)
    return seen


def test_a_first_step_out_of_memory_starts_anew_with_half(train, monkeypatch, capsys):
    plain, _ = train("uptrain", "plain", **AUTO, optimizer="muon")
    seen = failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), times=2)
    folder, report = train("uptrain", "less", **AUTO, optimizer="muon")
    assert seen == [16, 8, *[4] * 8]
    assert report.chosen["micro_batch"] == 4
    assert losses(folder) == pytest.approx(losses(plain), rel=1e-6)
    assert "CUDA out of memory" in capsys.readouterr().err
    assert json.loads((folder / "stage.json").read_text())["report"]["chosen"]["micro_batch"] == 4


@pytest.mark.parametrize("twice", [False, True])
def test_nothing_of_a_failed_start_stays_in_memory(train, monkeypatch, twice):
    """The graph of its pass held the model, which held the graph, where garbage collection does not look."""
    students, alive = [], []
    real = Uptrain.__init__

    def start(self, accelerator, student, *arguments):
        alive.append(sum(found() is not None for found in students))
        students.append(weakref.ref(student.model.sse_layers()[0]))
        real(self, accelerator, student, *arguments)

    def loss(*arguments):
        if len(students) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return linear_cross_entropy(*arguments)

    monkeypatch.setattr(Uptrain, "__init__", start)
    monkeypatch.setattr(uptrain, "linear_cross_entropy", loss)
    train("uptrain", **{**AUTO, "gradient_checkpointing": twice})
    assert alive == [0, 0, 0]


def test_what_was_halved_stays_so_after_a_kill(train, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    seen = failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), times=1)
    with monkeypatch.context() as patch:
        patch.setattr("sse_convert.training.loop._stepped", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            train("uptrain", "killed", **AUTO)
    assert json.loads((tmp_path / "killed.work" / fit.FILE).read_text())["micro_batch"] == 8
    before = len(seen)
    train("uptrain", "killed", **AUTO)
    assert set(seen[before:]) == {8}


@pytest.mark.parametrize("every", [1, 100])
def test_a_later_step_out_of_memory_goes_on_from_the_checkpoint_with_half(train, monkeypatch, capsys, every):
    """Rows of many documents take more memory than others, so any step may be the first that does not fit."""
    settings = {**AUTO, "tokens": 2048, "checkpoint_steps": every}
    plain, _ = train("uptrain", "plain", **settings)
    seen, real = [], Uptrain.backward

    def backward(self, batch, **arguments):
        seen.append(len(batch["input_ids"]))
        if len(seen) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, batch, **arguments)

    monkeypatch.setattr(Uptrain, "backward", backward)
    folder, report = train("uptrain", "less", **settings)
    assert seen == [16, 16, 16, *[8] * (4 if every == 1 else 8)]
    assert (report.steps, report.chosen["micro_batch"]) == (4, 8)
    assert losses(folder) == pytest.approx(losses(plain), rel=1e-5)
    assert ("continuing at step 2 of 4" in capsys.readouterr().err) is (every == 1)


def test_a_later_step_that_cannot_be_compiled_is_an_error(train, monkeypatch):
    seen, real = [], Uptrain.backward

    def backward(self, batch, **arguments):
        seen.append(len(batch["input_ids"]))
        if len(seen) == 2:
            raise compile_error()("no program")
        return real(self, batch, **arguments)

    monkeypatch.setattr(Uptrain, "backward", backward)
    with pytest.raises(compile_error()):
        train("uptrain", **AUTO)
    assert seen == [16, 16]


def test_several_processes_say_what_to_do(train, tmp_path, monkeypatch):
    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), times=9)
    monkeypatch.setattr(StageJob, "alone", property(lambda self: False))
    with pytest.raises(HardwareError, match="start again"):
        train("uptrain", **AUTO)
    assert json.loads((tmp_path / "result.work" / fit.FILE).read_text())["micro_batch"] == 8
