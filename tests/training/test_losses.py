"""Chunked losses against dense autograd: value and every gradient, whatever the chunks, dtypes and masks."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from sse_convert.errors import ShapeError
from sse_convert.modeling.head import Head
from sse_convert.training.losses import linear_cross_entropy, linear_kl, squared_error

T, D, V = 37, 12, 50
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "granite": {"scale": 0.25},
    "gemma": {"cap": 3.0},
    "all": {"bias": True, "scale": 0.5, "cap": 2.0},
}


@pytest.fixture(params=[1, 4 * V, 7 * V, 10**6], ids=["one", "ragged4", "ragged7", "whole"])
def _chunk(request, monkeypatch):
    monkeypatch.setattr("sse_convert.modeling.logits.ON_CPU", request.param)


def head_of(kind, seed, dtype, width=D):
    g = torch.Generator().manual_seed(seed)
    settings = dict(HEADS[kind])
    bias = torch.randn(V, generator=g, dtype=dtype).requires_grad_() if settings.pop("bias", False) else None
    weight = torch.randn(V, width, generator=g, dtype=dtype).requires_grad_()
    return Head(weight, bias, **settings)


def dense_logits(head, hidden):
    z = F.linear(hidden, head.weight, head.bias).to(torch.promote_types(hidden.dtype, torch.float32)) * head.scale
    return z if head.cap is None else torch.tanh(z / head.cap) * head.cap


def gradients(loss, *tensors):
    (2.5 * loss).backward()
    found = [t.grad.clone() for t in tensors if t is not None]
    for t in tensors:
        if t is not None:
            t.grad = None
    return found


def hidden_and_targets(dtype, width=D):
    g = torch.Generator().manual_seed(9)
    hidden = torch.randn(T, width, generator=g, dtype=dtype).requires_grad_()
    targets = torch.randint(0, V, (T,), generator=g)
    targets[[0, 5, 6, 36]] = -100
    return hidden, targets


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.usefixtures("_chunk")
def test_cross_entropy_equals_dense(kind):
    compare_cross_entropy(kind, torch.float64, 1e-12)


def test_float32_losses_equal_dense():
    compare_cross_entropy("all", torch.float32, 1e-5)
    compare_kl("all", torch.float32, 2e-5)


def compare_cross_entropy(kind, dtype, tolerance):
    hidden, targets = hidden_and_targets(dtype)
    head = head_of(kind, 0, dtype)
    loss = linear_cross_entropy(hidden, head, targets)
    dense = F.cross_entropy(dense_logits(head, hidden), targets, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, dense, rtol=tolerance, atol=tolerance)
    ours = gradients(loss, hidden, head.weight, head.bias)
    theirs = gradients(dense, hidden, head.weight, head.bias)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.usefixtures("_chunk")
def test_kl_equals_dense(kind):
    compare_kl(kind, torch.float64, 1e-12)


def compare_kl(kind, dtype, tolerance):
    hidden, _ = hidden_and_targets(dtype)
    teacher_hidden = hidden_and_targets(dtype, D + 3)[0].detach().flip(0)
    head, teacher = head_of(kind, 1, dtype), head_of(kind, 2, dtype, D + 3)
    loss = linear_kl(hidden, head, teacher_hidden, teacher)
    log_p = dense_logits(teacher, teacher_hidden).log_softmax(-1).detach()
    dense = F.kl_div(dense_logits(head, hidden).log_softmax(-1), log_p, log_target=True, reduction="sum")
    torch.testing.assert_close(loss, dense, rtol=tolerance, atol=tolerance)
    ours = gradients(loss, hidden, head.weight, head.bias)
    theirs = gradients(dense, hidden, head.weight, head.bias)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert teacher.weight.grad is None


@pytest.mark.usefixtures("_chunk")
def test_answers_take_the_place_of_a_teacher_that_does_not_know_them():
    """Cross entropy where the teacher gives the answer less than half, KL everywhere else."""
    hidden, _ = hidden_and_targets(torch.float64)
    teacher_hidden = 20 * hidden_and_targets(torch.float64)[0].detach().flip(0)
    head, teacher = head_of("plain", 1, torch.float64), head_of("plain", 2, torch.float64)
    p = dense_logits(teacher, teacher_hidden).softmax(-1).detach()
    answers = torch.full((len(hidden),), -100)
    answers[::3], answers[1::3] = p.argmax(-1)[::3], p.argmin(-1)[1::3]
    told = answers.clamp_min(0)
    doubtful = (answers >= 0) & (p.gather(1, told[:, None])[:, 0] < 0.5)
    assert 0 < int(doubtful.sum()) < int((answers >= 0).sum())
    target = torch.where(doubtful[:, None], F.one_hot(told, V).double(), p)
    loss = linear_kl(hidden, head, teacher_hidden, teacher, answers)
    dense = F.kl_div(dense_logits(head, hidden).log_softmax(-1), target, reduction="sum")
    torch.testing.assert_close(loss, dense, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(loss, hidden, head.weight), gradients(dense, hidden, head.weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", HEADS)
def test_losses_in_one_kernel_equal_dense(kind, monkeypatch):
    monkeypatch.setattr("sse_convert.training.losses._fuses", lambda hidden: True)
    monkeypatch.setattr("sse_convert.kernels.triton.logit_losses.TILE", 32)
    monkeypatch.setattr("sse_convert.modeling.logits.ON_CPU", 20 * V)
    compare_cross_entropy(kind, torch.float32, 1e-4)
    compare_kl(kind, torch.float32, 1e-4)


def test_answers_are_told_in_the_kernel_as_without(monkeypatch):
    hidden, _ = hidden_and_targets(torch.float32)
    teacher_hidden = 2 * hidden_and_targets(torch.float32, D + 3)[0].detach().flip(0)
    head, teacher = head_of("all", 1, torch.float32), head_of("plain", 2, torch.float32, D + 3)
    p, likeliest = dense_logits(teacher, teacher_hidden).softmax(-1).max(-1)
    assert 0 < (p[::2] < 0.5).sum() < len(p[::2])
    answers = torch.where(torch.arange(T) % 2 == 0, likeliest, -100)
    found = []
    for fused in (False, True):
        monkeypatch.setattr("sse_convert.training.losses._fuses", lambda hidden, fused=fused: fused)
        loss = linear_kl(hidden, head, teacher_hidden, teacher, answers)
        found.append([loss.detach(), *gradients(loss, hidden, head.weight, head.bias)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert found[0][0] != linear_kl(hidden, head, teacher_hidden, teacher)


def test_kl_of_a_model_with_itself_is_zero():
    hidden, _ = hidden_and_targets(torch.float64)
    head = head_of("plain", 1, torch.float64)
    loss = linear_kl(hidden, head, hidden, head)
    assert abs(loss.item()) < 1e-12
    assert max(g.abs().max().item() for g in gradients(loss, hidden, head.weight)) < 1e-12


def test_no_logits_of_the_whole_batch_exist(monkeypatch):
    monkeypatch.setattr("sse_convert.modeling.logits.ON_CPU", 5 * V)
    seen = []
    real = Head.linear
    monkeypatch.setattr(Head, "linear", lambda self, hidden: seen.append(len(hidden)) or real(self, hidden))
    hidden, targets = hidden_and_targets(torch.float32)
    linear_cross_entropy(hidden, head_of("plain", 0, torch.float32), targets).backward()
    assert max(seen) == 5
    assert sum(seen) == (targets != -100).sum()


@pytest.mark.parametrize(("loss", "sets"), [("ce", 1), ("kl", 2)])
def test_logits_of_one_chunk_exist_at_a_time(loss, sets, monkeypatch):
    """Those of the student, and of a teacher: what `surgery.stage_memory` counts."""
    monkeypatch.setattr("sse_convert.training.losses._fuses", lambda hidden: True)
    monkeypatch.setattr("sse_convert.kernels.triton.logit_losses.TILE", 32)
    monkeypatch.setattr("sse_convert.modeling.logits.ON_CPU", 10 * V)
    made, most, real = [], [], Head.linear

    def linear(head, hidden):
        logits = real(head, hidden)
        made.append(weakref.ref(logits))
        most.append(sum(one() is not None for one in made))
        return logits

    monkeypatch.setattr(Head, "linear", linear)
    hidden, targets = hidden_and_targets(torch.float32)
    head = head_of("plain", 0, torch.float32)
    if loss == "ce":
        linear_cross_entropy(hidden, head, targets)
    else:
        linear_kl(hidden, head, hidden.detach(), head_of("plain", 1, torch.float32))
    assert len(made) == sets * 4
    assert max(most) == sets


def test_nothing_is_computed_for_a_frozen_head():
    hidden, targets = hidden_and_targets(torch.float32)
    head = head_of("plain", 0, torch.float32)
    frozen = Head(head.weight.detach())
    loss = linear_cross_entropy(hidden, frozen, targets)
    assert loss.grad_fn.saved_tensors[1:] == (None, None)
    loss.backward()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, frozen, targets).requires_grad


def test_no_targets_give_zero_with_gradients():
    hidden, targets = hidden_and_targets(torch.float32)
    head = head_of("bias", 0, torch.float32)
    loss = linear_cross_entropy(hidden, head, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert all(g.abs().max() == 0 for g in gradients(loss, hidden, head.weight, head.bias))


def test_autocast_computes_products_in_bfloat16_and_sums_in_float32():
    hidden, targets = hidden_and_targets(torch.float32)
    head = head_of("plain", 0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, head, targets)
    dense = F.cross_entropy(dense_logits(head, hidden), targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() != dense.item()
    torch.testing.assert_close(loss, dense, rtol=1e-2, atol=0)
    ours, theirs = gradients(loss, hidden, head.weight), gradients(dense, hidden, head.weight)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 2e-2 * b.norm()


def test_mismatches_are_refused():
    hidden, targets = hidden_and_targets(torch.float32)
    head = head_of("plain", 0, torch.float32)
    with pytest.raises(ShapeError, match="student predicts 50 tokens, the teacher 49"):
        linear_kl(hidden, head, hidden, Head(head.weight[:-1]))
    with pytest.raises(ShapeError, match="the same tokens"):
        linear_kl(hidden, head, hidden[:-1], head)
    with pytest.raises(ShapeError, match="targets have shape"):
        linear_cross_entropy(hidden, head, targets[:-1])
    with pytest.raises(ShapeError, match="hidden states have shape"):
        linear_cross_entropy(hidden[:, :-1], head, targets)


def test_errors_between_hidden_states():
    g = torch.Generator().manual_seed(0)
    output = torch.randn(2, 5, 8, generator=g, dtype=torch.float64).requires_grad_()
    target = torch.randn(2, 5, 8, generator=g, dtype=torch.float64)
    error, power = squared_error(output, target)
    torch.testing.assert_close(error, F.mse_loss(output, target) * 10)
    torch.testing.assert_close(power, target.square().mean() * 10)
