"""The decode kernel against the definition in float64."""

import dataclasses as dc
from typing import Any

import pytest
import torch
from torch import Tensor

from sse_convert.kernels.triton import fused_recurrent as decode_module
from sse_convert.kernels.triton.fused_recurrent import sse_attention_decode
from sse_convert.kernels.validation import build_inputs
from tests.kernels.cases import SHARED_NAMES, Case, run
from tests.tolerance import assert_same

ONE_EACH = Case(lengths=(1, 1, 1), dim=16, value_dim=16)
CASES = (
    ONE_EACH,
    dc.replace(ONE_EACH, shared=False, num_partitions=1),
    dc.replace(ONE_EACH, num_partitions=1, initial_state=False),
    dc.replace(ONE_EACH, num_partitions=6, top_k=2, groups=3),
    dc.replace(ONE_EACH, num_partitions=5, top_k=5, heads=1, groups=4),
    dc.replace(ONE_EACH, num_partitions=64, top_k=9, shared=False),
    dc.replace(ONE_EACH, num_partitions=9, top_k=1),
    dc.replace(ONE_EACH, write_gate=False),
    dc.replace(ONE_EACH, read_gate=False, top_k=2),
    dc.replace(ONE_EACH, write_gate=False, read_gate=False, top_k=3),
    dc.replace(ONE_EACH, per_partition=True, top_k=2, groups=2),
    dc.replace(ONE_EACH, per_partition=True, top_k=2, shared=False),
    dc.replace(ONE_EACH, decay_scale=80.0),
    dc.replace(ONE_EACH, lengths=(1,) * 7, num_partitions=3, groups=5),
    dc.replace(ONE_EACH, top_k=2),
    dc.replace(ONE_EACH, top_k=3, write_gate=False),
    dc.replace(ONE_EACH, delta=True),
    dc.replace(ONE_EACH, delta=True, top_k=2, groups=2, shared=False, decay_scale=80.0),
    dc.replace(ONE_EACH, delta=True, per_partition=True, top_k=3, write_gate=False),
)
DIMS = ((16, 16), (20, 24), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (64, 256), (256, 16), (17, 5))


def decode(
    case: Case, inputs: dict[str, Tensor], device: str, inplace: bool = False, **overrides: Any
) -> tuple[Tensor, Tensor]:
    """Output and final state of the kernel; the initial state is overwritten if `inplace`."""
    x = {name: tensor.to(device) for name, tensor in inputs.items()}
    shared = tuple(x.pop(name) for name in SHARED_NAMES if name in x) or None
    options = {**case.options(), **overrides}
    on_device = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in options.items()}
    given = build_inputs(**x, shared=shared, max_seqlen=1, **on_device)
    o, final = sse_attention_decode(given, inplace_state=inplace)
    assert not inplace or final is given.initial_state
    return o, final


