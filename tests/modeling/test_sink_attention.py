"""Learned sinks without writing out all pairs of tokens: the same as families' own attention, gradients too."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss

from sse_convert.modeling import sink_attention
from sse_convert.modeling.attention_dims import document_attention_problem
from sse_convert.modeling.auto import load_pretrained
from sse_convert.modeling.document_attention import attend_to_documents
from sse_convert.modeling.sink_attention import SINK_ATTENTION, documents_with_sinks, use_kernels
from tests.modeling.tiny import LAYOUT, prompts, tiny_config, tiny_model, tiny_source

TOLERANCE = {"gpt_oss": 1e-9, "flint": 1e-5, "granite_swa": 1e-5, "granitemoe_swa": 1e-5}
"""of logits by family; all but the first compute their softmax in float32"""
OFFSETS = torch.tensor([0, 5, 6, 12, 12])


def drawn(heads: int = 2, length: int = 12, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and sinks of which some take most of the weight."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(length, n, 8, dtype=dtype, generator=generator) for n in (4, heads, heads))
    return [x.requires_grad_() for x in (q, k, v, torch.tensor([-3.0, 0.0, 1.0, 4.0], dtype=dtype))]


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """All pairs of tokens of the documents at OFFSETS."""
    index, document = torch.arange(len(q)), torch.searchsorted(OFFSETS, torch.arange(len(q)), right=True)
    sees = (index[:, None] >= index) & (document[:, None] == document) & (index[:, None] - index < (window or len(q)))
    groups = q.shape[1] // k.shape[1]
    scores = 0.3 * torch.einsum("thd,shd->hts", q, k.repeat_interleave(groups, 1)).masked_fill(~sees, -torch.inf)
    whole = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)], 2)
    return torch.einsum("hts,shd->thd", whole.softmax(2)[..., :-1], v.repeat_interleave(groups, 1))


def with_gradients(heads: Tensor, given: list[Tensor]) -> list[Tensor]:
    """The heads, and the gradients of a sum that weighs them differently."""
    weights = torch.arange(heads.numel(), dtype=heads.dtype).view_as(heads).cos()
    return [heads.detach(), *torch.autograd.grad((heads * weights).sum(), given)]


class _FlashOnCPU:
    """Torch's flash attention as it is on CPUs, document by document, in place of the one for GPUs."""

    forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def __init__(self, groups: int) -> None:
        self.groups = groups

    def _parts(self, offsets: Tensor, *tensors: Tensor) -> Any:
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            if begin < end:
                yield slice(begin, end), [x[begin:end].transpose(0, 1)[None].contiguous() for x in tensors]

    def _mask(self, length: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if window is None:
            return None
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= window)
        return torch.zeros(length, length, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def forward(self, q, k, v, offsets, longest, scaling, window):  # type: ignore[no-untyped-def]
        o, scores = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
        for part, (a, b, c) in self._parts(offsets, q, *(x.repeat_interleave(self.groups, 1) for x in (k, v))):
            mask = self._mask(a.shape[2], window, q.dtype)
            heads, lse = self.forward_op(a, b, c, 0.0, window is None, attn_mask=mask, scale=scaling)
            o[part], scores[:, part] = heads[0].transpose(0, 1), lse[0]
        return o, scores, []

    def backward(self, do, q, k, v, o, scores, offsets, longest, scaling, window, state):  # type: ignore[no-untyped-def]
        repeated = [x.repeat_interleave(self.groups, 1) for x in (k, v)]
        found = [torch.empty_like(x) for x in (q, *repeated)]
        for part, (grad, a, b, c, heads) in self._parts(offsets, do, q, *repeated, o):
            mask, lse = self._mask(a.shape[2], window, q.dtype), scores[None, :, part].contiguous()
            more = {"attn_mask": mask, "scale": scaling}
            grads = self.backward_op(grad, a, b, c, heads, lse, 0.0, window is None, **more)
            for whole, piece in zip(found, grads, strict=True):
                whole[part] = piece[0].transpose(0, 1)
        dq, dk, dv = found
        return dq, *(x.unflatten(1, (-1, self.groups)).sum(2) for x in (dk, dv))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_documents_one_by_one(heads: int, window: int | None) -> None:
    given = drawn(heads)
    q, k, v, sinks = given
    found = attend_to_documents(q, k, v, OFFSETS, 12, scaling=0.3, window=window, sinks=sinks)
    expected = written_out(*given, window)
    torch.testing.assert_close(with_gradients(found, given), with_gradients(expected, given), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_flash_attention_with_its_log_sum_exp_put_right(
    heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = _FlashOnCPU(4 // heads)
    monkeypatch.setattr(sink_attention, "varlen_forward", flash.forward)
    monkeypatch.setattr(sink_attention, "varlen_backward", flash.backward)
    given = drawn(heads)
    q, k, v, sinks = given
    found = documents_with_sinks(q, k, v, sinks, OFFSETS, 6, 0.3, window)
    expected = written_out(*given, window)
    torch.testing.assert_close(with_gradients(found, given), with_gradients(expected, given), atol=1e-12, rtol=0)


def test_layers_compile_whole_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """For which products of one document stand in."""

    def scores_of(q: Tensor, k: Tensor) -> Tensor:
        return 0.3 * torch.einsum("thd,shd->hts", q, k).masked_fill(torch.ones(len(q), len(q)).triu(1) > 0, -torch.inf)

    def forward(q, k, v, *where):  # type: ignore[no-untyped-def]
        scores = scores_of(q, k)
        return torch.einsum("hts,shd->thd", scores.softmax(2), v), scores.logsumexp(2), []

    def backward(do, q, k, v, o, whole, *where):  # type: ignore[no-untyped-def]
        weights = (scores_of(q, k) - whole[..., None]).exp()
        of_weights = torch.einsum("thd,shd->hts", do, v)
        of_scores = 0.3 * weights * (of_weights - (do * o).sum(2).T[..., None])
        dq, dk = torch.einsum("hts,shd->thd", of_scores, k), torch.einsum("hts,thd->shd", of_scores, q)
        return dq, dk, torch.einsum("hts,thd->shd", weights, do)

    monkeypatch.setattr(sink_attention, "varlen_forward", forward)
    monkeypatch.setattr(sink_attention, "varlen_backward", backward)
    given = drawn(4)
    whole = torch.tensor([0, 12])
    expected = attend_to_documents(*given[:3], whole, 12, scaling=0.3, sinks=given[3])
    torch.compiler.reset()
    compiled = torch.compile(documents_with_sinks, backend="aot_eager", fullgraph=True)
    found = compiled(*given, whole, 12, 0.3, None)
    torch.testing.assert_close(with_gradients(found, given), with_gradients(expected, given), atol=1e-12, rtol=0)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernel_gives_what_documents_give_one_by_one(window: int | None) -> None:
    """The squares of the outputs are summed: the gradient of a sink is then a sum of terms of one sign, so that what
    bfloat16 rounds off stays small beside it."""
    generator = torch.Generator().manual_seed(1)
    exact = [torch.randn(700, n, 64, generator=generator).bfloat16().double() for n in (4, 2, 2)]
    exact = [x.requires_grad_() for x in (*exact, torch.tensor([-3.0, 0.0, 1.0, 4.0], dtype=torch.float64))]
    found = [x.detach().cuda().bfloat16().requires_grad_() for x in exact[:3]] + [exact[3].detach().cuda()]
    found[3].requires_grad_()
    offsets = torch.tensor([0, 1, 130, 131, 700, 700, 700])
    results = []
    for *qkv, sinks in (exact, found):
        heads = attend_to_documents(*qkv, offsets.to(sinks.device), 700, window=window, sinks=sinks)
        grads = torch.autograd.grad(heads.double().square().sum(), [*qkv, sinks])
        results.append([x.detach().cpu().double() for x in (heads, *grads)])
    for expected, ours in zip(*results, strict=True):
        assert (ours - expected).norm() / expected.norm() < 2**-7


@pytest.mark.parametrize("model_type", TOLERANCE)
@torch.no_grad()
def test_models_say_the_same_as_with_their_own_attention(model_type: str) -> None:
    """With padding, a cache and windows, converted and not."""
    for model in (tiny_source(model_type, dtype=torch.float64), tiny_model(model_type, LAYOUT, dtype=torch.float64)):
        ids, mask = prompts()
        runs = []
        for kind in ("eager", SINK_ATTENTION):
            model.set_attn_implementation(kind)
            whole = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            made = model.generate(
                ids[:1], max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            runs.append([whole, *made.logits])
        torch.testing.assert_close(runs[1], runs[0], atol=TOLERANCE[model_type], rtol=0)


@pytest.mark.parametrize("model_type", TOLERANCE)
def test_loaded_models_write_out_no_pairs(model_type: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert document_attention_problem(tiny_config(model_type)) is None
    tiny_source(model_type).save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    assert model.config._attn_implementation == SINK_ATTENTION
    if model_type == "gpt_oss":
        monkeypatch.delattr(modeling_gpt_oss, "eager_attention_forward")
        with pytest.raises(NameError, match="eager_attention_forward"):
            AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([[1, 2, 3]]))


def test_converted_models_write_out_no_pairs_wherever_they_are_loaded(tmp_path: Any) -> None:
    tiny_model("gpt_oss", LAYOUT).save_pretrained(tmp_path)
    load = AutoModelForCausalLM.from_pretrained
    assert load(tmp_path).config._attn_implementation == SINK_ATTENTION
    assert load(tmp_path, output_loading_info=True)[0].config._attn_implementation == SINK_ATTENTION
    assert load(tmp_path, attn_implementation="eager").config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", TOLERANCE)
@torch.no_grad()
def test_caches_of_fixed_size_and_rows_without_padding(model_type: str) -> None:
    """Without a mask several queries are the first of their rows, whatever slots are empty behind them."""
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for model in (tiny_source(model_type, dtype=torch.float64), tiny_model(model_type, LAYOUT, dtype=torch.float64)):
        ids, runs = prompts()[0][:1], []
        for kind, cache in (("eager", None), (SINK_ATTENTION, "static"), (SINK_ATTENTION, None)):
            model.set_attn_implementation(kind)
            made = model.generate(ids, cache_implementation=cache, **settings)
            runs.append([model(ids, use_cache=False).logits, *made.logits])
        for found in runs[1:]:
            torch.testing.assert_close(found, runs[0], atol=TOLERANCE[model_type], rtol=0)


def test_autocast_and_masks_that_are_added() -> None:
    model = tiny_model("gpt_oss", ("full",) * 4)
    model.set_attn_implementation(SINK_ATTENTION)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.train()(prompts()[0], use_cache=False).logits.isfinite().all()
    q, k, v = (x[None].transpose(1, 2) for x in drawn()[:3])
    sees = torch.ones(12, 12).tril().bool()[None, None]
    added = torch.zeros(1, 1, 12, 12, dtype=q.dtype).masked_fill(~sees, -torch.inf)
    with_mask = [sink_attention.attend_with_sinks(q, k, v, x, drawn()[3], 0.3) for x in (sees, added, None)]
    torch.testing.assert_close(with_mask[1:], with_mask[:1] * 2, atol=1e-12, rtol=0)


def test_large_sinks_in_low_precision() -> None:
    q = torch.zeros(1, 1, 2, 80, dtype=torch.bfloat16)
    sinks = torch.tensor([20.03])
    wide, key, _ = sink_attention.with_sink_key(q, q, q, sinks, 80**-0.5)
    logit = (wide[0, 0, 0].float() @ key[0, 0, 0].float()) * 80**-0.5
    assert abs(float(logit - sinks[0])) < 1e-3


def test_dropout_of_the_weights() -> None:
    q, k, v = (x[None].transpose(1, 2) for x in drawn()[:3])
    torch.manual_seed(0)
    found = [
        sink_attention.sink_attention(torch.nn.Identity(), q, k, v, None, drawn()[3], dropout=0.5)[0] for _ in "ab"
    ]
    assert not torch.equal(*found)


def test_other_families_and_another_choice_stay_as_they_are() -> None:
    for model_type, kind in (("qwen3", "eager"), ("gpt_oss", "flex_attention")):
        model = tiny_source(model_type)
        model.config._attn_implementation = kind
        use_kernels(model)
        assert model.config._attn_implementation == kind
