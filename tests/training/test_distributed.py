"""Two processes (gloo, CPU): the losses of one process, and a complete result.

They are forked, which spares them the imports; the job script in `tests/examples/test_slurm.py` starts some
from nothing.
"""

import dataclasses as dc
import json
import shutil
from functools import partial
from importlib import import_module

import pytest
import torch
from accelerate import debug_launcher
from accelerate.utils import patch_environment

from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from tests.training.conftest import losses, make_llama, recipe_for
from tests.training.launched import COMPILED, CONTINUED, OLDEST, STOPPED, forked, forked_gradients, forked_main
from tests.training.running import run_alone

pytestmark = pytest.mark.slow
FSDP2 = {"accelerate_use_fsdp": "true", "fsdp_version": "2"}
SIZE = {"micro_batch": 1, "batch_tokens": 128, "seq_len": 32}
"""rows are cut into the same micro batches by one process and by two, so the balance losses agree as well"""
GENTLE = {"mixers": 3e-4, "rest": 1e-4}
"""Adam's first step makes a gradient of rounding's size as large as any: at ten times these rates, noise of 1e-7 in
the gradients moves the next one's norm by 9e-6; at these, by 3e-7"""
ALONE = {"name": "alone", "train": "mixers", "lr": 3e-4}
"""converted layers alone, as packaged recipes train"""
STAGES = [
    ("align", {**SIZE, "tokens": 256}),
    ("distill", {**SIZE, "tokens": 256, "gradient_checkpointing": True, "lr": GENTLE}),
    ("distill", {**SIZE, "tokens": 256, "name": "muon", "optimizer": "muon"}),
    ("distill", {**SIZE, "tokens": 256, "name": "lora", "train": "lora"}),
    ("uptrain", {**SIZE, "tokens": 512, "name": STOPPED, "checkpoint_steps": 2}),
]


WINDOWS = {
    "layers": {"pattern": ["sse+sliding", "sse+sliding", "full"]},
    "mixers": {"sse+sliding": {"qk_rank": 4, "window": 8, "sinks": 1}},
    "calibrate": {"seq_len": 32},
    "stages": [
        ("align", {**SIZE, "tokens": 256}),
        ("distill", {**SIZE, **ALONE, "tokens": 256, "gradient_checkpointing": True}),
    ],
}

BF16 = {
    # that of the packaged recipes, and heads that stay softmax
    "layers": {"pattern": ["sse+sliding", "sliding", "full"], "overrides": {0: {"full_heads": [1]}}},
    "mixers": {"sse+sliding": {"window": 8, "sinks": 1}, "sliding": {"window": 8, "sinks": 1}},
    "train": {"mixed_precision": "bf16"},
    "stages": [
        ("align", {**SIZE, "tokens": 256}),
        ("distill", {**SIZE, **ALONE, "tokens": 256, "gradient_checkpointing": True}),
        ("uptrain", {**SIZE, "tokens": 512, "gradient_checkpointing": True}),
        ("uptrain", {**SIZE, "tokens": 512, "gradient_checkpointing": True, "name": CONTINUED, "checkpoint_steps": 2}),
    ],
}


@pytest.fixture(
    scope="module",
    params=[pytest.param({}, id="DDP"), pytest.param(FSDP2, id="FSDP2")],
)
def how(request):
    """What `accelerate launch` tells the processes."""
    return request.param


@pytest.fixture(scope="module")
def build(teacher_folder, text_folder):
    """Builds recipes for the tiny teacher, with looks at one row of held-out text, which one of two processes has."""
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
    return partial(recipe_for, teacher_folder, text_folder, "unused", data=data, train={"validate_every": 32})


@pytest.fixture(scope="module")
def recipe(build):
    return build(stages=STAGES)


