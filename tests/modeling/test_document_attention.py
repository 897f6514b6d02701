"""Attention within documents: what masks of all pairs of tokens say, without them."""

import inspect
import itertools
import sys

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from sse_convert.errors import UsageError
from sse_convert.modeling import document_attention
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.architectures import ARCHITECTURES, backbone_of
from sse_convert.modeling.attention_dims import document_attention_problem
from sse_convert.modeling.context import split_problems
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION, attend_to_documents
from sse_convert.modeling.hybrid import source_class
from sse_convert.training.objective import Frozen
from tests.modeling.tiny import FAMILIES, HEADS, LAYOUT, VOCAB, prompts, tiny_config, tiny_model, tiny_source

LENGTHS = ((6, 1, 9, 4), (13, 7))
OFFSETS = torch.tensor([0, 6, 7, 16, 20, 33, 40, 40, 40])
"""of these, padded with empty documents"""
REFUSED = {"gemma2": "bounded"}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two packed rows and their positions."""
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(3))
    return ids, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


@pytest.fixture
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of all pairs of tokens cannot be made."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise MemoryError("a mask of all pairs")

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse)


def together(model: torch.nn.Module, ids: torch.Tensor, **where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of the embeddings."""
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    if hasattr(backbone := backbone_of(model), "get_per_layer_inputs"):
        where["per_layer_inputs"] = backbone.get_per_layer_inputs(ids)
    logits = model(inputs_embeds=embeddings, use_cache=False, **where).logits
    logits.square().mean().backward()
    return logits.detach(), embeddings.grad


