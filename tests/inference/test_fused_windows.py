"""Steps of layers with a window, alone or beside SSE, in few launches; the cache goes on afterwards as before."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from sse_convert.inference.cuda_graphs import TokenStep
from sse_convert.inference.fused_layers import not_fused
from sse_convert.inference.fused_weights import FEW_ROWS
from sse_convert.kernels import triton_backend
from tests.inference.launches import counted
from tests.inference.test_cuda_graphs import plain_steps, prefill
from tests.modeling.tiny import tiny_model

STEPS = 2
CLOSE = {"atol": 2e-5, "rtol": 1e-5}
"""of float32 logits"""
WINDOW = {"window": 4, "sinks": 2}
ONE_STATE = {
    "kind": "sse+sliding", "num_partitions": 1, "top_k": 1, "shared_partition": False, "balance": "none", "qk_rank": 0,
    "update": "delta", "k_feature_map": "l2", "state_heads": "query", **WINDOW,
}  # fmt: skip
MIXERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a window": ("llama", {"kind": "sliding", **WINDOW}),
    "a window without sinks, biases": ("qwen2", {"kind": "sliding", "window": 3, "sinks": 0}),
    "a window beside a head that sees all": ("qwen3", {"kind": "sliding", **WINDOW, "full_heads": [1]}),
    "one state and a window": ("llama", ONE_STATE),
    "one state and a window, norms and a head that sees all": ("qwen3", {**ONE_STATE, "full_heads": [0]}),
    "partitions and a window": ("smollm3", {"kind": "sse+sliding", "num_partitions": 3, "qk_rank": 4, **WINDOW}),
    "states and biases": ("qwen2", {**ONE_STATE, "full_heads": [1]}),
}
LENGTHS = {
    "before the sinks": ((1,), 6),
    "among the sinks": ((1,), STEPS),
    "inside the window": ((5, 5), STEPS),
    "beyond it": ((13,), STEPS),
    "many rows": ((9,) * (FEW_ROWS + 1), STEPS),
}
"""rows, and steps before plain layers go on: six have left sinks and window behind, two are among the sinks"""
CASES = [
    ("a window", "among the sinks"),
    ("a window", "inside the window"),
    ("a window", "many rows"),
    ("a window without sinks, biases", "before the sinks"),
    ("a window beside a head that sees all", "before the sinks"),
    ("a window beside a head that sees all", "beyond it"),
    ("one state and a window", "before the sinks"),
    ("one state and a window", "among the sinks"),
    ("one state and a window", "beyond it"),
    ("one state and a window, norms and a head that sees all", "inside the window"),
    ("one state and a window, norms and a head that sees all", "many rows"),
    ("partitions and a window", "beyond it"),
    ("states and biases", "inside the window"),
]
"""every mixer, and every length with a window alone and beside states"""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run where the tests do."""
    monkeypatch.setattr(triton_backend, "GPU", device)


def hybrid(name: str, device: str) -> PreTrainedModel:
    """One layer; of the family that rotates some of its layers two, the second as the teacher has it."""
    family, mixer = MIXERS[name]
    layers, rotated = (("own", "full"), {"no_rope_layers": [1, 0]}) if family == "smollm3" else (("own",), {})
    model = tiny_model(family, layers, {"own": mixer}, num_hidden_layers=len(layers), **rotated)
    for layer in model.sse_layers().values():
        layer.backend = "triton"
    return model.to(device)


def plainly(model: PreTrainedModel, lengths: tuple[int, ...], steps: int) -> Any:
    """As `plain_steps` after a prefill, without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "GPU", "none")
        return plain_steps(model, *prefill(model, lengths), steps)


def test_every_mixer_and_length_is_tried() -> None:
    assert {name for name, _ in CASES} == set(MIXERS)
    assert {length for _, length in CASES} == set(LENGTHS)


@pytest.mark.parametrize(("name", "length"), CASES)
def test_steps_equal_those_of_plain_layers(name: str, length: str, device: str) -> None:
    lengths, steps = LENGTHS[length]
    model = hybrid(name, device)
    assert not not_fused(model)
    expected, last = plainly(model, lengths, steps + STEPS)
    cache, mask, tokens = prefill(model, lengths)
    step = TokenStep(model, cache, tokens, 40)
    with counted() as launches:
        logits = torch.stack([step().clone() for _ in range(steps)], 1)
    assert device == "cuda" or launches.by_name["ring_kernel"] == steps
    products = 0 if len(lengths) > FEW_ROWS else model.config.num_hidden_layers * steps
    assert device == "cuda" or launches.by_name["row_products_kernel"] == products
    torch.testing.assert_close(logits, expected[:, :steps], **CLOSE)
    tokens = step.tokens.clone()
    step.release()
    mask = torch.cat([mask, mask.new_ones(len(mask), steps)], 1)
    after, end = plain_steps(model, cache, mask, tokens, STEPS)
    torch.testing.assert_close(after, expected[:, steps:], **CLOSE)
    assert torch.equal(end, last)


@pytest.mark.parametrize("name", ["a window beside a head that sees all", "one state and a window"])
def test_padded_rows_run_plain_layers(name: str, device: str) -> None:
    model = hybrid(name, device)
    expected, _ = plainly(model, (11, 7), STEPS)
    cache, mask, tokens = prefill(model, (11, 7))
    step = TokenStep(model, cache, tokens, 40, mask)
    with counted() as launches:
        logits = torch.stack([step().clone() for _ in range(STEPS)], 1)
    assert not launches.by_name["ring_kernel"]
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_rows_are_chosen_from_a_ring(device: str) -> None:
    """Beams choose among the rows of a cache, which then go on as those."""
    model = hybrid("one state and a window, norms and a head that sees all", device)
    expected, _ = plainly(model, (13, 13), 2 * STEPS)
    cache, mask, tokens = prefill(model, (13, 13))
    step = TokenStep(model, cache, tokens, 40)
    for _ in range(STEPS):
        step()
    swapped = torch.tensor([1, 0], device=device)
    step.release()
    cache.batch_select_indices(swapped)
    mask = torch.cat([mask, mask.new_ones(2, STEPS)], 1)
    after, _ = plain_steps(model, cache, mask, step.tokens[swapped], STEPS)
    torch.testing.assert_close(after, expected[swapped, STEPS:], **CLOSE)