@pytest.fixture(scope="module")
def windows(build, tmp_path_factory):
    """The recipe of windows beside SSE, and what it starts from."""
    return with_converted(build(**WINDOWS), tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def answers(build, converted, chats):
    """A stage that learns answers alone, and what it starts from; passes of one row, some without
    an answer, which only one of two processes may have."""
    own = {**SIZE, "tokens": 512, "lr": GENTLE, "loss_mask": "assistant"}
    data = {"train": [chats], "valid": [chats]}
    return build(stages=[("distill", own)], data=data), converted


@pytest.fixture(scope="module")
def bf16(build, tmp_path_factory):
    """The recipe in mixed precision, and what it starts from."""
    return with_converted(build(**BF16), tmp_path_factory.mktemp("bf16"))


@pytest.fixture(scope="module")
def compiled(tokenizer, text_folder, tmp_path_factory):
    """A stage of one layer, compiled, and what it starts from."""
    folder = tmp_path_factory.mktemp("compiled")
    make_llama(layers=1).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    one = {"layers": {"pattern": ["sse"]}, "train": {"compile": True}}
    return with_converted(recipe_for(folder / "teacher", text_folder, "unused", stages=STAGES[1:2], **one), folder)


def with_converted(recipe, folder):
    convert_checkpoint(Job.of(recipe), folder / "converted")
    return recipe, folder / "converted"


@pytest.fixture(scope="module")
def alone(recipe, converted, tmp_path_factory):
    """Every stage in one process."""
    folder = tmp_path_factory.mktemp("alone")
    for stage in recipe.stages:
        run_alone(recipe, stage, converted, folder / stage.name)
    return folder


@pytest.fixture(scope="module")
def launched(how, build, recipe, windows, answers, bf16, compiled, converted, tmp_path_factory):
    """The folder of all recipes' stages in two processes, started once for all: that takes longer than the stages."""
    folder = tmp_path_factory.mktemp("launched")
    for library in ("peft", "torch._dynamo.convert_frame", "torch._inductor"):
        import_module(library)  # here, and not in each of the processes
    sharded = {OLDEST: bf16, COMPILED: compiled}
    runs = {"answers": answers, "all": (recipe, converted), **(sharded if how == FSDP2 else {"windows": windows})}
    told = {name: (recipe.to_dict(), str(checkpoint)) for name, (recipe, checkpoint) in runs.items()}
    (folder / "runs.json").write_text(json.dumps(told))
    with patch_environment(**how):
        debug_launcher(forked_main, (folder / "runs.json", folder), num_processes=2)
    seen = [int(path.read_text()) for path in sorted(folder.glob("process-*"))]
    assert seen == [2, 2], "the number of processes that each sees"
    return folder


def test_two_processes_give_the_losses_of_one(how, recipe, converted, alone, launched):
    for stage in recipe.stages[:-1]:
        one, two = alone / stage.name, launched / "all" / stage.name
        on_losses, on_weights = tolerances(stage, sharded=how == FSDP2)
        for key in ("loss", "grad_norm", "valid_loss"):
            expected, found = (torch.tensor(losses(folder, key)) for folder in (one, two))
            torch.testing.assert_close(found, expected, rtol=on_losses, atol=0)
        assert_near(two, one, on_weights)


def tolerances(stage, *, sharded):
    """On losses and gradient norms, and on weights, some of which start at zero and are the sum of the steps."""
    if stage.optimizer == "muon":  # bf16; products of sharded matrices are summed in another order: 2% to 5%
        return (2e-2, 5e-2) if sharded else (1e-4, 2**-7)
    return 1e-5, 2e-3


def assert_near(folder, expected, tolerance):
    before, after = load_pretrained(expected).state_dict(), load_pretrained(folder).state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (after[name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("processes", [1, 4])
def test_a_checkpoint_of_two_processes_is_continued(how, recipe, converted, alone, launched, tmp_path, processes):
    if processes == 4 and how != FSDP2:
        pytest.skip("the same checkpoint files, and weights that nobody shards")
    stopped = recipe.stages[-1]
    shutil.copytree(launched / "all" / f"{STOPPED}.work", tmp_path / f"{STOPPED}.work")
    assert [path.name for path in (tmp_path / f"{STOPPED}.work").glob("step-*")] == ["step-000002"]
    arguments = recipe, stopped, converted, tmp_path / STOPPED
    if processes == 1:
        assert run_alone(*arguments).steps == 4
    else:
        with patch_environment(**FSDP2):
            debug_launcher(forked, arguments, num_processes=processes)
    for key in ("loss", "grad_norm"):
        expected, found = (torch.tensor(losses(folder / STOPPED, key)) for folder in (alone, tmp_path))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)  # Adam has magnified the rounding
    assert_near(tmp_path / STOPPED, alone / STOPPED, 2e-3)


def test_gradients_of_ddp_are_views_of_its_buckets(tmp_path):
    debug_launcher(forked_gradients, (tmp_path,), num_processes=2)
    for process in range(2):
        one, other = json.loads((tmp_path / f"gradients-{process}").read_text())
        assert one == other, "each has memory of its own beside the bucket"


def test_windows_beside_sse_in_two_processes(how, windows, launched, tmp_path):
    if how == FSDP2:
        pytest.skip("rows over two processes (test_context.py) have them")
    recipe, checkpoint = windows
    for stage in recipe.stages:
        run_alone(recipe, stage, checkpoint, tmp_path / stage.name)
        expected, found = (torch.tensor(losses(folder / stage.name)) for folder in (tmp_path, launched / "windows"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_answers_alone_in_two_processes(answers, launched, tmp_path):
    recipe, checkpoint = answers
    run_alone(recipe, recipe.stages[0], checkpoint, tmp_path / "distill")
    for key in ("loss", "grad_norm", "predicted"):
        expected, found = (torch.tensor(losses(at / "distill", key)) for at in (tmp_path, launched / "answers"))
        assert len(expected) == 4
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_compiled_layer_under_fsdp(how, compiled, launched, tmp_path):
    if how != FSDP2:
        pytest.skip("nothing is gathered around a layer")
    recipe, checkpoint = compiled
    plain = dc.replace(recipe, train=dc.replace(recipe.train, compile=False))
    run_alone(plain, plain.stages[0], checkpoint, tmp_path / "distill")
    chosen = json.loads((launched / COMPILED / "distill/stage.json").read_text())["report"]["chosen"]
    assert chosen["compile"] is True
    for key in ("loss", "grad_norm"):
        expected, found = (torch.tensor(losses(at / "distill", key)) for at in (tmp_path, launched / COMPILED))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_mixed_precision_and_checkpointing_under_the_oldest_fsdp(how, bf16, launched, tmp_path):
    """All three losses, with what FSDP2 of torch 2.11 leaves uncast when a layer is repeated."""
    if how != FSDP2:
        pytest.skip("DDP casts nothing")
    recipe, checkpoint = bf16
    *stages, _ = recipe.stages
    for stage in stages:
        run_alone(recipe, stage, checkpoint, tmp_path / stage.name)
        for key, tolerance in (("loss", 2**-8), ("grad_norm", 2**-5)):
            expected, found = (torch.tensor(losses(root / stage.name, key)) for root in (tmp_path, launched / OLDEST))
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        assert (
            load_pretrained(launched / OLDEST / stage.name).state_dict().keys()
            == load_pretrained(checkpoint).state_dict().keys()
        )
    whole, continued = (launched / OLDEST / name for name in ("uptrain", CONTINUED))
    assert losses(continued) == losses(whole)
    assert losses(continued, "grad_norm") == losses(whole, "grad_norm")
    assert_near(continued, whole, 0.0)
