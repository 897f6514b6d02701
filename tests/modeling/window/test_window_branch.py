"""SSE beside a window: each branch alone is the layer of its own kind, and both are added before the projection."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.modeling.attention_dims import softmax_layers
from tests.modeling.tiny import FAMILIES, SSE, prompts, tiny_model, tiny_source

BOTH = ("sse+sliding",) * 4


def settings(**changes: object) -> dict[str, dict[str, object]]:
    return {"sse+sliding": {**SSE, "kind": "sse+sliding", "window": 4, "sinks": 2, **changes}}


def with_scales(model: PreTrainedModel, *, window: float, sse: float | None = None) -> PreTrainedModel:
    with torch.no_grad():
        for layer in model.sse_layers().values():
            layer.sse_window_scale.fill_(window)
            if sse is not None:
                layer.sse_out_scale.fill_(sse)
    return model


def other(model: PreTrainedModel, model_type: str, kind: str, mixer: dict[str, object]) -> PreTrainedModel:
    """The same weights in layers of another kind."""
    made = tiny_model(model_type, (kind,) * 4, {kind: mixer}, dtype=torch.float64)
    missing, _ = made.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    return made


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:
    return model(ids, use_cache=False, **inputs).logits


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_window_alone_is_a_sliding_layer_to_the_bit(model_type: str) -> None:
    model = with_scales(tiny_model(model_type, BOTH, settings(), dtype=torch.float64), window=1, sse=0)
    sliding = other(model, model_type, "sliding", {"kind": "sliding", "window": 4, "sinks": 2})
    ids, mask = prompts((23, 7))
    found, expected = logits(model, ids, attention_mask=mask), logits(sliding, ids, attention_mask=mask)
    assert torch.equal(found[mask.bool()], expected[mask.bool()])
    positions = torch.cat([torch.arange(8), torch.arange(15)])[None].expand(2, -1)
    assert torch.equal(logits(model, ids, position_ids=positions), logits(sliding, ids, position_ids=positions))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sse_alone_is_an_sse_layer(model_type: str) -> None:
    model = with_scales(tiny_model(model_type, BOTH, settings(), dtype=torch.float64), window=0)
    ids = prompts((23, 23))[0]
    found = logits(model, ids)
    torch.testing.assert_close(found, logits(other(model, model_type, "sse", SSE), ids), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "model_type", ["qwen3", "llama", "phi3", "gpt_neox", "gpt2", "granite", "olmo2", "gpt_oss", "qwen3_next"]
)
def test_a_wide_window_alone_is_the_teacher(model_type: str) -> None:
    """With its learned sinks, and with its gate, which comes after both branches."""
    native = {"layer_types": ["full_attention"] * 4} if model_type == "gpt_oss" else {}
    teacher = tiny_source(model_type, dtype=torch.float64, **native)
    softmax = softmax_layers(teacher.config)
    names = tuple("sse+sliding" if index in softmax else "full" for index in range(4))
    model = tiny_model(model_type, names, settings(window=64), dtype=torch.float64, **native)
    model.load_state_dict(teacher.state_dict(), strict=False)
    ids, mask = prompts((23, 7))
    found = logits(with_scales(model, window=1, sse=0), ids, attention_mask=mask)
    expected = logits(teacher, ids, attention_mask=mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-12, rtol=0)


def test_the_new_tensor_is_one_scale_per_head() -> None:
    beside, alone = (tiny_model("qwen3", (kind,) * 4).state_dict().keys() for kind in ("sse+sliding", "sse"))
    assert beside - alone == {f"model.layers.{i}.self_attn.sse_window_scale" for i in range(4)}
    assert not alone - beside


def test_eager_equals_sdpa() -> None:
    ids, mask = prompts((23, 7))
    found = []
    for kind in ("sdpa", "eager"):
        model = tiny_model("qwen3", BOTH, dtype=torch.float64)
        model.set_attn_implementation(kind)
        found.append(logits(model, ids, attention_mask=mask)[mask.bool()])
    torch.testing.assert_close(*found, atol=1e-9, rtol=0)
