"""The door to fla-core: what it is handed, on a stand-in that computes the definition, and when it is refused."""

import dataclasses as dc
import functools
import sys
import types
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sse_convert.errors import HardwareError, UsageError
from sse_convert.kernels import dispatch, fla_backend
from sse_convert.kernels.dispatch import available_backends, explain
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.torch.operands import operands_of
from sse_convert.kernels.torch.varlen import sse_attention_varlen
from sse_convert.kernels.validation import build_inputs
from tests.kernels.cases import Case, run
from tests.tolerance import assert_same

CASE = Case(lengths=(0, 20, 3, 0), top_k=2, groups=2, delta=True)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fla's function by its docstring: q, k [1, T, H, K], v [1, T, H, V], g, beta [1, T, H], states [S, H, K, V]."""
    (one, T, H, D), V = q.shape, v.shape[-1]
    assert (one, k.shape, v.shape, g.shape, beta.shape) == (1, q.shape, (1, T, H, V), (1, T, H), (1, T, H))
    assert initial_state.shape == (len(cu_seqlens) - 1, H, D, V)
    assert q.dtype == k.dtype == v.dtype
    assert output_final_state
    assert bool((cu_seqlens.diff() > 0).all()), "fla numbers chunks wrongly if a segment is empty"
    outs, finals = [], []
    for state, (start, end) in zip(initial_state, pairwise(cu_seqlens.tolist()), strict=True):
        S = state
        for t in range(start, end):
            S = g[0, t].exp()[:, None, None] * S
            error = v[0, t] - torch.einsum("hk,hkv->hv", k[0, t].to(S), S)
            S = S + torch.einsum("h,hk,hv->hkv", beta[0, t].to(S), k[0, t].to(S), error)
            outs.append(torch.einsum("hk,hkv->hv", q[0, t].to(S) * scale, S))
        finals.append(S)
    return torch.stack(outs)[None].to(q.dtype), torch.stack(finals)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(fla_backend.MODULE)
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fla_backend.MODULE, module)
    monkeypatch.setattr(dispatch, "fla_unavailable_reason", lambda device: None)