def rounded(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs that `dtype` holds exactly; states stay float32."""
    return {name: x.float() if name == "initial_state" else x.to(dtype) for name, x in case.inputs().items()}


def exact(case: Case, inputs: dict[str, Tensor], **overrides: Any) -> tuple[Tensor, Tensor]:
    return run(case, "reference", {name: x.double().cpu() for name, x in inputs.items()}, **overrides)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: Case, device: str) -> None:
    inputs = rounded(case, torch.float32)
    o, final = decode(case, inputs, device)
    expected_o, expected = exact(case, inputs)
    assert_same(o.cpu(), expected_o, "o", 1e-5)
    assert_same(final.cpu(), expected, "final", 1e-5)


@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
@pytest.mark.parametrize("many", [False, True])
def test_head_dims(dim: int, value_dim: int, many: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and many states are cut into blocks of different sizes."""
    blocks = decode_module._blocks
    monkeypatch.setattr(decode_module, "_blocks", lambda _, *rest: blocks(10**6 if many else 1, *rest))
    case = Case(lengths=(1,), dim=dim, value_dim=value_dim, top_k=2, heads=1, groups=2)
    inputs = rounded(case, torch.float32)
    o, final = decode(case, inputs, device, k_map="softmax")
    expected_o, expected = exact(case, inputs, k_map="softmax")
    assert_same(o.cpu(), expected_o, "o", 1e-5)
    assert_same(final.cpu(), expected, "final", 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES[3:5] + CASES[10:11], ids=str)
def test_low_precision_inputs_lose_nothing_but_the_rounding_of_o(case: Case, dtype: torch.dtype, device: str) -> None:
    inputs = rounded(case, dtype)
    o, final = decode(case, inputs, device)
    expected_o, expected = exact(case, inputs)
    assert o.dtype == dtype
    assert final.dtype == torch.float32
    assert_same(o.cpu(), expected_o, "o", torch.finfo(dtype).eps / 2)
    assert_same(final.cpu(), expected, "final", 1e-5)


@pytest.mark.parametrize("name", ["write_strength", "shared_write_strength"])
def test_write_strengths_of_two_types(name: str, device: str) -> None:
    case = dc.replace(ONE_EACH, delta=True)
    inputs = rounded(case, torch.float32)
    inputs[name] = inputs[name].bfloat16()
    o, final = decode(case, inputs, device)
    expected_o, expected = exact(case, inputs)
    assert_same(o.cpu(), expected_o, "o", 1e-5)
    assert_same(final.cpu(), expected, "final", 1e-5)


@pytest.mark.parametrize("k_map", ["softmax", "silu", "relu", "l2", "identity"])
@pytest.mark.parametrize("decay_normalizer", [None, 0.25, 16.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_maps_keys_and_gate_logits(k_map: str, decay_normalizer: float | None, scaled: bool, device: str) -> None:
    case = dc.replace(ONE_EACH, dim=20)
    inputs = rounded(case, torch.float32)
    for name in ("k", "shared k"):
        inputs[name] = 4 * torch.randn_like(inputs[name])
    if decay_normalizer is not None:
        for name in ("log_decay", "shared log_decay"):
            inputs[name] = 30 * torch.randn_like(inputs[name])
    options = {"k_map": k_map, "decay_normalizer": decay_normalizer, "scale": 0.7}
    k_scale = torch.rand(case.heads) + 0.5 if scaled else None
    o, final = decode(case, inputs, device, k_scale=k_scale, **options)
    expected_o, expected = exact(case, inputs, k_scale=None if k_scale is None else k_scale.double(), **options)
    assert_same(o.cpu(), expected_o, "o", 1e-5)
    assert_same(final.cpu(), expected, "final", 1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_only_written_partitions_change(inplace: bool, device: str) -> None:
    case = dc.replace(ONE_EACH, lengths=(1,) * 5, num_partitions=8, top_k=2)
    inputs = rounded(case, torch.float32)
    before = inputs["initial_state"].to(device).clone()
    given = before.clone()
    _, final = decode(case, {**inputs, "initial_state": given}, device, inplace)
    order = inputs["router_logits"].sort(descending=True, stable=True).indices
    for row in range(5):
        written = {*order[row, :2].tolist(), 8}
        for partition in range(9):
            same = torch.equal(final[row, partition], before[row, partition])
            assert same != (partition in written), (row, partition)
    assert torch.equal(given, final if inplace else before)


def test_in_place_and_not_are_equal_to_the_bit(device: str) -> None:
    inputs = rounded(ONE_EACH, torch.float32)
    runs = [decode(ONE_EACH, {name: x.clone() for name, x in inputs.items()}, device, way) for way in (False, True)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_equal_gates_go_to_the_lowest_partition(device: str) -> None:
    case = dc.replace(ONE_EACH, num_partitions=33, top_k=3)
    inputs = rounded(case, torch.float32)
    inputs["router_logits"] = torch.tensor([[0.0] * 33, [0.0] * 30 + [1.0] * 3, [1.0, 0.0, 1.0] * 11])
    _, final = decode(case, inputs, device)
    changed = (final[:, :33].cpu() != inputs["initial_state"][:, :33]).flatten(2).any(2)
    assert [row.nonzero()[:, 0].tolist() for row in changed] == [[0, 1, 2], [30, 31, 32], [0, 2, 3]]


@pytest.mark.parametrize("groups", [1, 2])
def test_steps_equal_the_prefill_of_the_reference(groups: int, device: str) -> None:
    """Decays from 0 to -80 a step, over 40 steps."""
    steps, sequences = 40, 2
    case = Case(lengths=(steps,) * sequences, dim=16, value_dim=16, top_k=2, groups=groups)
    inputs = rounded(case, torch.float32)
    strength = torch.tensor([0.0, 1e-6, 1.0, 20.0, 80.0])[torch.randint(5, (steps * sequences, 1, 1))]
    inputs["log_decay"] = inputs["log_decay"].sign() * strength
    expected_o, expected = exact(case, inputs)
    state = inputs.pop("initial_state").to(device)
    rows = torch.arange(sequences) * steps
    one = dc.replace(case, lengths=(1,) * sequences)
    for step in range(steps):
        token = {name: x[rows + step] for name, x in inputs.items()}
        o, final = decode(one, {**token, "initial_state": state}, device, inplace=True)
        assert_same(o.cpu(), expected_o[rows + step], f"o at {step}", 1e-5)
    assert_same(final.cpu(), expected, "final", 1e-5)


def test_views_and_mixed_types_are_taken_as_they_are(device: str) -> None:
    """Decays shared by channels are expanded, keys are slices of a wider projection, the shared partition is finer."""
    inputs = rounded(ONE_EACH, torch.float32)
    inputs["log_decay"] = inputs["log_decay"][..., :1].expand(-1, -1, 16)
    inputs["k"] = torch.cat([inputs["k"], inputs["q"]], -1)[..., :16]
    inputs["v"] = inputs["v"].bfloat16()
    inputs["q"] = inputs["q"].bfloat16()
    o, final = decode(ONE_EACH, inputs, device)
    expected_o, expected = exact(ONE_EACH, {**inputs, "shared q": inputs["shared q"].bfloat16()})
    assert_same(o.cpu(), expected_o, "o", 2**-8)
    assert_same(final.cpu(), expected, "final", 1e-5)


def test_no_sequences(device: str) -> None:
    case = dc.replace(ONE_EACH, lengths=())
    o, final = decode(case, rounded(case, torch.float32), device)
    assert o.shape == (0, 2, 16)
    assert final.shape == (0, 5, 2, 16, 16)


def test_torch_compile_takes_the_operator_whole(device: str) -> None:
    case = dc.replace(ONE_EACH, top_k=2)
    inputs = {name: x.to(device) for name, x in rounded(case, torch.float32).items()}
    shared = tuple(inputs.pop(name) for name in SHARED_NAMES if name in inputs)
    offsets = case.cu_seqlens.to(device)

    def step(state: Tensor, **x: Tensor) -> Tensor:
        given = build_inputs(
            **x, shared=shared, top_k=2, cu_seqlens=offsets, max_seqlen=1, initial_state=state, k_map="softmax"
        )
        return sse_attention_decode(given, inplace_state=True)[0]

    state = inputs.pop("initial_state")
    plain_state, compiled_state = state.clone(), state.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(compiled_state, **inputs), step(plain_state, **inputs))
        assert torch.equal(compiled_state, plain_state)


@pytest.mark.gpu
def test_captured_in_a_cuda_graph_it_goes_on_from_the_state_in_place() -> None:
    case = dc.replace(ONE_EACH, lengths=(1,) * 8, dim=64, value_dim=64, groups=2)
    inputs = {name: x.cuda() for name, x in rounded(case, torch.float32).items()}
    state = inputs["initial_state"]
    plain = {**inputs, "initial_state": state.clone()}
    expected = [decode(case, plain, "cuda", inplace=True)[0] for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    decode(case, {**inputs, "initial_state": state.clone()}, "cuda", inplace=True)
    offsets = case.cu_seqlens.cuda()
    with torch.cuda.graph(graph):
        o, _ = decode(case, inputs, "cuda", inplace=True, cu_seqlens=offsets)
    for want in expected:
        graph.replay()
        assert torch.equal(o, want)
    assert torch.equal(state, plain["initial_state"])


@pytest.mark.gpu
def test_states_beyond_two_to_the_31_elements() -> None:
    case = Case(lengths=(1,) * 2, num_partitions=64, heads=16, dim=128, value_dim=128, initial_state=False)
    inputs = {name: x.cuda() for name, x in rounded(case, torch.float32).items()}
    small, _ = decode(case, inputs, "cuda")
    repeated = {name: x.repeat(64, *[1] * (x.dim() - 1)) for name, x in inputs.items()}
    o, final = decode(dc.replace(case, lengths=(1,) * 128), repeated, "cuda")
    assert final.numel() > 2**31
    assert_same(o[-2:], small.double(), "o", 1e-5)
    assert final[-1].count_nonzero() > 0
