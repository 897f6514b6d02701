"""Damage to what an interrupted stage left is named and mended from an older checkpoint, never passed over."""

import json
import math
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from sse_convert.calibration.calibrate import calibrate_checkpoint
from sse_convert.checkpoints.identity import write_sealed
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, DataError, Ended, OutputError, TrainingError
from sse_convert.files import digest
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.training import checkpoint, loop
from sse_convert.training.checkpoint import Checkpoints
from tests.training.conftest import losses
from tests.training.test_resume import Killed, same, steps_then


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    """Where the work folder of a killed stage is kept, once there is one."""
    return tmp_path_factory.mktemp("killed") / "stopped.work"


@pytest.fixture(scope="module")
def whole_once():
    """The folder of a stage that nothing interrupts, once there is one."""
    return []


@pytest.fixture
def whole(train, whole_once):
    """What the stage comes to that nothing interrupts; how often it is saved changes nothing."""
    if not whole_once:
        whole_once.append(train("uptrain", "whole")[0])
    return whole_once[0]


@pytest.fixture
def killed(train, killed_once, monkeypatch, tmp_path):
    """A stage killed in its fifth step, with checkpoints of steps 3 and 4."""
    if killed_once.exists():
        return shutil.copytree(killed_once, tmp_path / "stopped.work")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 4, Killed()))
        with pytest.raises(Killed):
            train("uptrain", "stopped", checkpoint_steps=1)
    shutil.copytree(tmp_path / "stopped.work", killed_once)
    return tmp_path / "stopped.work"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("share", "saved"), [(1e9, 4), (1e-9, 1)], ids=["at once", "rarely, where saving takes long"])
def test_slow_steps_are_saved_between_regular_checkpoints(train, whole, monkeypatch, tmp_path, share, saved):
    monkeypatch.setattr(checkpoint, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "LATE_SHARE", share)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 4, Killed()))
        with pytest.raises(Killed):
            train("uptrain", "stopped")
    assert max((tmp_path / "stopped.work").glob("step-*")).name == f"step-{saved:06d}"
    folder, _ = train("uptrain", "stopped")
    assert same(folder, whole)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}
CHECKPOINT_FILES = [
    ".metadata", "__0_0.distcp", "hashes.json", "metrics.jsonl", "random-0.safetensors", "state.json",
]  # fmt: skip


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(killed, capsys, tmp_path):
    kept = tmp_path / "kept"
    shutil.copytree(killed, kept)
    assert sorted(path.name for path in (killed / "step-000004").iterdir()) == CHECKPOINT_FILES
    for name in CHECKPOINT_FILES:
        for damage in DAMAGES.values():
            shutil.rmtree(killed)
            shutil.copytree(kept, killed)
            damage(killed / "step-000004" / name)
            assert Checkpoints(killed, Accelerator(cpu=True)).newest()["step"] == 3
            told = capsys.readouterr().err
            assert told == f"{killed / 'step-000004'} is damaged: {name}; going on from step-000003\n"
            assert not (killed / "step-000004").exists()  # its name is wanted again


def test_a_stage_goes_on_from_the_checkpoint_before_a_damaged_one(train, whole, killed):
    flip(killed / "step-000004" / "__0_0.distcp")
    folder, _ = train("uptrain", "stopped", checkpoint_steps=1)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)


