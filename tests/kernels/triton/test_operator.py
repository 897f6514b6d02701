"""The chunked kernels against the definition in float64, and what they promise to the bit."""

import dataclasses as dc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.triton import autograd as operator
from sse_convert.kernels.triton import chunk as launch
from sse_convert.kernels.triton import passes
from tests.covering import arguments, covering_array
from tests.kernels.triton.trials import (
    DECAYS,
    TOLERANCE,
    Inputs,
    Trial,
    assert_right,
    call,
    exact_results,
    forward,
    lay_out,
    results,
    rows,
    splice,
)
from tests.tolerance import assert_same

BF16, FP16 = torch.bfloat16, torch.float16
SHORT = (20, 0, 31, 1, 9)
EDGES = (63, 0, 64, 1, 65)
EVERYTHING = Trial(
    per_partition=True, top_k=2, groups=2, value_dim=24, k_map="softmax", k_scale=True, normalizer=16.0
)  # fmt: skip

FACTORS = {
    "lengths": ((70, 3), SHORT),
    "decays": ("mild", "mixed", {"normalizer": 16.0}),
    "sizes": ((16, 16), (24, 40), (17, 5)),
    "num_partitions": (4, 3, 1),
    "top_k": (1, 2, 3),
    "k_map": ("identity", "softmax", "silu"),
    "groups": (1, 2),
    "layout": ("aligned", "packed"),
    "states": ({}, {"initial_state": True}, {"final_state": True}),
    **dict.fromkeys(("shared", "per_partition", "write_gate", "read_gate", "k_scale"), (False, True)),
}
"""settings of small calls, in float32: some of their combinations cancel beyond what 16 bits can hold"""
LARGE = {
    "sizes": ((80, 96), (64, 128), (128, 128), (256, 16)),
    "dtype": (torch.float32, BF16),
    "decays": ("mild", "mixed"),
}
"""settings of calls whose sizes take blocks of their own"""
BOTH = (
    Trial(heads=2, groups=2, top_k=2),
    Trial(lengths=SHORT, decays="mixed", dtype=BF16),
    Trial(read_gate=False, dtype=FP16),
    Trial(num_partitions=9, target=5, dtype=BF16),
    Trial(top_k=2),
    Trial(top_k=3, read_gate=False),
    dc.replace(EVERYTHING, dtype=BF16, groups=3),
    dc.replace(EVERYTHING, dtype=FP16, k_map="silu", groups=1),
)
"""calls that run in either layout"""
ALIGNED = (
    Trial(lengths=EDGES, top_k=2, groups=2, initial_state=True),
    Trial(dim=64, value_dim=64, top_k=2, groups=2, initial_state=True),
    Trial(lengths=(9,), dim=128, groups=2, num_partitions=2),
    Trial(lengths=(1,)),
    Trial(lengths=(0, 1, 0), initial_state=True),
    Trial(decays="-1e4"),
    Trial(decays="-80", initial_state=True),
    Trial(decays="-80", dtype=FP16),
    Trial(decays="-5", dtype=BF16),
    Trial(decays="0", lengths=(200,), num_partitions=1, initial_state=True),
    Trial(decays="-0.1", lengths=(200,), num_partitions=1, dtype=BF16),
    dc.replace(EVERYTHING, initial_state=True, dtype=BF16, shared=False),
    Trial(k_map="relu", k_scale=True, normalizer=2.0, dtype=FP16),
    Trial(k_map="silu", k_scale=True, normalizer=0.5, dtype=BF16),
    Trial(lengths=(9,), dim=256, value_dim=256, num_partitions=1, dtype=BF16, decays="mixed"),
    Trial(lengths=(0, 1, 5), num_partitions=64, top_k=4, decays="mixed"),
)


def allowed(case: dict[str, Any]) -> bool:
    """Whether there is such a call, whose gates have a gradient: calls with states are never packed, nobody chooses
    more than all partitions, and gates of reads do not sum to 1 over states that are all alike."""
    chosen, partitions = case.get("top_k", 1), case.get("num_partitions", 3)
    packed_states = case.get("layout") == "packed" and case.get("states")
    ones = chosen == partitions > 1 and case.get("write_gate") is False and case.get("read_gate")
    alike = case.get("per_partition") is False and "initial_state" not in case.get("states", {})
    return chosen <= partitions and not packed_states and not (ones and alike)


def to_trial(case: dict[str, Any]) -> Trial:
    """The call with these settings; `sizes`, `states` and `decays` may stand for several fields."""
    fields = {name: value for name, value in case.items() if name not in ("sizes", "states", "decays", "layout")}
    dim, value_dim = case["sizes"]
    decays = case["decays"] if isinstance(case["decays"], dict) else {"decays": case["decays"]}
    return Trial(dim=dim, value_dim=value_dim, **decays, **case.get("states", {}), **fields)


