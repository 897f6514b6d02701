"""Runs one part: trains, measures, writes JSON. Whatever is finished is not done again."""

import gc
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.quality.convert import commit, measure
from benchmarks.quality.wordings.parts import TEACHERS, Part, Place, overrides
from sse_convert.checkpoints.load_model import device_name, load_model, load_tokenizer
from sse_convert.console import say
from sse_convert.evaluation.ruler import RULER_TASKS, load_material
from sse_convert.evaluation.ruler_rows import ruler_samples
from sse_convert.evaluation.ruler_score import answer, string_match_all
from sse_convert.files import write_json
from sse_convert.recipe.schema import RulerEval

ESSAY = "valid/marcel-proust-swann-s-way.txt"
ROWS = 64
"""prompts answered at once"""


def run(part: Part, place: Place, samples: dict[int, int], changes: list[str], out: Path) -> None:
    """Train and measure a part, or continue where it stopped; `out` is written when all is done."""
    teacher = TEACHERS[part.teacher]
    if part.layout == "teacher":
        folder = place.checkpoints / teacher.folder
        report: dict[str, Any] = {"schema": 1, "commit": commit(), "date": time.strftime("%F")}
    else:
        recipe, own = overrides(part, place, samples)
        report = _trained(out.with_suffix(".trained"), recipe, [*own, *changes])
        folder = place.model
    if teacher.ruler:
        report["ruler"] = ruler(folder, place.books / ESSAY, samples, out.with_suffix(".ruler"))
    write_json(out, {**report, "part": part.name})


def _trained(file: Path, recipe: str, changes: list[str]) -> dict[str, Any]:
    """The report of `convert.py`, kept in a file."""
    if not file.exists():
        write_json(file, measure(recipe, changes, untrained=False))
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return report


def ruler(folder: Path, essay: Path, samples: dict[int, int], file: Path) -> list[dict[str, Any]]:
    """What a model answers to the eight tasks: of each length and task the score of every sample, kept in a file."""
    done: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    finished = {(entry["length"], entry["task"]) for entry in done}
    model, tokenizer, material = load_model(folder), load_tokenizer(folder), load_material(str(essay))
    for length, count in samples.items():
        for task in RULER_TASKS:
            if (length, task) in finished:
                continue
            settings = RulerEval(tasks=[task], lengths=[length], samples=count, text=str(essay))
            (rows,) = ruler_samples(settings, tokenizer, material)
            start, scores = time.monotonic(), []
            for i in range(0, count, ROWS):
                texts = answer(model, tokenizer, rows[i : i + ROWS])
                scores += [string_match_all(text, row.answers) for text, row in zip(texts, rows[i:], strict=False)]
            done.append({"length": length, "task": task, "scores": scores, "device": device_name(model.device)})
            write_json(file, done)
            say(f"{folder.name} {task} {length}: {sum(scores) / count:.1%} ({time.monotonic() - start:.0f} s)")
            gc.collect()
    return done
