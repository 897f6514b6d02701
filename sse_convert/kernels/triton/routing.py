"""Which partitions each token uses, and the order in which the other kernels visit (token, partition) pairs.

A slot is one such pair, or a token of the shared partition; a chunk is 64 slots; a segment is one sequence's slots in
one partition; a group is a run of chunks that one program walks through. The slots are put in order by a counting sort:
tokens are cut into pieces (at multiples of a block, and wherever a sequence starts), pieces are counted, the counts
summed up per partition, and each slot goes to the place the sums give it. Nothing waits for the host.
"""

import dataclasses as dc
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.compiler import is_compiling

from sse_convert.kernels.torch_modes import operator_name
from sse_convert.kernels.triton.config import CHUNK
from sse_convert.kernels.triton.launching import launch
from sse_convert.kernels.triton.slot_sort_kernels import (
    aligned_chunks_kernel,
    count_kernel,
    packed_chunks_kernel,
    scatter_kernel,
    sum_kernel,
)

PIECE_SLOTS = 128
"""slots a program of the counting sort handles"""
SCAN = 1024
"""counts, or sequences, that are summed up at once"""
TABLE_CHUNKS = 8
"""chunks a program of the chunk tables handles"""
SELECT_ELEMENTS = 1024
"""logits a program of the selection handles"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """The order of the slots and what joins their chunks; int32 tensors on the device, R = 64 * chunks.

    Shared chunks come first, then those of partition 0, 1, ...; in a partition the sequences follow each other, and the
    tokens in each. A chunk's `head` is the segment whose rows read the state that enters, its `tail` the one whose
    state leaves; -2 for none.
    """

    token: Tensor
    """[R] token of the slot, -1 for padding"""
    out: Tensor
    """[R] rank * T + token, rank being the place of the partition among the token's own, K for the shared one"""
    segment: Tensor
    """[R] partition * S + sequence, N * S + sequence for the shared partition"""
    head: Tensor
    """[chunks]"""
    tail: Tensor
    """[chunks]"""
    load: Tensor
    """[chunks] row sequence * M + partition of the initial state that enters here, else -1"""
    store: Tensor
    """[chunks] row of the final state that leaves here, else -1"""
    group_first: Tensor
    """[groups] first chunk"""
    group_end: Tensor
    """[groups] chunk after the last; first and end are 0 when unused"""
    num_shared_chunks: int
    """chunks set aside for the shared partition"""


def select_partitions(router_logits: Tensor, used_k: int) -> tuple[Tensor, Tensor]:
    """The partitions of each token with the highest softmax gate, best first, ties to the lowest index.

    Args:
        router_logits: [T, N], any float dtype but float64.
        used_k: K, 1 to N.

    Returns:
        Partitions int32 [T, K] and their gates float32 [T, K]; gradients flow from the gates to the logits.
    """
    if router_logits.shape[1] == 1 and not router_logits.requires_grad:
        return torch.zeros_like(router_logits, dtype=torch.int32), torch.ones_like(router_logits, dtype=torch.float32)
    if is_compiling():
        gate, used = _select(router_logits, used_k)
    else:
        gate, used = _Selection.apply(router_logits, used_k)  # type: ignore[no-untyped-call]
    return used, gate


def slot_layout(
    used_TK: Tensor,
    cu_seqlens: Tensor,
    *,
    num_partitions: int,
    shared: bool,
    packed: bool,
    states: bool,
    group_chunks: int,
) -> SlotLayout:
    """Sort the slots by partition, sequence and token, and cut them into chunks and groups, without a host sync.

    Aligned: each segment starts a chunk and a group, so that the results of a token depend on nothing after it and on
    no other sequence, to the bit. Packed: slots follow each other without padding, and segments may share a chunk.

    Args:
        used_TK: int32 [T, K] partitions of each token, distinct, contiguous.
        cu_seqlens: [S + 1] offsets of the sequences, int32 or int64, on the device of used_TK.
        num_partitions: N.
        shared: whether there is a shared partition, which every token uses.
        packed: pack the slots instead of aligning the segments; excludes `states`.
        states: initial and final states are wanted, so every segment's first chunk loads and its last one stores.
        group_chunks: most chunks in a group.
    """
    assert not (packed and states), "states need aligned segments"
    (T, K), S, N = used_TK.shape, cu_seqlens.shape[0] - 1, num_partitions
    sizes = _sizes(T, K, S, N, shared, packed, group_chunks)
    sort = _sort if is_compiling() else _sort_slots
    tables = sort(used_TK, cu_seqlens, N, shared, packed, states, group_chunks, *sizes)
    return SlotLayout(**_carve(tables, _table_lengths(*sizes[1:])), num_shared_chunks=sizes[0])


