"""Which tokens of a step belong to which request, in the terms that serving engines have for it."""

import dataclasses as dc

import torch
from torch import Tensor


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requests of one step, those with a single new token first. Nothing of it needs a wait for the device."""

    decodes: int
    """requests at the front that have one new token each"""
    prefills: int
    """requests behind them, of any number of new tokens"""
    tokens: int
    """new tokens of all requests"""
    offsets: Tensor
    """int32 [requests + 1], where each request's tokens begin"""
    slots: Tensor
    """int32 [requests], the row of the states that is the request's own; negative for padding. Row 0 is nobody's"""
    past: Tensor
    """int32 [requests], tokens that a request has seen before"""

    @property
    def requests(self) -> int:
        """How many there are, padding among them."""
        return self.decodes + self.prefills

    def steps(self) -> "Batch":
        """The requests with one new token."""
        n = self.decodes
        return Batch(
            decodes=n, prefills=0, tokens=n, offsets=self.offsets[: n + 1], slots=self.slots[:n], past=self.past[:n]
        )

    def rows(self) -> "Batch":
        """The others, whose tokens are counted from the first of theirs."""
        n = self.decodes
        return Batch(
            decodes=0, prefills=self.prefills, tokens=self.tokens - n,
            offsets=self.offsets[n : self.requests + 1] - n, slots=self.slots[n : self.requests],
            past=self.past[n : self.requests],
        )  # fmt: skip

    def lengths(self) -> Tensor:
        """[requests] new tokens of each."""
        return self.offsets.diff()


def batch_of(decodes: int, lengths: list[int], slots: list[int], past: list[int], device: torch.device | str) -> Batch:
    """A batch of numbers that the host knows.

    Args:
        decodes: requests at the front with one new token.
        lengths: new tokens of each request.
        slots: its row of the states.
        past: tokens it has seen before.
        device: of the tensors.
    """

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return Batch(
        decodes=decodes, prefills=len(lengths) - decodes, tokens=ends[-1], offsets=numbers(ends), slots=numbers(slots),
        past=numbers(past),
    )  # fmt: skip
