"""How a forward pass and its backward pass become differentiable.

Eagerly they run as a `torch.autograd.Function`, which costs the host least; under torch.compile as torch operators,
which take tensors and plain values only. Gradients arrive slot by slot either way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from sse_convert.kernels.triton.problem import Settings, Slots
from sse_convert.kernels.triton.slot_sums import sum_slots

Tensors = list[Tensor | None]

LEAST = 1e-20
"""weights nearer to zero count as this, so that their gradients may be divided by them"""


class Pass(NamedTuple):
    """Functions of the input tensors, the tables of a layout and the settings."""

    forward: Callable[[Tensors, Slots, Settings], tuple[Tensors, Tensors]]
    """results, and what the backward pass needs (empty if none may follow)"""
    backward: Callable[[Tensors, Tensors, Tensors, Slots, Settings], Tensors]
    """gradients by slot, from those of the results, what was saved with the first `keeps` results, and the inputs"""
    gradients: Callable[[Tensors, Tensors, Settings], Tensors]
    """gradients of the inputs, from those by slot and the inputs"""
    keeps: int
    """results that the backward pass needs"""


class Differentiable(torch.autograd.Function):
    """A pass as a function of its tensors."""

    @staticmethod
    def forward(ctx: Any, steps: Pass, slots: Slots, settings: Settings, *tensors: Tensor | None) -> Any:
        """The results."""
        results, saved = steps.forward(list(tensors), slots, settings)
        ctx.steps, ctx.settings, ctx.inputs = steps, settings, len(tensors)
        ctx.save_for_backward(*tensors, *slots, *saved, *results[: steps.keeps])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *d_results: Tensor | None) -> Any:
        """The gradients of the tensors."""
        held = list(ctx.saved_tensors)
        return None, None, None, *_backward(ctx.steps, list(d_results), held, ctx.inputs, ctx.settings)


def _backward(steps: Pass, d_results: Tensors, held: list[Any], inputs: int, settings: Settings) -> Tensors:
    tensors, rest = held[:inputs], held[inputs:]
    if all(gradient is None for gradient in d_results):
        return [None] * inputs
    slots, saved = Slots(*rest[: len(Slots._fields)]), rest[len(Slots._fields) :]
    return steps.gradients(steps.backward(d_results, saved, tensors, slots, settings), tensors, settings)


def run_pass(steps: Pass, operator: Any, tensors: Tensors, slots: Slots, settings: Settings) -> Tensors:
    """The results of a pass, eagerly or by the operator that `compiled_pass` prepared."""
    if is_compiling():
        given = [or_empty(x, slots.token) for x in tensors]
        return list(operator(given, list(slots), *settings.encode())[0])
    if settings.save:
        return list(Differentiable.apply(steps, slots, settings, *tensors))  # type: ignore[no-untyped-call]
    return steps.forward(tensors, slots, settings)[0]


def compiled_pass(steps: Pass, operator: Any, backward: Any) -> None:
    """Give an operator over `plain_forward` its gradients, computed by one over `plain_backward`."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], list[Tensor]]) -> None:
        tensors, tables, *plain = inputs
        ctx.plain, ctx.inputs = plain, len(tensors)
        ctx.save_for_backward(*tensors, *tables, *output[1], *output[0][: steps.keeps])
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, d_results: Any, d_saved: Any) -> tuple[Any, ...]:
        held, inputs = list(ctx.saved_tensors), ctx.inputs
        tensors, tables = held[:inputs], held[inputs : inputs + len(Slots._fields)]
        settings = Settings.decode(*ctx.plain)
        found: Tensors = [None] * inputs
        if any(gradient is not None for gradient in d_results):
            given = [or_empty(x, tables[0]) for x in d_results]
            by_slot = backward(given, held[inputs + len(tables) :], tensors, tables, *ctx.plain)
            found = steps.gradients(list(map(or_none, by_slot)), list(map(or_none, tensors)), settings)
        return found, [None] * len(tables), None, None, None

    operator.register_autograd(gradients, setup_context=setup)


def plain_forward(
    step: Any, tensors: list[Tensor], tables: list[Tensor], numbers: list[int], factors: list[float], k_map: str
) -> tuple[list[Tensor], list[Tensor]]:
    """What an operator computes, with empty tensors for None."""
    settings = Settings.decode(numbers, factors, k_map)
    results, saved = step(list(map(or_none, tensors)), Slots(*tables), settings)
    return [or_empty(x, tables[0]) for x in results], [or_empty(x, tables[0]) for x in saved]


def plain_backward(
    step: Any, d_results: list[Tensor], saved: list[Tensor], tensors: list[Tensor], tables: list[Tensor],
    numbers: list[int], factors: list[float], k_map: str,
) -> list[Tensor]:  # fmt: skip
    """The same for its gradients by slot."""
    settings = Settings.decode(numbers, factors, k_map)
    given = [list(map(or_none, x)) for x in (d_results, saved, tensors)]
    return [or_empty(x, tables[0]) for x in step(*given, Slots(*tables), settings)]


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """x, or what stands for None where an operator takes tensors only."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


def or_none(x: Tensor) -> Tensor | None:
    """None for what stands for it."""
    return x if x.dim() != 1 or x.shape[0] else None


def away_from_zero(weight: Tensor) -> Tensor:
    """The weights with those next to zero moved to `LEAST`; their gradients stay as they are."""
    given = weight.detach()
    return weight + torch.where(given.abs() < LEAST, LEAST - given, 0.0)


def by_partition(slots: Tensor, used: Tensor, like: Tensor) -> Tensor:
    """Gradient [T, P, ...] from slots [K, T, ...]; zeros for partitions that a token does not use."""
    if like.shape[1] == 1:
        return sum_slots(slots)[:, None]
    tokens = torch.arange(like.shape[0], device=like.device)[:, None]
    return torch.zeros_like(like).index_put((tokens, used.long()), slots.transpose(0, 1))
