"""Launches the kernels of one forward or backward pass. Everything is allocated here; nothing waits for the device."""

import dataclasses as dc

import torch
from torch import Tensor

from sse_convert.kernels.triton.config import CHUNK
from sse_convert.kernels.triton.config import block
from sse_convert.kernels.triton.config import config_for
from sse_convert.kernels.triton.finish import finish_kernel
from sse_convert.kernels.triton.output import output_kernel
from sse_convert.kernels.triton.prepare import prepare_kernel
from sse_convert.kernels.triton.routing import SlotLayout
from sse_convert.kernels.triton.states import scan_kernel
from sse_convert.kernels.triton.states import state_kernel
from sse_convert.kernels.triton.values import value_gradient_kernel


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The tensors and settings of one call. Shapes: T tokens, P 1 or N, Hq = H * G query heads."""

    q: Tensor
    """[T, P, Hq, D]"""
    k: Tensor
    """[T, P, H, D]"""
    v: Tensor
    """[T, P, H, V]"""
    g: Tensor
    """[T, H, D] log decays, or gate logits when there is a normalizer"""
    gate: Tensor
    """[T, K] float32 weight of each used partition"""
    shared: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """q, k, g, v of the shared partition"""
    own_values: bool
    """whether the v of the shared partition is not that of the others"""
    k_scale: Tensor | None
    """[H]"""
    initial: Tensor | None
    """[S, M, H, D, V] float32, of a layout with states; None when states are carried neither in nor out"""
    layout: SlotLayout
    packed: bool
    """whether segments may share a chunk of the layout"""
    num_sequences: int
    top_k: int
    read_top_k: int
    write_gate: bool
    read_gate: bool
    scale: float
    k_map: str
    normalizer: float | None

    @property
    def ieee(self) -> bool:
        """Whether products are in float32."""
        return self.q.dtype == self.k.dtype == self.v.dtype == torch.float32

    @property
    def low(self) -> torch.dtype:
        """Type of what passes between kernels."""
        return torch.float32 if self.ieee else torch.bfloat16

    @property
    def ranks(self) -> int:
        """Slots per token."""
        return self.gate.shape[1] + (self.shared is not None)

    @property
    def value_partitions(self) -> int:
        """0 when every slot of a token has the same value, else the P of v."""
        return self.v.shape[1] if self.v.shape[1] > 1 or self.own_values else 0

    def sources(self) -> tuple[Tensor, ...]:
        """q, k, g for sparse slots, then for shared ones."""
        shared = (self.q, self.k, self.g) if self.shared is None else self.shared[:3]
        return (self.q, self.k, self.g, *shared)

    def values(self) -> tuple[Tensor, Tensor]:
        """v for sparse slots and for shared ones."""
        return self.v, self.v if self.shared is None else self.shared[3]


@dc.dataclass(frozen=True, slots=True)
class Forward:
    """Results of the forward pass; all but the first two are for the backward pass."""

    o: Tensor
    """[T, Hq, V]"""
    final: Tensor | None
    """[S, M, H, D, V]"""
    qd: Tensor
    """[chunks, Hq, C, D] queries decayed from the chunk's start"""
    kd: Tensor
    """[chunks, H, C, D] keys decayed to the chunk's end"""
    products: Tensor
    """[chunks, Hq, C, C] masked q k^T"""
    decay: Tensor
    """[chunks, H, D] decay of a state that passes through"""
    strong: Tensor
    """[chunks, H] int32, whether a channel decays by more than the fast path bears"""
    entering: Tensor
    """[groups, H, D, V] state entering each group"""


