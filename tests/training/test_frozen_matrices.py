"""Frozen matrices in autocast's dtype, and shared with the teacher: less memory, and not a bit of difference."""

import dataclasses as dc

import pytest
import torch
from accelerate import debug_launcher
from safetensors.torch import load_file

from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe import resolve
from sse_convert.recipe.schema import Stage
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.job import Job
from sse_convert.surgery.memory import Processes
from sse_convert.surgery.stage_memory import stage_memory
from sse_convert.surgery.verify_run import verify_folder
from sse_convert.training import attempt, distill, model_objective
from sse_convert.training.frozen_matrices import hold_low, share, with_originals
from sse_convert.training.lora import add_lora, lora_targets
from sse_convert.training.setup import prepare_parameters
from tests.modeling.tiny import tiny_source
from tests.training.conftest import losses, make_llama
from tests.training.launched import forked
from tests.training.running import run_alone

LOW = torch.bfloat16
SHARED = Processes(2, sharded=True)


def llama(**settings):
    """One whose values are those of a bfloat16 checkpoint, in float32, frozen."""
    return make_llama(**settings).to(LOW).float().requires_grad_(False)


def dtypes(model):
    return {name for name, p in model.named_parameters() if p.dtype == LOW}


def test_matrices_of_frozen_linear_modules_are_held_low():
    model = llama()
    model.model.layers[1].mlp.requires_grad_(True)
    hold_low(model, LOW)
    found = dtypes(model)
    assert {"lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.up_proj.weight"} <= found
    assert not any("norm" in name or "embed" in name or "layers.1.mlp" in name for name in found)


def test_what_the_dtype_does_not_hold_comes_back():
    model = llama()
    matrix = model.model.layers[0].mlp.up_proj.weight
    matrix.data[0, 0] = 1 + 2**-20
    before = {name: value.clone() for name, value in model.state_dict().items()}
    originals = hold_low(model, LOW)
    assert list(originals) == ["model.layers.0.mlp.up_proj.weight"]
    assert matrix[0, 0] == 1
    after = with_originals(model.state_dict(), originals)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].float(), before[name]) for name in before)
    assert after["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert after["model.layers.0.mlp.down_proj.weight"].dtype == LOW


def test_a_tied_head_stays():
    model = llama(tie=True)
    hold_low(model, LOW)
    assert model.lm_head.weight.dtype == torch.float32
    assert "model.layers.0.mlp.down_proj.weight" in dtypes(model)


def test_equal_frozen_parameters_exist_once():
    model, teacher = llama(), llama().to(LOW)
    teacher.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1
    add_lora(model, 2, lora_targets(model, set()), 0)
    hold_low(model, LOW)
    share(model, teacher)
    of_teacher = {p.data_ptr() for p in teacher.parameters()}
    shared = {name for name, p in model.named_parameters() if p.data_ptr() in of_teacher}
    assert "model.layers.0.mlp.up_proj.base_layer.weight" in shared
    assert "model.layers.1.mlp.up_proj.base_layer.weight" not in shared
    assert shared < dtypes(model)


def experts(**settings):
    """Four experts in each layer, whose grouped products bfloat16 can have."""
    model = tiny_source("qwen3_moe", moe_intermediate_size=16, **settings)
    return model.to(LOW).float().requires_grad_(False)


def test_matrices_of_experts_are_held_low_where_grouped_products_take_them():
    model = experts()
    expected = {n for n, p in model.named_parameters() if ".experts." in n}
    hold_low(model, LOW)
    assert {name for name in dtypes(model) if ".mlp." in name} == expected
    odd = tiny_source("qwen3_moe", moe_intermediate_size=12).requires_grad_(False)
    hold_low(odd, LOW)
    assert not any("down_proj" in name for name in dtypes(odd))


def test_experts_held_low_give_nearly_the_same_loss_and_gradients():
    model, found = experts(), []
    ids = torch.randint(5, 90, (2, 32))
    for _ in range(2):
        model.model.layers[0].self_attn.requires_grad_(True)
        model.zero_grad()
        with torch.autocast("cpu", LOW):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), model.model.layers[0].self_attn.v_proj.weight.grad.clone()))
        hold_low(model, LOW)
    (before, gradient), (after, held) = found
    torch.testing.assert_close(after, before, rtol=2**-8, atol=0)
    assert (held - gradient).norm() <= 0.1 * gradient.norm()


@pytest.fixture(scope="module")
def any_teacher(request, tmp_path_factory, tokenizer):
    """A teacher whose values bfloat16 holds, or does not hold."""
    folder = tmp_path_factory.mktemp("low")
    make_llama().to(request.param).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def held_by(folder, dtype):
    """Whether a teacher's values are of this type."""
    return load_file(folder / "model.safetensors")["model.norm.weight"].dtype == dtype


