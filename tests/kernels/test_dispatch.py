"""The public operator: what it refuses, and with which words; what `auto` picks; states written in place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels import dispatch
from sse_convert.kernels.dispatch import BACKENDS, available_backends, explain, sse_attention
from tests.kernels.cases import BACKENDS as EXACT
from tests.kernels.cases import SHARED_NAMES, Case, run, run_with_gradients

Inputs = dict[str, Tensor]
CASE = Case(lengths=(3, 4), groups=2)


def set_to(name: str, value: Tensor) -> Callable[[Inputs], None]:
    return lambda x: x.update({name: value})


BAD_SHAPES = [
    (set_to("q", torch.zeros(7, 4)), "q has shape [7, 4]", "3 or 4 dimensions"),
    (set_to("router_logits", torch.zeros(7)), "router_logits has shape [7]", "2 dimensions"),
    (set_to("q", torch.zeros(7, 3, 8)), "q has 3 heads and k has 2", "a multiple of the heads of k"),
    (set_to("q", torch.zeros(6, 4, 8)), "q has shape [6, 4, 8]", "q [7, 4, 8]"),
    (set_to("q", torch.zeros(7, 3, 4, 8)), "q has shape [7, 3, 4, 8]", "q [7, 4, 4, 8]"),
    (set_to("k", torch.zeros(7, 3, 2, 8)), "k has shape [7, 3, 2, 8]", "k [7, 4, 2, 8]"),
    (set_to("v", torch.zeros(7, 1, 6)), "v has shape [7, 1, 6]", "v [7, 2, 6]"),
    (set_to("log_decay", torch.zeros(7, 2, 1)), "log_decay has shape [7, 2, 1]", "log_decay [7, 2, 8]"),
    (set_to("initial_state", torch.zeros(2, 4, 2, 8, 6)), "initial_state has shape [2, 4, 2, 8, 6]", "[2, 5, 2, 8, 6]"),
    (set_to("shared k", torch.zeros(7, 4, 8)), "shared k has shape [7, 4, 8]", "shared k [7, 2, 8]"),
    (set_to("v", torch.zeros(7, 2, 6, dtype=torch.int64)), "v has dtype torch.int64", "v of a float dtype"),
]


@pytest.mark.parametrize(("change", "what", "expected"), BAD_SHAPES, ids=[what for _, what, _ in BAD_SHAPES])
def test_wrong_tensors_are_named_with_both_shapes(change: Callable[[Inputs], None], what: str, expected: str) -> None:
    inputs = CASE.inputs()
    change(inputs)
    with pytest.raises(ShapeError) as caught:
        run(CASE, "auto", inputs)
    assert what in caught.value.what
    assert expected in caught.value.expected


def test_all_disagreements_come_at_once() -> None:
    inputs = {**CASE.inputs(), "v": torch.zeros(7, 1, 6), "log_decay": torch.zeros(7, 2, 1)}
    with pytest.raises(ShapeError, match=r"v has shape \[7, 1, 6\]; log_decay has shape \[7, 2, 1\]"):
        run(CASE, "auto", inputs)


@pytest.mark.parametrize(
    ("cu_seqlens", "what"),
    [
        (torch.tensor([0.0, 7.0]), "cu_seqlens is torch.float32 [2]"),
        (torch.tensor([[0, 7]]), "cu_seqlens is torch.int64 [1, 2]"),
        (torch.tensor([0, 6]), "cu_seqlens is [0, 6]"),
        (torch.tensor([1, 7]), "cu_seqlens is [1, 7]"),
        (torch.tensor([0, 5, 3, 7]), "cu_seqlens is [0, 5, 3, 7]"),
    ],
    ids=str,
)
def test_wrong_offsets_are_refused(cu_seqlens: Tensor, what: str) -> None:
    case = Case(lengths=(7,), initial_state=False)
    with pytest.raises(ShapeError) as caught:
        run(case, "auto", cu_seqlens=cu_seqlens)
    assert caught.value.what == what


def test_values_per_partition_need_values_of_the_shared_partition() -> None:
    case = Case(per_partition=True)
    inputs = case.inputs()
    del inputs["shared v"]
    with pytest.raises(ShapeError, match=r"shared = \(q, k, log_decay, v\) when v is per partition"):
        run(case, "auto", inputs)
    with pytest.raises(ShapeError, match="shared has 1 tensors"):
        run(Case(), "auto", {n: x for n, x in Case().inputs().items() if n not in ("shared k", "shared log_decay")})


def test_shared_values_may_replace_common_ones() -> None:
    case, x = CASE, CASE.inputs()
    same = run(case, "reference", {**x, "shared v": x["v"].clone()})
    assert torch.equal(same[0], run(case, "reference", x)[0])
    for backend in EXACT:
        other = run(case, backend, {**x, "shared v": torch.zeros_like(x["v"])})
        torch.testing.assert_close(other, run(case, "reference", {**x, "shared v": torch.zeros_like(x["v"])}))


@pytest.mark.parametrize("value", [0, 5])
def test_out_of_range_top_k_is_refused(value: int) -> None:
    with pytest.raises(UsageError, match=f"top_k is {value}\nexpected: 1 to the number of partitions \\(4\\)"):
        run(CASE, "auto", top_k=value)


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'vralen'\nexpected: one of auto, reference, varlen, rec"):
        run(CASE, "vralen")
    with pytest.raises(UsageError, match="'vralen'"):
        explain("vralen")


def test_every_backend_is_explained() -> None:
    assert [name for name in available_backends() if name != "triton"] == list(BACKENDS[:-1])
    assert all(explain(name) for name in BACKENDS)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the torch backends that ran."""
    names: list[str] = []
    run_backend = dispatch._on_torch
    monkeypatch.setattr(dispatch, "_on_torch", lambda name, *rest: names.append(name) or run_backend(name, *rest))
    return names


