"""Each mixer against its equations: projections by plain matrices, the state by the step-by-step definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paper.row_sparse.definition import gated_linear_attention_steps, gated_slot_attention_steps
from benchmarks.paper.row_sparse.mixers import GLA, GSA, MetaLA, build_mixer
from benchmarks.paper.row_sparse.update import RowSparse
from tests.tolerance import assert_same

W, H, T = 8, 2, 7
UPDATES = [None, RowSparse(rows=1), RowSparse(rows=2, decay="all")]


def heads(x: Tensor) -> Tensor:
    """[T, W] as [H, T, W / H]."""
    return x.view(T, H, -1).movedim(1, 0)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def gla(m: GLA, r: int, x: Tensor) -> Tensor:
    q, k, v = (heads(y) for y in (x @ m.qkv.weight[r]).chunk(3, -1))
    logits = x @ m.decay_down.weight[r] @ m.decay_up.weight[r] + m.decay_up.bias[r]
    log_decay = heads(torch.log(torch.sigmoid(logits)) / 16)
    if m.k_map == "softmax":
        k = softmaxed(k, m.updates[r])
    o = [gated_linear_attention_steps(q[h] / 2, k[h], v[h], log_decay[h], m.updates[r]) for h in range(H)]
    return (torch.cat([rms(y) for y in o], -1) * F.silu(x @ m.gate.weight[r])) @ m.out.weight[r]


def softmaxed(k: Tensor, update: RowSparse | None) -> Tensor:
    """k = softmax(top-k(k)), entry by entry."""
    least = k.min() if update is None else k.sort(-1, descending=True).values[..., update.rows - 1, None]
    weight = k.exp() * (k >= least)
    return weight / weight.sum(-1, keepdim=True)


def metala(m: MetaLA, r: int, x: Tensor) -> Tensor:
    q, logits, v = (heads(y) for y in (x @ m.q_decay_v.weight[r]).chunk(3, -1))
    decay = torch.sigmoid(logits) ** (1 / 16)
    outs = []
    for h in range(H):
        k = 1 - decay[h]
        o = gated_linear_attention_steps(q[h], k, v[h], decay[h].log(), m.updates[r])
        written = k if m.updates[r] is None else k * (k >= k.sort(-1).values[:, -m.updates[r].rows, None])
        own = (q[h] * m.augmentation[r, 0, 0, h] * written).sum(-1, keepdim=True)
        o = o + torch.sigmoid(own * v[h])
        centred = o - o.mean(-1, keepdim=True)
        outs.append(rms(centred))
    gate = F.silu(x @ m.gate.weight[r] + m.gate.bias[r])
    return (torch.cat(outs, -1) * gate) @ m.out.weight[r]


def gsa(m: GSA, r: int, x: Tensor) -> Tensor:
    q, k, v = (heads(y) for y in F.silu(x @ m.qkv.weight[r]).chunk(3, -1))
    decay = torch.sigmoid(heads(x @ m.decay.weight[r])) ** (1 / 8)
    o = [gated_slot_attention_steps(q[h], k[h], v[h], 1 - decay[h], decay[h].log(), m.updates[r]) for h in range(H)]
    return rms(F.silu(torch.cat(o, -1))) @ m.out.weight[r]


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "equations"), [("gla", gla), ("gla_softmax", gla), ("metala", metala), ("gsa", gsa)])
def test_mixer_equals_its_equations(name, equations) -> None:
    mixer = build_mixer(name, W, H, UPDATES).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.count_nonzero() == 0:
                parameter.normal_()
    x = torch.randn(len(UPDATES), 2, T, W, dtype=torch.float64)
    y, keys = mixer(x)
    assert keys.shape == (len(UPDATES), 2, T, H, W // H)
    for r in range(len(UPDATES)):
        for b in range(2):
            assert_same(y[r, b], equations(mixer, r, x[r, b]), f"model {r}, row {b}")


@pytest.mark.parametrize("name", ["gla", "gla_softmax", "metala", "gsa"])
def test_keys_are_those_that_select(name) -> None:
    """Another key order must change what a row-sparse model says, and the returned keys must show that order."""
    mixer = build_mixer(name, W, H, [RowSparse(rows=1)]).double()
    x = torch.randn(1, 1, T, W, dtype=torch.float64)
    _, keys = mixer(x)
    weight = mixer.qkv.weight if name.startswith("gla") else mixer.q_decay_v.weight if name == "metala" else None
    if weight is not None:
        projected = (x @ weight[:, None])[..., W : 2 * W].view(keys.shape)
    else:
        projected = (x @ mixer.decay.weight[:, None]).view(keys.shape)
    largest = projected.argmax(-1) if name.startswith("gla") else projected.argmin(-1)
    assert torch.equal(keys.argmax(-1), largest)