def run_forward(x: Problem) -> Forward:
    """o and what the backward pass needs."""
    T, _, Hq, D = x.q.shape
    H, V = x.v.shape[-2:]
    chunks, groups = x.layout.head.numel(), x.layout.group_first.numel()
    config, place = config_for(D, V, x.ieee), x.layout
    new = x.q.new_empty
    qd, kd = new(chunks, Hq, CHUNK, D, dtype=x.low), new(chunks, H, CHUNK, D, dtype=x.low)
    products, decay = new(chunks, Hq, CHUNK, CHUNK, dtype=x.low), new(chunks, H, D, dtype=torch.float32)
    strong = new(chunks, H, dtype=torch.int32)
    entering, carry = new(groups, H, D, V, dtype=torch.float32), new(groups, H, D, dtype=torch.float32)
    slots = new(x.ranks, T, Hq, V, dtype=x.v.dtype)
    final = None if x.initial is None else x.initial.clone()
    initial = _or(x.initial, decay)
    shape = {"H": H, "G": Hq // H, "D": D, "C": CHUNK, "IEEE": x.ieee}
    prepare_kernel[(chunks, Hq)](
        *x.sources(), _or(x.k_scale, decay), x.gate,
        place.token, place.out, place.segment, place.head, place.tail, qd, kd, products, decay, strong,
        x.scale, x.normalizer or 1.0, T, x.num_sequences, place.num_shared_chunks,
        **_mapping(x), **shape, BD=config.prepare.block_d, THIN=min(32, config.prepare.block_d),
        num_warps=config.prepare.warps,
    )  # fmt: skip
    values, numbers = x.values(), (x.num_sequences, place.num_shared_chunks)
    _entering_states(x, kd, *values, decay, place.load, initial, entering, carry, reverse=False)
    tile = config.output
    output_kernel[(groups, Hq, -(-V // tile.block_v))](
        qd, kd, products, *values, decay, place.token, place.out, place.segment, place.load, place.store,
        place.group_first, place.group_end, entering, initial, _or(final, decay), slots, *numbers,
        P=x.value_partitions, **shape, V=V, BD=tile.block_d, BV=tile.block_v, HAS_STATE=x.initial is not None,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return Forward(_sum(slots), final, qd, kd, products, decay, strong, entering)


@dc.dataclass(frozen=True, slots=True)
class Gradients:
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


def run_backward(x: Problem, saved: Forward, do: Tensor, dfinal: Tensor | None) -> Gradients:
    """Gradients with respect to everything, from those of o [T, Hq, V] and of the final state (given with states)."""
    T, _, Hq, D = x.q.shape
    H, V = x.v.shape[-2:]
    chunks, groups = x.layout.head.numel(), x.layout.group_first.numel()
    config, place = config_for(D, V, x.ieee), x.layout
    new = x.q.new_empty
    shape = {"H": H, "G": Hq // H, "D": D, "V": V, "C": CHUNK, "IEEE": x.ieee}
    values, numbers = x.values(), (x.num_sequences, place.num_shared_chunks)
    states, dstates = (new(chunks, H, D, V, dtype=x.low) for _ in range(2))
    tile = config.states
    state_kernel[(groups, H, -(-V // tile.block_v))](
        saved.kd, *values, saved.decay, place.token, place.segment, place.load, place.group_first, place.group_end,
        _or(x.initial, saved.decay), saved.entering, saved.decay, states, *numbers,
        P=x.value_partitions, **{**shape, "G": 1}, BD=tile.block_d, BV=tile.block_v, REVERSE=False, STORE=True,
        HAS_STATE=x.initial is not None, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    leaving, carry = new(groups, H, D, V, dtype=torch.float32), new(groups, H, D, dtype=torch.float32)
    ends = _or(dfinal, saved.decay)
    _entering_states(x, saved.qd, do, do, saved.decay, place.store, ends, leaving, carry, reverse=True)
    dv = new(x.ranks, T, H, V, dtype=x.v.dtype)
    dinitial = None if dfinal is None else dfinal.clone()
    tile = config.values
    blocks = -(-V // tile.block_v)
    dots = new(blocks, x.ranks, T, H, dtype=torch.float32) if x.k_map == "softmax" else saved.decay
    value_gradient_kernel[(groups, H, blocks)](
        saved.qd, saved.kd, saved.products, *values, do, saved.decay, place.token, place.out, place.segment,
        place.load, place.store, place.group_first, place.group_end, leaving, ends, _or(dinitial, saved.decay), dstates,
        dv, dots, *numbers, x.ranks * T,
        P=x.value_partitions, **shape, BD=tile.block_d, BV=tile.block_v, HAS_STATE=x.initial is not None,
        DOTS=x.k_map == "softmax", STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    dq, dk, dg = new(x.ranks, T, Hq, D), *(new(x.ranks, T, H, D, dtype=s.dtype) for s in (x.k, x.g))
    gated = x.write_gate or x.read_gate
    parts = -(-D // min(config.finish.block_d, config.finish_strong.block_d))
    dgate = new(parts, x.ranks, T, H, dtype=torch.float32).zero_() if gated else saved.decay
    dk_scale = new(parts, chunks, H, dtype=torch.float32).zero_() if x.k_scale is not None else saved.decay
    for tile, strong in ((config.finish, False), (config.finish_strong, True)):
        finish_kernel[(chunks, H, -(-D // tile.block_d))](
            *x.sources(), _or(x.k_scale, saved.decay), x.gate, *values, do,
            place.token, place.out, place.segment, place.head, place.tail, saved.decay, saved.strong, states, dstates,
            dots, dq, dk, dg, dgate, dk_scale,
            x.scale, x.normalizer or 1.0, T, *numbers, x.ranks * T,
            **_mapping(x), **shape, VALUE_P=x.value_partitions, BD=tile.block_d, BV=tile.block_v,
            DOTS=blocks, STRONG=strong, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    K = x.gate.shape[1]
    return Gradients(
        dq, dk, dg, dv,
        dgate[:, :K].sum((0, 3)).T if gated else None,
        dk_scale.sum((0, 1)) if x.k_scale is not None else None,
        dinitial,
    )  # fmt: skip


def _entering_states(
    x: Problem, rows: Tensor, y: Tensor, y_shared: Tensor, decay: Tensor, inject: Tensor, ends: Tensor, local: Tensor,
    carry: Tensor, *, reverse: bool,
) -> None:  # fmt: skip
    """Fills `local` with the state entering each group (leaving it, in reverse)."""
    groups, H, D, V = local.shape
    config, place = config_for(D, V, x.ieee), x.layout
    tile = config.states
    state_kernel[(groups, H, -(-V // tile.block_v))](
        rows, y, y_shared, decay, place.token, place.segment, inject, place.group_first, place.group_end, ends, local,
        carry, decay, x.num_sequences, place.num_shared_chunks,
        P=0 if reverse else x.value_partitions, H=H, G=rows.shape[1] // H, D=D, V=V, BD=tile.block_d, BV=tile.block_v,
        C=CHUNK, REVERSE=reverse, STORE=False, HAS_STATE=x.initial is not None, IEEE=x.ieee,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    tile = config.scan
    scan_kernel[(H, -(-D // tile.block_d))](
        local, carry, groups, H=H, D=D, V=V, ROWS=tile.block_d, BV=tile.block_v, REVERSE=reverse, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip


def _mapping(x: Problem) -> dict[str, object]:
    """Compile-time settings of the kernels that read q, k and g."""
    return {
        "P": x.q.shape[1],
        "K": x.gate.shape[1],
        "TOP_K": x.top_k,
        "READ_TOP_K": x.read_top_k,
        "WRITE_GATE": x.write_gate,
        "READ_GATE": x.read_gate,
        "K_MAP": x.k_map,
        "FROM_LOGITS": x.normalizer is not None,
        "HAS_SCALE": x.k_scale is not None,
        "ROW": block(x.q.shape[-1]),
        "PACKED": x.packed,
    }


def _sum(slots: Tensor) -> Tensor:
    return slots[0] if slots.shape[0] == 1 else slots[0] + slots[1] if slots.shape[0] == 2 else slots.sum(0)


def _or(x: Tensor | None, filler: Tensor) -> Tensor:
    """x, or a pointer that the kernel does not follow."""
    return filler if x is None else x
