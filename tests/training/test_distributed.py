"""Two processes (gloo, CPU) under `accelerate launch`: the losses of one process, and a complete result."""

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.training import offline
from sse_convert.training.stage import run_stage
from tests.training.conftest import losses, recipe_for
from tests.training.launched import STOPPED

pytestmark = pytest.mark.slow
LAUNCHED = Path(__file__).with_name("launched.py")
SIZE = {"micro_batch": 1, "batch_tokens": 128, "seq_len": 32}
"""rows are cut into the same micro batches by one process and by two, so the balance losses agree as well"""
STAGES = [
    ("align", {**SIZE, "tokens": 384}),
    ("distill", {**SIZE, "tokens": 384, "hidden_loss": 0.1, "gradient_checkpointing": True}),
    ("uptrain", {**SIZE, "tokens": 384}),
    ("distill", {**SIZE, "tokens": 384, "name": "muon", "optimizer": "muon"}),
    ("distill", {**SIZE, "tokens": 256, "name": "lora", "train": "lora"}),
    ("uptrain", {**SIZE, "tokens": 768, "name": STOPPED, "checkpoint_steps": 2}),
]


WINDOWS = {
    "layers": {"pattern": ["sse+sliding", "sse+sliding", "full"]},
    "mixers": {"sse+sliding": {"qk_rank": 4, "decay_rank": 4, "window": 8, "sinks": 1, "branch_dropout": 0.5}},
    "calibrate": {"seq_len": 32},
    "stages": [
        ("align", {**SIZE, "tokens": 384}),
        ("distill", {**SIZE, "tokens": 384, "gradient_checkpointing": True}),
    ],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(["--multi_gpu"], id="DDP"), pytest.param(["--use_fsdp", "--fsdp_version=2"], id="FSDP2")],
)
def how(request):
    """Options of `accelerate launch`."""
    return request.param


@pytest.fixture(scope="module")
def build(teacher_folder, text_folder):
    """Builds recipes for the tiny teacher."""
    return partial(recipe_for, teacher_folder, text_folder, "unused")


@pytest.fixture(scope="module")
def recipe(build):
    return build(stages=STAGES)


@pytest.fixture(scope="module")
def windows(build, tmp_path_factory):
    """The recipe of windows beside SSE, and what it starts from."""
    folder, recipe = tmp_path_factory.mktemp("windows") / "converted", build(**WINDOWS)
    convert_checkpoint(recipe, folder)
    return recipe, folder


@pytest.fixture(scope="module")
def alone(recipe, converted, tmp_path_factory):
    """Every stage in one process."""
    folder = tmp_path_factory.mktemp("alone")
    for stage in recipe.stages:
        run_stage(recipe, stage, converted, folder / stage.name)
    return folder


@pytest.fixture(scope="module")
def launched(how, build, recipe, windows, converted, tmp_path_factory):
    """The folder of all recipes' stages in two processes, started once for all: that takes longer than the stages."""
    folder = tmp_path_factory.mktemp("launched")
    early = build(stages=early_stages(how, folder / "cache"))
    runs = {"early": (early, converted), "windows": windows, "all": (recipe, converted)}
    assert launch(runs, folder, *how) == [2, 2]
    return folder


def early_stages(how, cache):
    """An alignment that stops early, in groups of layers where these can be, and an offline teacher."""
    groups = {} if "--use_fsdp" in how else {"layers_at_once": 1}
    return [
        ("align", {**SIZE, "tokens": 768, "stop": {"window": 2, "improvement": 0.9}, **groups}),
        ("distill", {**SIZE, "tokens": 384, "offline": {"top_k": 8, "dir": str(cache)}}),
    ]


def launch(runs, out, *how):
    """Run `launched.py` in two processes; the number of processes that each of them sees."""
    told = {name: (recipe.to_dict(), str(checkpoint)) for name, (recipe, checkpoint) in runs.items()}
    (out / "runs.json").write_text(json.dumps(told))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*how, "--num_processes=2", "--num_machines=1", f"--main_process_port={port}"]
    arguments += ["--mixed_precision=no", "--dynamo_backend=no", str(LAUNCHED)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *arguments, str(out / "runs.json"), out],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    seen = sorted(out.glob("process-*"))
    assert seen, f"no process came to its end:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return [int(path.read_text()) for path in seen]


def test_two_processes_give_the_losses_of_one(how, recipe, converted, alone, launched):
    together, stopped = launched / "all", recipe.stages[-1]
    assert [path.name for path in (together / f"{STOPPED}.work").glob("step-*")] == ["step-000002"]
    assert run_stage(recipe, stopped, converted, together / STOPPED).steps == 6  # continued by one process
    for stage in recipe.stages:
        one, two = alone / stage.name, together / stage.name
        on_losses, on_weights = tolerances(stage, sharded="--use_fsdp" in how)
        for key in ("loss", "grad_norm"):
            expected, found = (torch.tensor(losses(folder, key)) for folder in (one, two))
            torch.testing.assert_close(found, expected, rtol=on_losses, atol=0)
        before, after = load_pretrained(one).state_dict(), load_pretrained(two).state_dict()
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert (after[name] - value).norm() <= on_weights * value.norm(), name


def tolerances(stage, *, sharded):
    """On losses and gradient norms, and on weights, some of which start at zero and are the sum of the steps."""
    if stage.optimizer == "muon":  # bf16; products of sharded matrices are summed in another order: 2% to 5%
        return (2e-2, 5e-2) if sharded else (1e-4, 2**-7)
    return (1e-4 if stage.name == STOPPED else 1e-5), 2e-3  # after three steps Adam has magnified the rounding


def test_early_stop_groups_and_offline_teacher_in_two_processes(how, build, converted, launched, tmp_path, monkeypatch):
    """Both processes stop layers at the same step, write the cache together, and get what one process gets."""
    monkeypatch.setattr(offline, "MOST_ROWS", 5)
    recipe = build(stages=early_stages(how, tmp_path / "cache"))
    for stage in recipe.stages:
        run_stage(recipe, stage, converted, tmp_path / stage.name)
        expected, found = (torch.tensor(losses(folder / stage.name)) for folder in (tmp_path, launched / "early"))
        assert len(expected) == (4 * (2 if stage.layers_at_once else 1) if stage.name == "align" else 3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    ours, theirs = (predictions(folder / "cache") for folder in (tmp_path, launched))
    assert torch.equal(ours["teacher_index"], theirs["teacher_index"])
    torch.testing.assert_close(ours["teacher_log_p"], theirs["teacher_log_p"], rtol=2**-10, atol=0)


def predictions(folder):
    shards = [load_file(path) for path in sorted(folder.glob("rows-*.safetensors"))]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def test_windows_beside_sse_are_left_out_alike_in_two_processes(windows, launched, tmp_path):
    """Which layers leave their window out is drawn from seed and step, so that two processes give one's losses."""
    recipe, checkpoint = windows
    for stage in recipe.stages:
        run_stage(recipe, stage, checkpoint, tmp_path / stage.name)
        expected, found = (torch.tensor(losses(folder / stage.name)) for folder in (tmp_path, launched / "windows"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
