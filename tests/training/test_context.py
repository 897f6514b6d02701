"""Stages whose rows are split over processes (gloo, FSDP2): the curve of one process, and what is refused."""

import dataclasses as dc
import json

import pytest
import torch
from accelerate import PartialState, debug_launcher
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, patch_environment

from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.errors import HardwareError, RecipeError, TrainingError
from sse_convert.evaluation import evaluate
from sse_convert.evaluation.evaluate import evaluate_checkpoint
from sse_convert.evaluation.long_rows import LongRows
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION
from sse_convert.modeling.sink_attention import use_kernels
from sse_convert.pipeline import run_recipe
from sse_convert.recipe.schema import Stage
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from sse_convert.training.context import ROW_POSITIONS, Place, choose_attention, lay_out
from sse_convert.training.setup import make_accelerator
from tests.modeling.tiny import tiny_source
from tests.training.conftest import losses, recipe_for
from tests.training.launched import CONTINUED, forked_stages, fresh_accelerate
from tests.training.running import run_alone

SIZE = {"micro_batch": 1, "batch_tokens": 64, "seq_len": 64, "tokens": 256, "lr": {"mixers": 3e-4, "rest": 1e-4}}
"""one row per step, which two processes can only split"""
WINDOW = {"window": 8, "sinks": 1}
RECIPE = {
    "layers": {"pattern": ["sse+sliding", "sliding", "full"]},
    "mixers": {"sse+sliding": {"qk_rank": 4, **WINDOW}, "sliding": WINDOW},
    "calibrate": {"enabled": False},
}
EVAL = {"tokens": 256, "lengths": [64, 32]}
STAGES = [
    ("align", {**SIZE, "lr": 3e-4}),
    ("distill", {**SIZE, "gradient_checkpointing": True}),
    ("uptrain", {**SIZE, "name": CONTINUED, "checkpoint_steps": 2}),
]


@pytest.fixture
def build(teacher_folder, text_folder):
    """Builds the recipe for a number of processes that hold a row together."""

    def build(parts, stages=STAGES, **settings):
        split = [(name, {**own, "context_parallel": parts}) for name, own in stages]
        return recipe_for(teacher_folder, text_folder, "unused", stages=split, **{**RECIPE, **settings})

    return build


