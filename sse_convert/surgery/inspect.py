"""What a checkpoint is: family, layers, sizes, new tensors, where it comes from. Reads small files and headers only."""

import dataclasses as dc
from collections import Counter
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.load_model import context_limit
from sse_convert.checkpoints.open import whole_checkpoint
from sse_convert.checkpoints.provenance import Provenance, read_provenance
from sse_convert.checkpoints.teacher import is_new_tensor, source_view
from sse_convert.mixers import FULL
from sse_convert.modeling.arch_spec import SSE_PREFIX
from sse_convert.modeling.configuration import checked_sse, stored_mixers
from sse_convert.recipe.units import format_count
from sse_convert.report import FieldsReport, counted, format_bytes, format_cache, format_mixer, format_number, table
from sse_convert.surgery.budget import Mixers, cache_bytes, constant_and_growth, table_lengths
from sse_convert.surgery.geometry import geometry_of


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class InspectReport(FieldsReport):
    """What was found."""

    name: str
    model_type: str
    converted: bool
    parameters: int
    """all stored elements"""
    new_parameters: int
    """of these, in tensors that conversion added"""
    dtypes: dict[str, int]
    """stored dtype -> elements"""
    shards: dict[str, int]
    """file -> bytes"""
    layers: list[str]
    """mixer name of each layer"""
    mixers: dict[str, Any]
    """settings of the named mixers"""
    constant_bytes: list[int]
    """per layer, state and window bytes of one sequence, whatever its length"""
    bytes_per_token: list[int]
    """per layer, bytes by which its cache grows with each token"""
    cache: dict[int, int]
    """length, the model's own context first -> cache and state bytes of one sequence"""
    base_model: str | None
    base_revision: str | None
    recipe_hash: str | None
    provenance: Provenance | None
    """content of sse_convert.json"""

    def lines(self) -> list[str]:
        """The result for a person."""
        stored = ", ".join(f"{format_number(count)} {dtype}" for dtype, count in self.dtypes.items())
        lines = [
            f"{self.name}: {self.model_type}, {len(self.layers)} layers, {format_number(self.parameters)} parameters "
            f"({stored}) in {counted(len(self.shards), 'file')} of {format_bytes(sum(self.shards.values()))}"
        ]
        if not self.converted:
            lines.append("a plain checkpoint, not converted")
        else:
            revision = f" at {self.base_revision}" if self.base_revision else ""
            counts = ", ".join(f"{count} {name}" for name, count in Counter(self.layers).items())
            lines += [
                f"converted from {self.base_model}{revision}: {counts}",
                f"{format_number(self.new_parameters)} new parameters; recipe {(self.recipe_hash or 'unknown')[:12]}",
            ]
        if self.provenance:
            lines.append(f"written by stage {self.provenance.stage}, sse-convert {self.provenance.tool_version}")
        lines += ["", *self._layer_table(), "", *self._mixer_lines()]
        sizes = ", ".join(f"{format_bytes(size)} at {format_count(length)}" for length, size in self.cache.items())
        return [*lines, f"cache and state of one sequence: {sizes}"]

    def _layer_table(self) -> list[str]:
        rows = [
            (str(i), name, format_cache(constant, growth))
            for i, (name, constant, growth) in enumerate(
                zip(self.layers, self.constant_bytes, self.bytes_per_token, strict=True)
            )
        ]
        return table(("layer", "mixer", "cache"), rows)

    def _mixer_lines(self) -> list[str]:
        written = {name: format_mixer(settings) for name, settings in self.mixers.items()}
        return [line if line.split()[0] == name else f"{name}: {line}" for name, line in written.items()]


def inspect_checkpoint(checkpoint: Path | str, revision: str | None = None) -> InspectReport:
    """Look at a checkpoint, converted or not. Arguments and errors as of `api.inspect`."""
    files = whole_checkpoint(checkpoint, revision)
    view = source_view(files)
    geometry = geometry_of(view)
    converted = files.model_type.startswith(SSE_PREFIX)
    sse = checked_sse(files.config.get("sse"), view.spec, view.num_layers) if converted else {}
    layers: list[str] = sse.get("layers", [FULL] * view.num_layers)
    by_layer: Mixers = stored_mixers(sse) if converted else [None] * view.num_layers
    sizes = [constant_and_growth(geometry, i, mixer) for i, mixer in enumerate(by_layer)]
    return InspectReport(
        name=str(checkpoint),
        model_type=files.model_type,
        converted=converted,
        parameters=files.parameters,
        new_parameters=sum(info.numel for name, info in files.tensors.items() if is_new_tensor(name)),
        dtypes=_dtypes([(info.dtype, info.numel) for info in files.tensors.values()]),
        shards=files.shard_bytes,
        layers=layers,
        mixers=sse.get("mixers", {}),
        constant_bytes=[constant for constant, _ in sizes],
        bytes_per_token=[growth for _, growth in sizes],
        cache={length: cache_bytes(geometry, by_layer, length) for length in table_lengths(context_limit(view.config))},
        base_model=sse.get("base_model"),
        base_revision=sse.get("base_revision"),
        recipe_hash=sse.get("recipe_hash"),
        provenance=read_provenance(files.folder),
    )


def _dtypes(tensors: list[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for dtype, numel in tensors:
        counts[dtype] += numel
    return dict(counts.most_common())
