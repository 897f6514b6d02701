"""Run by `accelerate launch` in the distributed tests: every stage of some recipes, a recipe's all from one checkpoint.

Accelerate enables FSDP on accelerators only. To test it on two CPU processes, Accelerate is told here, before anything
else, that the process group it has made is one of accelerators; all that follows is its own FSDP2 path.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from sse_convert.recipe import recipe_from_dict
from sse_convert.training import loop, offline
from sse_convert.training.stage import run_stage

STOPPED = "stopped"
"""the stage of this name is interrupted in its fourth step"""


def main(runs_file, out):
    torch.set_num_threads(1)
    offline.MOST_ROWS = 5  # so that there are shards for both processes to write
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    for name, (recipe, checkpoint) in json.loads(Path(runs_file).read_text()).items():
        run_stages(recipe_from_dict(recipe), Path(checkpoint), Path(out, name))
    state = PartialState()
    Path(out, f"process-{state.process_index}").write_text(str(state.num_processes))
    state.destroy_process_group()


def run_stages(recipe, checkpoint, out):
    for stage in recipe.stages:
        with interrupted_after(3) if stage.name == STOPPED else contextlib.nullcontext():
            run_stage(recipe, stage, checkpoint, out / stage.name)


@contextlib.contextmanager
def interrupted_after(steps):
    real, calls = loop._gradients, []

    def gradients(*args):
        calls.append(1)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return real(*args)

    loop._gradients = gradients
    with contextlib.suppress(KeyboardInterrupt):
        yield
    loop._gradients = real


if __name__ == "__main__":
    main(*sys.argv[1:])
