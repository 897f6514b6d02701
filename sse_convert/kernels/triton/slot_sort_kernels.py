"""Kernels that put the slots in order, and describe the chunks, for `routing.slot_layout`.

A counting sort by partition: tokens are cut into pieces, at multiples of a block and wherever a sequence starts; the
slots of each piece are counted, the counts summed up per partition, and each slot goes to the place the sums give it.
"""

import triton
import triton.language as tl

PARTITIONS_AT_ONCE = tl.constexpr(32)
"""partitions compared with at once, so that registers suffice for any number of them"""
SLOTS_AT_ONCE = tl.constexpr(16)
"""slots compared with at once; with 32 the scatter of 64 partitions spills"""
_INTEGERS = ["T", "S", "search_steps", "pieces", "chunks", "groups", "num_shared", "group_chunks"]


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
    """counts [N, pieces] = slots of each partition in each piece.

    Grid (pieces). Bytes of a piece: 4 of each slot + 4 N. Tiles: 128 slots compared with 32 partitions at once, 32
    registers of 4 warps, so that registers suffice for any N."""
    b = tl.program_id(0)
    _, first, end = _piece(cu, b, T, S, search_steps, BLOCK_TOKENS)
    at = first * K + tl.arange(0, BLOCK)
    partition = tl.load(used + at, mask=at < end * K, other=-1)
    for start in range(0, N, PARTITIONS_AT_ONCE):
        p = start + tl.arange(0, PARTITIONS_AT_ONCE)
        found = tl.sum((partition[:, None] == p[None, :]).to(tl.int32), 0)
        tl.store(counts + p * pieces + b, found, mask=p < N)


@triton.jit(do_not_specialize=_INTEGERS)
def sum_kernel(
    counts, before, table, cu, S, pieces, group_chunks,
    N: tl.constexpr, M: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """before [N, pieces + 1] = slots of the partition before each piece. When aligned also table [3, M, S + 1]: chunks
    and groups of the partition before each sequence, and slots in the sequence.

    Grid (M), a program per partition. Bytes of a partition: 8 of each piece (counts, before) and, when aligned, 8 + 12
    of each sequence (before, table) besides its offset. Tiles: 1024 counts or sequences, one scan of 4 warps."""
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
            its_groups = tl.cdiv(its_chunks, group_chunks)
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
    """token, out, segment [place] = those of each slot of a piece; its place = what is before its piece in its
    partition + earlier slots of the piece with this partition + what earlier partitions take.

    Grid (pieces). Bytes of a slot: 4 (used) + 12 (token, out, segment), and what `before` and `table` hold of each
    partition. Tiles: 128 slots compared with 16 others, then with 32 partitions at once: with 32 others the scatter of
    64 partitions spills."""
    b = tl.program_id(0)
    s, first, end = _piece(cu, b, T, S, search_steps, BLOCK_TOKENS)
    i = tl.arange(0, BLOCK)
    at = first * K + i
    ok = at < end * K
    partition = tl.load(used + at, mask=ok, other=-1)
    place = tl.load(before + partition * (pieces + 1) + b, mask=ok, other=0)
    for start in range(0, BLOCK, SLOTS_AT_ONCE):
        j = start + tl.arange(0, SLOTS_AT_ONCE)
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
    T, S, search_steps, chunks, groups, num_shared, group_chunks,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, STATES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything about a chunk, the groups that start in it, its padding, and the slots of the shared partition. With
    local = its number in its partition: sequence = the last with chunks before it <= local, group = groups before +
    local's place in the sequence / group_chunks.

    Grid (blocks of chunks). Bytes of a chunk: 16 (head, tail, load, store) and 12 of each slot that is shared or
    padding; 8 N of a program (table). Tiles: 8 chunks of 64 slots, four to a thread of 4 warps."""
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

    group = groups_before + tl.load(line + size + s) + nth // group_chunks
    starts = ok & (nth % group_chunks == 0)
    tl.store(group_first + group, c, mask=starts)
    tl.store(group_end + group, c + tl.minimum(its_chunks - nth, group_chunks), mask=starts)
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
    T, S, search_steps, chunks, groups, num_shared, group_chunks,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, STATES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything about a chunk, the group that starts at it, its padding, and the slots of the shared partition: head =
    its first slot's segment where the slot before has the same, tail = its last one's where the slot after has, else
    -2.

    Grid (blocks of chunks). Bytes of a chunk: 16 + 16 (segments at its borders; head, tail, load, store) and 12 of each
    slot that is shared or padding. Tiles: 8 chunks of 64 slots, four to a thread of 4 warps."""
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
    starts = inside & (c % group_chunks == 0)
    tl.store(group_first + c // group_chunks, c, mask=starts)
    tl.store(group_end + c // group_chunks, tl.minimum(c + group_chunks, chunks), mask=starts)

    i = tl.arange(0, CHUNK)
    slot = c[:, None] * CHUNK + i[None, :]
    at = local[:, None] + i[None, :]
    filled = inside[:, None] & (at < total[:, None])
    ours = inside[:, None] & (shared[:, None] | (filled == 0))
    its_segment = N * S + _last_not_above(cu, tl.where(ours & filled, at, 0), S, search_steps)
    tl.store(token + slot, tl.where(filled, at, -1), mask=ours)
    tl.store(out + slot, tl.where(filled, K * T + at, -1), mask=ours)
    tl.store(segment + slot, tl.where(filled, its_segment, -1), mask=ours)
