"""What every family must pass: its entry describes its attention and head; hybrids of those with something of their own
generate, learn and travel."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.attention_dims import softmax_layers
from sse_convert.modeling.head import Head
from sse_convert.modeling.layout import row_layout
from tests.modeling.test_generate import greedy_by_full_forward, greedy_with_cache, rows
from tests.modeling.tiny import ENTRIES, FAMILIES, exact, prompts, spec_for, tiny_model, tiny_source

NEW = 2
"""tokens: what the prompt gives, and what a step from the cache does"""


class Spy:
    """Takes the place of a family's softmax attention and remembers what it is given."""

    def __init__(self, attend: Any) -> None:
        self.attend = attend
        self.given: list[tuple[Tensor, ...]] = []

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.given.append((query, key, value))
        return self.attend(module, query, key, value, *args, **kwargs)


@pytest.mark.parametrize("model_type", ENTRIES)
@torch.no_grad()
def test_q_k_v_of_a_converted_layer_are_those_of_the_familys_attention(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a new path, q, k and v before the operator are what softmax would get where nothing is rotated: of tokens
    at position 0. Some families leave the channels of q and k in another order, both in the same."""
    spec = spec_for(model_type)
    source = tiny_source(model_type, dtype=torch.float64)
    mixers = {"plain": {"kind": "gla"}}
    layers = softmax_layers(source.config)
    names = tuple("plain" if index in layers else "full" for index in range(4))
    hybrid = tiny_model(model_type, names, mixers, dtype=torch.float64)
    hybrid.load_state_dict(source.state_dict(), strict=False)
    inputs: list[Tensor] = []
    for index in layers:
        source.get_submodule(spec.attention_path(index)).register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
    source.set_attn_implementation("eager")
    family = sys.modules[type(source).__module__]
    spy = Spy(family.eager_attention_forward)
    monkeypatch.setattr(family, "eager_attention_forward", spy)
    ids = prompts((9, 9))[0]
    source(ids, position_ids=torch.zeros_like(ids))
    longer = getattr(getattr(backbone_of(source), "rotary_emb", None), "attention_scaling", 1.0)  # yarn's q and k
    layout = row_layout(*ids.shape, None, ids.device)
    for index, (layer, x) in enumerate(zip(hybrid.sse_layers().values(), inputs, strict=True)):
        made = layer.operator_inputs(layout.pack(x))
        for name, expected in zip("qkv", spy.given[index], strict=True):
            found = made[name].view(*ids.shape, *made[name].shape[1:]).transpose(1, 2)
            if name != "v":
                expected = expected / longer
            if name != "v" and "rope_interleave" in spec.switches:
                found, expected = found.sort(-1).values, expected.sort(-1).values
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6, msg=f"{name} of layer {index}")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_hybrid_generates_from_its_cache_learns_and_travels(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, ("sse", "sliding", "sse", "full"), dtype=torch.float64)
    ids, mask = prompts()
    tokens, logits = greedy_with_cache(model, ids, mask, NEW)
    for row, alone in enumerate(rows(ids, mask)):
        want_tokens, want_logits = greedy_by_full_forward(model, alone, NEW)
        assert torch.equal(tokens[row], want_tokens)
        torch.testing.assert_close(logits[row], want_logits, **exact(model_type))
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    assert all(grad.any() for name, grad in grads.items() if "sse_" in name)
    model.float().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in loaded.state_dict().items())
    with torch.no_grad():  # products of experts round by where their weights lie in memory
        torch.testing.assert_close(loaded(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("model_type", ENTRIES)
@torch.no_grad()
def test_the_head_that_losses_use_is_the_familys(model_type: str) -> None:
    model, ids = tiny_source(model_type), prompts((9,))[0]
    hidden = backbone_of(model)(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(Head.of(model).logits(hidden), model(ids, use_cache=False).logits.float())
