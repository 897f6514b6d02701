"""The job script: what it starts, when it is requeued, and a run of it on two processes that is ended."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from sse_convert.training.metrics import read
from tests.training.conftest import make_llama, make_text, make_tokenizer, recipe_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
SRUN = """#!/bin/bash
# starts the tasks after srun's own options, tells each who it is, and ends with the highest code
while [[ "$1" == --* ]]; do shift; done
trap 'kill -TERM "${started[@]}"' TERM
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    started+=($!)
done
for child in "${started[@]}"; do
    wait "$child"; code=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
    ((code > highest)) && highest=$code
done
exit "${highest:-0}"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi
"""


@pytest.fixture
def job(tmp_path):
    """The environment of a job with two tasks, under a Slurm of shell scripts."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = 20000 + probe.getsockname()[1] % 20000
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "ACCELERATE_USE_CPU": "true",
        "SSE_CONVERT_CACHE": str(tmp_path / "cache"),
    }


def wait_for(condition, process):
    began = time.monotonic()
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() - began < 120
        time.sleep(0.01)


def submitted(job, *arguments):
    return subprocess.Popen(["bash", SCRIPT, *arguments], env=job, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 143, 3])
def test_a_job_that_was_ended_is_requeued(job, tmp_path, code):
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $FSDP_VERSION $*" >> {told}\n'
        f"exit {code}\n"
    )
    python.chmod(stat.S_IRWXU)
    done = submitted({**job, "PYTHON": str(python), "SHARD": "1"}, "a recipe.yaml")
    assert done.wait() == code
    port = 20000 + int(job["SLURM_JOB_ID"])
    lines = sorted(told.read_text().splitlines())
    assert lines == [f"{i} {i} 2 127.0.0.1 {port} 2 -m sse_convert run a recipe.yaml" for i in range(2)]
    requeued = Path(job["REQUEUED"])
    assert requeued.exists() == (code == 143)
    if code == 143:
        assert requeued.read_text() == f"requeue {job['SLURM_JOB_ID']}\n"


def test_a_recipe_is_asked_for(job):
    done = submitted(job)
    assert done.wait() != 0
    assert "the recipe is missing" in done.stderr.read()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_is_clean():
    subprocess.run(["shellcheck", SCRIPT], check=True)


@pytest.mark.slow
def test_two_tasks_train_are_ended_and_the_job_is_requeued(job, tmp_path):
    """SIGTERM to the tasks, started from nothing, saves the step from which the requeued job goes on."""
    make_llama().save_pretrained(tmp_path / "teacher")
    make_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(make_text(4000))
    stage = ("uptrain", {"tokens": 128 * 120, "checkpoint_steps": 120})
    recipe = recipe_for(
        tmp_path / "teacher", tmp_path / "text.txt", tmp_path / "out", stages=[stage], calibrate={"enabled": False}
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    work = tmp_path / "out.stages" / "01-uptrain.work"
    with submitted(job, str(tmp_path / "recipe.yaml")) as first:
        wait_for(lambda: read(work / "metrics.jsonl"), first)
        (srun,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        os.kill(int(srun), signal.SIGTERM)
        told = first.stderr.read()
        assert first.wait() == 143, told
    assert Path(job["REQUEUED"]).is_file()
    assert "of 120 steps are saved" in told
    (saved,) = work.glob("step-*")
    assert json.loads((saved / "state.json").read_text())["step"] == int(saved.name.removeprefix("step-")) > 0
