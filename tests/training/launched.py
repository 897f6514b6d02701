"""What each process of the distributed tests does: every stage of some recipes, a recipe's all from one checkpoint.

Accelerate enables FSDP on accelerators only. To test it on two CPU processes, Accelerate is told here, before anything
else, that the process group it has made is one of accelerators; all that follows is its own FSDP2 path.
"""

import contextlib
import ctypes
import gc
import json
import os
import re
from functools import partial, partialmethod
from pathlib import Path
from unittest import mock

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.errors import CheckpointError
from sse_convert.recipe import recipe_from_dict
from sse_convert.recipe.schema import Train
from sse_convert.surgery.job import Job
from sse_convert.training import loop
from sse_convert.training.setup import load_student, make_accelerator
from sse_convert.training.sharding import receive, share_out
from sse_convert.training.stage import run_stage
from tests.training.running import run_alone

STOPPED = "stopped"
"""the stage of this name is interrupted in its fourth step"""
CONTINUED = "continued"
"""so is this one, and started again"""
OLDEST = "oldest"
"""the recipe of this name meets the oldest torch and transformers that are allowed, as far as they differ in FSDP2"""


M_MMAP_THRESHOLD = -3
"""of mallopt, as malloc.h has it"""
COMPILED = "compiled"
"""in the recipe of this name torch.compile traces as ever, and hands its graphs to no compiler, which takes a minute"""


def main(runs_file, out):
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays, and Accelerate collects garbage after every stage
    for name, (recipe, checkpoint) in json.loads(Path(runs_file).read_text()).items():
        fresh_accelerate()
        with {OLDEST: oldest_libraries, COMPILED: only_traced}.get(name, contextlib.nullcontext)():
            run_stages(recipe_from_dict(recipe), Path(checkpoint), Path(out, name))
    state = PartialState()
    Path(out, f"process-{state.process_index}").write_text(str(state.num_processes))
    state.destroy_process_group()


