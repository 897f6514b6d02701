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

from sse_convert.kernels.gates import PartitionGate
from sse_convert.kernels.routing import route
from sse_convert.kernels.triton.config import CHUNK
from sse_convert.kernels.triton.namespace import operator_name

PIECE_SLOTS = 128
"""slots a program of the counting sort handles"""
SCAN = 1024
"""counts, or sequences, that are summed up at once"""
TABLE_CHUNKS = 16
"""chunks a program of the chunk tables handles"""
PARTITIONS_AT_ONCE = tl.constexpr(32)
"""partitions compared with at once, so that registers suffice for any number of them"""
SELECT_ELEMENTS = 2048
"""logits a program of the selection handles"""

_INTEGERS = ["T", "S", "search_steps", "pieces", "chunks", "groups", "num_shared"]


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


def select(router_logits: Tensor, router_bias: Tensor | None, used_k: int) -> tuple[Tensor, Tensor]:
    """The partitions of each token with the highest softmax gate (+ router_bias), best first, ties to the lowest index.

    Args:
        router_logits: [T, N], any float dtype but float64.
        router_bias: [N], added to the gate for the choice only.
        used_k: K, 1 to N.

    Returns:
        Partitions int32 [T, K] and their gates float32 [T, K]; gradients flow from the gates to the logits.
    """
    gate, used = _select(router_logits, router_bias, used_k)
    return used, gate


def select_by(
    partition_gate: PartitionGate, router_logits: Tensor, router_bias: Tensor | None, used_k: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """As `select`, with a registered gate in the place of softmax; computed by torch.

    Args:
        partition_gate: one that needs no state.
        router_logits: [T, N].
        router_bias: [N] or None.
        used_k: K, 1 to N.
        positions: int64 [T], place of each token in its sequence.
    """
    routing = route(router_logits, used_k, None, router_bias, partition_gate=partition_gate, positions=positions)
    return routing.write_TK.int().contiguous(), routing.gate_TN.gather(1, routing.write_TK).float()


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
    block_tokens = max(1, PIECE_SLOTS // K)
    pieces = T // block_tokens + S
    shared_chunks, chunks, groups = _sizes(T, K, S, N, shared, packed, group_chunks)
    M, device = N + shared, used_TK.device
    counts, before, table = _carve(device, [N * pieces, N * (pieces + 1), 3 * M * (S + 1)])
    slots = _carve(device, 3 * [chunks * CHUNK] + 4 * [chunks] + 2 * [groups])
    layout = SlotLayout(**dict(zip(_TABLES, slots, strict=True)), num_shared_chunks=shared_chunks)
    piece = {"N": N, "K": K, "BLOCK_TOKENS": block_tokens, "BLOCK": triton.next_power_of_2(block_tokens * K)}
    steps = S.bit_length()
    with torch.cuda.device_of(used_TK):
        count_kernel[(pieces,)](used_TK, cu_seqlens, counts, T, S, steps, pieces, **piece, num_warps=4)
        scan_kernel[(M,)](
            counts, before, table, cu_seqlens, S, pieces,
            N=N, M=M, BLOCK_TOKENS=block_tokens, GROUP=group_chunks, PACKED=packed, CHUNK=CHUNK, BLOCK=SCAN,
            num_warps=4,
        )  # fmt: skip
        scatter_kernel[(pieces,)](
            used_TK, cu_seqlens, before, table, layout.token, layout.out, layout.segment,
            T, S, steps, pieces, shared_chunks, **piece, M=M, PACKED=packed, CHUNK=CHUNK, num_warps=4,
        )  # fmt: skip
        kernel = packed_chunks_kernel if packed else aligned_chunks_kernel
        kernel[(triton.cdiv(chunks, TABLE_CHUNKS),)](
            cu_seqlens, table, *slots, T, S, steps, chunks, groups, shared_chunks,
            N=N, M=M, K=K, STATES=states, GROUP=group_chunks, CHUNK=CHUNK, BLOCK=TABLE_CHUNKS, num_warps=4,
        )  # fmt: skip
    return layout


_TABLES = ("token", "out", "segment", "head", "tail", "load", "store", "group_first", "group_end")


def _sizes(T: int, K: int, S: int, N: int, shared: bool, packed: bool, group_chunks: int) -> tuple[int, int, int]:
    """Shared chunks, all chunks and groups: exact when packed, else bounds that hold for any routing."""
    if packed:
        shared_chunks = triton.cdiv(T, CHUNK) if shared else 0
        chunks = shared_chunks + triton.cdiv(T * K, CHUNK)
        return shared_chunks, chunks, triton.cdiv(chunks, group_chunks)
    shared_segments, sparse_segments = min(S, T) if shared else 0, min(S * N, T * K)
    shared_chunks = (T + (CHUNK - 1) * shared_segments) // CHUNK if shared else 0
    chunks = shared_chunks + (T * K + (CHUNK - 1) * sparse_segments) // CHUNK
    groups = triton.cdiv(chunks, group_chunks) + shared_segments + sparse_segments
    return shared_chunks, chunks, min(chunks, groups)


def _carve(device: torch.device, sizes: list[int]) -> list[Tensor]:
    """Uninitialised int32 vectors from one allocation, each at a multiple of 256 bytes."""
    padded = [triton.cdiv(size, 64) * 64 for size in sizes]
    parts = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


@torch.library.custom_op(operator_name(__name__, "select"), mutates_args=())
def _select(router_logits: Tensor, router_bias: Tensor | None, used_k: int) -> tuple[Tensor, Tensor]:
    T, N = router_logits.shape
    logits = router_logits.contiguous()
    gate, used = _select_fake(router_logits, router_bias, used_k)
    tokens, width = _select_tile(N)
    with torch.cuda.device_of(logits):
        select_kernel[(triton.cdiv(T, tokens),)](
            logits, logits if router_bias is None else router_bias.contiguous(), used, gate, T,
            N=N, K=used_k, HAS_BIAS=router_bias is not None, BT=tokens, BN=width, num_warps=4,
        )  # fmt: skip
    return gate, used


@_select.register_fake
def _select_fake(router_logits: Tensor, router_bias: Tensor | None, used_k: int) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], used_k)
    return router_logits.new_empty(shape, dtype=torch.float32), router_logits.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op(operator_name(__name__, "select_backward"), mutates_args=())
