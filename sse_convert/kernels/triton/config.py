"""Block sizes and warps of every kernel, by head dim and precision. Pinned: nothing is tuned at run time.

Four warps unless the row count is 128: with 64 rows Triton gives chained products of more warps to all of them alike.
"""

import dataclasses as dc

CHUNK = 64
"""slots per chunk"""
MAX_DIM = 256
"""largest head dim"""


@dc.dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is launched."""

    block_d: int
    """channels of q and k per program, or per step of a loop over them"""
    block_v: int
    """channels of v per program, or per step of a loop over them"""
    warps: int = 4
    """warps per program"""
    stages: int = 1
    """depth of the load pipeline"""


@dc.dataclass(frozen=True, slots=True)
class Config:
    """Launches of the forward and backward kernels."""

    prepare: Launch
    states: Launch
    scan: Launch
    output: Launch
    values: Launch
    finish: Launch
    finish_strong: Launch


def config_for(dim: int, value_dim: int, ieee: bool) -> Config:
    """The launches for head dims D and V.

    Args:
        dim: D.
        value_dim: V.
        ieee: float32 products instead of bf16 ones.
    """
    d, v = block(dim), block(value_dim)
    scan = Launch(8, v, 4, 4)
    if ieee:
        carry, part = Launch(d, min(v, 16)), Launch(min(d, 32), min(v, 32))
        return Config(part, carry, scan, carry, carry, part, part)
    narrow = min(v, 64 if d <= 128 else 32)
    return Config(
        prepare=Launch(min(d, 64), 0),
        states=Launch(d, narrow, 4, 3),
        scan=scan,
        output=Launch(d, narrow, 4, 2),
        values=Launch(d, narrow, 4, 2),
        finish=Launch(min(d, 64), min(v, 32), 4, 2),
        finish_strong=Launch(min(d, 32), min(v, 32), 4, 2),
    )


def group_chunks(chunks: int, heads: int) -> int:
    """Chunks that one program carries a state over: about four programs per multiprocessor, at least four chunks."""
    groups = max(1, 528 // heads)
    return min(64, max(4, -(-chunks // groups)))


def block(dim: int) -> int:
    """The power of two, at least 16, that holds `dim` channels."""
    return max(16, 1 << (dim - 1).bit_length())
