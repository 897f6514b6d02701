"""A layer on a GPU asks the device for no value: the device here is one that has none."""

import contextlib

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, masking_utils

from sse_convert.kernels import dispatch
from sse_convert.kernels.inputs import Inputs
from sse_convert.modeling.cache import install
from sse_convert.modeling.head import Head
from sse_convert.modeling.layer_arguments import OFFSETS
from sse_convert.modeling.layout import row_layout
from sse_convert.training.cuda_graphs import one_document_per_row
from sse_convert.training.losses import linear_kl
from sse_convert.training.model_objective import hidden_and_balance
from tests.modeling.test_layer import KNOBS, model_with
from tests.modeling.tiny import BESIDE, tiny_model


def shapes_only(x: Inputs, *, output_final_state: bool, inplace_state: bool) -> tuple[Tensor, Tensor]:
    """In place of the kernels."""
    assert x.one_token_each == (x.num_tokens == 2)
    final = x.initial_state
    if final is None:
        final = x.q.new_empty(x.num_sequences, x.num_states, *x.k.shape[2:], x.v.shape[-1], dtype=torch.float32)
    parts = [part.sum() for name, part in x.tensors().items() if name != "initial_state"]
    return x.v.new_empty(x.num_tokens, x.q.shape[2], x.v.shape[-1]) + torch.stack(parts).sum(), final


@pytest.fixture(autouse=True)
def gpu_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_GPU", "meta")
    monkeypatch.setattr(dispatch, "untrusted", lambda x: None)
    monkeypatch.setattr(dispatch, "sse_attention_on_triton", shapes_only)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *args: False)  # knows no such device


@pytest.mark.parametrize("name", KNOBS)
def test_training(name: str) -> None:
    model = model_with(KNOBS[name], dtype=torch.float32).train().to("meta")
    layer = model.sse_layers()[0]
    x, rotation = torch.zeros(2, 9, 32, device="meta"), (torch.zeros(1, 9, 8, device="meta"),) * 2
    out = layer(x, rotation, row_layout(2, 9, None, "meta"))[0]
    loss = layer.balance_loss()
    (out.sum() if loss is None else out.sum() + loss).backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_whole_pass_as_it_is_recorded(model_type: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is recorded transformers takes itself for traced, and looks at nothing."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
    student = tiny_model(model_type, BESIDE, dtype=torch.float32).train().to("meta")
    ids = torch.zeros(2, 40, dtype=torch.long, device="meta")
    where = {"position_ids": ids, OFFSETS: torch.zeros(9, dtype=torch.long, device="meta")} if packed else {}
    with contextlib.nullcontext() if packed else one_document_per_row():
        hidden = hidden_and_balance(student, ids, where.get("position_ids"), where.get(OFFSETS))[0].flatten(0, 1)
    loss = linear_kl(hidden, Head.of(student), hidden, Head.of(student)) + student.sse_balance_loss()
    loss.backward()
    assert all(p.grad is not None for p in student.parameters())


@torch.no_grad()
def test_prefill_and_decoding() -> None:
    model = model_with({}, dtype=torch.float32).to("meta")
    layer, cache = model.sse_layers()[0], DynamicCache(config=model.config)
    install(cache, model.config, [0, 3], {})
    for length in (9, 1, 1):
        x = torch.zeros(2, length, 32, device="meta")
        out = layer(x, None, row_layout(2, length, None, "meta", cache), **{layer.cache_argument: cache})[0]
        assert out.shape == x.shape
    assert cache.layers[0].get_seq_length() == 11