def _select_backward(router_logits: Tensor, used: Tensor, d_gate: Tensor) -> Tensor:
    T, N = router_logits.shape
    d_logits = torch.empty(T, N, dtype=router_logits.dtype, device=router_logits.device)
    tokens, width = _select_tile(N)
    with torch.cuda.device_of(router_logits):
        select_backward_kernel[(triton.cdiv(T, tokens),)](
            router_logits.contiguous(), used, d_gate.contiguous(), d_logits, T,
            N=N, K=used.shape[1], BT=tokens, BN=width, num_warps=4,
        )  # fmt: skip
    return d_logits


@_select_backward.register_fake
def _select_backward_fake(router_logits: Tensor, used: Tensor, d_gate: Tensor) -> Tensor:
    return torch.empty(router_logits.shape, dtype=router_logits.dtype, device=router_logits.device)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor | None, int], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_gate: Tensor | None, d_used: Tensor | None) -> tuple[Tensor | None, None, None]:
    router_logits, used = ctx.saved_tensors
    return None if d_gate is None else _select_backward(router_logits, used, d_gate), None, None


_select.register_autograd(_backward, setup_context=_save_for_backward)


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
    logits, bias, used, gate, T,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """K times the highest score of each token."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, BN)
    e = _softmax_rows(logits, t, n, T, N)
    score = e
    if HAS_BIAS:
        score += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    score = tl.where(score == score, score, float("inf"))  # NaN ranks first, as in torch.sort
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
    """Backward of softmax, for gates that are zero outside the used partitions."""
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


@triton.jit
def _last_not_above(table, x, S, search_steps):
    """Per element of x the last index in [0, S) where the rising table, which starts at 0, does not exceed x."""
    index = tl.zeros_like(x)
    for step in range(search_steps):
        candidate = index + (1 << (search_steps - 1 - step))
        value = tl.load(table + candidate, mask=candidate < S, other=0).to(tl.int32)
        index = tl.where((candidate < S) & (value <= x), candidate, index)
    return index


@triton.jit
def _piece(cu, b, T, S, search_steps, BLOCK_TOKENS: tl.constexpr):
    """Sequence, first and end token of piece b. Piece b of sequence s is in block b - s of the tokens."""
    s = 0
    for step in range(search_steps):
        candidate = s + (1 << (search_steps - 1 - step))
        start = tl.load(cu + tl.minimum(candidate, S)).to(tl.int32)
        s = tl.where((candidate < S) & (start // BLOCK_TOKENS + candidate <= b), candidate, s)
    block = (b - s) * BLOCK_TOKENS
    first = tl.maximum(block, tl.load(cu + s).to(tl.int32))
    end = tl.minimum(block + BLOCK_TOKENS, tl.load(cu + s + 1).to(tl.int32))
    return s, first, tl.minimum(end, T)


@triton.jit(do_not_specialize=_INTEGERS)
def count_kernel(
    used, cu, counts, T, S, search_steps, pieces,
    N: tl.constexpr, K: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts [N, pieces]: slots of each partition in each piece."""
    b = tl.program_id(0)
    _, first, end = _piece(cu, b, T, S, search_steps, BLOCK_TOKENS)
    at = first * K + tl.arange(0, BLOCK)
    partition = tl.load(used + at, mask=at < end * K, other=-1)
    for start in range(0, N, PARTITIONS_AT_ONCE):
        p = start + tl.arange(0, PARTITIONS_AT_ONCE)
        found = tl.sum((partition[:, None] == p[None, :]).to(tl.int32), 0)
        tl.store(counts + p * pieces + b, found, mask=p < N)