def written_by_two(checkpoint, change):
    """Change the step log of a checkpoint, as a second run does before the checkpoint is sealed."""
    lines = (checkpoint / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (checkpoint / "metrics.jsonl").write_bytes(b"".join(change(lines)))
    hashes = {path.name: digest(path) for path in checkpoint.iterdir() if path.name != "hashes.json"}
    write_sealed(checkpoint / "hashes.json", {"files": hashes})


@pytest.mark.parametrize(
    ("change", "begin"),
    [
        (lambda lines: [line for line in lines for _ in range(2)], 4),
        (lambda lines: [*lines, *lines[1:3]], 4),
        (lambda lines: [lines[0][:20] + b"\n", *lines[1:], lines[0], lines[1][:9]], 4),
        (lambda lines: [lines[0], lines[1][:9] + lines[2], *lines[2:]], 3),
    ],
    ids=["each twice", "one behind the other", "cut", "missing"],
)
def test_a_stage_that_two_runs_wrote_to_is_finished(train, whole, killed, capsys, change, begin):
    written_by_two(killed / "step-000004", change)
    capsys.readouterr()
    folder, _ = train("uptrain", "stopped", checkpoint_steps=1)
    assert f"continuing at step {begin} of 6" in capsys.readouterr().err
    assert losses(folder) == losses(whole)
    assert same(folder, whole)


def test_a_step_that_another_run_saves_meanwhile_ends_this_one(train, monkeypatch, tmp_path):
    work, real = tmp_path / "result.work", checkpoint.Checkpoints._seal

    def seal(self, folder):
        real(self, folder)
        (work / "step-000002").mkdir(exist_ok=True)
        (work / "step-000002" / "theirs").touch()

    monkeypatch.setattr(checkpoint.Checkpoints, "_seal", seal)
    with pytest.raises(TrainingError, match="another run writes to it"):
        train("uptrain", checkpoint_steps=2)
    assert [path.name for path in (work / "step-000002").iterdir()] == ["theirs"]


def test_without_a_whole_checkpoint_nothing_is_overwritten(train, killed):
    for path in killed.glob("step-*/state.json"):
        flip(path)
    before = sorted(killed.rglob("*"))
    with pytest.raises(TrainingError, match=r"step-000004 is damaged: state\.json\n .*step-000003") as caught:
        train("uptrain", "stopped", checkpoint_steps=1)
    assert f"delete {killed}: the stage then starts at its first step, and 4 steps are made again" in caught.value.fix
    assert set(before) <= set(killed.rglob("*"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_beside_the_checkpoints_are_mended_from_them(train, whole, killed, capsys, damage):
    capsys.readouterr()
    for name in ("metrics.jsonl", "inputs.json", "chosen.json"):
        DAMAGES[damage](killed / name)
    folder, _ = train("uptrain", "stopped", checkpoint_steps=1)
    assert losses(folder) == losses(whole)
    assert len(losses(folder)) == 6
    assert f"{killed / 'inputs.json'} was damaged or missing; written anew" in capsys.readouterr().err


def test_inputs_that_changed_are_refused_whatever_happened_to_their_file(train, killed):
    (killed / "inputs.json").unlink()
    with pytest.raises(TrainingError, match=r"stage\.lr was 0\.003, is 0\.1"):
        train("uptrain", "stopped", lr=0.1)


def test_a_work_folder_with_other_things_in_it_is_left_alone(train, tmp_path):
    thesis = tmp_path / "result.work" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.touch()
    with pytest.raises(OutputError, match=r"holds thesis\.tex, which no stage wrote"):
        train("uptrain")
    assert thesis.exists()
    thesis.rename(tmp_path / thesis.name)
    train("uptrain")
    (tmp_path / thesis.name).rename(thesis)
    assert train("uptrain")[1].already_done
    assert thesis.exists()


@pytest.mark.parametrize("damage", list(DAMAGES)[:3])
def test_a_damaged_record_of_a_finished_stage_is_refused_by_name(train, damage):
    folder, _ = train("uptrain")
    DAMAGES[damage](folder / "stage.json")
    with pytest.raises(CheckpointError, match=r"stage\.json is damaged"):
        train("uptrain")
    with pytest.raises(CheckpointError, match=r"stage\.json is damaged"):
        train("uptrain", "next", checkpoint=folder)


def poisoned(source, target):
    """A copy of a checkpoint with one NaN in it."""
    shutil.copytree(source, target)
    path = next(path for path in target.glob("*.safetensors") if "norm" in "".join(load_file(path)))
    state = load_file(path)
    state["model.norm.weight"][0] = torch.nan
    path.unlink()  # it may be linked
    save_file(state, path, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", ["align", "distill"])
def test_a_teacher_that_is_not_finite_is_refused(train, make, teacher_folder, tmp_path, name):
    recipe = make(name, model=str(poisoned(teacher_folder, tmp_path / "teacher")))
    with pytest.raises(CheckpointError, match=r"1 tensor with NaN or Inf weights: model\.norm\.weight"):
        train(name, recipe=recipe)


def test_a_teacher_that_is_not_finite_samples_no_text_and_calibrates_nothing(make, teacher_folder, tmp_path):
    teacher = str(poisoned(teacher_folder, tmp_path / "teacher"))
    recipe = make(model=teacher, calibrate={"rows": 2, "seq_len": 32})
    with pytest.raises(CheckpointError, match="1 tensor with NaN or Inf weights"):
        Job.of(recipe).sampler.load()
    convert_checkpoint(Job.of(recipe), tmp_path / "converted")
    with pytest.raises(CheckpointError, match="1 tensor with NaN or Inf weights"):
        calibrate_checkpoint(Job.of(recipe), tmp_path / "converted", tmp_path / "calibrated")


def test_a_student_that_is_not_finite_is_refused(train, converted, tmp_path):
    with pytest.raises(CheckpointError, match=r"1 tensor with NaN or Inf weights: model\.norm\.weight"):
        train("uptrain", checkpoint=poisoned(converted, tmp_path / "student"))


def weights_break(monkeypatch, at):
    """The optimizer step after `at` others gives weights that are not finite, out of finite gradients."""
    real, calls = loop._stepped, []

    def stepped(objective, *args):
        result = real(objective, *args)
        calls.append(1)
        if len(calls) == at + 1:
            next(objective.parts[0].module.parameters()).data.view(-1)[0] = torch.inf
        return result

    monkeypatch.setattr(loop, "_stepped", stepped)


@pytest.mark.parametrize(("at", "saved"), [(2, "step-000002"), (5, "step-000004")], ids=["middle", "last step"])
def test_weights_that_are_not_finite_are_neither_saved_nor_the_result(train, monkeypatch, tmp_path, at, saved):
    weights_break(monkeypatch, at)
    with pytest.raises(TrainingError, match=r"weights are not finite after step \d: \S*embed_tokens") as caught:
        train("uptrain", checkpoint_steps=2)
    assert f"the last good checkpoint is {tmp_path / 'result.work' / saved}" in caught.value.fix
    assert not (tmp_path / "result").exists()


def test_while_steps_are_left_out_the_last_good_checkpoint_stays(train, monkeypatch, tmp_path):
    real, calls = loop._gradients, []

    def gradients(objective, *args):
        values, tokens = real(objective, *args)
        calls.append(1)
        return {**values, "loss": values["loss"] if len(calls) < 3 else torch.nan}, tokens

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", gradients)
        patch.setattr("sse_convert.training.left_out.IN_A_ROW", 3)
        with pytest.raises(TrainingError, match="3 steps in a row") as caught:
            train("uptrain", checkpoint_steps=1)
    work = tmp_path / "result.work"
    assert sorted(path.name for path in work.glob("step-*")) == ["step-000001", "step-000002"]
    assert str(work / "step-000002") in caught.value.fix
    state = json.loads((work / "step-000002" / "state.json").read_text())
    assert (state["step"], state["bad_in_a_row"]) == (2, 0)


@pytest.fixture
def signalled(make, converted, tmp_path, monkeypatch):
    """Runs a stage of six steps as a command, with signals in some of its steps; returns the exit code."""

    def run(*numbers, at=3, **settings):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(make(("uptrain", settings)).to_dict()))
        real, calls = loop._gradients, []

        def gradients(*args):
            calls.append(1)
            for number in numbers if len(calls) == at else ():
                signal.raise_signal(number)
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "_gradients", gradients)
            return run_app(app, ["uptrain", str(recipe), "-c", str(converted), "-o", str(tmp_path / "result")])

    return run


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)], ids=["TERM", "HUP", "INT"]
)
def test_a_signal_saves_the_step_and_ends(train, whole, signalled, capfd, tmp_path, number, code):
    assert signalled(number) == code
    told = capfd.readouterr().err
    assert "ending once this step is saved" in told
    assert f"uptrain: 3 of 6 steps are saved in {tmp_path / 'result.work'}" in told
    if number == signal.SIGTERM:
        assert signalled() == 0
        assert losses(tmp_path / "result") == losses(whole)
        assert same(tmp_path / "result", whole)