def test_two_processes_with_half_of_each_row(build, chats, text_folder, tmp_path):
    """All three losses, one interrupted and continued; answers alone; looks at held-out text."""
    data = {"train": [chats, {"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
    answers = {**SIZE, "name": "answers", "loss_mask": "assistant"}
    settings = {"data": data, "train": {"validate_every": 64}}
    one, two = (build(parts, [*STAGES, ("distill", answers)], **settings) for parts in (1, 2))
    convert_checkpoint(Job.of(one), tmp_path / "converted")
    for stage in one.stages:
        run_alone(one, stage, tmp_path / "converted", tmp_path / "one" / stage.name)
    with patch_environment(accelerate_use_fsdp="true", fsdp_version="2"):
        debug_launcher(forked_stages, (two, tmp_path / "converted", tmp_path / "two"), num_processes=2)
    for stage in one.stages:
        for key in ("loss", "grad_norm", "valid_kl" if stage.loss == "kl" else "valid_loss"):
            expected, found = (torch.tensor(losses(tmp_path / way / stage.name, key)) for way in ("one", "two"))
            assert len(expected) == 4
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_neighbours_have_parts_of_the_same_rows():
    batch = {"input_ids": torch.arange(16).view(2, 8), "position_ids": torch.arange(8).expand(2, 8)}
    own = Place(rank=0, ranks=1, part=1, parts=4).cut(batch)
    assert own["input_ids"].tolist() == [[2, 3], [10, 11]]
    assert own["position_ids"].tolist() == [[2, 3], [2, 3]]
    assert torch.equal(own[ROW_POSITIONS], batch["position_ids"])


@pytest.mark.parametrize(
    ("stages", "key", "message"),
    [
        ([("distill", {**SIZE, "seq_len": 63, "batch_tokens": 63})], "context_parallel", "does not divide seq_len"),
    ],
)
def test_recipes_that_cannot_be_split(build, stages, key, message):
    with pytest.raises(RecipeError, match=message) as refused:
        build(2, stages)
    assert key in str(refused.value)


@pytest.mark.parametrize(("parts", "message"), [(3, "does not divide 4 query heads"), (8, "4 query heads")])
def test_heads_that_cannot_be_dealt_out(build, parts, message):
    recipe = build(parts, [("distill", {**SIZE, "seq_len": 24 * 8, "batch_tokens": 24 * 8})])
    with pytest.raises(RecipeError, match=message):
        make_plan(Job.of(recipe, open_for_planning))


def test_processes_that_do_not_go_together(build, tmp_path):
    recipe = build(2)
    accelerator = make_accelerator(recipe.train)
    with pytest.raises(TrainingError, match="context_parallel is 2, for 1 process"):
        lay_out(accelerator, recipe.stages[0])
    accelerator.state._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    accelerator.state._shared_state["num_processes"] = 2
    with pytest.raises(HardwareError, match="FSDP version 2"):
        lay_out(accelerator, recipe.stages[0])
    assert lay_out(accelerator, dc.replace(recipe.stages[0], context_parallel=1)) == Place(0, 2, 0, 1)


@pytest.mark.slow
def test_a_whole_run_of_two_processes(build, text_folder, tmp_path):
    """Evaluation too reads rows of this length in parts, and gives the figures of one process."""
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "0.txt")}]}
    settings = {"data": data, "eval": {"tokens": 256, "lengths": [64, 32]}}
    for parts in (1, 2):
        recipe = build(parts, STAGES[1:2], **settings, export={"dir": str(tmp_path / str(parts))})
        if parts == 1:
            run_recipe(recipe)
            AcceleratorState._reset_state(reset_partial_state=True)
        else:
            with patch_environment(accelerate_use_fsdp="true", fsdp_version="2"):
                debug_launcher(forked_run, (recipe,), num_processes=parts)
    one, two = (
        json.loads(next(tmp_path.glob(f"{parts}.stages/*-eval/evaluation.json")).read_text()) for parts in (1, 2)
    )
    for found, expected in zip(two["student"]["held_out"], one["student"]["held_out"], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for found, expected in zip(two["student"]["agreement"], one["student"]["agreement"], strict=True):
        assert found["kl"] == pytest.approx(expected["kl"], rel=1e-3)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_launched_evaluation_by_itself(build, text_folder, tmp_path, parts):
    """Windows are read together where the recipe splits rows, else by the first process; one writes the report."""
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "0.txt")}]}
    recipe = build(parts, STAGES[1:2], data=data, eval=EVAL)
    convert_checkpoint(Job.of(recipe), tmp_path / "converted")
    alone = evaluate_checkpoint(Job.of(build(1, STAGES[1:2], data=data, eval=EVAL)), tmp_path / "converted").to_dict()
    debug_launcher(forked_evaluation, (recipe, tmp_path, alone, parts), num_processes=2)
    report = json.loads((tmp_path / "0.json").read_text())
    assert report["student"]["agreement"][0]["kl"] == pytest.approx(alone["student"]["agreement"][0]["kl"], rel=1e-3)
    assert not (tmp_path / "1.json").exists()


def forked_evaluation(recipe, folder, alone, parts):
    """What each process does: `eval`, with a report of its own name."""
    PartialState._reset_state()
    fresh_accelerate()
    seen, hidden, loaded, load = [], LongRows.hidden, [], evaluate.load_model
    LongRows.hidden = lambda *args: seen.append(args[2].shape[1]) or hidden(*args)
    evaluate.load_model = lambda *args, **settings: loaded.append(args[0]) or load(*args, **settings)
    rank = torch.distributed.get_rank()
    report = evaluate_checkpoint(Job.of(recipe), folder / "converted", out=folder / f"{rank}.json").to_dict()
    assert set(seen) == ({64} if parts == 2 else set())
    assert len(loaded) == (2 if parts == 2 or rank == 0 else 0)
    for found, expected in zip(report["student"]["held_out"], alone["student"]["held_out"], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    PartialState().destroy_process_group()


def forked_run(recipe):
    """What each process does: the run, in which evaluation splits windows of 64 tokens."""
    PartialState._reset_state()
    fresh_accelerate()
    seen, hidden = [], LongRows.hidden
    LongRows.hidden = lambda *args: seen.append(args[2].shape[1]) or hidden(*args)
    run_recipe(recipe)
    assert set(seen) == {64}
    PartialState().destroy_process_group()


@pytest.mark.parametrize(
    ("family", "expected"), [("qwen3", DOCUMENT_ATTENTION), ("gpt_oss", DOCUMENT_ATTENTION), ("gemma2", "eager")]
)
def test_models_attend_within_documents_where_that_is_built(family, expected):
    model = tiny_source(family)
    use_kernels(model)
    stage = Stage(name="s", loss="kl", tokens=64, seq_len=64, lr=1e-3)
    assert choose_attention(model, stage).config._attn_implementation == expected
