"""What the operator does before its equations: keys scaled and mapped, decays from gate logits; and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels.feature_maps import key_feature_map
from sse_convert.kernels.validation import build_inputs
from tests.kernels.cases import BACKENDS, Case, run
from tests.tolerance import assert_same

CASE = Case(lengths=(9, 70), top_k=2, groups=2)
CASES = (CASE, Case(lengths=(5, 3), per_partition=True), Case(lengths=(20,), shared=False))


def raw_inputs(case: Case) -> dict[str, Tensor]:
    """As `Case.inputs`, with keys and decays of any size and sign."""
    inputs = case.inputs()
    return {name: torch.randn_like(x) if "k" in name or "log_decay" in name else x for name, x in inputs.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("k_map", ["softmax", "silu", "relu", "l2", "identity"])
def test_mapping_in_the_operator_equals_mapping_before_it(k_map: Any, case: Case) -> None:
    """Output, final state and the gradient of every input, the scale included."""
    raw, scale = raw_inputs(case), torch.tensor([0.7, 1.9], dtype=torch.float64)

    def by_hand(given: dict[str, Tensor], k_scale: Tensor) -> dict[str, Tensor]:
        x = dict(given)
        for name in [name for name in x if name in ("k", "shared k")]:
            x[name] = key_feature_map(x[name] * k_scale[:, None], k_map)
        for name in [name for name in x if name.endswith("log_decay")]:
            x[name] = F.logsigmoid(x[name]) / 4.0
        return x

    leaves = {name: x.clone().requires_grad_() for name, x in raw.items()}
    leaf_scale = scale.clone().requires_grad_()
    expected_o, expected_final = run(case, "reference", by_hand(leaves, leaf_scale))
    weight = torch.randn_like(expected_o)
    wanted = torch.autograd.grad((expected_o * weight).sum(), [*leaves.values(), leaf_scale], materialize_grads=True)
    for backend in ("reference", *BACKENDS):
        o, final = run(case, backend, leaves, k_map=k_map, k_scale=leaf_scale, decay_normalizer=4.0)
        assert_same(o.detach(), expected_o.detach(), f"{backend} o")
        assert_same(final.detach(), expected_final.detach(), f"{backend} final")
        found = torch.autograd.grad((o * weight).sum(), [*leaves.values(), leaf_scale], materialize_grads=True)
        for name, value, exact in zip([*leaves, "k_scale"], found, wanted, strict=True):
            assert_same(value, exact, f"{backend} d {name}")


def test_low_precision_keys_and_gate_logits_are_mapped_in_float32() -> None:
    case = Case(lengths=(40,), initial_state=False)
    x = {name: t.bfloat16() for name, t in raw_inputs(case).items()}
    scale = torch.tensor([0.7, 1.9])
    o, _ = run(case, "varlen", x, k_map="softmax", k_scale=scale, decay_normalizer=16.0)
    mapped = {
        name: (t.float() * scale[:, None]).softmax(-1) if name in ("k", "shared k")
        else F.logsigmoid(t.float()) / 16 if name.endswith("log_decay") else t
        for name, t in x.items()
    }  # fmt: skip
    assert torch.equal(o, run(case, "varlen", mapped)[0])


def test_checked_inputs_are_the_callers_tensors() -> None:
    x = {name: t.bfloat16() for name, t in CASE.inputs().items()}
    shared = tuple(x.pop(name) for name in ("shared q", "shared k", "shared log_decay"))
    found = build_inputs(**x, shared=shared, **CASE.options())
    assert found.q.data_ptr() == x["q"].data_ptr()
    assert (found.q.shape, found.q.dtype) == ((79, 1, 4, 8), torch.bfloat16)
    assert found.log_decay is x["log_decay"]
    assert found.initial_state is x["initial_state"]
    assert found.shared is not None
    assert found.shared.v is x["v"]
    assert not found.shared.own_values
    assert (found.scale, found.top_k, found.max_seqlen, found.num_states) == (8**-0.5, 2, 70, 5)
    assert not found.wants_grad()
    assert build_inputs(**x, shared=(*shared, x["v"]), **CASE.options()).shared.own_values  # type: ignore[union-attr]


def test_gradients_to_the_key_scale_alone_are_wanted() -> None:
    x = Case(shared=False, initial_state=False).inputs()
    assert not build_inputs(**x, top_k=1).wants_grad()
    scale = torch.ones(2, requires_grad=True)
    assert build_inputs(**x, top_k=1, k_scale=scale).wants_grad()
    with torch.no_grad():
        assert not build_inputs(**x, top_k=1, k_scale=scale).wants_grad()


@pytest.mark.parametrize(
    ("lengths", "expected"), [((1, 1, 1), True), ((0, 2, 1), False), ((1, 0, 1), False), ((), True)], ids=str
)
def test_one_token_each_is_seen_from_offsets_on_the_cpu(lengths: tuple[int, ...], expected: bool) -> None:
    case = Case(lengths=lengths, shared=False)
    x = build_inputs(**case.inputs(), top_k=1, cu_seqlens=case.cu_seqlens)
    assert x.one_token_each is expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_map": "elu"}, "key feature map is 'elu'\nexpected: one of softmax, silu, relu, l2, identity"),
        ({"decay_normalizer": 0.0}, "decay_normalizer is 0.0\nexpected: more than 0"),
        ({"decay_normalizer": float("nan")}, "decay_normalizer is nan\nexpected: more than 0"),
        ({"max_seqlen": 69}, r"max_seqlen is 69\nexpected: at least the longest sequence \(70\)"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(CASE, "auto", **options)


def test_wrong_key_scale_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"k_scale has shape \[4\]\nexpected: k_scale \[2\]"):
        run(CASE, "auto", k_scale=torch.ones(4))
    with pytest.raises(ShapeError, match=r"k_scale has dtype torch\.int64"):
        run(CASE, "auto", k_scale=torch.ones(2, dtype=torch.int64))
