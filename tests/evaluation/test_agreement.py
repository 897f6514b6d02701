import pytest
import torch

from sse_convert.errors import CheckpointError
from sse_convert.evaluation.agreement import Comparison, TeacherStates, divergence
from sse_convert.evaluation.perplexity import held_out_loss, make_windows
from sse_convert.modeling.head import Head


@pytest.fixture(scope="module")
def windows(tokenizer, haystack):
    return make_windows(torch.tensor(haystack[:600]).view(4, 150), tokenizer)


def compare(teacher, student, windows, batch_tokens=300):
    states = TeacherStates()
    held_out_loss(teacher, windows, batch_tokens=150, watch=states)
    comparison = Comparison(windows, states)
    held_out_loss(student, windows, batch_tokens=batch_tokens, watch=comparison)
    return comparison.result()


@torch.no_grad()
def test_it_equals_a_dense_computation(llama, make_llama, windows, monkeypatch):
    other = make_llama(llama.config.vocab_size, seed=1)
    monkeypatch.setattr("sse_convert.modeling.logits.ON_CPU", 13 * llama.config.vocab_size)
    result = compare(llama, other, windows)
    log_p, log_q = (torch.log_softmax(m(windows.input_ids).logits[:, :-1].double(), -1) for m in (llama, other))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    assert result.kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert result.kl_se == pytest.approx((kl.mean(1).std() / 2).item(), rel=1e-5)
    assert result.top1 == pytest.approx(same.mean().item())
    assert result.top1_se == pytest.approx((same.mean(1).std() / 2).item())
    assert [(b.start, b.stop, b.tokens) for b in result.buckets] == [(0, 64, 252), (64, 128, 256), (128, 150, 88)]
    for bucket in result.buckets:
        part = slice(max(bucket.start, 1) - 1, bucket.stop - 1)
        assert bucket.kl == pytest.approx(kl[:, part].mean().item(), rel=1e-5)
        assert bucket.top1 == pytest.approx(same[:, part].mean().item())
    data = result.to_dict()
    assert data["kl_low"] < data["kl"] < data["kl_high"]
    assert data["tokens"] == 4 * 149


def test_a_model_agrees_with_itself(llama, windows):
    total = compare(llama, llama, windows)
    assert (total.top1, total.top1_se) == (1.0, 0.0)
    assert total.kl == pytest.approx(0, abs=1e-6)


def test_first_tokens_of_packed_documents_do_not_count(llama, tokenizer, haystack):
    ids = torch.tensor(haystack[:200]).view(1, 200)
    positions = torch.cat([torch.arange(80), torch.arange(120)]).view(1, 200)
    result = compare(llama, llama, make_windows(ids, tokenizer, positions))
    assert result.tokens == 79 + 119
    assert result.kl_se is None
    assert result.to_dict()["kl_low"] is None


def test_another_vocabulary_is_refused():
    hidden = torch.zeros(3, 4)
    with pytest.raises(CheckpointError, match="predicts 7 tokens, the teacher 9"):
        divergence(hidden, Head(torch.zeros(7, 4)), hidden, Head(torch.zeros(9, 4)))