def test_auto_decodes_with_recurrent_and_trains_with_varlen(chosen: list[str]) -> None:
    one_each, short = Case(lengths=(1, 1, 1)), Case(lengths=(0, 2, 1))
    run(one_each, "auto")
    run(short, "auto")
    run(one_each, "auto", {name: x.requires_grad_() for name, x in one_each.inputs().items()})
    with torch.no_grad():
        run(one_each, "auto", {name: x.requires_grad_() for name, x in one_each.inputs().items()})
    assert chosen == ["recurrent", "varlen", "varlen", "recurrent"]


@pytest.mark.parametrize("backend", ["reference", *EXACT])
def test_state_written_in_place(backend: str) -> None:
    x = CASE.inputs()
    o, final = run(CASE, backend)
    given = x["initial_state"]
    inplace_o, inplace_final = run(CASE, backend, x, inplace_state=True)
    assert inplace_final.data_ptr() == given.data_ptr()
    assert torch.equal(given, final)
    assert torch.equal(inplace_o, o)


@pytest.mark.parametrize("backend", ["reference", *EXACT])
def test_initial_state_is_left_alone_otherwise(backend: str) -> None:
    x = CASE.inputs()
    before = x["initial_state"].clone()
    run(CASE, backend, x)
    assert torch.equal(x["initial_state"], before)


def test_state_in_place_needs_a_state_and_no_gradients() -> None:
    x = CASE.inputs()
    with pytest.raises(UsageError, match="inplace_state with inputs that require gradients"):
        run(CASE, "auto", {**x, "q": x["q"].requires_grad_()}, inplace_state=True)
    with pytest.raises(UsageError, match="initial_state None"):
        run(Case(initial_state=False), "auto", inplace_state=True)
    single = {**x, "q": x["q"].detach(), "initial_state": x["initial_state"].float()}
    with pytest.raises(UsageError, match=r"torch\.float32\nexpected: an initial_state in torch\.float64"):
        run(CASE, "auto", single, inplace_state=True)


def test_decoding_touches_the_selected_states_only() -> None:
    """Memory of the partitions that are not selected is neither read nor written: NaN there stays there."""
    case = Case(lengths=(1, 1), top_k=2)
    x = case.inputs()
    x["router_logits"][:, 2:] -= 50.0
    expected_o, expected = run(case, "reference", x)
    x["initial_state"][:, 2:4] = float("nan")
    o, final = run(case, "recurrent", x, inplace_state=True)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(final[:, [0, 1, 4]], expected[:, [0, 1, 4]])
    assert final[:, 2:4].isnan().all()


@pytest.mark.parametrize("backend", ["reference", *EXACT])
def test_autocast_does_not_lower_the_precision(backend: str) -> None:
    inputs = CASE.inputs(torch.float32)
    o, final = run(CASE, backend, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        cast_o, cast_final = run(CASE, backend, inputs)
    assert torch.equal(cast_o, o)
    assert torch.equal(cast_final, final)


def test_a_backward_inside_autocast_does_not_either() -> None:
    inputs = CASE.inputs(torch.float32)
    expected = run_with_gradients(CASE, "varlen", inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_with_gradients(CASE, "varlen", inputs)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_final_state_only_on_request_and_one_sequence_by_default() -> None:
    x = Case(shared=False).inputs()
    o, final = sse_attention(**x, top_k=1)
    assert final is None
    assert torch.equal(o, run(Case(shared=False), "auto")[0])


def test_scale_defaults_to_the_inverse_root_of_the_key_dim() -> None:
    assert torch.equal(run(CASE, "varlen")[0], run(CASE, "varlen", scale=8**-0.5)[0])
    torch.testing.assert_close(run(CASE, "varlen", scale=1.0)[0], run(CASE, "varlen")[0] * 8**0.5)


def test_misspelt_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="cu_seqlen"):
        sse_attention(**Case(shared=False).inputs(), top_k=1, cu_seqlen=torch.tensor([0, 5]))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "case",
    [
        Case(heads=5, groups=2, initial_state=False, lengths=(3, 70), top_k=2),
        Case(heads=3, initial_state=False, delta=True, lengths=(9,), top_k=2),
        Case(heads=3, groups=3, initial_state=False, per_partition=True),
        Case(heads=3, initial_state=False, shared=False),
    ],
    ids=str,
)
def test_heads_in_turn_where_no_state_is_kept(case, monkeypatch):
    """Two at a time, and what is left over, give what all of them give together."""
    monkeypatch.setattr(dispatch, "STATES_AT_ONCE", 2 * 8 * len(case.lengths) * (4 + case.shared) * 8 * 6)
    sizes = []
    original = dispatch._on_torch

    def counting(backend, x, inplace_state):
        sizes.append(x.k.shape[2])
        return original(backend, x, inplace_state)

    monkeypatch.setattr(dispatch, "_on_torch", counting)
    k_scale = torch.rand(case.heads, dtype=torch.float64) + 0.5
    expected, _ = run(case, "varlen", k_scale=k_scale)
    x = case.inputs()
    shared = tuple(x.pop(name) for name in SHARED_NAMES if name in x) or None
    found, state = sse_attention(**x, shared=shared, backend="varlen", k_scale=k_scale, **case.options())
    assert state is None
    assert sizes == [case.heads, *([2] * (case.heads // 2)), *([1] * (case.heads % 2))]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
