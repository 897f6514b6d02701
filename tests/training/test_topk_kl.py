"""The loss against a truncated teacher: dense autograd in float64, and the whole KL where every token is kept."""

import pytest
import torch

from sse_convert.errors import ShapeError
from sse_convert.modeling.head import Head
from sse_convert.training.losses import linear_kl
from sse_convert.training.topk_kl import Truncated, linear_truncated_kl
from tests.training.test_losses import HEADS, D, T, V, dense_logits, gradients, head_of, hidden_and_targets


@pytest.fixture(params=[1, 4 * V, 10**6], ids=["one", "ragged4", "whole"])
def _chunk(request, monkeypatch):
    monkeypatch.setattr("sse_convert.modeling.logits.ON_CPU", request.param)


def models(kind="plain", dtype=torch.float64):
    """Hidden states, a student's head, and the logits of a teacher."""
    hidden, _ = hidden_and_targets(dtype)
    teacher = dense_logits(head_of(kind, 2, dtype, D + 3), hidden_and_targets(dtype, D + 3)[0].flip(0)).detach()
    return hidden, head_of(kind, 1, dtype), teacher


def dense(hidden, head, logits, k):
    """The definition: sums of probabilities over k kept tokens and one bucket."""
    p, q = logits.softmax(-1), dense_logits(head, hidden).softmax(-1)
    index = p.topk(k, -1).indices
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(1, index, True)
    terms = torch.where(kept, p * (p.log() - q.log()), 0).sum()
    if k == p.shape[1]:
        return terms
    rest_p, rest_q = torch.where(kept, 0, p).sum(-1), torch.where(kept, 0, q).sum(-1)
    return terms + (rest_p * (rest_p.log() - rest_q.log())).sum()


@pytest.mark.parametrize("k", [1, 7, V - 1, V])
@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.usefixtures("_chunk")
def test_value_and_gradients_equal_dense(kind, k):
    hidden, head, logits = models(kind)
    loss = linear_truncated_kl(hidden, head, Truncated.of(logits, k))
    expected = dense(hidden, head, logits, k)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
    ours = gradients(loss, hidden, head.weight, head.bias)
    for a, b in zip(ours, gradients(expected, hidden, head.weight, head.bias), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", HEADS)
def test_all_tokens_kept_is_the_whole_divergence(kind):
    teacher_hidden = hidden_and_targets(torch.float64, D + 3)[0].detach().flip(0)
    hidden, head, _ = models(kind)
    teacher = head_of(kind, 2, torch.float64, D + 3)
    expected = linear_kl(hidden, head, teacher_hidden, teacher)
    loss = linear_truncated_kl(hidden, head, Truncated.of(dense_logits(teacher, teacher_hidden).detach(), V))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    ours, theirs = gradients(loss, hidden, head.weight), gradients(expected, hidden, head.weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_it_never_exceeds_the_whole_divergence_and_grows_with_k():
    hidden, head, logits = models()
    values = [linear_truncated_kl(hidden, head, Truncated.of(logits, k)).item() for k in (1, 2, 5, 20, V)]
    assert values == sorted(values)
    assert values[0] < 0.9 * values[-1]


def test_a_student_that_equals_the_teacher_has_no_loss_and_no_gradient():
    hidden, head, _ = models()
    truncated = Truncated.of(dense_logits(head, hidden).detach(), 5)
    loss = linear_truncated_kl(hidden, head, truncated)
    assert abs(loss.item()) < 1e-12
    assert max(g.abs().max().item() for g in gradients(loss, hidden, head.weight)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_masses_sum_to_one(dtype):
    _, _, logits = models()
    stored = Truncated.of(logits, 6)
    rounded = Truncated(stored.index.int(), stored.log_p.to(dtype), stored.log_rest.float())
    flat = rounded.flat(torch.float64)
    torch.testing.assert_close(flat.log_p.exp().sum(-1) + flat.log_rest.exp(), torch.ones(T, dtype=torch.float64))
    exact = logits.softmax(-1).gather(1, stored.index)
    assert (flat.log_p.exp() - exact).abs().max() < (2e-3 if dtype == torch.float16 else 2e-2)


def test_a_mass_too_small_for_float32_stays_finite():
    logits = torch.zeros(2, 8)
    logits[:, 0] = 300.0
    hidden = torch.randn(2, 4).requires_grad_()
    head = Head(torch.randn(8, 4))
    loss = linear_truncated_kl(hidden, head, Truncated.of(logits, 1))
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad.isfinite().all()


def test_mismatches_are_refused():
    hidden, head, logits = models()
    with pytest.raises(ShapeError, match=r"the teacher has \(36, 3\)"):
        linear_truncated_kl(hidden, head, Truncated.of(logits[1:], 3))
    with pytest.raises(ShapeError, match="hidden states have shape"):
        linear_truncated_kl(hidden[:, 1:], head, Truncated.of(logits, 3))
