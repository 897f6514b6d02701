"""Run by `accelerate launch` in the distributed tests: every stage of a recipe, all from the same checkpoint.

Accelerate enables FSDP on accelerators only. To test it on two CPU processes, Accelerate is told here, before anything
else, that the process group it has made is one of accelerators; all that follows is its own FSDP2 path.
"""

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


def main(recipe_file, checkpoint, out):
    torch.set_num_threads(1)
    offline.MOST_ROWS = 5  # so that there are shards for both processes to write
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    recipe = recipe_from_dict(json.loads(Path(recipe_file).read_text()))
    for stage in recipe.stages:
        if stage.name == STOPPED:
            interrupt_after(3)
        try:
            run_stage(recipe, stage, Path(checkpoint), Path(out) / stage.name)
        except KeyboardInterrupt:
            assert stage.name == STOPPED
    state = PartialState()
    Path(out, f"process-{state.process_index}").write_text(str(state.num_processes))
    state.destroy_process_group()


def interrupt_after(steps):
    real, calls = loop._gradients, []

    def gradients(*args):
        calls.append(1)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return real(*args)

    loop._gradients = gradients


if __name__ == "__main__":
    main(*sys.argv[1:])
