"""Runs one part: trains, measures, writes JSON. Whatever is finished is not done again."""

import gc
import json
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.quality.convert import commit, measure
from benchmarks.quality.wordings.jobs import CUT
from benchmarks.quality.wordings.misses import misses
from benchmarks.quality.wordings.own_forms import own_forms
from benchmarks.quality.wordings.parts import TEACHERS, Part, Place, overrides
from sse_convert.checkpoints.identity import STAGE_FILE, read_stage_record
from sse_convert.checkpoints.load_model import device_name, load_model, load_tokenizer
from sse_convert.console import say
from sse_convert.data.needle import load_words
from sse_convert.data.tokens import token_ids
from sse_convert.errors import TrainingError
from sse_convert.evaluation.controls import stages_folder
from sse_convert.evaluation.ruler import RULER_TASKS, load_material
from sse_convert.evaluation.ruler_rows import ruler_samples
from sse_convert.evaluation.ruler_score import answer, string_match_all
from sse_convert.files import write_json
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.recipe.schema import RulerEval
from sse_convert.training.schedule import Schedule

ESSAY = "valid/marcel-proust-swann-s-way.txt"
SEED = 0
"""of RULER's questions"""
TOKENS = 2**18
"""tokens of the prompts that are answered at once"""


def run(part: Part, place: Place, samples: dict[int, int], changes: list[str], out: Path, *, cut: bool = False) -> None:
    """Train and measure a part, or continue where it stopped; `out` is written when all is done.

    Args:
        part: what to do.
        place: folders.
        samples: questions of each task by context length.
        changes: of the recipe.
        out: JSON file.
        cut: end a training that was stopped where it is saved, and measure that.
    """
    teacher = TEACHERS[part.teacher]
    if teacher.ruler:
        load_material(None)  # a missing package is found now
    if part.layout == "teacher":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it only measures
        report: dict[str, Any] = {"schema": 1, "commit": commit(), "date": time.strftime("%F"), "seed": SEED}
        folder, kept = place.checkpoints / teacher.folder, out
    else:
        source, own = overrides(part, place, samples)
        changed = [*own, *changes]
        recipe, folder = load_recipe(source, changed), place.model
        report, kept = _converted(recipe, source, changed, out, cut=cut)
        report |= _looks(recipe, folder, place.books / ESSAY, min(samples))
    if teacher.ruler:
        report["ruler"] = ruler(folder, place.books / ESSAY, samples, kept.with_suffix(f"{kept.suffix}.ruler"))
    write_json(out, {**report, "command": _command(part, samples, changes), "part": part.name})


def _looks(recipe: Recipe, folder: Path, essay: Path, length: int) -> dict[str, Any]:
    """What a model answers in the forms of its training, if that planted rows, and where answers go wrong in the
    wording of `eval.needle`, if that asks."""
    needles, asked, found = recipe.data.needles, recipe.eval.needle, {}
    model, tokenizer, words = load_model(folder), load_tokenizer(folder), load_words(needles.words)
    (haystack,) = token_ids(tokenizer, [essay.read_text(encoding="utf-8")])
    if needles.share:
        found["own_forms"] = own_forms(model, tokenizer, haystack, words, needles, length)
    if asked is not None:
        found["misses"] = misses(model, tokenizer, haystack, words, asked)
    return found


def _command(part: Part, samples: dict[int, int], changes: list[str]) -> str:
    """What measures a part, but for its folders."""
    of_lengths = [",".join(map(str, numbers)) for numbers in (samples, samples.values())]
    options = ["--parts", part.name, "--lengths", of_lengths[0], "--samples", of_lengths[1]]
    sets = [word for change in changes for word in ("--set", change)]
    return shlex.join(["python", "-m", "benchmarks.quality.wordings", *options, *sets])


def _converted(recipe: Recipe, source: str, changed: list[str], out: Path, *, cut: bool) -> tuple[dict[str, Any], Path]:
    """The report of a training, and the start of the names of files for what was measured of it; of a recipe, which
    comes from a file with all that is changed in it."""
    if not cut:
        signal.signal(signal.SIGTERM, _saving(recipe))
        return _trained(out.with_suffix(".json.trained"), source, changed), out
    ends = ends_of(recipe)
    tokens = [f"stages.{i}.tokens={n}" for i, n in ends.items()]
    kept = out.with_suffix("." + "-".join(["cut", *map(str, ends.values())]))
    report = _trained(kept.with_suffix(f"{kept.suffix}.trained"), source, [*changed, *tokens])
    report["cut"] = {recipe.stages[i].name: n for i, n in ends.items()}
    return report, kept


def ends_of(recipe: Recipe) -> dict[int, int]:
    """Tokens at which each stage of a stopped run ends, by its number, where these are not the recipe's: those that it
    is saved at, one step where it did not begin, and those of a stage that was ended before.

    Raises:
        TrainingError: no stage has saved anything.
    """
    found = {i: _trained_steps(recipe, stage.name) for i, stage in enumerate(recipe.stages)}
    if not any(found.values()):
        raise TrainingError(f"nothing is saved in {stages_folder(Path(recipe.export.dir))}", expected="a step")
    schedules = {i: Schedule.of(recipe.stages[i]) for i in found}
    return {i: (n or 1) * schedules[i].step_tokens for i, n in found.items() if n != schedules[i].steps}


def _trained_steps(recipe: Recipe, stage: str) -> int:
    """Steps that a stage has made, finished or saved; 0 where there is none."""
    if (folder := _finished(recipe, stage)) is not None:
        return int(read_stage_record(folder)["report"]["steps"])
    saved = stages_folder(Path(recipe.export.dir)).glob(f"*-{stage}.work/step-*")
    return max((int(path.name.removeprefix("step-")) for path in saved), default=0)


def _finished(recipe: Recipe, stage: str) -> Path | None:
    """The folder of a stage if it is finished."""
    files = stages_folder(Path(recipe.export.dir)).glob(f"*-{stage}/{STAGE_FILE}")
    return next((path.parent for path in files if not path.parent.name.startswith("outdated-")), None)


def _saving(recipe: Recipe) -> Callable[[int, FrameType | None], None]:
    """What SIGTERM does, once the step at hand is saved: end with `CUT`; nothing while a trained model is measured."""

    def end(number: int, frame: FrameType | None) -> None:
        if any(_finished(recipe, stage.name) is None for stage in recipe.stages):
            raise SystemExit(CUT)

    return end


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
        size = max(1, TOKENS // length)
        for task in RULER_TASKS:
            if (length, task) in finished:
                continue
            settings = RulerEval(tasks=[task], lengths=[length], samples=count, text=str(essay))
            start, scores = time.monotonic(), []
            (rows,) = ruler_samples(settings, tokenizer, material, SEED)
            made = time.monotonic() - start
            for i in range(0, count, size):
                texts = answer(model, tokenizer, rows[i : i + size])
                scores += [string_match_all(text, row.answers) for text, row in zip(texts, rows[i:], strict=False)]
            done.append({"length": length, "task": task, "scores": scores, "device": device_name(model.device)})
            write_json(file, done)
            seconds = time.monotonic() - start
            say(f"{folder.name} {task} {length}: {sum(scores) / count:.1%} ({seconds:.1f} s, rows {made:.1f} s)")
            gc.collect()
    return done
