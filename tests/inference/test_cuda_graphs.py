"""Steps over a fixed cache compute what steps over a growing one compute; on a GPU they are replayed from a graph."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sse_convert.errors import UsageError
from sse_convert.inference import cuda_graphs as decoding
from sse_convert.inference.cuda_graphs import TokenStep, graphed
from sse_convert.kernels import triton_backend
from sse_convert.modeling import generation
from sse_convert.modeling.roomy_keys import RoomyLayer
from sse_convert.modeling.state_cache import SSECacheLayer, with_slots
from sse_convert.modeling.window_cache import JoinedCacheLayer, SlidingCacheLayer
from tests.modeling.tiny import HEADS, LAYOUT, PAD, prompts, tiny_model, tiny_source

STEPS = 5
GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD}
CLOSE = {"atol": 1e-10, "rtol": 0}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODELS = ("qwen3", "gemma3_text", "gpt2", "beside llama", "teacher qwen3", "teacher gemma3_text", "teacher mistral")


@pytest.fixture(autouse=True)
def _nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are replayed where a test asks for it: a converted model's own `generate` would do so too on a GPU."""
    monkeypatch.setattr(generation, "_around", [])


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make(name: str, device: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    kind, _, family = name.rpartition(" ")
    if kind == "teacher":
        return tiny_source(family, dtype=dtype).to(device)
    return tiny_model(family, HEADS if kind else LAYOUT, dtype=dtype).to(device)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    return make(request.param, device)


@torch.no_grad()
def prefill(model: PreTrainedModel, lengths: tuple[int, ...]) -> tuple[DynamicCache, Tensor, Tensor]:
    """The filled cache, the mask and the likeliest next tokens."""
    ids, mask = (x.to(model.device) for x in prompts(lengths))
    cache = DynamicCache(config=model.config)
    position = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(ids, attention_mask=mask, position_ids=position, past_key_values=cache).logits
    return cache, mask, logits[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def plain_steps(
    model: PreTrainedModel, cache: DynamicCache, mask: Tensor, tokens: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Logits [rows, steps, vocab] of greedy steps, and the token after them."""
    logits = []
    for _ in range(steps):
        position = mask.sum(1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        logits.append(model(tokens, attention_mask=mask, position_ids=position, past_key_values=cache).logits)
        tokens = logits[-1].argmax(-1)
    return torch.cat(logits, 1), tokens


@pytest.mark.parametrize("lengths", [(11, 11), (11, 7), (3, 1)], ids=str)
def test_steps_equal_those_over_a_growing_cache(model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    """Through windows that fill up on the way; afterwards the cache goes on as it was before."""
    expected, last = plain_steps(model, *prefill(model, lengths), 2 * STEPS)
    cache, mask, tokens = prefill(model, lengths)
    kinds = [type(layer) for layer in cache.layers]
    padded = not bool(mask.all())
    step = TokenStep(model, cache, tokens, slots=40, attention_mask=mask if padded else None)
    logits = torch.stack([step().clone() for _ in range(STEPS)], 1)
    torch.testing.assert_close(logits, expected[:, :STEPS], **CLOSE)
    tokens = step.tokens.clone()
    step.release()
    assert [type(layer) for layer in cache.layers] == kinds
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {max(lengths) + STEPS}
    mask = torch.cat([mask, mask.new_ones(len(lengths), STEPS)], 1)
    rest, token = plain_steps(model, cache, mask, tokens, STEPS)
    torch.testing.assert_close(rest, expected[:, STEPS:], **CLOSE)
    assert torch.equal(token, last)


def test_steps_go_on_with_other_tokens(model: PreTrainedModel) -> None:
    cache, _, _ = prefill(model, (6,))
    other, _, first = prefill(model, (6,))
    step = TokenStep(model, cache, first, slots=12)
    given = torch.tensor([[[7]], [[8]], [[9]]], device=model.device)
    with torch.no_grad():
        for i, token in enumerate(given):
            step.tokens.copy_(token)
            position = torch.tensor([[6 + i]], device=model.device)
            expected = model(token, position_ids=position, past_key_values=other).logits[:, -1]
            torch.testing.assert_close(step(), expected, **CLOSE)


def test_slots_take_what_comes_in_another_type() -> None:
    """In autocast, in which trainers generate, rotated keys are wider than values; dynamic layers promote both."""
    layer, (keys, values) = DynamicLayer(), torch.randn(2, 1, 2, 4, 8)
    layer.update(keys[:, :, :3], values[:, :, :3])
    _, held = with_slots(layer, 6, 3).update(keys[:, :, 3:], values[:, :, 3:].bfloat16())
    torch.testing.assert_close(held[:, :, 3:4], values[:, :, 3:].bfloat16().float(), atol=0, rtol=0)


def test_a_released_cache_holds_no_more_than_a_dynamic_one(device: str) -> None:
    model = make("teacher gemma3_text", device)
    cache, _, tokens = prefill(model, (11,))
    step = TokenStep(model, cache, tokens, slots=300)
    step()
    step.release()
    assert [type(layer) for layer in cache.layers].count(DynamicSlidingWindowLayer) == 3
    assert [layer.keys.shape[2] for layer in cache.layers] == [4, 4, 12, 4]


class Noted:
    """A kernel that notes its launches."""

    def __init__(self, name: str, kernel: Any, launched: set[str]) -> None:
        self._name, self._kernel, self._launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._launched.add(self._name)
        return self._kernel[grid]


@pytest.mark.parametrize(("name", "compiled"), [("qwen3", True), ("teacher gemma3_text", False)])
def test_steps_with_the_kernels(name: str, compiled: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph per step for torch.compile, which fuses norms itself; no layer falls back to torch."""
    from sse_convert.kernels.triton.generation import norm, precise_linear, row_products

    model = make(name, device, torch.float32)
    expected, _ = plain_steps(model, *prefill(model, (11, 7)), 3)
    cache, mask, tokens = prefill(model, (11, 7))
    for layer in model.sse_layers().values() if hasattr(model, "sse_layers") else ():
        layer.backend = "triton"
    monkeypatch.setattr(decoding, "sdpa_attention_forward", None)
    monkeypatch.setattr(triton_backend, "GPU", device)
    fused = set()
    watched = (
        (norm, "rms_norm_kernel"),
        (precise_linear, "precise_linear_kernel"),
        (row_products, "row_products_kernel"),
    )
    for module, name in watched:
        monkeypatch.setattr(module, name, Noted(name, getattr(module, name), fused))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"forward": torch.compile(model.forward, fullgraph=True, backend="aot_eager")} if compiled else {}
    step = TokenStep(model, cache, tokens, 20, mask, **options)
    logits = torch.stack([step().clone() for _ in range(3)], 1)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    hybrid = hasattr(model, "sse_layers")
    products = "precise_linear_kernel" if compiled else "row_products_kernel"
    assert fused == {*(() if compiled else ("rms_norm_kernel",)), *((products,) if hybrid else ())}
    assert model.config._attn_implementation == "sdpa"


def test_caches_that_cannot_be_fixed_are_refused(device: str) -> None:
    model = make("qwen3", device)
    tokens = torch.zeros(1, 1, dtype=torch.long, device=device)
    with pytest.raises(UsageError, match="a cache of 0 columns"):
        TokenStep(model, DynamicCache(config=model.config), tokens, slots=4)
    cache, _, _ = prefill(model, (6,))
    with pytest.raises(UsageError, match="a cache of 6 columns, to be fixed at 6"):
        TokenStep(model, cache, tokens, slots=6)
    step = TokenStep(model, cache, tokens, slots=7)
    step()
    with pytest.raises(UsageError, match="7 slots are full"):
        step()
    step.release()
    cache.activate_past_recording()
    with pytest.raises(UsageError, match="does not record"):
        TokenStep(model, cache, tokens, slots=20)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU on a CPU too, as far as it goes."""
    monkeypatch.setattr(decoding, "runs_graphs", lambda model: True)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths at which steps were taken."""
    taken: list[int] = []
    run = TokenStep._run
    monkeypatch.setattr(TokenStep, "_run", lambda self: (taken.append(self.length), run(self))[1])
    return taken


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_p": 0.9}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("lengths", [(11, 11), (11, 7)], ids=str)
def test_generate_gives_the_same(
    model: PreTrainedModel, lengths: tuple[int, ...], options: dict[str, Any], everywhere: None, steps: list[int]
) -> None:
    ids, mask = (x.to(model.device) for x in prompts(lengths))
    found = []
    for slots in (0, 20):
        torch.manual_seed(3)
        with graphed(model, slots):
            found.append(model.generate(ids, attention_mask=mask, **{**GREEDY, **options}))
    assert torch.equal(*found)
    assert steps
    assert "forward" not in vars(model)


def test_a_conversation_goes_on_in_its_cache(model: PreTrainedModel, everywhere: None, steps: list[int]) -> None:
    """Two answers with one cache; the second prompt longer than a token. Masks are given: answers may hold padding."""
    ids = prompts((8,))[0].to(model.device)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    more = torch.cat([expected, ids], 1)
    seen = torch.ones_like(more)
    expected = model.generate(more, attention_mask=seen, **GREEDY)
    cache = DynamicCache(config=model.config)
    with graphed(model, 17):
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 16
    assert {type(layer) for layer in cache.layers} <= {
        DynamicLayer, DynamicSlidingWindowLayer, RoomyLayer, SSECacheLayer, SlidingCacheLayer, JoinedCacheLayer,
    }  # fmt: skip
    with graphed(model, 34):
        assert torch.equal(model.generate(more, attention_mask=seen, past_key_values=cache, **GREEDY), expected)
    assert len(steps) == (2 if model.device.type == "cuda" else 8) * 2


def test_generation_stops_at_the_end_and_streams(everywhere: None, device: str) -> None:
    model = make("qwen3", device)
    ids = prompts((8,))[0].to(device)
    plain = model.generate(ids, **GREEDY)[0, 8:].tolist()
    seen: list[int] = []

    class Streamer:
        def put(self, value: Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    end = plain[4]
    with graphed(model, 17):
        out = model.generate(ids, streamer=Streamer(), eos_token_id=end, **GREEDY)
    stop = plain.index(end) + 1
    assert out[0, 8:].tolist() == plain[:stop]
    assert seen == [*ids[0].tolist(), *plain[:stop], -1]


def test_what_asks_for_more_than_logits_runs_plainly(everywhere: None, steps: list[int], device: str) -> None:
    model = make("qwen3", device)
    ids = prompts((8,))[0].to(device)
    with graphed(model, 17):
        out = model.generate(ids, output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    assert len(out.hidden_states) == 9
    assert not steps


def test_an_error_leaves_model_and_cache_usable(everywhere: None, device: str) -> None:
    model = make("qwen3", device)
    ids = prompts((8,))[0].to(device)
    expected = model.generate(ids, **GREEDY)
    cache = DynamicCache(config=model.config)

    class Interrupt:
        def put(self, value: Tensor) -> None:
            if cache.get_seq_length() > 10:
                raise KeyboardInterrupt

        def end(self) -> None: ...

    with pytest.raises(KeyboardInterrupt), graphed(model, 17):
        model.generate(ids, past_key_values=cache, streamer=Interrupt(), **GREEDY)
    assert "forward" not in vars(model)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    kept = cache.get_seq_length()
    assert torch.equal(model.generate(expected[:, : kept + 1], past_key_values=cache, **GREEDY)[:, :17], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_recorded_once_and_then_need_no_host(name: str, steps: list[int]) -> None:
    model = make(name, "cuda", torch.bfloat16)
    cache, _, tokens = prefill(model, (11, 11))
    step = TokenStep(model, cache, tokens, slots=40)
    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 2


@pytest.mark.parametrize(("model_type", "recorded"), [("qwen3", True), ("qwen3_moe", False)])
def test_steps_that_send_tokens_to_experts_are_not_recorded(model_type: str, recorded: bool) -> None:
    model: Any = SimpleNamespace(config=tiny_model(model_type).config, device=torch.device("cuda"))
    assert decoding.runs_graphs(model) is recorded