@pytest.mark.parametrize(
    ("any_teacher", "stage", "trained", "precision"),
    [
        (LOW, "distill", "lora", "bf16"),
        (torch.float32, "uptrain", "lora", "bf16"),
        (torch.float32, "distill", "mixers", "bf16"),
        (LOW, "distill", "lora", "no"),
    ],
    indirect=["any_teacher"],
)
def test_training_is_the_same_to_the_bit(make, any_teacher, tmp_path, monkeypatch, stage, trained, precision):
    rates = {"lr": {"mixers": 3e-3}} if trained == "mixers" else {}
    own = {"train": trained, "tokens": 512, "gradient_checkpointing": True, **rates}
    recipe = make((stage, own), model=str(any_teacher), train={"mixed_precision": precision})
    convert_checkpoint(Job.of(recipe), tmp_path / "converted")
    low, shared = [], []

    def held(model, dtype):
        originals = hold_low(model, dtype)
        low.extend(dtypes(model))
        return originals

    def counted(model, other):
        share(model, other)
        shared.extend({p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in other.parameters()})

    found = {}
    for name, ways in (("held", (held, counted)), ("plain", (lambda *_: {},) * 2)):
        monkeypatch.setattr(model_objective, "hold_low", ways[0])
        monkeypatch.setattr(distill, "share", ways[1])
        run_alone(recipe, recipe.stages[0], tmp_path / "converted", tmp_path / name)
        found[name] = losses(tmp_path / name), load_file(tmp_path / name / "model.safetensors")
    assert bool(low) == (precision == "bf16")
    assert bool(shared) == (stage == "distill")  # on a CPU the teacher is in float32: what is not held low is shared
    assert found["held"][0] == found["plain"][0]
    held_state, plain_state = (found[name][1] for name in ("held", "plain"))
    assert held_state.keys() == plain_state.keys()
    assert [name for name, value in held_state.items() if not torch.equal(value.float(), plain_state[name])] == []
    narrow = {name for name, value in held_state.items() if value.dtype == LOW}
    assert ("lm_head.weight" in narrow) == (bool(low) and held_by(any_teacher, LOW))
    assert all(check.passed for check in verify_folder(tmp_path / "held").checks)


@pytest.mark.parametrize("any_teacher", [torch.float32], indirect=True)
def test_frozen_matrices_are_halved_before_the_teacher_is_read(make, any_teacher, tmp_path, monkeypatch):
    own = {"train": "mixers", "tokens": 256, "lr": {"mixers": 3e-3}}
    recipe = make(("distill", own), model=str(any_teacher), train={"mixed_precision": "bf16"})
    convert_checkpoint(Job.of(recipe), tmp_path / "converted")
    order = []
    for place, name in ((model_objective, "hold_low"), (attempt, "load_teacher")):
        real = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, name=name, real=real: (order.append(name), real(*given))[1])
    run_alone(recipe, recipe.stages[0], tmp_path / "converted", tmp_path / "out")
    assert order == ["hold_low", "load_teacher"]


@pytest.mark.parametrize("any_teacher", [torch.float32], indirect=True)
def test_two_processes_of_ddp_as_well(make, any_teacher, tmp_path, monkeypatch):
    own = {"train": "lora", "tokens": 512, "micro_batch": 1}
    recipe = make(("distill", own), model=str(any_teacher), train={"mixed_precision": "bf16"})
    convert_checkpoint(Job.of(recipe), tmp_path / "converted")
    for name in ("held", "plain"):
        debug_launcher(forked, (recipe, recipe.stages[0], tmp_path / "converted", tmp_path / name), num_processes=2)
        monkeypatch.setattr(model_objective, "hold_low", lambda *_: {})
    assert losses(tmp_path / "held") == losses(tmp_path / "plain")
    held, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("held", "plain"))
    assert [name for name, value in held.items() if not torch.equal(value.float(), plain[name])] == []


def test_the_estimate_counts_experts(tmp_path, tokenizer):
    experts().save_pretrained(tmp_path)
    teacher = open_teacher(str(tmp_path))
    model = experts()
    hold_low(model, LOW)
    held = sum(p.numel() for p in model.parameters() if p.dtype == LOW)
    own = Stage(name="s", loss="kl", train="mixers", tokens=1024, seq_len=128, lr=1e-3)
    settings = {"lora_rank": 16, "bf16": True, "checkpointing": False, "cuda_graphs": False}
    found = stage_memory(geometry_of(teacher), [None] * teacher.num_layers, own, **settings)
    assert found.held_low == pytest.approx((2 + 2) * held, rel=0.05)  # routers and norms stay


@pytest.mark.parametrize("any_teacher", [LOW, torch.float32], indirect=True)
def test_the_estimate_counts_what_is_held_low(make, any_teacher, tmp_path):
    recipe = make(("distill", {"train": "lora"}), model=str(any_teacher))
    convert_checkpoint(Job.of(recipe), tmp_path / "converted")
    model = load_pretrained(tmp_path / "converted", dtype=torch.float32)
    prepare_parameters(model, recipe.stages[0], recipe.train)
    hold_low(model, LOW)
    held = sum(p.numel() for p in model.parameters() if p.dtype == LOW)
    teacher = open_teacher(str(any_teacher))
    names, mixers = resolve(recipe, teacher.num_layers)
    layers = [mixers.get(name) for name in names]
    settings = {"lora_rank": recipe.train.lora_rank, "bf16": True, "checkpointing": False, "cuda_graphs": False}
    stages = [dc.replace(recipe.stages[0], train=train) for train in ("lora", "all")]
    some, none = (stage_memory(geometry_of(teacher), layers, stage, **settings) for stage in stages)
    bytes_less = 2 + 2  # of the matrix itself, and of its copy for autocast
    assert some.held_low == pytest.approx(bytes_less * held, rel=0.02)
    own = stage_memory(geometry_of(teacher), layers, stages[0], **settings, shared=True)
    assert own.held_low == pytest.approx((bytes_less + 2) * held, rel=0.02)  # the teacher's is the same
    assert some.fixed() == some.weights - some.held_low + some.head
    assert (some.fixed(SHARED), none.held_low) == (dc.replace(some, held_low=0).fixed(SHARED), 0)
