"""Window attention in blocks of queries equals the masked form, whatever the row holds, and grows with its length."""

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sse_convert.modeling.window import sliding
from sse_convert.modeling.window.sliding import training_mask, training_sees
from sse_convert.modeling.window.window_attention import WindowBlocks, WindowConfig
from tests.modeling.tiny import FAMILIES, prompts, tiny_model

ALL = ("sliding",) * 4
CPU = torch.device("cpu")


def model_of(model_type: str, window: int = 4, sinks: int = 2) -> PreTrainedModel:
    mixers = {"sliding": {"kind": "sliding", "window": window, "sinks": sinks}}
    return tiny_model(model_type, ALL, mixers, dtype=torch.float64)


def random_starts(rows: int, length: int, share: float) -> Tensor:
    starts = torch.rand(rows, length, generator=torch.Generator().manual_seed(length)) < share
    starts[:, 0] = True
    return starts


def from_blocks(blocks: WindowBlocks, batch: int, length: int, window: int) -> Tensor:
    """bool [B, T, T]: the masked form of a blocked one; a key seen twice would be an error of the blocked one."""
    count = len(blocks.sees) // batch
    sees = blocks.sees.view(batch, count, window, -1).long()
    sinks = blocks.sinks.view(batch, count, -1)
    times = torch.zeros(batch, count * window, count * window + length, dtype=torch.long)
    for block in range(count):
        queries = times[:, block * window : (block + 1) * window]
        far, near = sees[:, block].split([sinks.shape[2], 2 * window], 2)
        queries.scatter_add_(2, sinks[:, block, None].expand(-1, window, -1), far)
        for slot in range(2 * window):
            column = (block - 1) * window + slot
            if column >= 0:
                queries[:, :, column] += near[:, :, slot]
    assert times.max() == 1
    return times[:, :length, :length].bool()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.3])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 3), (3, 2), (5, 9), (8, 1)])
def test_blocks_say_what_the_mask_says_of_packed_rows(window: int, sinks: int, share: float) -> None:
    for length in (17, 40, 41):
        starts = random_starts(3, length, share)
        mask = training_mask(None, starts, (3, length), window, sinks, CPU)[:, 0]
        blocks = training_sees(None, starts, (3, length), window, sinks, CPU)
        assert isinstance(blocks, WindowBlocks)
        assert torch.equal(from_blocks(blocks, 3, length, window), mask)


@pytest.mark.parametrize("side", ["left", "right"])
def test_blocks_say_what_the_mask_says_of_padded_rows(side: str) -> None:
    real = prompts((30, 11, 1), side=side)[1].bool()
    mask = training_mask(real, None, (3, 30), 4, 3, CPU)[:, 0]
    blocks = training_sees(real, None, (3, 30), 4, 3, CPU)
    assert isinstance(blocks, WindowBlocks)
    assert torch.equal(from_blocks(blocks, 3, 30, 4)[real], mask[real])


def test_short_rows_keep_the_mask() -> None:
    assert isinstance(training_sees(None, None, (2, 8), 4, 2, CPU), Tensor)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_and_gradients_equal_the_masked_form(
    model_type: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model_type in ("gemma2", "gpt_oss") and attention == "sdpa":
        pytest.skip("Gemma 2 has soft caps and gpt-oss learned sinks, which sdpa does not offer")
    model = model_of(model_type)
    model.set_attn_implementation(attention)
    ids = prompts((23, 23))[0]
    positions = torch.cat([torch.arange(12), torch.arange(11)]).expand(2, -1)
    found = []
    for sees in (training_sees, training_mask):
        monkeypatch.setattr(sliding, "training_sees", sees)
        model.zero_grad()
        logits = model(ids, position_ids=positions, use_cache=False).logits
        logits.square().mean().backward()
        found.append({"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters()})
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-12, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_the_masked_form(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompts((21, 9), side=side)
    model = model_of("qwen3")
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    monkeypatch.setattr(sliding, "training_sees", training_mask)
    dense = model(ids, attention_mask=mask, use_cache=False).logits
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits[mask.bool()], dense[mask.bool()], atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_long_prefill_after_a_short_one_equals_the_whole() -> None:
    ids, mask = prompts((40, 26))
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    model = model_of("llama")
    cache = DynamicCache(config=model.config)
    pieces = [
        model(ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions[:, a:b], past_key_values=cache).logits
        for a, b in ((0, 3), (3, 17), (17, 18), (18, 40))
    ]
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(torch.cat(pieces, 1)[mask.bool()], whole[mask.bool()], atol=1e-12, rtol=0)


def test_masks_grow_with_the_length() -> None:
    def elements(length: int) -> int:
        blocks = training_sees(None, None, (1, length), 16, 4, CPU)
        assert isinstance(blocks, WindowBlocks)
        return blocks.sees.numel() + blocks.sinks.numel()

    assert elements(4096) == 4 * elements(1024) == 4096 * (2 * 16 + 4) + 4096 // 16 * 4


def test_no_graph_break() -> None:
    model = tiny_model("qwen3", ALL)
    ids = prompts((40,))[0]
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_the_configuration_seen_by_a_layer_is_the_models() -> None:
    model = model_of("llama")
    seen = model.model.layers[0].self_attn.config
    assert isinstance(seen, WindowConfig)
    model.set_attn_implementation("eager")
    assert seen.model._attn_implementation == "eager"
    assert seen.hidden_size == model.config.hidden_size


def test_blocks_move_with_the_layer_that_takes_them() -> None:
    blocks = training_sees(None, None, (1, 40), 4, 2, CPU)
    moved = send_to_device({"mask": blocks}, "meta")["mask"]
    assert isinstance(moved, WindowBlocks)
    assert {moved.sees.device.type, moved.sinks.device.type} == {"meta"}
