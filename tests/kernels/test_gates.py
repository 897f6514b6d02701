import pytest
import torch
from torch import Tensor

from sse_convert.errors import UsageError
from sse_convert.kernels import routing
from sse_convert.kernels.routing import partition_gate, register_partition_gate
from tests.kernels.cases import BACKENDS, CHUNKED, Case, run, run_with_gradients
from tests.tolerance import assert_same


class Sigmoid:
    """Weights that do not sum to one and drift with the position."""

    needs_state = False

    def __call__(self, router_logits_RN: Tensor, positions_R: Tensor, state_RNHDV: Tensor | None) -> Tensor:
        assert state_RNHDV is None
        return torch.sigmoid(router_logits_RN + 0.1 * positions_R[:, None])


class Emptiest:
    """Prefers the partition whose state is smallest."""

    needs_state = True

    def __call__(self, router_logits_RN: Tensor, positions_R: Tensor, state_RNHDV: Tensor | None) -> Tensor:
        assert state_RNHDV is not None
        assert state_RNHDV.shape[:2] == router_logits_RN.shape
        return torch.softmax(router_logits_RN - state_RNHDV.square().mean((2, 3, 4)), dim=-1)


@pytest.fixture(autouse=True)
def _fresh_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_GATES", {})


CASE = Case(lengths=(3, 70, 0, 9), top_k=2, read_top_k=3)


def test_registered_gate_is_found_by_name() -> None:
    gate = Sigmoid()
    register_partition_gate("sigmoid", gate)
    register_partition_gate("sigmoid", gate)
    assert partition_gate("sigmoid") is gate
    assert partition_gate("softmax") is None


def test_names_are_not_overwritten() -> None:
    register_partition_gate("sigmoid", Sigmoid())
    for name in ("sigmoid", "softmax"):
        with pytest.raises(UsageError, match=f"'{name}' is already registered"):
            register_partition_gate(name, Sigmoid())


def test_unknown_name_lists_the_known_ones() -> None:
    register_partition_gate("sigmoid", Sigmoid())
    with pytest.raises(UsageError, match=r"'sigmiod' is not registered\nexpected: one of \['sigmoid', 'softmax'\]"):
        partition_gate("sigmiod")


def test_stateless_gate_runs_on_every_backend() -> None:
    exact = run_with_gradients(CASE, "reference", partition_gate=Sigmoid())
    for backend in BACKENDS:
        for name, value in run_with_gradients(CASE, backend, partition_gate=Sigmoid()).items():
            assert_same(value, exact[name], f"{backend} {name}")


def test_given_positions_replace_counted_ones() -> None:
    counted = torch.cat([torch.arange(n) for n in CASE.lengths])
    default = run(CASE, "varlen", partition_gate=Sigmoid())[0]
    assert torch.equal(run(CASE, "varlen", partition_gate=Sigmoid(), positions=counted)[0], default)
    assert not torch.equal(run(CASE, "varlen", partition_gate=Sigmoid(), positions=counted + 40)[0], default)


def test_state_gate_runs_step_by_step() -> None:
    exact = run_with_gradients(CASE, "reference", partition_gate=Emptiest())
    for backend in ("recurrent", "auto"):
        for name, value in run_with_gradients(CASE, backend, partition_gate=Emptiest()).items():
            assert_same(value, exact[name], f"{backend} {name}")


@pytest.mark.parametrize("backend", CHUNKED)
def test_chunked_backends_refuse_a_state_gate_by_name(backend: str) -> None:
    gate = Emptiest()
    with pytest.raises(UsageError, match="'Emptiest', which reads the state"):
        run(CASE, backend, partition_gate=gate)
    register_partition_gate("emptiest", gate)
    with pytest.raises(UsageError, match=r"'emptiest'.*\nexpected: one of auto, reference, recurrent"):
        run(CASE, backend, partition_gate=gate)
