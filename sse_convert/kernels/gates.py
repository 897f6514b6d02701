"""Partition gates: how router logits become e, the weight of each partition. Softmax unless a gate is registered."""

from typing import Protocol

from torch import Tensor

from sse_convert.errors import UsageError

SOFTMAX = "softmax"


class PartitionGate(Protocol):
    """e = g(t, x, S): the weight of each of the N partitions for each row (token).

    A gate without state is called once with all tokens. A gate with `needs_state = True` is called token by token with
    the sparse partitions' states as they are before the token, so only the step-by-step backends can run it.
    """

    needs_state: bool

    def __call__(self, router_logits_RN: Tensor, positions_R: Tensor, state_RNHDV: Tensor | None) -> Tensor:
        """The gate e [R, N] for R rows, in the dtype of the logits (float32 or float64), differentiable.

        Args:
            router_logits_RN: the router's outputs.
            positions_R: int64 position of each token in its sequence.
            state_RNHDV: states of the sparse partitions before the token; None unless `needs_state`.
        """
        ...


_GATES: dict[str, PartitionGate] = {}


def register_partition_gate(name: str, gate: PartitionGate) -> None:
    """Make `gate` available as `partition_gate: name` in recipes and checkpoints of this process.

    Raises:
        UsageError: the name is taken by another gate, or is `softmax`.
    """
    if name == SOFTMAX or _GATES.get(name, gate) is not gate:
        raise UsageError(
            f"partition gate {name!r} is already registered",
            expected=f"a name other than {sorted([SOFTMAX, *_GATES])}",
            fix="register the gate under a new name",
        )
    _GATES[name] = gate


def partition_gate(name: str) -> PartitionGate | None:
    """The gate registered under `name`; None for `softmax`, which routing computes itself.

    Raises:
        UsageError: nothing is registered under `name`.
    """
    if name == SOFTMAX:
        return None
    if name not in _GATES:
        raise UsageError(
            f"partition gate {name!r} is not registered",
            expected=f"one of {sorted([SOFTMAX, *_GATES])}",
            fix="call sse_convert.kernels.gates.register_partition_gate before the model is built",
        )
    return _GATES[name]


def gate_name(gate: PartitionGate | None) -> str:
    """The registered name of `gate`, or its class name; `softmax` for None."""
    if gate is None:
        return SOFTMAX
    names = [name for name, known in _GATES.items() if known is gate]
    return names[0] if names else type(gate).__name__
