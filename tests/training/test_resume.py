"""Killed or interrupted at any moment and continued, training gives the uninterrupted run's curve, to the last bit."""

import functools
import json
import multiprocessing
import resource
import signal
import time

import pytest
import torch
from filelock import FileLock
from torch.distributed.checkpoint import FileSystemWriter

from sse_convert.checkpoints.identity import read_sealed, write_sealed
from sse_convert.errors import OutputError, TrainingError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.training import checkpoint, loop
from sse_convert.training.metrics import read
from sse_convert.training.objective import Objective
from tests.training.conftest import losses
from tests.training.launched import forked


class Killed(BaseException):
    """Stands for SIGKILL: nothing but `finally` sees it."""


def steps_then(real, allowed, error):
    """`real`, until it has been called `allowed` times."""
    calls = []

    def function(*args, **kwargs):
        calls.append(1)
        if len(calls) > allowed:
            raise error
        return real(*args, **kwargs)

    return function


def weights(folder):
    return load_pretrained(folder).state_dict()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


@pytest.mark.parametrize(("name", "optimizer"), [("align", "adamw"), ("distill", "muon"), ("uptrain", "adamw")])
def test_interrupted_and_continued(train, monkeypatch, capsys, tmp_path, name, optimizer):
    train = functools.partial(train, checkpoint_steps=2, optimizer=optimizer)
    whole, _ = train(name, "whole")
    assert len(losses(whole)) == 6
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train(name, "stopped")
    stopped = tmp_path / "stopped"
    assert not stopped.exists()
    assert f"{name}: 2 of 6 steps are saved in {stopped}.work" in capsys.readouterr().err
    folder, report = train(name, "stopped")
    assert f"{name}: continuing at step 2 of 6" in capsys.readouterr().err
    assert losses(folder) == losses(whole)
    assert losses(folder, "grad_norm") == losses(whole, "grad_norm")
    assert report.steps == 6
    assert same(folder, whole)


@pytest.fixture(scope="module")
def undisturbed():
    """The folder of a run that nothing ends, once one has been made; no run depends on what ran before it."""
    return []


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(("_gradients", 1), id="before the first checkpoint"),
        pytest.param(("save", 1), id="while tensors are written"),
        pytest.param(("save_file", 1), id="before random state is written"),
        pytest.param(("rename", 7), id="before the rename"),
        pytest.param(("rmtree", 0), id="before an old checkpoint is removed"),
        pytest.param(("save_pretrained", 0), id="while the result is written"),
    ],
)
def test_killed_at_any_moment(train, undisturbed, monkeypatch, tmp_path, moment):
    what, allowed = moment
    place = {
        "_gradients": (loop, "_gradients"),
        "save": (checkpoint.state_dict_saver, "save"),
        "save_file": (checkpoint, "save_file"),
        "rename": (checkpoint.Path, "rename"),
        "rmtree": (checkpoint.shutil, "rmtree"),
        "save_pretrained": (__import__("transformers").PreTrainedModel, "save_pretrained"),
    }[what]
    if not undisturbed:
        undisturbed.append(train("uptrain", "whole", checkpoint_steps=1)[0])
    (whole,) = undisturbed
    with monkeypatch.context() as patch:
        patch.setattr(*place, steps_then(getattr(*place), allowed, Killed()))
        with pytest.raises(Killed):
            train("uptrain", "stopped", checkpoint_steps=1)
    assert not (tmp_path / "stopped").exists()
    folder, _ = train("uptrain", "stopped", checkpoint_steps=1)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".", "stopped")))
    assert left == ["stopped", "stopped.work"]
    assert [path.name for path in (tmp_path / "stopped.work").glob("*step*")] == ["step-000006"]


@pytest.mark.parametrize("bytes_allowed", [20_000, 100_000], ids=["checkpoint", "result"])
def test_a_full_disk_while_saving(train, tmp_path, bytes_allowed):
    """A limit on file sizes stands for the full disk: writes fail in torch's and safetensors' own code."""
    whole, _ = train("uptrain", "whole", train="mixers", lr=1e-3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, before[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            train("uptrain", "full", train="mixers", lr=1e-3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "full").exists()
    assert not [path for path in tmp_path.rglob(".*") if path.is_dir()]
    folder, _ = train("uptrain", "full", train="mixers", lr=1e-3)
    assert losses(folder) == losses(whole)


def test_ctrl_c_while_a_checkpoint_is_written_is_ctrl_c(train, monkeypatch, capsys, tmp_path):
    writer = FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", steps_then(writer, 1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train("uptrain", "stopped", checkpoint_steps=2)
    assert "2 of 6 steps are saved" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "stopped.work").glob("*step*")] == ["step-000002"]


