"""What the chunked kernels are given and what they leave: settings, tensors, and the tuples that kernels take.

Shapes: T tokens, P 1 or N, H state heads, Hq = H * G query heads, D key and V value channels, C slots in a chunk.
"""

import dataclasses as dc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sse_convert.kernels.triton.config import CHUNK, Config, config_for, shared_memory, tensor_memory
from sse_convert.kernels.triton.routing import SlotLayout


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything about a call that is not a tensor."""

    num_sequences: int
    num_shared_chunks: int
    """chunks of the layout set aside for the shared partition"""
    group_chunks: int
    """most chunks in a group of the layout"""
    packed: bool
    """whether segments may share a chunk of the layout"""
    save: bool
    """whether a backward pass may follow"""
    write_gate: bool
    read_gate: bool
    by_slot: bool
    """whether v has a row for each slot"""
    corrects: bool
    """whether queries are keys that the delta rule reads with: none reads its own token, do has a row for each slot,
    and no states are carried out"""
    scale: float
    normalizer: float | None
    """of gate logits; None for log decays"""
    k_map: str

    @property
    def keeps(self) -> bool:
        """Whether what chunks hold waits for the backward pass. Under the delta rule that makes it once more: there no
        segments share a chunk, and for many short documents the chunks of all layers would take most of the memory."""
        return self.save and not (self.by_slot or self.corrects)

    def encode(self) -> tuple[list[int], list[float], str]:
        """The same in types that a torch operator takes; sizes may be symbols."""
        flags = [int(getattr(self, name)) for name in _FLAGS]
        factors = [self.scale] if self.normalizer is None else [self.scale, self.normalizer]
        return [getattr(self, name) for name in _SIZES] + flags, factors, self.k_map

    @classmethod
    def decode(cls, numbers: list[int], factors: list[float], k_map: str) -> "Settings":
        """What `encode` was called on."""
        sizes: dict[str, Any] = dict(zip(_SIZES, numbers, strict=False))
        flags: dict[str, Any] = {n: bool(on) for n, on in zip(_FLAGS, numbers[len(_SIZES) :], strict=True)}
        normalizer = factors[1] if len(factors) > 1 else None
        return cls(**sizes, **flags, scale=factors[0], normalizer=normalizer, k_map=k_map)


_SIZES = ("num_sequences", "num_shared_chunks", "group_chunks")
_FLAGS = ("packed", "save", "write_gate", "read_gate", "by_slot", "corrects")


class Sources(NamedTuple):
    """Inputs that kernels gather from; those of the shared partition are the others' where there is none."""

    q: Tensor
    k: Tensor
    g: Tensor
    v: Tensor
    shared_q: Tensor
    shared_k: Tensor
    shared_g: Tensor
    shared_v: Tensor
    k_scale: Tensor | None
    gate: Tensor


class Slots(NamedTuple):
    """The tables of a `SlotLayout`."""

    token: Tensor
    out: Tensor
    segment: Tensor
    head: Tensor
    tail: Tensor
    load: Tensor
    store: Tensor
    group_first: Tensor
    group_end: Tensor


class Shape(NamedTuple):
    """Compile-time sizes of all kernels."""

    H: int
    G: int
    D: int
    V: int
    C: int
    VALUE_P: int
    """0 when one table of rows serves all slots, else the P of v"""
    IEEE: bool
    """whether products are in float32"""