def per_head(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Inputs whose decays are expanded views, as the layers make them."""
    x = case.inputs(dtype)
    return {name: t[..., :1].expand_as(t) if name.endswith("log_decay") else t for name, t in x.items()}


def checked(case: Case, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Inputs:
    x = {name: t for name, t in per_head(case, dtype).items() if not name.startswith("shared")}
    return build_inputs(**{**x, "initial_state": None}, **{**case.options(), **options})


@pytest.mark.parametrize("change", [{}, {"shared": False, "per_partition": True}, {"num_partitions": 1, "top_k": 1}])
def test_slots_reach_the_kernel_as_it_wants_them(change: dict[str, Any], stand_in: None) -> None:
    case = dc.replace(CASE, **change)
    x = {name: t.requires_grad_() for name, t in per_head(case).items() if not name.endswith("log_decay")}
    x |= {name: t for name, t in per_head(case).items() if name.endswith("log_decay")}
    shared = tuple(x.pop(f"shared {name}") for name in ("q", "k", "log_decay") if case.shared) or None
    operands = operands_of(build_inputs(**x, shared=shared, **case.options()))
    leaves = [t for t in x.values() if t.requires_grad]

    def results(**options: Any) -> list[Tensor]:
        o, final = sse_attention_varlen(operands, **options)
        gradients = torch.autograd.grad(o.cos().sum() + final.sin().sum(), leaves, retain_graph=True)
        return [o.detach(), final.detach(), *gradients]

    found = results(attend=functools.partial(fla_backend._attend, dtype=torch.float64))
    for value, exact in zip(found, results(), strict=True):
        assert_same(value, exact, "")


def test_it_runs_behind_the_dispatch_in_low_precision(stand_in: None) -> None:
    x = per_head(CASE, torch.bfloat16)
    x["initial_state"] = x["initial_state"].float()
    o, final = run(CASE, "fla", x)
    expected_o, expected = run(CASE, "reference", x)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert_same(o.double(), expected_o.double(), "o", 1e-2)
    assert_same(final, expected, "final", 1e-2)
    assert run(CASE, "fla", x, inplace_state=True)[1] is x["initial_state"]
    assert torch.equal(x["initial_state"], final)
    assert available_backends()[-1] == "fla"
    assert "gated delta rule" in explain("fla")


class StateGate:
    needs_state = True

    def __call__(self, router_logits_RN: Tensor, positions_R: Tensor, state_RNHDV: Tensor | None) -> Tensor:
        raise NotImplementedError


SHORT = Case(lengths=(3, 4), delta=True, shared=False)


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        (dc.replace(SHORT, delta=False), {}, "it runs the gated delta rule only"),
        (SHORT, {"log_decay": torch.zeros(7, 2, 8)}, "the decay is one per key channel"),
        (SHORT, {"dtype": torch.float32}, "v is float32, not float16 or bfloat16"),
        (dc.replace(SHORT, dim=300), {}, "the head dim is 300, more than 256"),
        (SHORT, {"partition_gate": StateGate()}, "the partition gate reads the state"),
        (dc.replace(SHORT, lengths=(0,)), {}, "there are no tokens"),
        (SHORT, {}, None),
    ],
    ids=["gla", "channels", "float32", "head dim", "gate", "empty", "fits"],
)
def test_what_it_cannot_run(case: Case, options: dict[str, Any], reason: str | None) -> None:
    changed = {name: options[name] for name in ("log_decay",) if name in options}
    rest = {name: value for name, value in options.items() if name not in changed}
    assert fla_backend.fla_unsupported_reason(dc.replace(checked(case, **rest), **changed)) == reason


def test_it_says_what_it_cannot_run(stand_in: None) -> None:
    with pytest.raises(UsageError, match="backend 'fla' cannot run this: it runs the gated delta rule only\nexpected"):
        run(Case(), "fla")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_is_refused_without_a_gpu() -> None:
    with pytest.raises(HardwareError, match="backend 'fla' is not available: it needs a CUDA GPU\nexpected: one of au"):
        run(SHORT, "fla")
    assert explain("fla") == "not available: it needs a CUDA GPU"
    assert "fla" not in available_backends()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module, package in (("fla", "fla-core"), ("triton", "triton")):
        monkeypatch.setattr(fla_backend.importlib.util, "find_spec", lambda name, module=module: name != module or None)
        reason = fla_backend.fla_unavailable_reason(torch.device("cuda"))
        assert reason == f"{package} is not installed (pip install {package})"


@pytest.mark.parametrize(
    ("triton", "capability", "hip", "refused"),
    [
        ("3.6.0", (9, 0), None, True),
        ("3.7.0+git1a2b", (9, 0), None, True),
        ("3.7.1", (9, 0), None, False),
        ("3.3.1", (9, 0), None, False),
        ("3.6.0", (8, 0), None, False),
        ("3.6.0", (9, 4), "6.4", False),
    ],
)
def test_a_triton_that_miscompiles_it_on_hopper_is_named(
    triton: str, capability: tuple[int, int], hip: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(fla_backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(fla_backend.importlib, "import_module", lambda name: types.SimpleNamespace(__version__=triton))
    reason = fla_backend.fla_unavailable_reason(torch.device("cuda"))
    expected = f"triton {triton} miscompiles fla's gated backward on Hopper GPUs (install triton 3.7.1 or newer)"
    assert reason == (expected if refused else None)


def test_nothing_is_asked_of_it_for_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a package breaks the graph of torch.compile."""
    monkeypatch.setattr(dispatch, "fla_unavailable_reason", lambda device: pytest.fail("fla was asked"))
    monkeypatch.setattr(dispatch, "unavailable_reason", lambda device, delta: None)
    assert dispatch._chosen("triton", checked(Case(lengths=(3, 4)), torch.float32)) == "triton"


def test_auto_takes_it_for_prefill_and_training_and_recurrent_for_steps(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_GPU", "cpu")
    monkeypatch.setattr(dispatch, "unavailable_reason", lambda device, delta: "wrong" if delta else None)
    step = dc.replace(SHORT, lengths=(1, 1))
    assert dispatch._chosen("auto", checked(SHORT)) == "fla"
    assert dispatch._chosen("auto", checked(SHORT, torch.float32)) == "varlen"
    assert dispatch._chosen("auto", checked(step)) == "recurrent"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dispatch._chosen("auto", checked(SHORT)) == "varlen"
