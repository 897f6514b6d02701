import copy
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from sse_convert.errors import CheckpointError, DataError
from sse_convert.evaluation import perplexity
from sse_convert.evaluation.perplexity import bucket_edges, final_hidden, held_out_loss, loss_gap, make_windows
from sse_convert.modeling.head import Head
from tests.modeling.tiny import tiny_source


@pytest.fixture(scope="module")
def windows(tokenizer, haystack):
    return make_windows(torch.tensor(haystack[:600]).view(4, 150), tokenizer)


@torch.no_grad()
def test_packed_documents_do_not_mix_where_a_family_does_not_look():
    """gpt-oss, whose backbone does not separate documents."""
    model = tiny_source("gpt_oss")
    ids = torch.arange(24)[None] % 20 + 3
    positions = torch.tensor([[*range(10), *range(14)]])
    packed = final_hidden(model, ids, positions)
    first, second = (final_hidden(model, ids[:, part]) for part in (slice(10), slice(10, None)))
    torch.testing.assert_close(packed[:, :9], first, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 10:], second, rtol=1e-4, atol=1e-5)


def test_bucket_edges_are_powers_of_two_up_to_the_window():
    assert bucket_edges(512) == (0, 64, 128, 256, 512)
    assert bucket_edges(300) == (0, 64, 128, 256, 300)
    assert bucket_edges(10) == (0, 10)


@torch.no_grad()
def test_loss_equals_a_dense_computation(llama, windows, monkeypatch):
    monkeypatch.setattr("sse_convert.modeling.logits.ON_CPU", 13 * llama.config.vocab_size)
    exact = copy.deepcopy(llama).double()
    result = held_out_loss(exact, windows, batch_tokens=300)
    logits = exact(windows.input_ids).logits[:, :-1]
    dense = F.cross_entropy(logits.transpose(1, 2), windows.input_ids[:, 1:], reduction="none")
    assert result.loss == pytest.approx(dense.mean().item(), rel=1e-6)
    assert result.tokens == 4 * 149
    assert [(b.start, b.stop, b.tokens) for b in result.buckets] == [(0, 64, 252), (64, 128, 256), (128, 150, 88)]
    for bucket in result.buckets:
        part = dense[:, max(bucket.start, 1) - 1 : bucket.stop - 1]
        assert bucket.loss == pytest.approx(part.mean().item(), rel=1e-6)
    assert result.loss_se == pytest.approx((dense.mean(1).std() / 2).item(), rel=1e-6)


@torch.no_grad()
def test_packed_documents_are_scored_by_their_own_context(llama, tokenizer, haystack):
    ids = torch.tensor(haystack[:200]).view(1, 200)
    positions = torch.cat([torch.arange(80), torch.arange(120)]).view(1, 200)
    packed = held_out_loss(llama, make_windows(ids, tokenizer, positions))
    alone = [
        F.cross_entropy(llama(part).logits[0, :-1], part[0, 1:], reduction="sum").item()
        for part in (ids[:, :80], ids[:, 80:])
    ]
    assert packed.tokens == 79 + 119
    assert packed.loss == pytest.approx(sum(alone) / 198, rel=1e-5)
    assert [(b.start, b.tokens) for b in packed.buckets] == [(0, 126), (64, 72)]


def test_bits_per_byte_by_hand(tokenizer, llama):
    text = "The keeper walked — then “stopped”. He saw a ship." * 4
    ids = tokenizer(text, return_tensors="pt").input_ids
    windows = make_windows(ids, tokenizer)
    first = tokenizer.decode(ids[0, :1])
    assert windows.byte_counts.sum().item() == len(text.encode()) - len(first.encode())
    result = held_out_loss(llama, windows)
    nats = result.loss * result.tokens
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / (len(text.encode()) - len(first.encode())))


def test_special_tokens_have_no_bytes(tokenizer):
    ids = tokenizer("The ship", return_tensors="pt").input_ids
    with_end = torch.cat([ids, torch.full((1, 1), tokenizer.eos_token_id)], 1)
    assert (make_windows(with_end, tokenizer).byte_counts == make_windows(ids, tokenizer).byte_counts).all()


def test_gap_pairs_windows(llama, windows, make_llama):
    other = make_llama(llama.config.vocab_size, seed=1)
    teacher, student = held_out_loss(llama, windows), held_out_loss(other, windows)
    gap, error = loss_gap(student, teacher)
    assert gap == pytest.approx(student.loss - teacher.loss)
    by_window = torch.tensor(student.window_sums) / 149 - torch.tensor(teacher.window_sums) / 149
    assert error == pytest.approx((by_window.std() / 2).item(), rel=1e-5)
    assert loss_gap(teacher, teacher) == (0.0, 0.0)


SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=0.5)),
        GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=7.0)),
    ],
    ids=["soft cap", "scale"],
)
@torch.no_grad()
def test_logit_scales_and_caps_are_applied(model):
    model.eval()
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    losses = perplexity._losses(perplexity.final_hidden(model, ids), Head.of(model), ids)
    assert torch.allclose(losses, expected, atol=1e-5)


def test_a_head_that_does_something_else_is_refused(llama, windows, monkeypatch):
    monkeypatch.setattr(llama.config, "final_logit_softcapping", 2.0, raising=False)
    with pytest.raises(CheckpointError, match="changes its logits"):
        held_out_loss(llama, windows)


def test_nothing_to_score_is_a_clear_error(tokenizer):
    with pytest.raises(DataError, match="0 windows of 64 tokens"):
        make_windows(torch.zeros(0, 64, dtype=torch.long), tokenizer)
