"""Shares of the teacher's score, on the tasks of which it answers most."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.quality.wordings.parts import parse
from sse_convert.evaluation.intervals import Accuracy, wilson
from sse_convert.report import table

ENOUGH = 0.6
"""tasks count where the teacher's score is this or more"""


class Task(NamedTuple):
    """A model beside its teacher on one task."""

    name: str
    student: Accuracy
    teacher: Accuracy


def tasks(report: dict[str, Any], teacher: dict[str, Any] | None) -> Iterator[Task]:
    """Tasks of a part: RULER's with the report of the teacher's part, else our needles."""
    if "ruler" not in report:
        pairs = zip(report["after"]["student"]["needles"], report["after"]["teacher"]["needles"], strict=True)
        for own, its in pairs:
            name = f"{own['kind']} x{own['keys']} {own['length']}"
            yield Task(name, *(Accuracy(one["correct"], one["samples"]) for one in (own, its)))
        return
    known = {(entry["task"], entry["length"]): entry["scores"] for entry in (teacher or {"ruler": []})["ruler"]}
    for entry in report["ruler"]:
        own, its = entry["scores"], known.get((entry["task"], entry["length"]), [])
        count = min(len(own), len(its))
        if count:
            name = f"{entry['task']} {entry['length']}"
            yield Task(name, Accuracy(sum(own[:count]), count), Accuracy(sum(its[:count]), count))


def share(one: Task) -> tuple[float, float, float]:
    """The student's score as a share of the teacher's, with the ends of the student's 95% interval on that scale."""
    low, high = wilson(one.student.correct, one.student.samples)
    return tuple(value / one.teacher.value for value in (one.student.value, low, high))  # type: ignore[return-value]


def lines(folder: Path) -> list[str]:
    """A table of all parts that are finished."""
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    rows: list[tuple[object, ...]] = []
    for name, report in reports.items():
        if parse(name).layout == "teacher":
            for entry in report["ruler"]:
                score = f"{sum(entry['scores']) / len(entry['scores']):.1%}"
                rows.append((name, f"{entry['task']} {entry['length']}", "", score, len(entry["scores"])))
            continue
        if "cut" in report:
            rows.append((name, "cut short at", ", ".join(f"{k} {n:,}" for k, n in report["cut"].items()), "", ""))
        divergences = {part["length"]: part["kl"] for part in report["after"]["student"].get("agreement", ())}
        gaps = {part["length"]: part["gap"] for part in report["after"]["loss_gaps"]}
        rows += [(name, f"KL and gap {n}", f"{divergences.get(n, 0):.4f}", f"{gap:.4f}", "") for n, gap in gaps.items()]
        for form, n in report.get("own_forms", {}).items():
            shown = f"{n['first'] / n['answers']:.1%} of first tokens, {n['right'] / n['answers']:.1%} whole"
            rows.append((name, f"in training's own {form}", shown, "", n["answers"]))
        for one in tasks(report, reports.get(f"{name.partition('-')[0]}-teacher")):
            if one.teacher.value >= ENOUGH:
                value, low, high = share(one)
                shown = f"{value:.1%} ({low:.1%} to {high:.1%})"
                rows.append((name, one.name, shown, f"{one.teacher.value:.1%}", one.student.samples))
    return table(("part", "task", "share of the teacher's", "teacher", "samples"), rows)
