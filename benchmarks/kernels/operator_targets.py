"""What the operator should reach, and whether a report says so."""

import dataclasses as dc
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from benchmarks.kernels.operator_cases import CUDNN, FLASH, GLA, OURS, VARLEN

Row = dict[str, Any]
LONG = (2**16, 2**18)
DIRECTIONS = ("forward", "forward_backward")
ERROR = 5e-3
"""relative error of o and of each gradient, bfloat16"""


@dc.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One row of the table."""

    target: str
    case: str
    direction: str
    ratio: float | None
    """None if one of its figures is missing"""
    limit: float
    at_least: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit


def verdicts(cells: list[Row]) -> Iterator[Verdict]:
    """All rows; each ratio is of medians of one run."""
    yield from _against_peers(cells)
    yield from _against_softmax(cells)
    yield from _across_partitions(cells)
    yield from _decoding(cells)
    yield from _errors(cells)


def figure(cells: list[Row], candidate: str, path: str, *, direction: str = "forward", **case: Any) -> float | None:
    """A figure such as `eager.ms` of one cell; None if it was not measured."""
    wanted = {"group": "figure", "partitions": 4, "top_k": 1, "candidate": candidate} | case
    for cell in cells:
        if all(cell[name] == value for name, value in wanted.items()):
            found: Any = cell.get(direction)
            for name in path.split("."):
                found = found.get(name) if isinstance(found, dict) else None
            return found
    return None


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _against_peers(cells: list[Row]) -> Iterator[Verdict]:
    for tokens, direction in product(LONG, DIRECTIONS):
        get = partial(figure, cells, direction=direction, tokens=tokens)
        verdict = partial(Verdict, case=f"{tokens} tokens, N = 4", direction=direction)
        ours = get(OURS, "eager.ms")
        yield verdict(target="speed-up over published varlen, both eager", ratio=_ratio(get(VARLEN, "eager.ms"), ours),
                      limit=5.0, at_least=True)  # fmt: skip
        yield verdict(target="time over chunk_gla of the same tokens, both eager",
                      ratio=_ratio(ours, get(GLA, "eager.ms")), limit=1.0)  # fmt: skip
        yield verdict(target="peak extra memory over published varlen",
                      ratio=_ratio(get(OURS, "extra_mib"), get(VARLEN, "extra_mib")), limit=1 / 3)  # fmt: skip


def _against_softmax(cells: list[Row]) -> Iterator[Verdict]:
    measured = {c["tokens"] for c in cells if c["group"] == "figure" and c["candidate"] == FLASH}
    for tokens in sorted({2**10} | {count for count in measured if count >= 2**13}):
        get = partial(figure, cells, path="graph.ms", direction="forward_backward", tokens=tokens)
        for peer, name in ((FLASH, "flash"), (CUDNN, "cuDNN")):
            yield Verdict(target=f"time over {name} attention, both as CUDA graphs", case=f"{tokens} tokens, N = 4",
                          direction="forward_backward", ratio=_ratio(get(OURS), get(peer)),
                          limit=1.0 if tokens >= 2**13 else 2.0)  # fmt: skip


def _across_partitions(cells: list[Row]) -> Iterator[Verdict]:
    for tokens, direction in product(LONG, DIRECTIONS):
        get = partial(figure, cells, OURS, "eager.ms", direction=direction, tokens=tokens)
        yield Verdict(target="time of N = 64 over N = 4, eager", case=f"{tokens} tokens", direction=direction,
                      ratio=_ratio(get(partitions=64), get(partitions=4)), limit=1.05)  # fmt: skip


def _decoding(cells: list[Row]) -> Iterator[Verdict]:
    get = partial(figure, cells, OURS, group="decode", tokens=64)
    for partitions in (4, 64):
        ratio = _ratio(get("graph.ms", partitions=partitions), get("floor_ms", partitions=partitions))
        yield Verdict(target="decoding step over the bytes floor, CUDA graph", case=f"batch 64, N = {partitions}",
                      direction="forward", ratio=ratio, limit=2.0)  # fmt: skip
    yield Verdict(target="decoding step of N = 64 over N = 4, CUDA graph", case="batch 64", direction="forward",
                  ratio=_ratio(get("graph.ms", partitions=64), get("graph.ms", partitions=4)), limit=1.05)  # fmt: skip


def _errors(cells: list[Row]) -> Iterator[Verdict]:
    errors = [(error, name) for cell in cells if cell["candidate"] == OURS and cell.get("errors")
              for name, error in cell["errors"].items()]  # fmt: skip
    worst, name = max(errors) if errors else (None, "")
    yield Verdict(target="relative error against float64", case=f"worst of {len(errors)}: {name}",
                  direction="", ratio=worst, limit=ERROR, unit="")  # fmt: skip
