"""The report of an analysis, as JSON and as a table.

JSON (schema 1); lengths, widths and half-lives in tokens; null where nothing was found or a layer has no such part:

    schema, model, teacher, conditions {device, dtype, versions, text, tokens, rows, length ...}
    layers    [{index, mixer, kind, ...}], for recurrent layers also partitions, shared, heads, head_dim, and of these
              whatever applies:
        half_life        sparse {p10, median, p90}, own, shared, sparse_by_head [H], shared_by_head [H]
        routing          load [N], load_entropy, gate_entropy, gate_mean, dead [partition ...]
        tokens           top [N][{id, text, count, of}]
        branches         sparse_rms, shared_rms, sparse_share, sparse_share_by_head [Hq], cosine
        output_error     relative, cosine                                       against the teacher, given its inputs
        attention        distance [Hq]                                          of the teacher
    left_out  [{layers, quantities, reason}]
    files     names of the figures beside the JSON, where it was written
"""

import dataclasses as dc
import math
from pathlib import Path
from typing import Any

from sse_convert.report import json_ready, table

SCHEMA = 1
FILE = "analysis.json"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LayerAnalysis:
    """One layer."""

    index: int
    """of the layer"""
    mixer: str
    """its name in the recipe, or `full`"""
    sizes: dict[str, Any]
    """kind, and the sizes of the state where there is one"""
    quantities: dict[str, dict[str, Any]]
    """what was found, by name"""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready but for NaN."""
        return {"index": self.index, "mixer": self.mixer, **self.sizes, **self.quantities}

    def get(self, quantity: str, *keys: str) -> float | None:
        """A number of a quantity; None where the layer has none or nothing was found."""
        value: Any = self.quantities.get(quantity)
        for key in keys:
            value = None if value is None else value[key]
        return None if value is None or math.isnan(value) else value


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Quantities that do not apply to some layers."""

    layers: tuple[int, ...]
    """indices"""
    quantities: tuple[str, ...]
    """names"""
    reason: str
    """why"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class AnalysisReport:
    """What the layers of a converted model do with a text."""

    model: str
    """folder or hub id"""
    teacher: str | None
    """the same, of the teacher, where one was given"""
    conditions: dict[str, Any]
    """text, machine, versions"""
    layers: tuple[LayerAnalysis, ...]
    """every layer of the model, in order"""
    left_out: tuple[LeftOut, ...]
    """what does not apply"""
    folder: Path | None = None
    """where the report was written, None where it was not"""
    files: tuple[str, ...] = ()
    """figures in that folder"""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, described at the top of this module."""
        data: dict[str, Any] = json_ready(
            {
                "schema": SCHEMA,
                "model": self.model,
                "teacher": self.teacher,
                "conditions": self.conditions,
                "layers": [layer.to_dict() for layer in self.layers],
                "left_out": [dc.asdict(part) for part in self.left_out],
                "files": list(self.files),
            }
        )
        return data

    def lines(self) -> list[str]:
        """A table of the converted layers, what was left out, and the files."""
        shown = [layer for layer in self.layers if layer.sizes["kind"] != "full"]
        c = self.conditions
        return [
            f"{self.model}: {len(shown)} of {len(self.layers)} layers converted",
            f"{c['tokens']:,} tokens of {c['text']} in rows of {c['length']:,}; {c['device']}, {c['dtype']}",
            "",
            *table(_HEADER, [_row(layer) for layer in shown]),
            "",
            *_LEGEND,
            *(
                f"left out in {_layers(part.layers)}: {', '.join(part.quantities)} ({part.reason})"
                for part in self.left_out
            ),
            *([f"wrote {self.folder}: {', '.join((FILE, *self.files))}"] if self.folder else []),
        ]


_HEADER = (*("layer", "mixer", "half-life", "shared", "load H", "gate H", "dead", "sparse", "error"),)
_LEGEND = (
    "half-life: tokens of text, and of the shared partition; load H, gate H: entropy of load and gate (1 is even);",
    "sparse: the partitions' part of the output; error: of the output against the teacher's, as a part of its power",
)


def _row(layer: LayerAnalysis) -> tuple[str | None, ...]:
    dead = layer.quantities.get("routing", {}).get("dead")
    return (
        str(layer.index),
        layer.mixer,
        _tokens(layer.get("half_life", "sparse", "median")),
        _tokens(layer.get("half_life", "shared", "median")),
        _number(layer.get("routing", "load_entropy")),
        _number(layer.get("routing", "gate_entropy")),
        None if dead is None else ",".join(map(str, dead)) or "none",
        _percent(layer.get("branches", "sparse_share")),
        _error(layer.get("output_error", "relative")),
    )


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _error(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _tokens(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _layers(indices: tuple[int, ...]) -> str:
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
