"""A converted model's `generate` replays its steps by itself, and not where somebody would notice."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import PreTrainedModel

from sse_convert.inference import by_itself, cuda_graphs
from sse_convert.inference.cuda_graphs import TokenStep, has_room
from sse_convert.modeling import generation
from tests.modeling.tiny import HEADS, PAD, prompts, tiny_model

GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A CPU takes the path of a GPU, as far as it goes."""
    for module in (by_itself, cuda_graphs):
        monkeypatch.setattr(module, "runs_graphs", lambda model: True)
    return request.param


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The columns that were held when steps were taken."""
    taken: list[int] = []
    call = TokenStep.__call__
    monkeypatch.setattr(TokenStep, "__call__", lambda self: (taken.append(self.length), call(self))[1])
    return taken


@pytest.fixture
def model(device: str) -> PreTrainedModel:
    return tiny_model("llama", HEADS, dtype=torch.float64).to(device)


def generate(model: PreTrainedModel, lengths: tuple[int, ...] = (11, 7), **options: Any) -> Any:
    ids, mask = (x.to(model.device) for x in prompts(lengths))
    torch.manual_seed(3)
    return model.generate(ids, attention_mask=mask, **{**GREEDY, **options})


def plainly(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(generation, "_around", [])
        return generate(model, **options)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_p": 0.9}, {"max_length": 15, "max_new_tokens": None}])
def test_generate_replays_its_steps_and_gives_the_same(
    model: PreTrainedModel, options: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plainly(model, monkeypatch, **options)
    assert not steps
    assert torch.equal(generate(model, **options), expected)
    assert steps == list(range(11, expected.shape[1] - 1))
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2, "lengths": (11,)}, {"cache_implementation": "static"}]
)
def test_other_ways_to_generate_stay_as_they_are(
    model: PreTrainedModel, options: dict[str, Any], steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.equal(generate(model, **options), plainly(model, monkeypatch, **options))
    assert not steps


def test_hooks_see_every_step(model: PreTrainedModel, steps: list[int]) -> None:
    seen = []
    handle = model.sse_layers()[0].register_forward_hook(lambda *_: seen.append(1))
    generate(model)
    assert len(seen) == GREEDY["max_new_tokens"]
    assert not steps
    handle.remove()
    generate(model)
    assert steps


def test_a_model_in_training_or_in_company_stays_as_it_is(
    model: PreTrainedModel, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(model.train())
    model.eval()
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    generate(model)
    assert not steps
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    generate(model)
    assert steps


@pytest.mark.parametrize(("free", "fits"), [(2 * 2 * 90 * 64, True), (2 * 2 * 90 * 64 - 1, False)])
def test_a_fixed_cache_needs_twice_its_growth(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """90 more columns of 64 bytes for keys and for values, of one layer; memory is counted on a device that is not."""
    x = SimpleNamespace(device=torch.device("cuda"), nbytes=640, shape=(1, 1, 10, 16))
    layer = SimpleNamespace(keys=x, values=x)
    monkeypatch.setattr(cuda_graphs, "_SOFTMAX", (SimpleNamespace,))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 150)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 100, 0))
    assert has_room(SimpleNamespace(layers=[layer]), 100) is fits


def test_without_the_package_nothing_surrounds_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_around", [])
    assert isinstance(generation.stepping(None), nullcontext)
