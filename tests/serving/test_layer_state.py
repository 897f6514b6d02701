"""Layers over rows of pages equal the package's own layers, whatever the steps in which the tokens come."""

import dataclasses as dc
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.serving.pages import TableRotary, layer_io, run_steps, served_layer
from sse_convert.mixers import SlidingMixer, SSEMixer, SSESlidingMixer
from tests.modeling.tiny import VOCAB, tiny_model

DELTA: dict[str, Any] = {"update": "delta", "k_feature_map": "l2", "state_heads": "query", "decay_params": "separate"}
MIXERS = {
    "gla": SSEMixer(top_k=2, qk_rank=4),
    "delta": SSEMixer(**DELTA, num_partitions=6, top_k=2, qk_rank=4),
    "beside a window": SSESlidingMixer(**DELTA, qk_rank=4, window=5, sinks=2),
    "no sinks": SSESlidingMixer(qk_rank=4, window=4, sinks=0),
    "window": SlidingMixer(window=5, sinks=2),
}
LENGTHS = (23, 9, 1)
"""tokens of the requests in the end"""
STEPS = ({0: 7}, {0: 5, 1: 1}, {2: 1, 1: 2, 0: 1}, {0: 1, 1: 6}, {0: 9})
"""new tokens of each request, step by step: chunks, single tokens, and both at once"""


@pytest.mark.parametrize("name", MIXERS)
def test_equals_the_layer_of_the_package(name: str) -> None:
    model = tiny_model("qwen3", ("it",) * 4, {"it": dc.asdict(MIXERS[name])}, dtype=torch.float64)
    rotary = TableRotary(model.model, 64)
    served = served_layer(model, 1, rotary, rows=5, state_type=torch.float32)
    rows = [layer_io(model, 1, torch.randint(3, VOCAB, (1, length))) for length in LENGTHS]
    found = run_steps(served, [x for x, _ in rows], STEPS, slots=(3, 1, 4))
    for request, (_, expected) in enumerate(rows):
        torch.testing.assert_close(found[request], expected, rtol=1e-4, atol=1e-5)
    for page in served.pages:
        assert page[2].isnan().all(), "a row that is nobody's was written"


@pytest.mark.parametrize("first", [{0: 1}, {0: 3}])
def test_a_row_begins_anew_without_a_past(first: dict[int, int]) -> None:
    """A request's row holds what the last request left there, of one that begins with one token too."""
    model = tiny_model("qwen3", ("it",) * 4, {"it": dc.asdict(MIXERS["beside a window"])}, dtype=torch.float64)
    served = served_layer(model, 0, TableRotary(model.model, 64), rows=2, state_type=torch.float32)
    for length in (9, 6):
        x, expected = layer_io(model, 0, torch.randint(3, VOCAB, (1, length)))
        [found] = run_steps(served, [x], (first, {0: length - first[0]}), slots=(1,))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing() -> None:
    """Rows of a recorded step that no request has: slot -1."""
    model = tiny_model("qwen3", ("it",) * 4, {"it": dc.asdict(MIXERS["beside a window"])})
    x, _ = layer_io(model, 0, torch.randint(3, VOCAB, (1, 8)))
    results: list[Tensor] = []
    for pads in (0, 2):
        served = served_layer(model, 0, TableRotary(model.model, 64), rows=3, state_type=torch.float32)
        steps = ({0: 7}, {0: 1, **{-1 - pad: 1 for pad in range(pads)}})
        results.append(run_steps(served, [x], steps, slots=(2,))[0])
    torch.testing.assert_close(*results)


def test_states_in_bfloat16_cost_little() -> None:
    model = tiny_model("qwen3", ("it",) * 4, {"it": dc.asdict(MIXERS["delta"])})
    x, expected = layer_io(model, 0, torch.randint(3, VOCAB, (1, 20)))
    served = served_layer(model, 0, TableRotary(model.model, 64), rows=2, state_type=torch.bfloat16)
    [found] = run_steps(served, [x], ({0: 10}, *({0: 1},) * 10), slots=(1,))
    assert served.pages[0].dtype == torch.bfloat16
    error = (found - expected).norm() / expected.norm()
    assert 1e-6 < error < 2e-2
