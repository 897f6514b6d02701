"""Rows over several ranks (gloo, float64): the loss and the gradients of one process.

The processes are forked from this one, which has computed what they must find.
"""

import copy
import dataclasses as dc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState, debug_launcher
from torch import Tensor

from sse_convert.modeling.context import CONTEXT_ATTENTION, Shard, current_shard, sharded
from sse_convert.modeling.head import Head
from sse_convert.training.losses import linear_cross_entropy, linear_kl
from tests.modeling.tiny import SSE, VOCAB, tiny_model, tiny_source

LENGTH = 96
DOCUMENTS = ([10, 38, 48], [96], [70, 3, 23])
"""the first row's last one begins at a rank's edge, the second row's spans all ranks, and the third's cross edges"""
LAYERS = ("sse", "sse+sliding", "sliding", "full", "delta", "each", "rows")
SIZES: dict[str, Any] = {"num_hidden_layers": len(LAYERS), "num_attention_heads": 4, "num_key_value_heads": 2}
EACH = {"shared_params": False, "decay_params": "separate", "decay": "scalar", "top_k": 2, "balance": "bias"}
MIXERS = {
    "each": {**SSE, **EACH, "output_gate": True},
    "rows": {**SSE, "row_top_k": 4, "decay": "none", "rope": "keep", "state_heads": "query"},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """A process that is forked off has none of the threads that matrix products would wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dc.dataclass(frozen=True)
class Found:
    """What a pass over all rows gives."""

    losses: Tensor
    """KL, cross entropy and balance loss"""
    gradients: dict[str, Tensor]
    biases: Tensor
    """of the layers with `balance: bias`, after one step"""


def rows(documents=DOCUMENTS):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (len(documents), LENGTH), generator=generator)
    return ids, torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in documents])


def models(family="qwen3", **settings):
    student = tiny_model(family, LAYERS, MIXERS, dtype=torch.float64, **SIZES, **settings).train()
    teacher = tiny_source(family, dtype=torch.float64, seed=7, **SIZES, **settings).requires_grad_(False)
    return student, teacher


def attention(pair, kind):
    for model in pair:
        model.config._attn_implementation = kind


def backward(pair, ids, positions, targets) -> Found:
    """The tokens' part of the losses and gradients of all rows."""
    student, teacher = pair
    student.zero_grad()
    call = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    known, hidden = (model.base_model(**call).last_hidden_state for model in (teacher, student))
    flat, head = hidden.flatten(0, 1), Head.of(student)
    tokens = len(DOCUMENTS) * LENGTH
    kl = linear_kl(flat, head, known.flatten(0, 1), Head.of(teacher)) / tokens
    ce = linear_cross_entropy(flat, head, targets.flatten()) / tokens
    balance = student.sse_balance_loss() * ids.numel() / tokens
    (kl + ce + balance).backward()
    gradients = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    student.sse_update_router_bias()
    biases = [layer.sse_router_bias for layer in student.sse_layers().values() if layer.mixer.balance == "bias"]
    return Found(torch.stack([kl, ce, balance]).detach(), gradients, torch.cat(biases).clone())


def targets_of(ids, positions):
    after = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    return after.masked_fill(torch.cat([positions[:, 1:], positions[:, :1]], 1) == 0, -100)


def alone(pair, ids, positions) -> Found:
    """The whole in one process; the student stays as it was."""
    attention(pair, "sdpa")
    before = copy.deepcopy(pair[0].state_dict())
    found = backward(pair, ids, positions, targets_of(ids, positions))
    pair[0].load_state_dict(before)
    return found


def together(cases):
    """What each process does: its part of every case, and its share of the sums compared with the whole."""
    for pair, ids, positions, expected in cases:
        shard = Shard.of(dist.group.WORLD, positions, ids.device)
        attention(pair, CONTEXT_ATTENTION)
        with sharded(shard):
            parts = (shard.own(x) for x in (ids, positions, targets_of(ids, positions)))
            found = backward(pair, *parts)
        assert current_shard() is None
        for part in (found.losses, *found.gradients.values()):
            dist.all_reduce(part)
        torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.biases, expected.biases, rtol=0, atol=0)
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            off = (found.gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
            assert off < 1e-9, f"{name}: {float(off)}"
    PartialState._reset_state()


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_find_what_one_process_finds(processes):
    packed, one_each = rows(), rows([[LENGTH]] * len(DOCUMENTS))
    cases = []
    for family, checkpointing, (ids, positions) in (("qwen3", False, packed), ("llama", True, packed)):
        pair = models(family)
        if checkpointing:
            pair[0].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        cases.append((pair, ids, positions, alone(pair, ids, positions)))
    pair = models("llama")
    cases.append((pair, *one_each, alone(pair, *one_each)))
    for _, _, _, expected in cases:
        assert all(gradient.norm() > 0 for name, gradient in expected.gradients.items() if "sse_" in name)
        assert expected.biases.abs().sum() > 0
    debug_launcher(together, (cases,), num_processes=processes)