def _sizes(T: int, K: int, S: int, N: int, shared: bool, packed: bool, group_chunks: int) -> tuple[int, int, int]:
    """Shared chunks, all chunks and groups: exact when packed, else bounds that hold for any routing."""
    if packed:
        shared_chunks = _ceil(T, CHUNK) if shared else 0
        chunks = shared_chunks + _ceil(T * K, CHUNK)
        return shared_chunks, chunks, _ceil(chunks, group_chunks)
    shared_segments, sparse_segments = min(S, T) if shared else 0, min(S * N, T * K)
    shared_chunks = (T + (CHUNK - 1) * shared_segments) // CHUNK if shared else 0
    chunks = shared_chunks + (T * K + (CHUNK - 1) * sparse_segments) // CHUNK
    return shared_chunks, chunks, min(chunks, _ceil(chunks, group_chunks) + shared_segments + sparse_segments)


def _table_lengths(chunks: int, groups: int) -> dict[str, int]:
    """Entries of each tensor of a layout."""
    slots = dict.fromkeys(("token", "out", "segment"), chunks * CHUNK)
    return (
        slots | dict.fromkeys(("head", "tail", "load", "store"), chunks) | {"group_first": groups, "group_end": groups}
    )


def _carve(memory: Tensor, lengths: dict[str, int]) -> dict[str, Tensor]:
    """Vectors in one allocation, each at a multiple of 256 bytes."""
    # rests between vectors would be tensors too: torch.compile makes a program for those of no element, another for one
    parts = memory.split([_ceil(length, 64) * 64 for length in lengths.values()])
    return {name: part[:length] for part, (name, length) in zip(parts, lengths.items(), strict=True)}


def _memory(lengths: dict[str, int], like: Tensor) -> Tensor:
    """Uninitialised int32 memory for `_carve`."""
    size = sum(_ceil(length, 64) * 64 for length in lengths.values())
    return torch.empty(size, dtype=torch.int32, device=like.device)


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


def _sort_slots(
    used_TK: Tensor, cu_seqlens: Tensor, num_partitions: int, shared: bool, packed: bool, states: bool,
    group_chunks: int, shared_chunks: int, chunks: int, groups: int,
) -> Tensor:  # fmt: skip
    """The tensors of a layout in one."""
    (T, K), S, N, M = used_TK.shape, cu_seqlens.shape[0] - 1, num_partitions, num_partitions + shared
    block_tokens = max(1, PIECE_SLOTS // K)
    pieces, steps = T // block_tokens + S, S.bit_length()
    tables = _memory(_table_lengths(chunks, groups), used_TK)
    out = _carve(tables, _table_lengths(chunks, groups))
    lengths = {"counts": N * pieces, "before": N * (pieces + 1), "table": 3 * M * (S + 1)}
    counts, before, table = _carve(_memory(lengths, used_TK), lengths).values()
    piece = {"N": N, "K": K, "BLOCK_TOKENS": block_tokens, "BLOCK": triton.next_power_of_2(block_tokens * K)}
    with torch.cuda.device_of(used_TK):
        launch(count_kernel, (pieces,), used_TK, cu_seqlens, counts, T, S, steps, pieces, **piece, warps=4)
        launch(
            sum_kernel, (M,), counts, before, table, cu_seqlens, S, pieces, group_chunks,
            N=N, M=M, BLOCK_TOKENS=block_tokens, PACKED=packed, CHUNK=CHUNK, BLOCK=SCAN, warps=4,
        )  # fmt: skip
        launch(
            scatter_kernel, (pieces,), used_TK, cu_seqlens, before, table, out["token"], out["out"], out["segment"],
            T, S, steps, pieces, shared_chunks, **piece, M=M, PACKED=packed, CHUNK=CHUNK, warps=4,
        )  # fmt: skip
        launch(
            packed_chunks_kernel if packed else aligned_chunks_kernel, (_ceil(chunks, TABLE_CHUNKS),),
            cu_seqlens, table, *out.values(), T, S, steps, chunks, groups, shared_chunks, group_chunks,
            N=N, M=M, K=K, STATES=states, CHUNK=CHUNK, BLOCK=TABLE_CHUNKS, warps=4,
        )  # fmt: skip
    return tables


_sort = torch.library.custom_op(operator_name(__name__, "sort"), _sort_slots, mutates_args=())


@_sort.register_fake
def _sort_fake(
    used_TK: Tensor, cu_seqlens: Tensor, num_partitions: int, shared: bool, packed: bool, states: bool,
    group_chunks: int, shared_chunks: int, chunks: int, groups: int,
) -> Tensor:  # fmt: skip
    return _memory(_table_lengths(chunks, groups), used_TK)


def _select_partitions(router_logits: Tensor, used_k: int) -> tuple[Tensor, Tensor]:
    T, N = router_logits.shape
    logits = router_logits.contiguous()
    gate, used = _no_selection(router_logits, used_k)
    tokens, width = _select_tile(N)
    with torch.cuda.device_of(logits):
        launch(
            select_kernel, (_ceil(T, tokens),),
            logits, used, gate, T, N=N, K=used_k, BT=tokens, BN=width, warps=4,
        )  # fmt: skip
    return gate, used


_select = torch.library.custom_op(operator_name(__name__, "select"), _select_partitions, mutates_args=())


@_select.register_fake
def _no_selection(router_logits: Tensor, used_k: int) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], used_k)
    return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(shape, dtype=torch.int32)


