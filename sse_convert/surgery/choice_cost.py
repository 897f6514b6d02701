"""What choosing layers or heads takes, and less of it on a CPU that would take long.

There one pass over attention ranks layers as it ranks heads, on fewer and shorter rows, and as many swaps are tried as
time is left for. On SmolLM2 such rows rank its heads as rows of 4K do, and kept layers lose no more than by the greedy
way (page *A real model*).
"""

import dataclasses as dc

import torch

from sse_convert.recipe.choosing import METHODS, TRIES, ProbeRows, most_sets
from sse_convert.surgery.budget import Geometry, forward_flops
from sse_convert.surgery.cpu_speed import fast_in_bfloat16, forward_flops_per_second

CPU_FLOPS = 4e13
"""of a choice on a CPU, about: three minutes on two cores with AVX-512, in float32"""
LIGHT_ROW, LIGHT_TEXT, LIGHT_RECALL = 1024, 4096, 8
"""tokens of a row, tokens of running text and recall rows, at most"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured."""

    rows: ProbeRows
    method: str
    """greedy or retrieval"""
    tries: int
    """of the method retrieval"""
    light: bool
    """it is less than elsewhere"""
    sets: int
    """forward passes over the rows, at most"""
    token_flops: float
    """of a token of a pass, counted as the teacher's"""

    @property
    def flops(self) -> float:
        """Of all passes."""
        return self.sets * self.rows.tokens * self.token_flops


def choice_effort(geometry: Geometry, rows: ProbeRows, *, by: str, keep: int, among: int, cpu: bool) -> Effort:
    """The effort of a choice.

    Args:
        geometry: the model's sizes.
        rows: as long and as many as are wanted.
        by: layers or heads.
        keep: how many stay.
        among: how many there are.
        cpu: it is made on a CPU.
    """
    full = _effort(geometry, rows, METHODS[by], keep, among, TRIES, light=False)
    if not cpu or full.flops <= CPU_FLOPS:
        return full
    length = min(LIGHT_ROW, rows.length)
    few = ProbeRows(length=length, text=max(1, LIGHT_TEXT // length), recall=min(LIGHT_RECALL, rows.recall))
    least = _effort(geometry, few, METHODS["heads"], keep, among, 0, light=True)
    swap = least.flops / least.sets / 2  # computed from the first layer on that differs: half of them, about
    tries = int((CPU_FLOPS - least.flops) / swap / (keep - keep // 2))
    return _effort(geometry, few, METHODS["heads"], keep, among, min(TRIES, max(0, tries)), light=True)


def _effort(
    geometry: Geometry, rows: ProbeRows, method: str, keep: int, among: int, tries: int, *, light: bool
) -> Effort:
    sets = most_sets(method, keep=keep, among=among, tries=tries)
    token_flops = forward_flops(geometry, [None] * geometry.layers, rows.length)
    return Effort(rows=rows, method=method, tries=tries, light=light, sets=sets, token_flops=token_flops)


def cpu_hours(effort: Effort, dtype: str) -> float:
    """On this machine, about.

    Args:
        effort: of `choice_effort`.
        dtype: that the model is stored in.
    """
    low = effort.light and fast_in_bfloat16() and dtype != "F32"
    return effort.flops / forward_flops_per_second(torch.bfloat16 if low else torch.float32) / 3600
