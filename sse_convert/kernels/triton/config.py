"""Block sizes and warps of every kernel, by head dim, precision and the device's shared memory. Pinned: nothing is
tuned at run time.

Four warps unless the row count is 128: with 64 rows Triton gives chained products of more warps to all of them alike.
Products in float32 are not tensor core ones; there eight warps hold twice the tile in registers.
"""

import dataclasses as dc
import functools
from typing import NamedTuple

import torch

CHUNK = 64
"""slots per chunk"""
MAX_DIM = 256
"""largest head dim"""
LARGE = 227 * 1024
"""bytes of shared memory that the larger tiles are for: Hopper, and Blackwell in servers"""
TENSOR_MEMORY = 10
"""major compute capability of devices whose products add up in tensor memory: no property of a device tells"""


class Widths(NamedTuple):
    """Sizes of a head that decide which code the kernels are compiled to."""

    groups: int
    """G, query heads per state head"""
    dim: int
    """D"""
    value_dim: int
    """V"""


USUAL = Widths(2, 128, 128)
"""of most models"""


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
    heads: int = 1
    """query heads of one state per program, or per step of a loop over them"""
    registers: int | None = None
    """most that a thread may use where states of all chunks are stored"""


@dc.dataclass(frozen=True, slots=True)
class Config:
    """Launches of the forward and backward kernels."""

    prepare: Launch
    strong_products: Launch
    states: Launch
    scan: Launch
    output: Launch
    correct: Launch
    """both directions of the delta rule's walk"""
    values: Launch
    finish: Launch
    finish_strong: Launch


@functools.cache
def config_for(
    dim: int, value_dim: int, groups: int, ieee: bool, shared_bytes: int, tensor_memory: bool
) -> Config:  # fmt: skip
    """The launches for head dims D and V.

    Args:
        dim: D.
        value_dim: V.
        groups: G, query heads per state head.
        ieee: float32 products instead of bf16 ones.
        shared_bytes: shared memory that a program may ask for.
        tensor_memory: whether products add up in tensor memory.
    """
    d, v = block(dim), block(value_dim)
    scan = Launch(8, v, 4, 4)
    if ieee:
        carry, part = Launch(d, min(v, 16 if d <= 128 else 8)), Launch(min(d, 32), min(v, 32), 8)
        walk = dc.replace(carry, warps=8)
        return Config(part, part, carry, scan, walk, walk, walk, part, part)
    strong = Launch(32, min(v, 32), 4, 1)
    if shared_bytes < LARGE or d > 128:
        carry = Launch(d, min(v, 32), 4, 1)
        part = Launch(min(d, 32), min(v, 32))
        # of one stage, ptxas 12.8 makes code for Hopper that reads anywhere
        walk = dc.replace(carry, stages=2, warps=8 if tensor_memory else 4) if shared_bytes >= LARGE else carry
        return Config(Launch(min(d, 32), 0), strong, carry, scan, carry, walk, carry, part, strong)
    finish = {1: Launch(32, min(v // 2, 64), 4, 2, registers=128), 2: Launch(32, 32, 4, 3, 2, registers=168)}
    wide, half, pairs = min(v, 128), min(v, 64), 2 - groups % 2
    large = Config(
        prepare=Launch(32 if dim % 64 else 64, 0, 4 * pairs, heads=pairs),
        strong_products=Launch(min(d, 32), 0),
        states=Launch(d, wide, 8, 3, registers=128) if d == 128 else Launch(d, half, 4, 3),
        scan=scan,
        output=Launch(d, wide, 4 * pairs, 2, pairs),
        correct=Launch(d, min(v, 32), 4, 2),
        values=Launch(d, wide, 4, 3) if groups == 1 else Launch(d, half, 4, 2 if groups == 2 else 1),
        finish=finish.get(groups, Launch(min(d, 64), 32, 4, 3)),
        finish_strong=strong,
    )
    return _in_tensor_memory(large, groups) if tensor_memory else large


def _in_tensor_memory(large: Config, groups: int) -> Config:
    """Tiles of a device with tensor memory, whose registers take what they read from there besides what they compute:
    smaller ones or more warps, so that nothing spills and no thread need be held to fewer registers."""
    half = min(large.output.block_v, 64)
    return dc.replace(
        large,
        prepare=dc.replace(large.prepare, block_d=32),
        states=dc.replace(large.states, block_v=half, warps=4, registers=None),
        output=dc.replace(large.output, block_v=half if large.output.heads > 1 else large.output.block_v, warps=8),
        values=dc.replace(large.values, warps=8),
        finish=dc.replace(large.finish, registers=None),
    )


def group_chunks(chunks: int, heads: int) -> int:
    """Chunks that one program carries a state over: about eight programs per multiprocessor, 4 to 16 chunks each."""
    return min(16, max(4, -(-chunks * heads // 1056)))


def block(dim: int) -> int:
    """The power of two, at least 32, that holds `dim` channels: products of 16 columns are miscompiled for Hopper."""
    return max(32, 1 << (dim - 1).bit_length())


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may ask for on a device; `LARGE` where kernels are interpreted."""
    if device.type != "cuda":
        return LARGE
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@functools.cache
def tensor_memory(device: torch.device) -> bool:
    """Whether products add up in tensor memory on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == TENSOR_MEMORY