@triton.jit(do_not_specialize=_INTEGERS)
def scan_kernel(
    counts, before, table, cu, S, pieces,
    N: tl.constexpr, M: tl.constexpr, BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per partition. before [N, pieces + 1]: slots of the partition before each piece. When aligned also
    table [3, M, S + 1]: chunks and groups of the partition before each sequence, and slots in the sequence."""
    m = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    row = before + m * (pieces + 1)
    if m < N:
        total = 0
        for start in range(0, pieces, BLOCK):
            b = start + i
            found = tl.load(counts + m * pieces + b, mask=b < pieces, other=0)
            tl.store(row + b, total + tl.cumsum(found, 0) - found, mask=b < pieces)
            total += tl.sum(found, 0)
        tl.store(row + pieces, total)
    if not PACKED:
        tl.debug_barrier()
        chunks, groups = 0, 0
        size = M * (S + 1)
        line = table + m * (S + 1)
        for start in range(0, S, BLOCK):
            s = start + i
            inside = s < S
            first = tl.load(cu + s, mask=inside, other=0).to(tl.int32)
            end = tl.load(cu + s + 1, mask=inside, other=0).to(tl.int32)
            length = end - first
            if m < N:
                length = tl.load(row + end // BLOCK_TOKENS + s + 1, mask=inside, other=0)
                length -= tl.load(row + first // BLOCK_TOKENS + s, mask=inside, other=0)
            its_chunks = tl.cdiv(length, CHUNK)
            its_groups = tl.cdiv(its_chunks, GROUP)
            tl.store(line + s, chunks + tl.cumsum(its_chunks, 0) - its_chunks, mask=inside)
            tl.store(line + size + s, groups + tl.cumsum(its_groups, 0) - its_groups, mask=inside)
            tl.store(line + 2 * size + s, length, mask=inside)
            chunks += tl.sum(its_chunks, 0)
            groups += tl.sum(its_groups, 0)
        tl.store(line + S, chunks)
        tl.store(line + size + S, groups)


@triton.jit(do_not_specialize=_INTEGERS)
def scatter_kernel(
    used, cu, before, table, token, out, segment, T, S, search_steps, pieces, num_shared,
    N: tl.constexpr, K: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write each slot of a piece to its place."""
    b = tl.program_id(0)
    s, first, end = _piece(cu, b, T, S, search_steps, BLOCK_TOKENS)
    i = tl.arange(0, BLOCK)
    at = first * K + i
    ok = at < end * K
    partition = tl.load(used + at, mask=ok, other=-1)
    place = tl.load(before + partition * (pieces + 1) + b, mask=ok, other=0)
    for start in range(0, BLOCK, PARTITIONS_AT_ONCE):
        j = start + tl.arange(0, PARTITIONS_AT_ONCE)
        other = tl.load(used + first * K + j, mask=first * K + j < end * K, other=-2)
        place += tl.sum(((partition[:, None] == other[None, :]) & (j[None, :] < i[:, None])).to(tl.int32), 1)
    if PACKED:
        totals, step = before + pieces, pieces + 1
    else:
        totals, step = table + S, S + 1
        segment_first = tl.load(cu + s).to(tl.int32) // BLOCK_TOKENS + s
        place -= tl.load(before + partition * (pieces + 1) + segment_first, mask=ok, other=0)
        place += CHUNK * tl.load(table + partition * (S + 1) + s, mask=ok, other=0)
    earlier = tl.zeros([BLOCK], tl.int32)
    for start in range(0, N, PARTITIONS_AT_ONCE):
        p = start + tl.arange(0, PARTITIONS_AT_ONCE)
        total = tl.load(totals + p * step, mask=p < N, other=0)
        earlier += tl.sum(tl.where(p[None, :] < partition[:, None], total[None, :], 0), 1)
    place += num_shared * CHUNK + (earlier if PACKED else earlier * CHUNK)
    tl.store(token + place, at // K, mask=ok)
    tl.store(out + place, (at % K) * T + at // K, mask=ok)
    tl.store(segment + place, partition * S + s, mask=ok)


@triton.jit(do_not_specialize=_INTEGERS)
def aligned_chunks_kernel(
    cu, table, token, out, segment, head, tail, load, store, group_first, group_end,
    T, S, search_steps, chunks, groups, num_shared,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything about a chunk, the groups that start in it, its padding, and the slots of the shared partition."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = M * (S + 1)
    shared = c < num_shared
    local = tl.where(shared, c, c - num_shared)
    partition = tl.where(shared, N, 0)
    chunks_before = tl.zeros([BLOCK], tl.int32)
    all_chunks, all_groups, shared_chunks = 0, 0, 0
    if M > N:
        shared_chunks = tl.load(table + N * (S + 1) + S)
        all_groups = tl.load(table + size + N * (S + 1) + S)
    groups_before = tl.where(shared, 0, all_groups)
    for start in range(0, N, PARTITIONS_AT_ONCE):
        p = start + tl.arange(0, PARTITIONS_AT_ONCE)
        its_chunks = tl.load(table + p * (S + 1) + S, mask=p < N, other=0)
        its_groups = tl.load(table + size + p * (S + 1) + S, mask=p < N, other=0)
        end = all_chunks + tl.cumsum(its_chunks, 0)
        past = (end[None, :] <= local[:, None]) & (p < N)[None, :] & (c >= num_shared)[:, None]
        partition += tl.sum(past.to(tl.int32), 1)
        chunks_before += tl.sum(tl.where(past, its_chunks[None, :], 0), 1)
        groups_before += tl.sum(tl.where(past, its_groups[None, :], 0), 1)
        all_chunks += tl.sum(its_chunks, 0)
        all_groups += tl.sum(its_groups, 0)
    ok = (c < chunks) & (local < tl.where(shared, shared_chunks, all_chunks))
    partition = tl.where(ok, partition, 0)
    line = table + partition * (S + 1)
    local = tl.where(ok, local - chunks_before, 0)
    s = _last_not_above(line, local, S, search_steps)
    nth = local - tl.load(line + s)
    length = tl.load(line + 2 * size + s)
    its_chunks = tl.cdiv(length, CHUNK)
    its_segment = partition * S + s
    first, last = nth == 0, nth == its_chunks - 1
    state = tl.where(ok, s * M + partition, -1)
    if STATES:
        entered, left = ok, ok
    else:
        entered, left = ok & (first == 0), ok & (last == 0)
        state = tl.zeros_like(c) - 1
    tl.store(head + c, tl.where(entered, its_segment, -2), mask=c < chunks)
    tl.store(tail + c, tl.where(left, its_segment, -2), mask=c < chunks)
    tl.store(load + c, tl.where(first, state, -1), mask=c < chunks)
    tl.store(store + c, tl.where(last, state, -1), mask=c < chunks)

    group = groups_before + tl.load(line + size + s) + nth // GROUP
    starts = ok & (nth % GROUP == 0)
    tl.store(group_first + group, c, mask=starts)
    tl.store(group_end + group, c + tl.minimum(its_chunks - nth, GROUP), mask=starts)
    tl.store(group_first + c, tl.zeros_like(c), mask=(c >= all_groups) & (c < groups))
    tl.store(group_end + c, tl.zeros_like(c), mask=(c >= all_groups) & (c < groups))

    i = tl.arange(0, CHUNK)
    slot = c[:, None] * CHUNK + i[None, :]
    row = (nth * CHUNK)[:, None] + i[None, :]
    filled = ok[:, None] & (row < length[:, None])
    ours = (c < chunks)[:, None] & (shared[:, None] | (filled == 0))
    t = tl.load(cu + s).to(tl.int32)[:, None] + row
    tl.store(token + slot, tl.where(filled, t, -1), mask=ours)
    tl.store(out + slot, tl.where(filled, K * T + t, -1), mask=ours)
    tl.store(segment + slot, tl.where(filled, its_segment[:, None], -1), mask=ours)


@triton.jit
def _packed_segment(segment, cu, at, ok, shared, S, search_steps, offset, N: tl.constexpr):
    """Segment of the slots `at` in their region; the scatter has written those of the sparse one. -3 where not ok."""
    s = _last_not_above(cu, tl.where(shared & ok, at, 0), S, search_steps)
    sparse = tl.load(segment + offset + at, mask=ok & (shared == 0), other=0)
    return tl.where(ok, tl.where(shared, N * S + s, sparse), -3)


@triton.jit(do_not_specialize=_INTEGERS)
def packed_chunks_kernel(
    cu, table, token, out, segment, head, tail, load, store, group_first, group_end,
    T, S, search_steps, chunks, groups, num_shared,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, STATES: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything about a chunk, the group that starts at it, its padding, and the slots of the shared partition."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < chunks
    shared = c < num_shared
    local = tl.where(shared, c, c - num_shared) * CHUNK
    total = tl.where(shared, T, T * K)
    final = tl.minimum(local + CHUNK, total) - 1
    offset = num_shared * CHUNK
    first_segment = _packed_segment(segment, cu, local, inside, shared, S, search_steps, offset, N)
    last_segment = _packed_segment(segment, cu, final, inside, shared, S, search_steps, offset, N)
    previous = _packed_segment(segment, cu, local - 1, inside & (local > 0), shared, S, search_steps, offset, N)
    following = _packed_segment(
        segment, cu, final + 1, inside & (final + 1 < total), shared, S, search_steps, offset, N
    )
    tl.store(head + c, tl.where(previous == first_segment, first_segment, -2), mask=inside)
    tl.store(tail + c, tl.where(following == last_segment, last_segment, -2), mask=inside)
    tl.store(load + c, tl.zeros_like(c) - 1, mask=inside)
    tl.store(store + c, tl.zeros_like(c) - 1, mask=inside)
    starts = inside & (c % GROUP == 0)
    tl.store(group_first + c // GROUP, c, mask=starts)
    tl.store(group_end + c // GROUP, tl.minimum(c + GROUP, chunks), mask=starts)

    i = tl.arange(0, CHUNK)
    slot = c[:, None] * CHUNK + i[None, :]
    at = local[:, None] + i[None, :]
    filled = inside[:, None] & (at < total[:, None])
    ours = inside[:, None] & (shared[:, None] | (filled == 0))
    its_segment = N * S + _last_not_above(cu, tl.where(ours & filled, at, 0), S, search_steps)
    tl.store(token + slot, tl.where(filled, at, -1), mask=ours)
    tl.store(out + slot, tl.where(filled, K * T + at, -1), mask=ours)
    tl.store(segment + slot, tl.where(filled, its_segment, -1), mask=ours)