GRID = [
    *((to_trial(case), case["layout"]) for case in covering_array(FACTORS, allowed)),
    *((dc.replace(to_trial(case), lengths=(9,), num_partitions=2), "aligned") for case in covering_array(LARGE)),
    *((trial, layout) for trial in BOTH for layout in ("aligned", "packed")),
    *((trial, "aligned") for trial in ALIGNED),
]


@pytest.mark.parametrize(("trial", "layout"), GRID, ids=str)
def test_equals_float64(trial: Trial, layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(monkeypatch, layout)
    assert_right(trial, trial.rounded(device))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("below", [60.0, 90.0, 200.0])
def test_vanishing_gates(below: float, dtype: torch.dtype, device: str) -> None:
    """e is tiny, or underflows to 0, for a partition that is used only because top_k = N."""
    trial = Trial(top_k=4, dtype=dtype)
    x = trial.rounded(device)
    x["router_logits"][:, 1] -= below
    assert_right(trial, x)


@pytest.mark.parametrize("layout", ["aligned", "packed"])
def test_a_strong_decay_does_not_blur_weak_ones_after_it(
    layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences of sums from a chunk's start would lose the second half's decays beside those of the first."""
    lay_out(monkeypatch, layout)
    trial = Trial(lengths=(130,), num_partitions=1)
    x = trial.rounded(device)
    for name in DECAYS:
        x[name][:] = -0.02
        x[name][:32] = -80.0
    assert_right(trial, x)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_of_many_inputs_is_common_to_the_partitions(name: str, delta: bool, device: str) -> None:
    trial = Trial(lengths=(9,), per_partition=True, top_k=2, delta=delta)
    x = trial.rounded(device)
    assert_right(trial, {**x, name: x[name][:, 0].contiguous()})


@pytest.mark.parametrize("normalizer", [None, 4.0])
def test_infinite_decays(normalizer: float | None, device: str) -> None:
    """A state forgotten for good, at one token in one channel."""
    trial = Trial(initial_state=True, normalizer=normalizer)
    x = trial.rounded(device)
    x["log_decay"][5, :, 3] = -float("inf")
    expected = exact_results(trial, {**x, "log_decay": x["log_decay"].clamp_min(-1e6)})
    found = results(trial, x)
    for name, value in expected.items():
        assert_same(found[name], value, name, 1e-5)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"v": BF16},
        {"q": BF16},
        {"k": FP16, "v": BF16},
        {"log_decay": BF16},
        {"router_logits": BF16},
        {"shared q": BF16},
    ],
    ids=str,
)
def test_mixed_dtypes(dtypes: dict[str, torch.dtype], device: str) -> None:
    """Whatever is given, each gradient has the dtype of its input."""
    trial = Trial(top_k=2)
    x = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in trial.rounded(device).items()}
    found, exact = results(trial, x), exact_results(trial, x)
    for name, value in exact.items():
        assert_same(found[name], value, name, 5e-3)
        assert found[name].dtype == x[name.removeprefix("d ") if name != "o" else "v"].dtype


def test_views_of_any_stride(device: str) -> None:
    trial = Trial(lengths=(20, 3), heads=2, initial_state=True)
    x = trial.rounded(device)
    x["log_decay"][:] = x["log_decay"][..., :1]
    expected, names = results(trial, x), list(x)
    strided = {name: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t for name, t in x.items()}
    strided["log_decay"] = x["log_decay"][..., :1].expand_as(x["log_decay"])
    o, final = forward(trial, strided)
    assert torch.equal(o, expected["o"])
    assert final is not None
    assert torch.equal(final, expected["final"])
    leaves = [t.requires_grad_() for t in strided.values()]
    gradient = torch.autograd.grad(call(trial, strided)[0].sum(), leaves)
    contiguous = [t.clone().requires_grad_() for t in x.values()]
    reference = torch.autograd.grad(call(trial, dict(zip(names, contiguous, strict=True)))[0].sum(), contiguous)
    for name, a, b in zip(names, gradient, reference, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("wanted", "source"),
    [
        *((name, "o") for name in ("q", "log_decay", "router_logits", "shared k", "k_scale")),
        *((name, "final") for name in ("q", "v", "initial_state")),
    ],
)
def test_one_gradient_alone(wanted: str, source: str, device: str) -> None:
    """Nothing else requires a gradient, and only one of the two results is used."""
    trial = Trial(lengths=(20, 3), top_k=2, initial_state=True, k_scale=True)
    x = trial.rounded(device)

    def gradient(inputs: Inputs, backend: str) -> Tensor:
        leaf = inputs[wanted].clone().requires_grad_()
        o, final = call(trial, {**inputs, wanted: leaf}, backend)
        result = o if source == "o" else final
        assert result is not None
        return torch.autograd.grad(result.sum(), leaf, materialize_grads=True)[0]

    exact = gradient({name: t.double() for name, t in x.items()}, "varlen")
    assert_same(gradient(x, "triton"), exact, wanted, 1e-5)


@pytest.mark.parametrize("lengths", [(0,), (0, 0)], ids=str)
@pytest.mark.parametrize("states", [False, True])
def test_gradients_of_no_tokens(lengths: tuple[int, ...], states: bool, device: str) -> None:
    trial = Trial(lengths=lengths, initial_state=states)
    assert_right(trial, trial.rounded(device))


BITS = (
    Trial(lengths=(100,), num_partitions=2, top_k=2, dtype=BF16, decays="mixed"),
    Trial(lengths=(100,), num_partitions=2, dtype=BF16, initial_state=True, groups=2),
    Trial(lengths=(100,), num_partitions=2, k_map="softmax", normalizer=4.0),
)


@pytest.mark.parametrize(
    ("cut", "trial", "later"),
    arguments({"cut": (1, 37, 70), "trial": BITS, "later": ("other", "stronger", "weaker", "absent")}),
    ids=str,
)
def test_nothing_depends_on_later_tokens(
    trial: Trial, cut: int, later: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other keys, values, decays and routing from `cut` on, or no tokens there: earlier outputs keep every bit."""
    lay_out(monkeypatch, "aligned")
    x = trial.rounded(device)
    o, _ = forward(trial, x)
    if later == "absent":
        changed, _ = forward(dc.replace(trial, lengths=(cut,)), rows(x, 0, cut))
    else:
        y = dc.replace(trial, seed=7).rounded(device)
        strength = {"other": None, "stronger": -80.0, "weaker": 0.0}[later]
        if strength is not None:
            y |= {name: torch.full_like(y[name], strength) for name in DECAYS}
        changed, _ = forward(trial, splice(x, y, cut))
        assert not torch.equal(changed[cut:], o[cut:])
    assert torch.equal(changed[:cut], o[:cut])


@pytest.mark.parametrize(
    ("trial", "poison"), [*zip(BITS, (False, True, True), strict=True)], ids=["other values", "nan", "nan, mapped"]
)
def test_sequences_do_not_leak(trial: Trial, poison: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the first sequence changes, or is NaN: results and gradients of the others keep every bit."""
    lay_out(monkeypatch, "aligned")
    trial = dc.replace(trial, lengths=(50, 0, 80))
    x, other = trial.rounded(device), dc.replace(trial, seed=7).rounded(device)
    for name, tensor in other.items():
        if poison and name != "router_logits":
            tensor.fill_(float("nan"))
    changed = {**splice(other, x, 50), "k_scale": x["k_scale"]} if "k_scale" in x else splice(other, x, 50)
    if "initial_state" in x:
        changed["initial_state"] = torch.cat([other["initial_state"][:1], x["initial_state"][1:]])
    before, after = results(trial, x), results(trial, changed)
    for name, value in before.items():
        part = slice(1, None) if name in ("final", "d initial_state") else slice(50, None)
        assert torch.equal(after[name][part], value[part]), name
    assert not torch.equal(after["o"][:50], before["o"][:50])


@pytest.mark.parametrize("trial", BITS, ids=str)
def test_a_sequence_gives_the_same_bits_alone(trial: Trial, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(monkeypatch, "aligned")
    trial = dc.replace(trial, lengths=(50, 80))
    x = trial.rounded(device)
    o, final = forward(trial, x)
    alone = rows(x, 50, 130) | {name: x[name][1:] for name in ("initial_state",) if name in x}
    alone_o, alone_final = forward(dc.replace(trial, lengths=(80,)), alone)
    assert torch.equal(alone_o, o[50:])
    assert final is None or torch.equal(alone_final, final[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trial", "layout"),
    [(dc.replace(EVERYTHING, dtype=BF16, lengths=(20, 0, 9)), "aligned"), (BITS[0], "packed")],
    ids=str,
)
def test_two_runs_are_equal_to_the_bit(trial: Trial, layout: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(monkeypatch, layout)
    x = trial.rounded(device)
    first, second = results(trial, x), results(trial, x)
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@pytest.mark.parametrize(("trial", "layout"), [(BITS[1], "aligned"), (Trial(lengths=SHORT), "packed")], ids=str)
def test_nothing_recorded_changes_no_bit(
    trial: Trial, layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(monkeypatch, layout)
    x = trial.rounded(device)
    recorded, (o, final) = results(trial, x), forward(trial, x)
    assert torch.equal(o, recorded["o"])
    assert final is None or torch.equal(final, recorded["final"])


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 64])
def test_two_calls_with_carried_state_are_one_call(cut: int, dtype: torch.dtype, device: str) -> None:
    """States are float32, so both calls are as near to float64 as one is."""
    trial = Trial(lengths=(100,), num_partitions=2, initial_state=True, dtype=dtype)
    x = trial.rounded(device)
    exact = exact_results(trial, x)
    first_o, state = forward(dc.replace(trial, lengths=(cut,)), rows(x, 0, cut))
    assert state is not None
    second = {**rows(x, cut, 100), "initial_state": state}
    second_o, final = forward(dc.replace(trial, lengths=(100 - cut,)), second)
    assert final is not None
    assert_same(torch.cat([first_o, second_o]), exact["o"], "o", TOLERANCE[dtype])
    assert_same(final, exact["final"], "final", TOLERANCE[dtype])


def test_decoding_after_a_prefill_is_one_prefill(device: str) -> None:
    trial = Trial(lengths=(70, 9), top_k=2, groups=2, initial_state=True)
    x, exact = trial.rounded(device), exact_results(trial, trial.rounded(device))
    kept = [*range(66), *range(70, 75)]
    prefill = {name: t if name == "initial_state" else t[kept] for name, t in x.items()}
    _, state = forward(dc.replace(trial, lengths=(66, 5)), prefill)
    for step in range(4):
        at = torch.tensor([66 + step, 75 + step])
        token = {name: t[at] for name, t in x.items() if name != "initial_state"}
        shared = tuple(token.pop(f"shared {name}") for name in ("q", "k", "log_decay"))
        options = {**trial.options(), "cu_seqlens": torch.tensor([0, 1, 2])}
        o, state = sse_attention(
            **token, shared=shared, initial_state=state, output_final_state=True, backend="triton", **options
        )
        assert_same(o, exact["o"][at], f"o of step {step}", 1e-5)
    assert state is not None
    assert_same(state, exact["final"], "final", 1e-5)


SLABS = (
    (Trial(lengths=(20, 200), num_partitions=1, initial_state=True), "aligned"),
    (Trial(lengths=(20, 200), num_partitions=1, dtype=BF16, decays="-0.1"), "aligned"),
    (Trial(lengths=(20, 200), num_partitions=1), "packed"),
)


@pytest.mark.parametrize(
    ("group", "slab", "case"), arguments({"group": (1, 3), "slab": (1, 2**14), "case": SLABS}), ids=str
)
def test_groups_and_slabs_of_any_size(
    group: int, slab: int, case: tuple[Trial, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, layout = case
    lay_out(monkeypatch, layout)
    monkeypatch.setattr(operator, "group_chunks", lambda chunks, heads: group)
    monkeypatch.setattr(launch, "SLAB_BYTES", slab)
    assert_right(trial, trial.rounded(device))


@pytest.mark.parametrize(
    ("trial", "packed"),
    [
        (Trial(lengths=(900,)), False),
        (Trial(lengths=(30,) * 30), True),
        (Trial(lengths=(30,) * 30, initial_state=True), False),
        (Trial(lengths=(30,) * 30, final_state=True), False),
        (Trial(lengths=(900,), num_partitions=64), True),
    ],
    ids=str,
)
def test_segments_share_chunks_where_padding_would_cost_more(
    trial: Trial, packed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LaidOutError(Exception):
        pass

    def spy(*args: object, packed: bool, **kwargs: object) -> None:
        raise LaidOutError(packed)

    monkeypatch.setattr(operator, "slot_layout", spy)
    with pytest.raises(LaidOutError, match=str(packed)):
        forward(trial, trial.rounded(device))


@pytest.mark.parametrize(
    "trial",
    [
        dc.replace(EVERYTHING, lengths=(9, 3), initial_state=True),
        Trial(lengths=(9, 3), shared=False, write_gate=False, read_gate=False, top_k=3),
        Trial(lengths=(9, 3), top_k=2, groups=3, k_map="silu"),
    ],
    ids=str,
)
def test_operators_pass_opcheck(trial: Trial, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operators, seen = {x._opoverload: x for x in (operator._forward, operator._backward)}, {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in operators:
                seen[function] = args
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(passes, "is_compiling", lambda: True)
    with Watch():
        results(trial, trial.rounded(device))
    assert seen.keys() == operators.keys()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for function, args in seen.items():
        torch.library.opcheck(operators[function], args, test_utils=checks)
