"""Rows over several ranks (gloo, float64): the loss and the gradients of one process.

The processes are forked from this one, which has computed what they must find.
"""

import copy
import dataclasses as dc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import debug_launcher
from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.attention_dims import attention_dims, heads_problem
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.context import CONTEXT_ATTENTION, Shard, current_shard, sharded, split_problems
from sse_convert.modeling.head import Head
from sse_convert.modeling.window.masks import packed_arguments
from sse_convert.training.losses import linear_cross_entropy, linear_kl
from sse_convert.training.setup import recompute_activations
from tests.modeling.tiny import BESIDE, FAMILIES, HEADS, SSE, VOCAB, prompts, tiny_config, tiny_model, tiny_source

LENGTH = 96
DOCUMENTS = ([10, 38, 48], [96], [70, 3, 23])
"""the first row's last one begins at a rank's edge, the second row's spans all ranks, and the third's cross edges"""
LAYERS = ("sse", "sse+sliding", "sliding", "full", "delta", "each", "query heads")
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
EACH = {"decay_params": "separate", "decay": "scalar", "top_k": 2}
MIXERS = {
    "each": {**SSE, **EACH},
    "query heads": {**SSE, "state_heads": "query"},
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


def rows(documents=DOCUMENTS):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (len(documents), LENGTH), generator=generator)
    return ids, torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in documents])


def models(family, layers=LAYERS, **settings):
    sizes = {"num_hidden_layers": len(layers), **SIZES, **settings}
    student = tiny_model(family, layers, MIXERS, dtype=torch.float64, **sizes).train()
    teacher = tiny_source(family, dtype=torch.float64, seed=7, **sizes).requires_grad_(False)
    return student, teacher


def attention(pair, kind):
    for model in pair:
        model.config._attn_implementation = kind


def backward(pair, ids, positions, targets) -> Found:
    """The tokens' part of the losses and gradients of all rows."""
    student, teacher = pair
    student.zero_grad()
    call = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    apart = {} if current_shard() else packed_arguments(teacher, positions)
    known = backbone_of(teacher)(**call, **apart).last_hidden_state
    hidden = backbone_of(student)(**call).last_hidden_state
    flat, head = hidden.flatten(0, 1), Head.of(student)
    tokens = len(DOCUMENTS) * LENGTH
    kl = linear_kl(flat, head, known.flatten(0, 1), Head.of(teacher)) / tokens
    ce = linear_cross_entropy(flat, head, targets.flatten()) / tokens
    balance = student.sse_balance_loss() * ids.numel() / tokens
    (kl + ce + balance).backward()
    gradients = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    return Found(torch.stack([kl, ce, balance]).detach(), gradients)


def targets_of(ids, positions):
    after = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    return after.masked_fill(torch.cat([positions[:, 1:], positions[:, :1]], 1) == 0, -100)


def alone(pair, ids, positions) -> Found:
    """The whole in one process; the student stays as it was."""
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
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            off = (found.gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
            assert off < 1e-9, f"{name}: {float(off)}"


def case(family, documents, *, checkpointing=False, **settings):
    pair, (ids, positions) = models(family, **settings), rows(documents)
    if checkpointing:
        recompute_activations(pair[0])
    expected = alone(pair, ids, positions)
    assert all(gradient.norm() > 0 for name, gradient in expected.gradients.items() if "sse_" in name)
    return pair, ids, positions, expected


def test_two_ranks_find_what_one_process_finds():
    """Gradient checkpoints repeat the exchanges in the backward pass; in two layers some heads see the whole row."""
    layers = (*LAYERS[:1], "sse+sliding@0", "sliding@1", *LAYERS[3:])
    debug_launcher(together, ([case("qwen3", DOCUMENTS, checkpointing=True, layers=layers)],), num_processes=2)


def test_four_ranks_find_what_one_process_finds():
    """More ranks than key-value heads; once with one document per row, once with learned sinks and windows."""
    windows = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    sinks = case("gpt_oss", DOCUMENTS, layers=("sse", "full", "full"), **windows)
    assert any(name.endswith("sinks") and bool(g.abs().min() > 0) for name, g in sinks[-1].gradients.items())
    whole_rows = case("llama", [[LENGTH]] * len(DOCUMENTS), layers=("sse+sliding", "sliding", "full"))
    cases = [case("qwen3", DOCUMENTS), whole_rows, sinks]
    debug_launcher(together, (cases,), num_processes=4)


def own_logits(cases):
    """What each process does: its part of the logits."""
    for model, ids, positions, expected in cases:
        shard = Shard.of(dist.group.WORLD, positions, ids.device)
        model.config._attn_implementation = CONTEXT_ATTENTION
        with sharded(shard), torch.no_grad():
            found = model(input_ids=shard.own(ids), position_ids=shard.own(positions)).logits
        torch.testing.assert_close(found, shard.own(expected), rtol=0, atol=1e-10, msg=model.config.model_type)


def test_families_are_exact_or_refused_by_name():
    cases, refused = [], {}
    ids, positions = rows(DOCUMENTS[:1])
    for family in FAMILIES:
        config = tiny_config(family)
        split = all(heads_problem(config, layer, (1,)) is None for layer in (1, 2))
        two = attention_dims(config).kv_heads == 2  # with more, a head for two ranks has one query head
        model = tiny_model(family, HEADS if split and two else BESIDE, dtype=torch.float64)
        if problems := split_problems(model.config, 2, layer_mixers(model.config)):
            refused[family] = problems[0].partition(", which is not built for ")[2]
        else:
            with torch.no_grad():
                logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            cases.append((model, ids, positions, logits))
    debug_launcher(own_logits, (cases,), num_processes=2)
    assert len(cases) > len(FAMILIES) // 2
    assert refused == {
        "gemma2": "bounded attention scores",
        "llama4_text": "masks of another kind than causal ones and windows",
    }


def test_padding_is_refused(shard):
    model = tiny_model("llama")
    ids, mask = prompts()
    with pytest.raises(UsageError, match="context parallelism with padding"), sharded(shard):
        model(ids, attention_mask=mask, position_ids=torch.arange(11)[None])


def test_tokens_of_whole_rows_are_refused(shard):
    model, (ids, _) = tiny_model("llama"), prompts()
    with pytest.raises(UsageError, match="no position_ids"), sharded(shard):
        model(ids)


def test_rows_that_are_not_split_are_refused():
    model, (ids, _) = tiny_source("mistral"), prompts()
    model.config._attn_implementation = CONTEXT_ATTENTION
    with pytest.raises(UsageError, match="rows are not split"):
        model(ids)


@pytest.fixture
def shard():
    """A place for the second of two ranks, which do not exist."""
    return Shard(None, 1, 2, torch.arange(22).expand(2, -1), None, (0, 22, 44))
