"""Two processes (gloo, CPU) under `accelerate launch`: the losses of one process, and a complete result."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sse_convert.modeling.auto import load
from tests.training.conftest import losses, recipe_for

pytestmark = pytest.mark.slow
STAGES = [
    ("align", {"tokens": 384}),
    ("distill", {"tokens": 384, "hidden_loss": 0.1, "gradient_checkpointing": True}),
    ("uptrain", {"tokens": 384, "checkpoint_steps": 2}),
    ("distill", {"name": "lora", "train": "lora", "tokens": 256}),
]
SIZE = {"micro_batch": 1, "batch_tokens": 128, "seq_len": 32}
LAUNCHED = Path(__file__).with_name("launched.py")


def launch(recipe, checkpoint, out, *how, stop_after=None):
    out.mkdir(exist_ok=True)
    (out / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [*how, "--num_machines=1", f"--main_process_port={port}", "--mixed_precision=no", "--dynamo_backend=no"]
    paths = [str(out / "recipe.json"), str(checkpoint), str(out)]
    root = Path(__file__).parents[2]
    stop = {} if stop_after is None else {"STOP_AFTER_STEPS": str(stop_after)}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *arguments, str(LAUNCHED), *paths],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), **stop},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode == 0) == (stop_after is None), done.stderr[-8000:]
    return [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("processes ")]


@pytest.fixture(scope="module")
def recipe(teacher_folder, text_folder):
    """Rows are cut into the same micro batches by one process and by two, so the balance losses agree as well."""
    stages = [(name, {**SIZE, **own}) for name, own in STAGES]
    return recipe_for(teacher_folder, text_folder, "unused", stages=stages)


@pytest.fixture(scope="module")
def alone(recipe, converted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert launch(recipe, converted, folder, "--num_processes=1") == [1]
    return folder


@pytest.mark.parametrize(
    "how", [pytest.param(["--multi_gpu"], id="DDP"), pytest.param(["--use_fsdp", "--fsdp_version=2"], id="FSDP2")]
)
def test_two_processes_give_the_losses_of_one(recipe, converted, alone, tmp_path, how):
    assert launch(recipe, converted, tmp_path, "--num_processes=2", *how) == [2, 2]
    for stage in recipe.stages:
        one, two = alone / stage.name, tmp_path / stage.name
        for key in ("loss", "grad_norm"):
            expected, found = (torch.tensor(losses(folder, key)) for folder in (one, two))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        before, after = load(one).state_dict(), load(two).state_dict()
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert (after[name] - value).norm() <= 1e-3 * value.norm(), name


def test_a_sharded_run_is_continued_by_one_process(make, train, converted, tmp_path):
    recipe = make(("uptrain", {**SIZE, "tokens": 128 * 6, "checkpoint_steps": 2}))
    whole, _ = train("uptrain", "whole", recipe=recipe)
    launch(recipe, converted, tmp_path, "--num_processes=2", "--use_fsdp", "--fsdp_version=2", stop_after=3)
    assert [path.name for path in (tmp_path / "uptrain.work").glob("step-*")] == ["step-000002"]
    folder, report = train("uptrain", "uptrain", recipe=recipe)
    assert report.steps == 6
    expected, found = (torch.tensor(losses(path)) for path in (whole, folder))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
