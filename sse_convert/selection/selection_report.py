"""The result of a selection: tables, JSON, a CSV of scores and a recipe fragment."""

import csv
import dataclasses as dc
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from sse_convert.files import write_json, write_text
from sse_convert.report import format_bytes, format_flow, format_mixer, table
from sse_convert.selection.choice import Choice
from sse_convert.selection.measure import Measurement

SCORES = "scores.csv"
FRAGMENT = "layers.yaml"
REPORT = "selection.json"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class SelectReport:
    """What was chosen, and what it is worth before any training."""

    model: str
    folder: Path
    """where the files are"""
    keep: int
    layers: dict[str, Any]
    """`layers` of a recipe with this choice"""
    stand_in: dict[str, Any]
    """settings of what stood in for replaced layers"""
    recall: str
    """what the recall rows were, and why"""
    teacher: Measurement
    """nothing replaced"""
    nothing: Measurement
    """every layer replaced"""
    chosen: Choice
    """the one in the fragment"""
    span: int
    """1 where layers were chosen, else the factor in the numbers of heads"""
    cache_length: int
    """tokens of the sequence whose cache is counted: the model's context"""
    cache_bytes_saved: list[int]
    """per layer, what replacing it saves of that cache (negative where it costs more)"""
    conditions: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        data = {field.name: getattr(self, field.name) for field in dc.fields(self)}
        chosen = data.pop("chosen")
        data["choices"] = [{**dc.asdict(chosen), "longest_run": chosen.longest_run, "cache_bytes_saved": self.saved()}]
        data["teacher"], data["nothing"] = dc.asdict(self.teacher), dc.asdict(self.nothing)
        return {**data, "folder": str(self.folder)}

    def saved(self) -> int:
        """Bytes of cache that one sequence of `cache_length` tokens saves."""
        return sum(saved for i, saved in enumerate(self.cache_bytes_saved) if i not in self.chosen.kept)

    def lines(self) -> list[str]:
        """The result for a person, and what to do with it."""
        return [*self.found_lines(), f"next: sse-convert plan RECIPE --set 'layers={format_flow(self.layers)}'"]

    def found_lines(self) -> list[str]:
        """The result for a person."""
        what = "layers" if self.span == 1 else "heads"
        return [
            f"wrote {self.folder}: keep {what} {self.names(self.chosen.kept)} ({self.chosen.method}), {FRAGMENT}, "
            f"{SCORES}, {REPORT}",
            f"recall: {self.recall}",
            *table(
                ("kept", "by", "text loss", "text KL", "recall loss", "recalled", "longest run", "cost", "seconds"),
                self._rows(),
            ),
            f"no training yet: replaced layers are {format_mixer(self.stand_in)}; cost in tokens read; "
            f"the choice saves {format_bytes(self.saved())} of cache at {self.cache_length:,} tokens",
            *self._length_lines(),
        ]

    def names(self, kept: Iterable[int]) -> str:
        """Layers, or heads as layer:head."""
        pairs = (divmod(unit, self.span) for unit in kept)
        return " ".join(str(layer) if self.span == 1 else f"{layer}:{head}" for layer, head in pairs)

    def _rows(self) -> list[tuple[object, ...]]:
        c = self.chosen
        return [
            (self.names(c.kept), c.method, *_figures(c.measured), c.longest_run, c.tokens, c.seconds),
            ("all", "(teacher)", *_figures(self.teacher), 0, None, None),
            ("none", "", *_figures(self.nothing), len(self.teacher.kept), None, None),
        ]

    def _length_lines(self) -> list[str]:
        """A note where the teacher reaches farther back than the rows of the choice."""
        length, context = self.conditions["length"], self.conditions["context"]
        if context is not None and context <= length:
            return []
        reach = "" if context is None else f" of the teacher's {context:,} positions"
        return [f"chosen on rows of {length:,}{reach}: other layers may find what lies farther back (--length)"]

    def write(self) -> None:
        """Write the three files, replacing earlier ones.

        Raises:
            OutputError: they cannot be written.
        """
        write_text(self.folder / SCORES, self.scores_csv())
        write_text(self.folder / FRAGMENT, self.fragment())
        write_json(self.folder / REPORT, self.to_dict())

    def scores_csv(self) -> str:
        """One row per layer; tokens and seconds are those of the whole choice."""
        stream, c = io.StringIO(), self.chosen
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("method", "layer", "kept", "score", "tokens", "seconds", "cache_bytes_saved"))
        for layer, saved in enumerate(self.cache_bytes_saved):
            score, kept = c.scores.get(layer, ""), int(layer in c.kept)
            writer.writerow((c.method, self.names([layer]), kept, score, c.tokens, c.seconds, saved))
        return stream.getvalue()

    def fragment(self) -> str:
        """The `layers` of a recipe, as YAML."""
        what = "layers" if self.span == 1 else "heads"
        head = [
            f"# {self.chosen.method} keeps these of the {len(self.teacher.kept)} {what} of {self.model}: put this in",
            "# place of the recipe's `layers`. Scores and measurements are in the files beside this one.",
        ]
        return "\n".join([*head, yaml.safe_dump({"layers": self.layers}, sort_keys=False)])


def _figures(m: Measurement | None) -> tuple[object, ...]:
    if m is None:
        return (None,) * 4
    return m.text_loss, m.text_kl, m.recall_loss, f"{m.recall_accuracy:.0%}"
