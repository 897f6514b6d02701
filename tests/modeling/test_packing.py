"""Packed documents: the same as each alone, and not a bit of one in another."""

import pytest
import torch
from transformers import DynamicCache

from sse_convert.errors import UsageError
from tests.modeling.tiny import FAMILIES, HEADS, LAYOUT, VOCAB, exact, prompts, tiny_model

LENGTHS = (6, 1, 9, 4)


def documents() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Documents, and one packed row with its positions."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(3, VOCAB, (1, length), generator=generator) for length in LENGTHS]
    return rows, torch.cat(rows, 1), torch.cat([torch.arange(length) for length in LENGTHS])[None]


@pytest.mark.parametrize(("model_type", "layers"), [*((name, LAYOUT) for name in FAMILIES), ("qwen3", HEADS)])
@torch.no_grad()
def test_packed_equals_separate(model_type: str, layers: tuple[str, ...]) -> None:
    model = tiny_model(model_type, layers, dtype=torch.float64)
    rows, packed, positions = documents()
    expected = torch.cat([model(row, use_cache=False).logits for row in rows], 1)
    for inputs in ({"use_cache": False}, {}, {"attention_mask": torch.ones_like(packed)}):
        found = model(packed, position_ids=positions, **inputs)
        torch.testing.assert_close(found.logits, expected, **exact(model_type))
        assert found.past_key_values is None


@torch.no_grad()
def test_offsets_alone_mark_documents() -> None:
    model = tiny_model("qwen3", dtype=torch.float64)
    rows, packed, _ = documents()
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    expected = torch.cat([model(row, use_cache=False).logits for row in rows], 1)
    logits = model(packed, cu_seq_lens_q=offsets).logits
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("layers", [LAYOUT, HEADS], ids=str)
@torch.no_grad()
def test_offsets_beside_positions_may_end_in_empty_documents(layers: tuple[str, ...]) -> None:
    model = tiny_model("qwen3", layers, dtype=torch.float64)
    _, packed, positions = documents()
    other = torch.cat([torch.arange(15), torch.arange(5)])[None]
    rows = {"position_ids": torch.cat([positions, other]), "use_cache": False}
    offsets = torch.tensor([0, 6, 7, 16, 20, 35, 40, 40, 40])
    found = model(torch.cat([packed, packed]), sse_offsets=offsets, **rows).logits
    torch.testing.assert_close(found, model(torch.cat([packed, packed]), **rows).logits, atol=1e-12, rtol=0)


def test_offsets_without_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="sse_offsets without position_ids"):
        tiny_model("qwen3")(documents()[1], sse_offsets=torch.tensor([0, 6, 20]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_no_bit_of_one_document_reaches_another(model_type: str, dtype: torch.dtype) -> None:
    model = tiny_model(model_type, dtype=dtype)
    positions = torch.cat([torch.arange(70), torch.arange(75)])[None]
    ids = prompts((145,))[0]
    other = ids.clone()
    other[:, :70] = prompts((70,), seed=9)[0]
    results = []
    for text in (ids, other):
        model.zero_grad()
        embeddings = model.get_input_embeddings()(text).detach().requires_grad_()
        logits = model(inputs_embeds=embeddings, position_ids=positions, use_cache=False).logits
        logits[:, 70:].square().sum().backward()
        results.append((logits[:, 70:].detach(), embeddings.grad[:, 70:], embeddings.grad[:, :70]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[0][2].any()


def test_two_packed_rows() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    rows, packed, positions = documents()
    other = torch.cat([torch.arange(15), torch.arange(5)])[None]
    with torch.no_grad():
        together = model(torch.cat([packed, packed]), position_ids=torch.cat([positions, other])).logits
        torch.testing.assert_close(together[:1], model(packed, position_ids=positions).logits, atol=1e-9, rtol=0)
        torch.testing.assert_close(together[1:], model(packed, position_ids=other).logits, atol=1e-9, rtol=0)
    assert len(rows) == len(LENGTHS)


@pytest.mark.parametrize("inputs", [{"use_cache": True}, {"past_key_values": "fresh"}], ids=str)
def test_a_cache_with_packed_documents_is_refused(inputs: dict[str, object]) -> None:
    model = tiny_model("llama")
    _, packed, positions = documents()
    if "past_key_values" in inputs:
        inputs = {"past_key_values": DynamicCache(config=model.config)}
    with pytest.raises(UsageError, match="packed documents"):
        model(packed, position_ids=positions, **inputs)


def test_padding_in_packed_rows_is_refused() -> None:
    model = tiny_model("llama")
    _, packed, positions = documents()
    mask = torch.ones_like(packed)
    mask[:, -2:] = 0
    with pytest.raises(UsageError, match="position_ids restart inside a padded row"):
        model(packed, position_ids=positions, attention_mask=mask)


def test_custom_masks_are_refused() -> None:
    model = tiny_model("llama")
    ids = prompts((5,))[0]
    with pytest.raises(UsageError, match=r"attention_mask has shape \[1, 1, 5, 5\]"):
        model(ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())
