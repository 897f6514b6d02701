"""`train: lora`: what trains, and that merging changes nothing."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import sse_convert
from sse_convert.modeling.auto import load_pretrained
from sse_convert.training.lora import add_lora, lora_targets, merge_lora
from sse_convert.training.setup import converted_attention
from tests.modeling.tiny import BASELINES, HEADS, LAYOUT, tiny_model
from tests.training.conftest import losses, make_llama


def randomised(model, rank=3, converted=frozenset()):
    """The model with adapters that do something."""
    add_lora(model, rank, lora_targets(model, set(converted)), 0)
    g = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=g)
    return model


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64)).eval()


def beside():
    return tiny_model("phi3", HEADS)


@pytest.mark.parametrize("build", [make_llama, gpt2, beside])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_merged_equals_unmerged(build):
    model, plain = randomised(build()).double(), build().double()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        unmerged = model(ids).logits
        assert (unmerged - plain(ids).logits).abs().max() > 0.1
        state = merge_lora(model.state_dict(), model)
        assert state.keys() == plain.state_dict().keys()
        plain.load_state_dict(state)
        torch.testing.assert_close(plain(ids).logits, unmerged, rtol=1e-5, atol=1e-5)


def test_merging_is_what_peft_does():
    from peft import LoraConfig, get_peft_model

    ours = randomised(make_llama())
    targets = lora_targets(make_llama(), set())
    theirs = get_peft_model(make_llama(), LoraConfig(r=3, lora_alpha=6.0, target_modules=targets))
    theirs.base_model.model.load_state_dict(ours.state_dict())
    merged = theirs.merge_and_unload().state_dict()
    for name, value in merge_lora(ours.state_dict(), ours).items():
        torch.testing.assert_close(value, merged[name])


def test_adapters_go_beside_frozen_weights_only(converted):
    model = load_pretrained(converted)
    paths = set(converted_attention(model).values())
    targets = lora_targets(model, paths)
    assert any(name.startswith("model.layers.2.self_attn.") for name in targets)
    assert any(name.startswith("model.layers.0.mlp.") for name in targets)
    assert not any("sse_" in name or name.startswith("model.layers.0.self_attn") for name in targets)


@pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
def test_routers_of_experts_get_no_adapter(family):
    """They are linear modules by descent, and answer with more than a product."""
    model = tiny_model(family, LAYOUT)
    targets = lora_targets(model, set(converted_attention(model).values()))
    assert targets
    assert not [name for name in [*targets, *sse_convert.peft_targets(model)] if "router" in name]
    assert randomised(model)(torch.arange(1, 9)[None]).logits.isfinite().all()


def test_a_lora_stage_trains_and_merges(make, train, converted, tokenizer):
    recipe = make(("distill", {"train": "lora", "tokens": 2048}), train={"lora_rank": 4})
    folder, report = train("distill", recipe=recipe)
    assert report.loss_last < report.loss_first
    before, after = load_pretrained(converted).state_dict(), load_pretrained(folder).state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.2.self_attn.q_proj.weight" in changed
    assert "model.layers.0.self_attn.sse_router.weight" in changed
    assert not any(("norm" in name and ".self_attn." not in name) or "embed" in name for name in changed)
    difference = after["model.layers.2.mlp.up_proj.weight"] - before["model.layers.2.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(difference, rtol=1e-3) <= 4


def test_a_lora_stage_resumes(make, train, monkeypatch):
    from sse_convert.training import loop
    from tests.training.test_resume import Killed, same, steps_then

    recipe = make(("distill", {"train": "lora", "tokens": 512, "checkpoint_steps": 2}), train={"lora_rank": 4})
    whole, _ = train("distill", "whole", recipe=recipe)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_gradients", steps_then(loop._gradients, 3, Killed()))
        with pytest.raises(Killed):
            train("distill", "stopped", recipe=recipe)
    folder, _ = train("distill", "stopped", recipe=recipe)
    assert losses(folder) == losses(whole)
    assert same(folder, whole)


@pytest.mark.parametrize("layers", [LAYOUT, HEADS, BASELINES])
def test_peft_adapts_the_teachers_matrices_and_leaves_routers_and_decays(layers, tmp_path):
    model = tiny_model("qwen3", layers, dtype=torch.float64)
    targets = sse_convert.peft_targets(model)
    assert targets == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    before = model(ids).logits
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    assert torch.equal(adapted(ids).logits, before)
    wrapped = {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    assert len(wrapped) == len(targets) * 4
    assert not any("sse_" in name for name in wrapped)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    changed = adapted(ids).logits
    assert not torch.allclose(changed, before, atol=1e-3)
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, changed, atol=1e-10, rtol=0)


def test_all_linear_layers_of_peft_are_the_same():
    adapted = get_peft_model(beside(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert adapted.targeted_module_names
    assert not [name for name in adapted.targeted_module_names if "sse_" in name]


@pytest.mark.parametrize("layers", [LAYOUT, HEADS, BASELINES])
def test_trainers_that_look_for_linear_in_class_names_find_the_same(layers):
    """PEFT refuses targets of other classes than its own, so one name too many would stop such a trainer."""
    model = tiny_model("qwen3", layers)
    named = {name.rpartition(".")[2] for name, module in model.named_modules() if "Linear" in type(module).__name__}
    assert sorted(named - {"lm_head"}) == sse_convert.peft_targets(model)


def test_peft_targets_of_fused_projections():
    assert sse_convert.peft_targets(gpt2()) == ["c_attn", "c_fc", "c_proj"]


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="has no attribute 'peft_target'"):
        sse_convert.peft_target  # noqa: B018