class Mapping(NamedTuple):
    """Compile-time settings of the kernels that read q, k and g."""

    P: int
    K: int
    WRITE_GATE: bool
    READ_GATE: bool
    K_MAP: str
    PACKED: bool


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProblem:
    """The tensors and settings of one call."""

    q: Tensor
    """[T, P, Hq, D]"""
    k: Tensor
    """[T, P, H, D]"""
    v: Tensor
    """[T, P, H, V], or of each slot by its own, [ranks * T, 1, H, V] in the order of the layout's `out`"""
    g: Tensor
    """[T, H, D] log decays, or gate logits when there is a normalizer"""
    gate: Tensor
    """[T, K] float32 weight of each used partition"""
    shared: tuple[Tensor, Tensor, Tensor] | None
    """q, k and g of the shared partition"""
    shared_v: Tensor | None
    """[T, H, V], where the values of the shared partition are not those of the others"""
    k_scale: Tensor | None
    """[H]"""
    initial: Tensor | None
    """[S, M, H, D, V] float32, of a layout with states; None when states are carried neither in nor out"""
    slots: Slots
    settings: Settings

    @property
    def ieee(self) -> bool:
        """Whether products are in float32."""
        return self.q.dtype == self.k.dtype == self.v.dtype == torch.float32

    @property
    def low(self) -> torch.dtype:
        """Type of what passes between kernels."""
        return torch.float32 if self.ieee else torch.bfloat16

    @property
    def config(self) -> Config:
        """How the kernels are launched."""
        (H, V), device = self.v.shape[-2:], self.q.device
        groups = self.q.shape[2] // H
        return config_for(self.q.shape[-1], V, groups, self.ieee, shared_memory(device), tensor_memory(device))

    @property
    def ranks(self) -> int:
        """Slots per token."""
        return self.gate.shape[1] + (self.shared is not None)

    @property
    def num_chunks(self) -> int:
        """Chunks of the layout."""
        return self.slots.head.shape[0]

    @property
    def num_groups(self) -> int:
        """Groups of the layout."""
        return self.slots.group_first.shape[0]

    @property
    def value_partitions(self) -> int:
        """0 when one table of rows serves all slots, else the P of v."""
        P = self.v.shape[1]
        return P if P > 1 or self.shared_v is not None else 0

    @property
    def value_rows(self) -> Tensor:
        """Row of v of each slot, -1 for padding."""
        return self.slots.out if self.settings.by_slot else self.slots.token

    @property
    def sources(self) -> Sources:
        """What kernels gather from."""
        shared = (self.q, self.k, self.g) if self.shared is None else self.shared
        shared_v = self.v if self.shared_v is None else self.shared_v
        return Sources(self.q, self.k, self.g, self.v, *shared, shared_v, self.k_scale, self.gate)

    @property
    def shape(self) -> Shape:
        """Compile-time sizes."""
        return self.shape_of(self.q.shape[2] // self.k.shape[2], self.value_partitions)

    def shape_of(self, groups: int, value_partitions: int) -> Shape:
        """Compile-time sizes for so many heads to a state, and values [T, value_partitions, H, V]."""
        (H, V), D = self.v.shape[-2:], self.q.shape[-1]
        return Shape(H, groups, D, V, CHUNK, value_partitions, self.ieee)

    @property
    def mapping(self) -> Mapping:
        """Compile-time settings of the kernels that read q, k and g."""
        s = self.settings
        return Mapping(
            self.q.shape[1], self.gate.shape[1], s.write_gate, s.read_gate, s.k_map,
            s.packed,
        )  # fmt: skip


def slots_of(layout: SlotLayout) -> Slots:
    """The tables of a layout."""
    return Slots(*(getattr(layout, name) for name in Slots._fields))


@dc.dataclass(frozen=True, slots=True)
class Forward:
    """What the kernels of the forward pass write for each other, and for the backward pass."""

    qt: Tensor
    """[chunks, Hq, C, D] queries decayed from the chunk's start"""
    kt: Tensor
    """[chunks, H, C, D] keys decayed to the chunk's end"""
    packed_q: Tensor | None
    """qt without rows that read no entering state, if segments share chunks"""
    packed_k: Tensor | None
    """kt without rows whose state does not leave, if segments share chunks"""
    falls: Tensor | None
    """[chunks, H, C, D] decay from the chunk's start, where the backward pass reads this"""
    products: Tensor
    """[chunks, Hq, C, C] masked q k^T"""
    decay: Tensor
    """[chunks, H, D] decay of a state that passes through, 0 where none does"""
    full: Tensor
    """[chunks, H, D] decay from the chunk's start to its end"""
    norms: Tensor | None
    """[chunks, H, C] log-sum-exp of the keys, base 2, with softmax"""
    strong: Tensor
    """[chunks, H] int32, whether a channel decays by more than the fast path bears"""
    entering: Tensor
    """[groups, H, D, V] state entering each group"""

    @property
    def qd(self) -> Tensor:
        """Queries that read states."""
        return self.qt if self.packed_q is None else self.packed_q

    @property
    def kd(self) -> Tensor:
        """Keys that write states."""
        return self.kt if self.packed_k is None else self.packed_k

    def to_save(self) -> list[Tensor | None]:
        """All of it, as `saved` takes it."""
        return [getattr(self, field.name) for field in dc.fields(self)]

    @classmethod
    def saved(cls, tensors: list[Any]) -> "Forward":
        """What `to_save` took apart."""
        return cls(*tensors)


@dc.dataclass(frozen=True, slots=True)
class SlotGradients:
    """Gradients by slot; rank K is the shared partition."""

    dq: Tensor
    """[ranks, T, Hq, D]"""
    dk: Tensor
    """[ranks, T, H, D]"""
    dg: Tensor
    """[ranks, T, H, D]"""
    dv: Tensor
    """[ranks, T, H, V]"""
    dgate: Tensor | None
    """[T, K]"""
    dk_scale: Tensor | None
    """[H]"""
    dinitial: Tensor | None
    """[S, M, H, D, V]"""


def allocate(x: ChunkProblem, *, falls: bool) -> Forward:
    """The buffers of the forward pass.

    Args:
        x: the problem.
        falls: the backward pass reads them.
    """
    Hq, D, (H, V) = x.q.shape[2], x.q.shape[3], x.v.shape[-2:]
    chunks, new = x.num_chunks, x.q.new_empty
    qt, kt = new(chunks, Hq, CHUNK, D, dtype=x.low), new(chunks, H, CHUNK, D, dtype=x.low)
    packed, softmax = x.settings.packed, x.settings.k_map == "softmax"
    return Forward(
        qt=qt,
        kt=kt,
        packed_q=torch.empty_like(qt) if packed else None,
        packed_k=torch.empty_like(kt) if packed else None,
        falls=torch.empty_like(kt) if falls else None,
        products=new(chunks, Hq, CHUNK, CHUNK, dtype=x.low),
        decay=new(chunks, H, D, dtype=torch.float32),
        full=new(chunks, H, D, dtype=torch.float32),
        norms=new(chunks, H, CHUNK, dtype=torch.float32) if softmax else None,
        strong=new(chunks, H, dtype=torch.int32),
        entering=new(x.num_groups, H, D, V, dtype=torch.float32),
    )