@pytest.mark.parametrize("model_type", FAMILIES)
def test_documents_attend_as_under_masks(model_type: str) -> None:
    if (problem := document_attention_problem(tiny_config(model_type))) is not None:
        assert REFUSED.get(model_type, "layers") in problem
        return
    model = tiny_model(model_type, LAYOUT, dtype=torch.float64)
    ids, positions = rows()
    expected = together(model, ids, position_ids=positions)
    kind, model.config._attn_implementation = model.config._attn_implementation, DOCUMENT_ATTENTION
    found = together(model, ids, position_ids=positions)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    whole = model(ids, use_cache=False).logits  # each row one document
    model.config._attn_implementation = kind
    torch.testing.assert_close(whole, model(ids, use_cache=False).logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_teachers_attend_as_under_masks(model_type: str) -> None:
    source = tiny_source(model_type, dtype=torch.float64)
    if document_attention_problem(source.config) is not None:
        return
    teacher = Frozen(source)
    ids, positions = rows()
    expected = [teacher(ids, where)[0] for where in (positions, None)]
    source.config._attn_implementation = DOCUMENT_ATTENTION
    found = [teacher(ids, where)[0] for where in (positions, None)]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(teacher(ids, positions, OFFSETS)[0], expected[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe"])
def test_windows_that_masks_alone_have_need_masks(model_type: str) -> None:
    windows = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 4, "layer_types": None}
    assert "masks alone" in str(document_attention_problem(tiny_config(model_type, **windows)))
    assert split_problems(tiny_config(model_type, **windows), 2) == [
        "context_parallel is 2, which is not built for windows that the masks alone have"
    ]
    assert document_attention_problem(tiny_config(model_type)) is None


@pytest.mark.parametrize("spec", ARCHITECTURES.values(), ids=lambda spec: spec.model_type)
def test_families_tell_attention_of_windows_or_say_that_they_do_not(spec: ArchSpec) -> None:
    module = inspect.getsource(sys.modules[source_class(spec).__module__])
    if "create_sliding_window_causal_mask" in module:
        assert ("sliding_window=" in module.replace("config.sliding_window=", "")) != spec.windows_in_masks


def test_no_mask_of_all_pairs_is_made(no_masks: None) -> None:
    model = tiny_model("qwen3", HEADS)
    ids, positions = rows()
    with pytest.raises(MemoryError):
        model(ids, position_ids=positions, use_cache=False)
    model.config._attn_implementation = DOCUMENT_ATTENTION
    assert model(ids, position_ids=positions, use_cache=False).logits.isfinite().all()


def test_a_model_without_converted_layers_attends_within_documents() -> None:
    model = tiny_model("qwen3", ("full",) * 4, dtype=torch.float64)
    ids, positions = rows()
    where = [{"position_ids": positions}, {"position_ids": positions, "sse_offsets": OFFSETS}, {}]
    expected = [model(ids, use_cache=False, **{k: v for k, v in w.items() if k != "sse_offsets"}).logits for w in where]
    model.config._attn_implementation = DOCUMENT_ATTENTION
    found = [model(ids, use_cache=False, **w).logits for w in where]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_documents_do_not_see_each_other(heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(heads)
    q, k, v = (torch.randn(12, n, 4, dtype=torch.float64, generator=generator) for n in (4, heads, heads))
    found = attend_to_documents(q, k, v, torch.tensor([0, 5, 6, 12, 12]), 12, scaling=0.3, window=window)
    index = torch.arange(12)
    document = torch.tensor([0] * 5 + [1] + [2] * 6)
    sees = (index[:, None] >= index) & (document[:, None] == document) & (index[:, None] - index < (window or 12))
    scores = 0.3 * torch.einsum("thd,shd->hts", q, k.repeat_interleave(4 // heads, 1))
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    expected = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(4 // heads, 1))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_padding_caches_and_calls_without_documents_are_refused() -> None:
    model = tiny_model("qwen3", LAYOUT)
    model.config._attn_implementation = DOCUMENT_ATTENTION
    ids, mask = prompts()
    with pytest.raises(UsageError, match="padding or a cache"):
        model(ids, attention_mask=mask, use_cache=False)
    with pytest.raises(UsageError, match="padding or a cache"):
        model.generate(ids[:1], max_new_tokens=2, do_sample=False)
    source = tiny_source("qwen3")
    source.config._attn_implementation = DOCUMENT_ATTENTION
    with pytest.raises(UsageError, match="without sse_layout"):
        source(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_the_kernel_gives_what_documents_give_one_by_one(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    exact = [torch.randn(700, n, 64, generator=generator).bfloat16().double().requires_grad_() for n in (4, 2, 2)]
    offsets = torch.tensor([0, 1, 130, 131, 700, 700, 700])
    expected = attend_to_documents(*exact, offsets, 700, window=window)
    expected.square().sum().backward()
    found = [x.detach().cuda().bfloat16().requires_grad_() for x in exact]
    heads = attend_to_documents(*found, offsets.cuda(), 700, window=window)
    heads.square().sum().backward()
    pairs = [(heads, expected), *((x.grad, y.grad) for x, y in zip(found, exact, strict=True))]
    for ours, theirs in pairs:
        error = (ours.detach().cpu().double() - theirs.detach()).norm() / theirs.detach().norm()
        assert error < 2**-7


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@torch.no_grad()
def test_layers_compile_whole_for_any_number_of_documents(
    family: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel, as on a GPU, for which one that masks stands in; without one under masks: a layer of each kind,
    and one that has windows."""
    if has_kernel and family != "qwen3":
        return

    def kernel(q, k, v, offsets, longest, scaling, window):  # type: ignore[no-untyped-def]
        index = torch.arange(len(q))
        document = torch.searchsorted(offsets[1:].long(), index, right=True)
        sees = (index[:, None] >= index) & (document[:, None] == document)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = scaling * torch.einsum("thd,shd->hts", q, k)
        return torch.einsum("hts,shd->thd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)

    model = tiny_model(family, LAYOUT)
    model.config._attn_implementation = DOCUMENT_ATTENTION
    packed = [rows(), (rows()[0], torch.arange(20) % torch.tensor([[5], [10]])), (rows()[0], None)]
    expected = [model(ids, position_ids=where, use_cache=False).logits for ids, where in packed]
    monkeypatch.setattr(document_attention, "_has_kernel", lambda q: has_kernel)
    monkeypatch.setattr(document_attention, "varlen_attention", kernel)
    torch.compiler.reset()
    for layer in model.base_model.layers[1 if family == "qwen3" and not has_kernel else -1 :]:
        layer.compile(backend="aot_eager", fullgraph=True)
    for (ids, where), logits in zip(packed, expected, strict=True):
        found = model(ids, position_ids=where, use_cache=False).logits
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=0)
    torch.compiler.reset()


@pytest.mark.parametrize(("key", "value"), [(6, 4), (4, 6), (4, 4)])
def test_a_kernel_gets_keys_and_values_of_one_size(key: int, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention has values of another size than keys, the kernel has none of it."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, *rest: object) -> torch.Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == max(key, value)
        parts = [slice(int(a), int(b)) for a, b in itertools.pairwise(offsets)]
        return torch.cat([document_attention._attend(q[at], k[at], v[at], *rest[1:]) for at in parts])

    q, k, v = (torch.randn(12, 2, size, dtype=torch.float64) for size in (key, key, value))
    offsets = torch.tensor([0, 5, 12])
    expected = attend_to_documents(q, k, v, offsets, 12)
    monkeypatch.setattr(document_attention, "_has_kernel", lambda q: True)
    monkeypatch.setattr(document_attention, "varlen_attention", kernel)
    torch.testing.assert_close(attend_to_documents(q, k, v, offsets, 12), expected, atol=1e-12, rtol=0)