def test_two_checkpoints_are_kept(train, monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "_gradients", steps_then(loop._gradients, 5, Killed()))
    with pytest.raises(Killed):
        train("uptrain", "stopped", checkpoint_steps=1)
    work = tmp_path / "stopped.work"
    assert sorted(path.name for path in work.glob("step-*")) == ["step-000004", "step-000005"]
    state = json.loads((work / "step-000005" / "state.json").read_text())
    assert state["step"] == 5
    assert state["position"]["row"] == 20
    assert not list(work.rglob("*.pkl"))


def test_a_log_line_cut_short_is_dropped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]


def test_continuing_with_other_inputs_is_refused(train, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, Killed()))
        with pytest.raises(Killed):
            train("uptrain", "stopped", checkpoint_steps=1)
    with pytest.raises(TrainingError, match=r"stage\.lr was 0\.003, is 0\.1") as caught:
        train("uptrain", "stopped", lr=0.1)
    assert str(tmp_path / "stopped.work") in caught.value.fix
    _, report = train("uptrain", "stopped", micro_batch=1)
    assert not report.already_done


def test_settings_of_speed_alone_may_change_at_any_time(train, make, monkeypatch, capsys, tmp_path):
    """Before the end and after it, also in records that versions before wrote, which named `train.compile`."""
    speed = {"compile": False, "cuda_graphs": False, "validate_every": None}
    other = {"micro_batch": 1, "gradient_checkpointing": True, "checkpoint_steps": 2}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, Killed()))
        with pytest.raises(Killed):
            train("uptrain", checkpoint_steps=1)
    rewritten(tmp_path / "result.work" / "inputs.json", lambda inputs: inputs["train"].update(compile="auto"))
    train("uptrain", recipe=make(("uptrain", other), train=speed))
    assert "continuing at step 3 of 6" in capsys.readouterr().err
    rewritten(tmp_path / "result" / "stage.json", lambda record: record["inputs"]["train"].update(compile=True))
    assert train("uptrain")[1].already_done
    assert train("uptrain", recipe=make(("uptrain", other), train=speed))[1].already_done
    with pytest.raises(TrainingError, match=r"other inputs:\n  train\.seed was 0, is 1\nexpected"):
        train("uptrain", recipe=make(("uptrain", other), train=speed | {"seed": 1}))
    with pytest.raises(TrainingError, match=r"other inputs:\n  stage\.optimizer was 'adamw', is 'muon'\nexpected"):
        train("uptrain", recipe=make(("uptrain", {"optimizer": "muon"}), train=speed))


def rewritten(path, change):
    """A sealed file with other contents."""
    record = read_sealed(path)
    change(record)
    write_sealed(path, record)


def test_a_folder_that_another_run_writes_to_is_refused(train, tmp_path):
    """A launcher that is killed leaves its workers, which go on and remove the work folder in the end."""
    work = tmp_path / "result.work"
    work.mkdir()
    with FileLock(work / "lock"), pytest.raises(TrainingError, match="another run writes to it") as caught:
        train("uptrain")
    assert str(work) in str(caught.value)
    train("uptrain")


def test_random_state_is_restored(train, monkeypatch):
    """With dropout the curve depends on every random number drawn."""
    real = Objective.__init__

    def with_dropout(self, accelerator):
        real(self, accelerator)
        monkeypatch.setattr(loop, "_gradients", noisy)

    plain = loop._gradients

    def noisy(objective, batches, schedule):
        for module in objective.student.modules():
            if module.__class__.__name__ == "LlamaMLP" and not module._forward_hooks:
                module.register_forward_hook(lambda m, a, output: torch.nn.functional.dropout(output, 0.2))
        return plain(objective, batches, schedule)

    monkeypatch.setattr(Objective, "__init__", with_dropout)
    whole, _ = train("uptrain", "whole", checkpoint_steps=2)
    quiet, _ = train("uptrain", "again", checkpoint_steps=2)
    assert losses(whole) == losses(quiet)

    interrupted = steps_then(noisy, 3, Killed())
    monkeypatch.setattr(Objective, "__init__", real)
    monkeypatch.setattr(loop, "_gradients", interrupted)
    with pytest.raises(Killed):
        train("uptrain", "stopped", checkpoint_steps=2)
    monkeypatch.setattr(loop, "_gradients", noisy)
    folder, _ = train("uptrain", "stopped", checkpoint_steps=2)
    assert losses(folder) == losses(whole)


def test_sigkill(train, make, converted, tmp_path):
    settings = {"tokens": 128 * 24, "checkpoint_steps": 3}
    recipe = make(("distill", settings))
    whole, _ = train("distill", "whole", recipe=recipe)
    out = tmp_path / "killed"
    log = out.with_name("killed.work") / "metrics.jsonl"
    child = multiprocessing.get_context("fork").Process(target=forked, args=(recipe, recipe.stages[0], converted, out))
    child.start()
    while len(read(log)) < 7:
        assert child.exitcode is None
        time.sleep(0.01)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    folder, _ = train("distill", "killed", recipe=recipe)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)