def _select_gradient(router_logits: Tensor, used: Tensor, d_gate: Tensor) -> Tensor:
    T, N = router_logits.shape
    d_logits = torch.empty(T, N, dtype=router_logits.dtype, device=router_logits.device)
    tokens, width = _select_tile(N)
    with torch.cuda.device_of(router_logits):
        launch(
            select_backward_kernel, (_ceil(T, tokens),),
            router_logits.contiguous(), used, d_gate.contiguous(), d_logits, T,
            N=N, K=used.shape[1], BT=tokens, BN=width, warps=4,
        )  # fmt: skip
    return d_logits


_select_backward = torch.library.custom_op(
    operator_name(__name__, "select_backward"), _select_gradient, mutates_args=()
)


@_select_backward.register_fake
def _select_backward_fake(router_logits: Tensor, used: Tensor, d_gate: Tensor) -> Tensor:
    return torch.empty(router_logits.shape, dtype=router_logits.dtype, device=router_logits.device)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_gate: Tensor | None, d_used: Tensor | None) -> tuple[Tensor | None, None]:
    router_logits, used = ctx.saved_tensors
    return None if d_gate is None else _select_backward(router_logits, used, d_gate), None


_select.register_autograd(_backward, setup_context=_save_for_backward)


class _Selection(torch.autograd.Function):
    """The same at less cost for the host."""

    @staticmethod
    def forward(ctx: Any, router_logits: Tensor, used_k: int) -> tuple[Tensor, Tensor]:
        gate, used = _select_partitions(router_logits, used_k)
        ctx.save_for_backward(router_logits, used)
        ctx.mark_non_differentiable(used)
        return gate, used

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        router_logits, used = ctx.saved_tensors
        return _select_gradient(router_logits, used, gradients[0]), None


def _select_tile(N: int) -> tuple[int, int]:
    """Tokens and (padded) partitions of one program."""
    width = max(2, triton.next_power_of_2(N))
    return max(1, SELECT_ELEMENTS // width), width


@triton.jit
def _softmax_rows(logits, t, n, T, N: tl.constexpr):
    """Softmax in float32 of rows t of logits [T, N], 0 beyond N."""
    inside = (t < T)[:, None] & (n < N)[None, :]
    x = tl.load(logits + t.to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    x = tl.where((n < N)[None, :], x, float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit(do_not_specialize=["T"])
def select_kernel(
    logits, used, gate, T,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """gate = softmax(logits) of the K partitions with the highest gate.

    Grid (blocks of tokens). Bytes of a token: 4 N (logits in float32) + 8 K (used, gate). Tiles: 1024 logits, 8 to a
    thread of 4 warps; a token's logits side by side, since each choice looks at all of them."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, BN)
    e = _softmax_rows(logits, t, n, T, N)
    score = tl.where(e == e, e, float("inf"))  # NaN ranks first, as in torch.sort
    score = tl.where((n < N)[None, :], tl.maximum(score, -3.0e38), float("-inf"))
    at = t.to(tl.int64) * K
    for k in range(K):
        best = tl.argmax(score, 1, tie_break_left=True)
        chosen = n[None, :] == best[:, None]
        tl.store(used + at + k, best, mask=t < T)
        tl.store(gate + at + k, tl.sum(tl.where(chosen, e, 0.0), 1), mask=t < T)
        score = tl.where(chosen, float("-inf"), score)


@triton.jit(do_not_specialize=["T"])
def select_backward_kernel(
    logits, used, d_gate, d_logits, T, N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr
):
    """d logits = e (d e - sum(e d e)) with e = softmax(logits), and d e = 0 outside the used partitions.

    Grid (blocks of tokens). Bytes of a token: 8 N (logits and their gradient, float32) + 8 K (used, d gate). Tiles: as
    `select_kernel`."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, BN)
    e = _softmax_rows(logits, t, n, T, N)
    d_e = tl.zeros([BT, BN], tl.float32)
    at = t.to(tl.int64) * K
    for k in range(K):
        chosen = n[None, :] == tl.load(used + at + k, mask=t < T, other=0)[:, None]
        d_e += tl.where(chosen, tl.load(d_gate + at + k, mask=t < T, other=0.0)[:, None], 0.0)
    d_x = e * (d_e - tl.sum(e * d_e, 1)[:, None])
    inside = (t < T)[:, None] & (n < N)[None, :]
    tl.store(d_logits + t.to(tl.int64)[:, None] * N + n[None, :], d_x.to(d_logits.dtype.element_ty), mask=inside)
