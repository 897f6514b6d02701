"""Under FSDP2 one process reads each model, and the others get their shards from it (gloo, CPU)."""

import json
import pickle

import pytest
import torch
from accelerate import debug_launcher
from accelerate.utils import patch_environment

from sse_convert.errors import RecipeError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from tests.modeling.tiny import tiny_model
from tests.modeling.tiny_images import tiny_image_model
from tests.training.conftest import make_llama, recipe_for
from tests.training.launched import forked_copies, forked_gathered, forked_memory

SIZE = {"micro_batch": 1, "batch_tokens": 64, "seq_len": 32, "tokens": 128}
MOST = {"align": (2.9, 1.7), "distill": (2.4, 1.5), "uptrain": (1.9, 1.0)}
"""how much a stage's two processes grow, in students of float32. Each has half of a student and of a teacher as large,
a layer, and what it imports late, 0.2; to align, all attention. The first has mapped the files it reads, 0.5."""


def sharing(function, *arguments, processes=2, **settings):
    """Run a function in processes that share the weights."""
    with patch_environment(accelerate_use_fsdp="true", fsdp_version="2", **settings):
        debug_launcher(function, arguments, num_processes=processes)


@pytest.fixture(scope="module")
def large(tokenizer, text_folder, tmp_path_factory):
    """A recipe whose weights are much more than what else a process needs, and what it starts from."""
    folder = tmp_path_factory.mktemp("large")
    make_llama(layers=6, hidden=768).bfloat16().save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    stages = [(name, SIZE) for name in MOST]
    recipe = recipe_for(folder / "teacher", text_folder, "unused", stages=stages)
    convert_checkpoint(Job.of(recipe), folder / "converted")
    return recipe, folder / "converted"


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_one_process_holds_a_whole_model(large, tmp_path, name):
    recipe, checkpoint = large
    stage = next(stage for stage in recipe.stages if stage.name == name)
    student = sum(4 * p.numel() for p in load_pretrained(checkpoint).parameters())
    sharing(forked_memory, recipe, stage, checkpoint, tmp_path / name)
    found = [int((tmp_path / f"{name}-memory-{i}").read_text()) / student for i in range(2)]
    assert all(grown < most for grown, most in zip(found, MOST[name], strict=True)), found


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """What two processes have of models, some of which transformers reads in more than one dtype."""
    folder = tmp_path_factory.mktemp("copies")
    models = {
        "tied": tiny_model("llama", tie_word_embeddings=True),
        "ernie": tiny_model("ernie4_5_moe"),
        "buffers": tiny_model("deepseek_v3"),
        "images": tiny_image_model("llama4"),
        "broken": tiny_model("llama"),
    }
    with torch.no_grad():
        models["broken"].lm_head.weight[0, 0] = float("nan")
    for name, model in models.items():
        model.bfloat16().save_pretrained(folder / name)
    sharing(forked_copies, {name: folder / name for name in models}, folder)
    return folder


@pytest.mark.parametrize("name", ["tied", "ernie", "buffers", "images"])
def test_the_others_receive_what_the_first_process_reads(copies, name):
    (held, two, first), (empty, _, second) = (torch.load(copies / f"{name}-{i}", weights_only=False) for i in range(2))
    assert two == 2
    assert held == 0
    assert empty == len(list(load_pretrained(copies / name).parameters()))
    assert first.keys() == second.keys()
    for key, value in load_pretrained(copies / name, dtype=torch.float32).state_dict(keep_vars=True).items():
        for other in (first[key], second[key]):
            assert other.dtype == value.dtype
            assert torch.equal(other, value), key
        assert first[key].requires_grad == second[key].requires_grad == (value.requires_grad and "norm" not in key)
    if name == "tied":
        assert second["lm_head.weight"] is second["model.embed_tokens.weight"]


def test_the_others_fail_as_the_first_process_does(copies):
    one, other = ((copies / f"broken-{i}").read_text() for i in range(2))
    assert one == other
    assert "1 tensor with NaN or Inf weights: lm_head.weight" in one


@pytest.mark.parametrize("reshard", [True, False])
def test_roots_keep_their_weights_until_the_backward(tmp_path, reshard):
    sharing(forked_gathered, tmp_path, processes=1, fsdp_reshard_after_forward=str(reshard).lower())
    gathered = json.loads((tmp_path / "gathered").read_text())
    assert gathered == {
        "before": [],
        "forward": ["around", "error"] if reshard else ["around", "layer", "error"],
        "backward": [],
    }


def test_errors_travel_whole():
    error = RecipeError("2 problems", expected="none", fix="mend them", problems=["a", "b"])
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.problems) == (RecipeError, str(error), ["a", "b"])