def test_a_signal_while_a_checkpoint_is_read_comes_out_as_itself(train, killed, monkeypatch):
    """torch wraps what stops its reading, and sends it to the other processes."""
    monkeypatch.setattr(FileSystemReader, "read_data", steps_then(None, 0, Ended(signal.SIGTERM)))
    with pytest.raises(Ended) as caught:
        train("uptrain", "stopped", checkpoint_steps=1)
    assert pickle.loads(pickle.dumps(caught.value)).number == signal.SIGTERM
    assert (killed / "step-000004").is_dir()


def test_a_signal_while_the_last_step_is_saved_is_obeyed(signalled, monkeypatch, capsys):
    real = Checkpoints.save

    def save(self, step, *args, **options):
        real(self, step, *args, **options)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save)
        assert signalled() == 143
    assert "6 of 6 steps are saved" in capsys.readouterr().err
    assert signalled() == 0


def test_a_second_signal_ends_at_once(signalled, capsys, tmp_path):
    assert signalled(signal.SIGTERM, signal.SIGTERM) == 143
    assert "0 of 6 steps are saved" in capsys.readouterr().err


def test_a_signal_while_steps_are_left_out_keeps_the_last_good_checkpoint(signalled, monkeypatch, capsys, tmp_path):
    real = loop._gradients
    monkeypatch.setattr(loop, "_gradients", lambda *args: ({**real(*args)[0], "loss": math.inf}, 1))
    assert signalled(signal.SIGHUP, at=2) == 129
    assert "the last 2 steps were left out; no checkpoint was written yet" in capsys.readouterr().err
    assert not list((tmp_path / "result.work").glob("step-*"))


