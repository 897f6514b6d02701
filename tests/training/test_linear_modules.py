"""Which matrices an adapter of PEFT should stand beside."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import sse_convert
from tests.modeling.tiny import BASELINES, HEADS, LAYOUT, tiny_model


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64)).eval()


def beside():
    return tiny_model("phi3", HEADS)


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
