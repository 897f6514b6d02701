"""GPU memory as a function of a stage's rows and processes, and the rows that fit. `stage_memory` makes the numbers."""

import dataclasses as dc

from sse_convert.modeling.logits import KL_BYTES, logits_at_once

GIB = 1 << 30
GPU_GIB = (24, 48, 80, 141)
"""memory sizes of the tables"""
USABLE = 0.92
"""share of a GPU's memory that training can use; the rest is the driver's, the library's and fragmentation"""
CPU_TOKENS = 4096
"""tokens of a pass on a CPU beyond which more of them no longer make it faster"""
LIBRARIES = 600 << 20
"""bytes of a process that has imported torch and transformers"""
MOST_TOKENS = 65536
"""tokens of a pass beyond which more of them no longer make a GPU faster"""


@dc.dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a stage, each with a GPU."""

    count: int = 1
    sharded: bool = False
    """they share the weights (FSDP2); else each has all of them (DDP)"""


ONE = Processes()


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Memory of one training stage as a function of its rows, of its processes and of the GPU."""

    weights: int
    """bytes of weights, gradients, optimizer and teacher"""
    copies: int = 0
    """of these, copies for autocast, which FSDP makes of what it gathers"""
    held_low: int = 0
    """bytes of `weights` that frozen matrices take less, where weights are not shared out"""
    gathered: int = 0
    """bytes that a process has whole at a time under FSDP"""
    ddp: int = 0
    """bytes that DDP takes beside the gradients"""
    head: int
    """bytes of the head's gradient, which the losses hold whole"""
    chunked_by: int
    """bytes per logit that chunks are cut for"""
    per_logit: int
    """bytes per logit that a chunk takes"""
    vocabulary: int
    """logits per token"""
    per_token: float
    """activation bytes per token that are kept from the forward to the backward pass"""
    again: float = 0
    """activation bytes per token, beside those, of one layer that is computed when no logits are there"""
    narrower: float = 0
    """bytes of `per_token` that FSDP spares: its weights have the compute dtype, and so has the residual stream"""
    per_pair: int
    """bytes per pair of tokens of a row: the mask of packed rows"""
    ranks: int = 1
    """processes that hold a row together, and share the weights at least among themselves"""

    def fixed(self, processes: Processes = ONE) -> float:
        """Bytes of a process that its rows do not change, the head's gradient included."""
        count = max(processes.count, self.ranks)
        if self._shares_out(processes):
            return (self.weights - self.copies) / count + self.gathered + self.head
        return self.weights - self.held_low + self.head + (self.ddp if count > 1 else 0)

    def total(self, seq_len: int, rows: int, gpu_bytes: int, processes: Processes = ONE) -> float:
        """Bytes of one process for a forward and backward pass.

        Args:
            seq_len: tokens of a row.
            rows: rows of the pass.
            gpu_bytes: memory of the whole GPU, which decides on the logits that exist at a time.
            processes: how many, and whether they share the weights.
        """
        tokens = rows * seq_len
        some = tokens // self.ranks * self.vocabulary
        logits = min(logits_at_once(gpu_bytes, self.chunked_by), some) if self.chunked_by else 0
        spared = self.narrower if self._shares_out(processes) else 0
        kept = tokens * (self.per_token - spared + self.per_pair * seq_len)
        return self.fixed(processes) + kept + max(self.per_logit * logits, tokens * self.again)

    def _shares_out(self, processes: Processes) -> bool:
        return processes.sharded or self.ranks > 1

    def least(self, seq_len: int, rows: int, processes: Processes = ONE) -> float:
        """Bytes on the smallest of the usual GPUs that this fits, or on the largest of them."""
        needed = {gib: self.total(seq_len, rows, gib * GIB, processes) for gib in GPU_GIB}
        return next((total for gib, total in needed.items() if total <= gib * GIB * USABLE), needed[GPU_GIB[-1]])

    def on_cpu(self, seq_len: int, rows: int) -> float:
        """Bytes of a process on a CPU, where losses are no kernels of their own."""
        tokens = rows * seq_len
        logits = min(logits_at_once(None), tokens * self.vocabulary) if self.chunked_by else 0
        kept = tokens * (self.per_token + self.per_pair * seq_len)
        return LIBRARIES + self.fixed() + kept + max(KL_BYTES * logits, tokens * self.again)

    def longest(self, gpu_gib: int) -> int:
        """Tokens of the longest single row that fits a GPU, a multiple of 256; 0 if the model itself does not fit."""
        room = gpu_gib * GIB * USABLE
        low, high = 0, 1 << 24
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.total(middle * 256, 1, gpu_gib * GIB) <= room
            low, high = (middle, high) if fits else (low, middle)
        return low * 256


def most_rows(estimate: StageMemory, seq_len: int, rows: int, gpu_bytes: int, room: float, processes: Processes) -> int:
    """Rows of the largest pass that fits and goes evenly into `rows`; 0 if none does.

    Args:
        estimate: of the stage.
        seq_len: tokens of a row.
        rows: of one step and process.
        gpu_bytes: memory of the whole GPU.
        room: bytes that may be used.
        processes: how many, and whether they share the weights.
    """
    fitting = (n for n in even_parts(rows) if estimate.total(seq_len, n, gpu_bytes, processes) <= room)
    most = MOST_TOKENS * estimate.ranks
    return max((n for n in fitting if n == 1 or n * seq_len <= most), default=0)


def cpu_rows(seq_len: int, rows: int) -> int:
    """Rows of a pass on a CPU, of so many of a step."""
    return max(n for n in even_parts(rows) if n == 1 or n * seq_len <= CPU_TOKENS)


def even_parts(rows: int) -> list[int]:
    """The numbers that go evenly into a number of rows, in rising order."""
    return [n for n in range(1, rows + 1) if rows % n == 0]
