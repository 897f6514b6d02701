"""Tensor parallelism by hand: devices that each have some of the heads together give what one gives."""

import copy
import dataclasses as dc

import pytest
import torch
from torch import Tensor

from benchmarks.serving.pages import Served, TableRotary, layer_io, pages_for, run_steps, served_layer
from sse_convert.errors import UsageError
from sse_convert.mixers import SSEMixer, SSESlidingMixer
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.attention_dims import AttentionDims, attention_dims
from sse_convert.modeling.tensors import new_tensors
from sse_convert.serving.head_slices import local_config, local_dims, own_part
from sse_convert.serving.layer_state import ServedAttention
from sse_convert.serving.ring import RingWindow
from tests.modeling.tiny import VOCAB, tiny_model

WINDOW = {"window": 5, "sinks": 2}
CASES = {
    "a state for each query head": SSESlidingMixer(state_heads="query", update="delta", k_feature_map="l2", **WINDOW),
    "a state for each key-value head": SSESlidingMixer(decay="scalar", **WINDOW),
    "a state for each query head, no window": SSEMixer(qk_rank=0, top_k=2, state_heads="query"),
    "separate decays": SSEMixer(qk_rank=0, decay_params="separate"),
}


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_devices_together_give_what_one_gives(name: str, devices: int) -> None:
    """Two key-value heads: one each on two devices, each of them on two of four."""
    mixer = CASES[name]
    model = tiny_model("qwen3", ("it",) * 4, {"it": dc.asdict(mixer)}, dtype=torch.float64)
    rotary = TableRotary(model.model, 64)
    x, expected = layer_io(model, 2, torch.randint(3, VOCAB, (1, 12)))
    whole = served_layer(model, 2, rotary, rows=2, state_type=torch.float32)
    parts = [part_of(whole, model.config, mixer, rank, devices, rotary) for rank in range(devices)]
    found = [run_steps(part, [x], ({0: 8}, {0: 1}, {0: 3}), slots=(1,))[0] for part in parts]
    torch.testing.assert_close(torch.stack(found).sum(0), expected, rtol=1e-4, atol=1e-5)
    one = sum(page.numel() for page in whole.pages)
    shares = [sum(page.numel() for page in part.pages) for part in parts]
    assert shares[0] * (devices if mixer.state_heads == "query" else 2) >= one


def part_of(whole: Served, config: object, mixer: SSEMixer, rank: int, devices: int, rotary: TableRotary) -> Served:
    """A layer as one of several devices has it, its output to be added to the others'."""
    dims = attention_dims(config)
    local = local_dims(dims, devices)
    source = copy.deepcopy(whole.source)

    def rows(linear: torch.nn.Linear, heads: int, own: int) -> None:
        kept = own_part(linear.weight.data, (own * dims.head_dim, dims.hidden), rank, devices)
        assert kept.shape[0] * heads == own * linear.weight.shape[0]
        linear.weight = torch.nn.Parameter(kept)

    rows(source.q_proj, dims.query_heads, local.query_heads)
    for projection in (source.k_proj, source.v_proj):
        rows(projection, dims.kv_heads, local.kv_heads)
    columns = own_part(source.o_proj.weight.data, (dims.hidden, local.query_heads * dims.head_dim), rank, devices)
    source.o_proj.weight = torch.nn.Parameter(columns)
    window = None
    if isinstance(mixer, SSESlidingMixer):
        window = RingWindow(window=mixer.window, sinks=mixer.sinks, scale=dims.head_dim**-0.5)
    plain = torch.nn.Module()
    for name, child in source.named_children():
        if not name.startswith("sse_"):
            plain.add_module(name, child)
    spec = spec_for("qwen3")
    layer = ServedAttention(
        plain, local_config(config, local), 0, spec=spec, mixer=mixer, window=window, rotary=rotary
    ).to(torch.float64)
    stored = whole.layer.state_dict()
    for spec_of_tensor in new_tensors(dims, mixer):
        own: Tensor = layer.get_parameter(spec_of_tensor.name)
        own.data = own_part(stored[spec_of_tensor.name], tuple(own.shape), rank, devices).clone()
    pages = pages_for(local, mixer, 2, torch.float32, source.o_proj.weight)
    return Served(plain, layer, source.o_proj, pages)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    dims = AttentionDims(hidden=8, query_heads=12, kv_heads=4, head_dim=8, value_dim=8)
    assert [local_dims(dims, n).kv_heads for n in (1, 2, 4)] == [4, 2, 1]
    assert local_dims(dc.replace(dims, kv_heads=2), 4).query_heads == 3
    for devices in (3, 5, 8):
        with pytest.raises(UsageError, match=f"12 query heads and 4 key-value heads on {devices} devices"):
            local_dims(dims, devices)