def test_a_signal_with_weights_that_are_not_finite_keeps_the_last_good_checkpoint(
    signalled, monkeypatch, capsys, tmp_path
):
    weights_break(monkeypatch, 2)
    assert signalled(signal.SIGTERM, checkpoint_steps=2) == 143
    told = capsys.readouterr().err
    kept = tmp_path / "result.work" / "step-000002"
    assert "weights are not finite after step 3" in told
    assert f"the last good checkpoint is {kept}" in told
    assert [path.name for path in kept.parent.glob("step-*")] == [kept.name]


@pytest.fixture
def own_text(text_folder, tmp_path):
    """Text that a test may change."""
    return Path(shutil.copytree(text_folder, tmp_path / "text"))


def test_text_that_changes_while_it_is_trained_on_ends_the_stage_and_says_the_price(
    make, train, monkeypatch, own_text, tmp_path
):
    recipe = make(("uptrain", {"checkpoint_steps": 1, "tokens": 128 * 60}), data={"train": [{"path": str(own_text)}]})
    real, calls = loop._gradients, []

    def gradients(*args):
        calls.append(1)
        if len(calls) == 2:
            for path in own_text.iterdir():
                path.write_text(path.read_text()[:-500])
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", gradients)
        patch.setattr("sse_convert.data.packing.ENCODED_AT_ONCE", 1)
        with pytest.raises(DataError, match="was changed while it was read") as caught:
            train("uptrain", recipe=recipe)
    work = tmp_path / "result.work"
    steps = max(int(path.name[5:]) for path in work.glob("step-*"))
    assert 2 <= steps < 60
    assert f"the {steps} steps in {work} are lost: delete it first" in caught.value.fix
    with pytest.raises(TrainingError, match=r"text\.0\.bytes was \d+, is \d+"):
        train("uptrain", recipe=recipe)


def test_a_line_mended_before_the_first_checkpoint_continues(make, train, tmp_path):
    lines = [json.dumps({"text": "all is well here"})] * 400
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join([*lines, '{"text": ', *lines]) + "\n")
    recipe = make("uptrain", data={"train": [{"path": str(path)}]})
    with pytest.raises(DataError, match=r"text\.jsonl at byte \d+: not JSON") as caught:
        train("uptrain", recipe=recipe)
    assert "other text starts anew, nothing is lost" in caught.value.fix
    path.write_text("\n".join(lines * 2) + "\n")
    assert train("uptrain", recipe=recipe)[1].steps == 6
