"""Tiles of the products of a few rows with a weight, which read the weight once and so take the time of reading it."""

import triton

MOST_INPUTS = 1024
"""of a tile: 8 in 16 bits for each thread of 4 warps, one load"""
TILE = 4096
"""weights of a tile"""
PROGRAMS = 1024
"""wanted in a launch, eight per multiprocessor: together they have the whole weight on its way at once"""


def row_tiles(inputs: int, outputs: int) -> tuple[int, int]:
    """Outputs and inputs of a program's tile.

    Args:
        inputs: columns of the weight.
        outputs: its rows, of all weights of the launch.
    """
    block_in = min(MOST_INPUTS, triton.next_power_of_2(inputs))
    wanted = triton.next_power_of_2(max(1, outputs // PROGRAMS))
    return min(wanted, max(1, TILE // block_in)), block_in