def fresh_accelerate():
    """Forget the last recipe's accelerator, which may have had another precision; offer FSDP where it is asked for."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def run_stages(recipe, checkpoint, out):
    """By one accelerator, as `run` does."""
    job, accelerator = Job.of(recipe), make_accelerator(recipe.train)
    for stage in recipe.stages:
        if stage.name in (STOPPED, CONTINUED):
            with interrupted_after(3):
                run_stage(job, stage, checkpoint, out / stage.name, accelerator)
        if stage.name != STOPPED:
            run_stage(job, stage, checkpoint, out / stage.name, accelerator)


def begin_anew():
    """What a process that was forked off a test has to do first."""
    PartialState._reset_state()  # the test's own
    torch.set_num_threads(1)  # before the threads that read weights: all at once, they fail at what fork broke


def forked_main(runs_file, out):
    """`main` in a process that `debug_launcher` forks off a test."""
    begin_anew()
    main(runs_file, out)


def forked(recipe, stage, checkpoint, out):
    """What each process does that `debug_launcher` forks off a test."""
    begin_anew()
    fresh_accelerate()
    run_alone(recipe, stage, checkpoint, out)
    PartialState().destroy_process_group()


def forked_gradients(folder):
    """Which memory the gradients of two parameters lie in, under DDP."""
    PartialState._reset_state()
    accelerator = make_accelerator(Train())
    linear = accelerator.prepare(nn.Linear(3, 2))
    for _ in range(2):  # buckets are laid out anew after the first step
        linear.zero_grad()
        linear(torch.ones(1, 3)).sum().backward()
    places = [tensor.grad.untyped_storage().data_ptr() for tensor in linear.parameters()]
    Path(folder, f"gradients-{accelerator.process_index}").write_text(json.dumps(places))
    PartialState().destroy_process_group()


def forked_memory(recipe, stage, checkpoint, out):
    """How many bytes a process grows by at most until the first step of a stage."""
    begin_anew()
    fresh_accelerate()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # what is freed is given back, and leaves no holes
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    with interrupted_after(0):
        run_alone(recipe, stage, checkpoint, out)
    grown = resident("VmHWM") - before
    Path(f"{out}-memory-{PartialState().process_index}").write_text(str(grown))
    PartialState().destroy_process_group()


def forked_copies(checkpoints, out):
    """What each process has of models that the first one reads, or why it has none."""
    begin_anew()
    fresh_accelerate()
    accelerator = make_accelerator(Train())
    for name, folder in checkpoints.items():
        path = out / f"{name}-{accelerator.process_index}"
        try:
            model = load_student(files := open_checkpoint(folder), files.config["sse"], accelerator)
        except CheckpointError as error:
            path.write_text(str(error))
            continue
        empty = sum(p.is_meta for p in model.parameters())
        for key, parameter in model.named_parameters():
            if "norm" in key and accelerator.is_main_process:
                parameter.requires_grad_(False)
        receive(model, accelerator)
        torch.save((empty, accelerator.num_processes, model.state_dict(keep_vars=True)), path)
    PartialState().destroy_process_group()


def forked_gathered(out):
    """Which weights are whole after a forward and a backward: around a decoder layer, in it, in one that is aligned."""
    PartialState._reset_state()
    fresh_accelerate()
    accelerator = make_accelerator(Train())
    around, error = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 4)
    share_out([around[1]], accelerator, trained=True)
    for root in (around, error):
        share_out([root], accelerator, trained=True)
    weights = {"around": around[0], "layer": around[1][0], "error": error}

    def gathered():
        return [name for name, module in weights.items() if not isinstance(module.weight, DTensor)]

    found = {"before": gathered()}
    outputs = [root(torch.ones(1, 4)).sum() for root in (around, error)]
    found["forward"] = gathered()
    for output in outputs:
        output.backward()
    found["backward"] = gathered()
    Path(out, "gathered").write_text(json.dumps(found))
    PartialState().destroy_process_group()


def resident(field):
    """Bytes of this process's memory, as Linux counts them."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def forked_stages(recipe, checkpoint, out):
    """The same for all stages of a recipe."""
    PartialState._reset_state()
    fresh_accelerate()
    run_stages(recipe, checkpoint, out)
    PartialState().destroy_process_group()


@contextlib.contextmanager
def oldest_libraries():
    """FSDP2 of torch 2.11 under checkpointing of transformers 5.17. That repeats a layer's whole call, hooks included,
    and in the repetition FSDP casts neither inputs nor outputs, although it did in the forward (pytorch#159359)."""

    def repeats(state):
        return state._training_state == TrainingState.PRE_BACKWARD

    def pre_forward(self, module, args, kwargs):
        return (args, kwargs) if repeats(self) else real_pre_forward(self, module, args, kwargs)

    def post_forward(self, module, args, output):
        return output if repeats(self) else real_post_forward(self, module, args, output)

    def call(layer, *args, **kwargs):
        if not layer.gradient_checkpointing:
            return nn.Module.__call__(layer, *args, **kwargs)
        return layer._gradient_checkpointing_func(partial(call_once, layer, **kwargs), *args)

    def call_once(layer, *args, **kwargs):
        layer.gradient_checkpointing = False  # newer versions would checkpoint the layer's forward beside its call
        try:
            return nn.Module.__call__(layer, *args, **kwargs)
        finally:
            layer.gradient_checkpointing = True

    real_pre_forward, real_post_forward = FSDPState._pre_forward, FSDPState._post_forward
    with (
        mock.patch.object(FSDPState, "_pre_forward", pre_forward),
        mock.patch.object(FSDPState, "_post_forward", post_forward),
        mock.patch.object(GradientCheckpointingLayer, "__call__", call),
    ):
        yield


@contextlib.contextmanager
def only_traced():
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager")):
        yield


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
