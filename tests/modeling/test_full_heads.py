"""Layers of which some heads see the whole row: each head is what it is in a layer of its own kind."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.attention_dims import heads_problem
from sse_convert.modeling.window.window_attention import HeadOrder
from tests.modeling.tiny import FAMILIES, MIXERS, exact, prompts, tiny_config, tiny_model

SPLIT = tuple(name for name in FAMILIES if heads_problem(tiny_config(name), 2, (0,)) is None)


def test_heads_are_taken_apart_and_joined() -> None:
    x = torch.arange(2 * 12 * 3).view(2, 12, 3)
    for heads in ((0,), (1, 2), (0, 3), (0, 2), (5,)):
        order = HeadOrder(heads, 6)
        full, others = order.apart(x, 1)
        assert torch.equal(full, torch.cat([x[:, 2 * head : 2 * head + 2] for head in heads], 1))
        assert torch.equal(order.joined(full, others, 1), x)


def test_gradients_go_back_to_their_heads() -> None:
    x = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    order = HeadOrder((0, 3), 6)
    assert torch.autograd.gradcheck(lambda x: order.apart(x, 1), x)
    assert torch.autograd.gradcheck(lambda x: order.joined(x[:, :4], x[:, 4:], -2), x)


def test_heads_learn_on_a_device_where_a_first_answer_was_given_without_gradients() -> None:
    order, x = HeadOrder((0, 3), 6), torch.empty(2, 12, 3, device="meta", requires_grad=True)
    with torch.inference_mode():
        order.place(x.device)
    full, others = order.apart(x, 1)
    order.joined(full, others, 1).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_all_heads_of_a_layer_are_a_layer_that_is_kept() -> None:
    config = tiny_config("llama")
    assert heads_problem(config, 1, (2,)) == "there are 2 key-value heads"
    assert heads_problem(config, 1, (0, 1)) == "these are all of its 2 key-value heads: name the layer in layers.keep"


@torch.no_grad()
def heads_of(model: PreTrainedModel, layer: int, ids: Tensor, **inputs: Tensor) -> Tensor:
    """What a layer's output projection is given: [B, T, Hq * D]."""
    spec, given = source_spec(model.config.model_type), []
    output = getattr(model.get_submodule(spec.attention_path(layer)), spec.output)
    with output.register_forward_pre_hook(lambda _, args: given.append(args[0])):
        model(ids, use_cache=False, **inputs)
    return given[0]


def converted(model_type: str, name: str, heads: list[int]) -> PreTrainedModel:
    """A model whose layer 2 alone is converted."""
    mixers = {name: {**MIXERS[name], "full_heads": heads}}
    return tiny_model(model_type, ("full", "full", name, "full"), mixers, dtype=torch.float64)


def same_weights(model: PreTrainedModel, like: PreTrainedModel, order: HeadOrder) -> None:
    """Give a model the weights of another; of new tensors those of heads that do not see the whole row."""
    found = {}
    for name, tensor in model.state_dict().items():
        whole = like.state_dict()[name]
        dims = [dim for dim, size in enumerate(tensor.shape) if size != whole.shape[dim]]
        found[name] = order.apart(whole, dims[0])[1] if dims else whole
    model.load_state_dict(found)


@pytest.mark.parametrize("name", ["sliding", "sse+sliding"])
@pytest.mark.parametrize("model_type", SPLIT)
def test_each_head_is_that_of_a_layer_of_its_kind(model_type: str, name: str) -> None:
    """Softmax heads those of the teacher, the others those of a converted layer, in padded rows and in packed ones."""
    every, teacher = converted(model_type, name, []), tiny_model(model_type, ("full",) * 4, dtype=torch.float64)
    teacher.load_state_dict({name: every.state_dict()[name] for name in teacher.state_dict()})
    of = getattr(teacher.config, "num_key_value_heads", None) or teacher.config.num_attention_heads
    heads = (1,) if of == 2 else (1, 3)
    mixed = converted(model_type, name, list(heads))
    order = HeadOrder(heads, of)
    same_weights(mixed, every, order)
    ids, mask = prompts((23, 7))
    packed = torch.cat([torch.arange(8), torch.arange(15)])[None].expand(2, -1)
    for inputs in ({"attention_mask": mask}, {"position_ids": packed}):
        found, full, rest = (heads_of(model, 2, ids, **inputs) for model in (mixed, teacher, every))
        expected = order.joined(order.apart(full, 2)[0], order.apart(rest, 2)[1], 2)
        real = mask.bool() if "attention_mask" in inputs else mask >= 0
        torch.testing.assert_close(found[real], expected[real], **exact(model_type))
        assert not torch.allclose(found[real], rest[real])


@pytest.mark.parametrize("model_type", SPLIT)
def test_softmax_of_one_shape_gets_gradients_of_one_layout(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps cuDNN's backward passes by the shapes and strides of queries, keys, values and mask alone, so one
    that was built for gradients of another layout gives wrong ones."""
    layouts: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    attend = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **given: Any) -> Tensor:
        o = attend(query, key, value, attn_mask, **given)
        shapes = tuple((x.shape, x.stride()) for x in (query, key, value))
        o.register_hook(lambda grad: layouts.setdefault(shapes, set()).add(grad.stride()))
        return o

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model = tiny_model(model_type, ("full", "full", "sse+sliding@0", "full"), attn_implementation="sdpa").train()
    ids, mask = prompts((7, 5))
    model(ids, attention_mask=mask).logits[mask.bool()].square().sum().backward()
    assert len(layouts) >= 2
    assert {shapes: found for shapes, found in layouts.items() if len(found) > 1} == {}


ON_GPUS = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("llama", "qwen2", "qwen3", "smollm3")]
"""of random weights, those whose gradients rounding changes least"""


@pytest.mark.parametrize(("device", "model_type"), [("cpu", "qwen2"), *ON_GPUS])
def test_padding_leaves_gradients_alone(device: str, model_type: str) -> None:
    """In bfloat16, where a GPU takes other kernels than in float32; rounding alone makes 0.03 here."""
    kinds = ("full", "sse+sliding", "sse+sliding@0", "sliding")
    model = tiny_model(model_type, kinds, hidden_size=256).to(device).train()
    ids, mask = (x.to(device) for x in prompts((7, 5, 3, 6)))
    found = []
    for rows in ([(ids, mask)], [(row[real][None], None) for row, real in zip(ids, mask.bool(), strict=True)]):
        model.zero_grad()
        for row, real in rows:
            with torch.autocast(device, torch.bfloat16):
                logits = model(row, attention_mask=real, use_cache=False).logits
            (logits if real is None else logits[real.bool()]).float().log_softmax(-1)[..., 1].sum().backward()
        found.append(torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]))
    padded, alone = found
    assert (padded - alone).norm() < 0.1 * alone.norm()
