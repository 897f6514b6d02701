"""What must hold whatever the numbers are: symmetries, limits, boundaries and causality."""

import dataclasses as dc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.cases import BACKENDS, CHUNKED, Case, run, run_with_gradients
from tests.tolerance import assert_same

EVERY = ("reference", *BACKENDS)
Inputs = dict[str, Tensor]


def rows(inputs: Inputs, start: int, end: int) -> Inputs:
    """Tokens start to end of every input that has tokens."""
    return {name: x if name == "initial_state" else x[start:end] for name, x in inputs.items()}


def splice(first: Inputs, second: Inputs, at: int) -> Inputs:
    """Tokens of `first` up to `at`, of `second` from there on."""
    return {name: x if name == "initial_state" else torch.cat([x[:at], second[name][at:]]) for name, x in first.items()}


def gla(case: Case, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Plain gated linear attention, token by token."""
    outs = []
    for start, end in pairwise(case.cu_seqlens.tolist()):
        S = torch.zeros(case.heads, case.dim, case.value_dim, dtype=q.dtype)
        for t in range(start, end):
            S = log_decay[t].exp()[..., None] * S + k[t][..., None] * v[t][:, None]
            outs.append(torch.einsum("hd,hdv->hv", q[t] * case.dim**-0.5, S))
    return torch.stack(outs)


@pytest.mark.parametrize("backend", EVERY)
def test_one_partition_is_gla_plus_gla(backend: str) -> None:
    case = Case(lengths=(70, 9), num_partitions=1, initial_state=False)
    x = case.inputs()
    expected = gla(case, x["q"], x["k"], x["v"], x["log_decay"])
    expected += gla(case, x["shared q"], x["shared k"], x["v"], x["shared log_decay"])
    assert_same(run(case, backend)[0], expected, "o")


@pytest.mark.parametrize("backend", EVERY)
def test_all_partitions_selected_is_a_sum_of_gated_glas(backend: str) -> None:
    case = Case(lengths=(70, 9), top_k=4, shared=False, initial_state=False)
    x = case.inputs()
    e = x["router_logits"].softmax(-1)[:, :, None, None]
    expected = sum(gla(case, e[:, p] * x["q"], e[:, p] * x["k"], x["v"], x["log_decay"]) for p in range(4))
    assert isinstance(expected, Tensor)
    assert_same(run(case, backend)[0], expected, "o")


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("per_partition", [False, True])
def test_renaming_partitions_changes_nothing_but_the_order_of_states(backend: str, per_partition: bool) -> None:
    case = Case(lengths=(40, 30), top_k=2, per_partition=per_partition)
    x = case.inputs()
    order = torch.tensor([2, 0, 3, 1])
    with_shared = torch.cat([order, torch.tensor([4])])
    renamed = {**x, "router_logits": x["router_logits"][:, order], "initial_state": x["initial_state"][:, with_shared]}
    if per_partition:
        renamed.update({name: x[name][:, order] for name in ("q", "k", "v")})
    (o, final), (renamed_o, renamed_final) = run(case, backend, x), run(case, backend, renamed)
    assert_same(renamed_o, o, "o")
    assert_same(renamed_final, final[:, with_shared], "final")


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("cut", [0, 1, 63, 64, 100, 130])
def test_two_calls_with_carried_state_are_one_call(backend: str, cut: int) -> None:
    case, x = Case(lengths=(130,), top_k=2), Case(lengths=(130,), top_k=2).inputs()
    o, final = run(case, backend, x)
    first_o, state = run(Case(lengths=(cut,), top_k=2), backend, rows(x, 0, cut))
    second = {**rows(x, cut, 130), "initial_state": state}
    second_o, second_final = run(Case(lengths=(130 - cut,), top_k=2), backend, second)
    assert_same(torch.cat([first_o, second_o]), o, "o")
    assert_same(second_final, final, "final")


@pytest.mark.parametrize("backend", CHUNKED)
@pytest.mark.parametrize("settings_", [{}, {"delta": True}], ids=str)
def test_decoding_token_by_token_is_prefill(backend: str, settings_: dict[str, Any]) -> None:
    """Three sequences decoded together, each call one token of each, the state overwritten in place."""
    case = Case(lengths=(70, 70, 70), top_k=2, groups=2, **settings_)
    x = case.inputs()
    o, final = run(case, backend, x)
    state = x["initial_state"].clone()
    step = Case(lengths=(1, 1, 1), top_k=2, groups=2, **settings_)
    outs = []
    for t in range(70):
        token = {name: v[[t, 70 + t, 140 + t]] for name, v in x.items() if name != "initial_state"}
        out, returned = run(step, "recurrent", {**token, "initial_state": state}, inplace_state=True)
        assert returned.data_ptr() == state.data_ptr()
        outs.append(out)
    assert_same(torch.stack(outs, dim=1).flatten(0, 1), o, "o")
    assert_same(state, final, "final")


@pytest.mark.parametrize("backend", EVERY)
def test_partitions_nobody_writes_keep_their_state_to_the_bit(backend: str) -> None:
    case = Case(lengths=(80, 3, 0))
    x = case.inputs()
    x["router_logits"][:, 2] -= 100.0
    _, final = run(case, backend, x)
    assert torch.equal(final[:, 2], x["initial_state"][:, 2])
    assert torch.equal(final[2], x["initial_state"][2])
    assert not torch.equal(final[0, :2], x["initial_state"][0, :2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", [0, 3])
def test_all_tokens_in_one_partition(backend: str, target: int) -> None:
    case = Case(lengths=(130, 5))
    x = case.inputs()
    x["router_logits"][:, target] += 30.0
    exact = run_with_gradients(case, "reference", x)
    for name, value in run_with_gradients(case, backend, x).items():
        assert_same(value, exact[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits_route_to_the_first_partitions(backend: str) -> None:
    case = Case(lengths=(20,), top_k=2, initial_state=False)
    x = {**case.inputs(), "router_logits": torch.zeros(20, 4, dtype=torch.float64)}
    _, final = run(case, backend, x)
    assert final[:, :2].ne(0).any()
    assert final[:, 2:4].eq(0).all()
    assert_same(final, run(case, "reference", x)[1], "final")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_runs_are_equal_to_the_bit(backend: str) -> None:
    case = Case(lengths=(70, 40), top_k=2, dim=8, value_dim=8)
    first, second = run_with_gradients(case, backend), run_with_gradients(case, backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


def affects(change: Callable[[Inputs], None], case: Case, backend: str) -> tuple[Tensor, Tensor]:
    """Output before and after a change of the inputs."""
    changed = {name: x.clone() for name, x in case.inputs().items()}
    change(changed)
    return run(case, backend)[0], run(case, backend, changed)[0]


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("poison", [None, float("nan")], ids=["other values", "nan"])
@pytest.mark.parametrize("delta", [False, True], ids=["gla", "delta"])
def test_sequences_do_not_leak(backend: str, poison: float | None, delta: bool) -> None:
    """Everything of sequence 0 changes, its routing and its state included: sequence 1 keeps every bit."""
    case = Case(lengths=(50, 90), top_k=2, value_dim=8, delta=delta)
    other = dc.replace(case, seed=1).inputs()

    def change(x: Inputs) -> None:
        for name, tensor in x.items():
            part = slice(0, 1) if name == "initial_state" else slice(0, 50)
            tensor[part] = other[name][part] if poison is None or name == "router_logits" else poison

    before, after = affects(change, case, backend)
    assert not torch.equal(before[:50], after[:50])
    assert torch.equal(before[50:], after[50:])


@pytest.mark.parametrize("backend", CHUNKED)
@given(
    tokens=st.integers(2, 200), cut=st.integers(1, 199), top_k=st.integers(1, 4), shared=st.booleans(),
    groups=st.integers(1, 2), seed=st.integers(0, 9), single=st.booleans(), delta=st.booleans(),
)  # fmt: skip
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_nothing_depends_on_later_tokens(
    backend: str, tokens: int, cut: int, top_k: int, shared: bool, groups: int, seed: int, single: bool, delta: bool
) -> None:
    """New tokens from `cut` on, other routing included, or no tokens there at all: earlier outputs keep every bit.

    Exact for head dimensions that are multiples of 4; odd ones shift the alignment that matrix libraries round by.
    """
    cut = min(cut, tokens - 1)
    settings_ = {"top_k": top_k, "shared": shared, "groups": groups, "dim": 8, "value_dim": 12, "delta": delta}
    case = Case(lengths=(tokens,), seed=seed, **settings_)  # type: ignore[arg-type]
    dtype = torch.float32 if single else torch.float64
    x, other = case.inputs(dtype), Case(lengths=(tokens,), seed=seed + 10, **settings_).inputs(dtype)  # type: ignore[arg-type]
    o, _ = run(case, backend, x)
    changed, _ = run(case, backend, splice(x, other, cut))
    shorter, _ = run(Case(lengths=(cut,), **settings_), backend, rows(x, 0, cut))  # type: ignore[arg-type]
    assert torch.equal(changed[:cut], o[:cut])
    assert torch.equal(shorter, o[:cut])


@pytest.mark.parametrize("backend", CHUNKED)
def test_packing_equals_one_call_per_sequence(backend: str) -> None:
    case = Case(lengths=(33, 0, 70, 1, 64), top_k=2)
    x = case.inputs()
    o, final = run(case, backend, x)
    for s, (start, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
        alone = {**rows(x, start, end), "initial_state": x["initial_state"][s : s + 1]}
        alone_o, alone_final = run(Case(lengths=(end - start,), top_k=2), backend, alone)
        assert_same(alone_o, o[start:end], "o")
        assert_same(alone_final[0], final[s], "final")


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5), num_partitions=st.integers(1, 6), data=st.data(),
    groups=st.integers(1, 3), shared=st.booleans(), per_partition=st.booleans(), seed=st.integers(0, 99),
    delta=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_any_case_equals_the_reference(
    lengths: list[int], num_partitions: int, data: st.DataObject, groups: int, shared: bool, per_partition: bool,
    seed: int, delta: bool,
) -> None:  # fmt: skip
    top_k = data.draw(st.integers(1, num_partitions))
    case = Case(
        lengths=tuple(lengths), num_partitions=num_partitions, top_k=top_k, groups=groups,
        shared=shared, per_partition=per_partition, seed=seed, delta=delta,
    )  # fmt: skip
    o, final = run(case, "reference")
    for backend in BACKENDS:
        other_o, other_final = run(case, backend)
        assert_same(other_o, o, f"{backend} o")
        assert_same(other_final, final, f"{backend} final")
