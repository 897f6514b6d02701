"""The rows of `results.csv`, and how the JSON of each benchmark becomes rows."""

import csv
import dataclasses as dc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.quality import words
from benchmarks.quality.wordings import parts

KINDS = ("number_x1", "number_x4", "number_x8", "code_x1", "code_x4", "code_x8")
"""columns of needles: what is hidden, and how many of them stand in the row"""
Z95 = 1.96
LONG = 131_072


@dc.dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one model at one context length."""

    run: str
    """name of the JSON file"""
    model: str
    """trained, untrained, or the name of a variant or control in the file"""
    commit: str = ""
    date: str = ""
    seed: int | None = None
    hardware: str = ""
    command: str = ""
    teacher: str = ""
    softmax_layers: str = ""
    """indices of layers that stay softmax attention"""
    other_layers: str = ""
    training: str = ""
    tokens: int | None = None
    """training tokens"""
    context: int = 0
    """tokens of the rows that were measured"""
    gap: float | None = None
    """loss above the teacher's on held-out text, nats per token"""
    gap_low: float | None = None
    """end of the 95% interval"""
    gap_high: float | None = None
    kl: float | None = None
    """KL divergence from the teacher, nats per token"""
    samples: int | None = None
    """needles asked for, of each kind"""
    number_x1: int | None = None
    """needles found"""
    number_x4: int | None = None
    number_x8: int | None = None
    code_x1: int | None = None
    code_x4: int | None = None
    code_x8: int | None = None
    teacher_number_x1: int | None = None
    """needles that the teacher finds in the same rows"""
    teacher_number_x4: int | None = None
    teacher_number_x8: int | None = None
    teacher_code_x1: int | None = None
    teacher_code_x4: int | None = None
    teacher_code_x8: int | None = None
    ruler: str = ""
    """scores of RULER's tasks, in words"""
    cache_bytes: int | None = None
    """keys, values and states of one sequence"""
    teacher_cache_bytes: int | None = None
    cache_bytes_128k: int | None = None
    """the same after 131,072 tokens"""
    teacher_cache_bytes_128k: int | None = None
    notes: str = ""

    def found(self, *, teacher: bool = False, kinds: Iterable[str] = KINDS) -> int:
        """Needles found, of several kinds together."""
        prefix = "teacher_" if teacher else ""
        return sum(getattr(self, prefix + kind) or 0 for kind in kinds)

    def asked(self, kinds: Iterable[str] = KINDS) -> int:
        """Needles asked for, of several kinds together."""
        return (self.samples or 0) * sum(getattr(self, kind) is not None for kind in kinds)


def read(path: Path) -> list[Row]:
    """The rows of a `results.csv`."""
    types = {field.name: field.type for field in dc.fields(Row)}

    def value(name: str, text: str) -> Any:
        if types[name] is str:
            return text
        if text == "":
            return None
        return float(text) if types[name] == float | None else int(text)

    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**{name: value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


def pick(rows: Iterable[Row], run: str, context: int, model: str = "trained") -> Row:
    """The one row of a run at a context length.

    Raises:
        LookupError: there is none, or there are several.
    """
    found = [row for row in rows if (row.run, row.context, row.model) == (run, context, model)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {run} ({model}) at {context} tokens, expected 1")
    return found[0]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write a `results.csv`."""
    names = [field.name for field in dc.fields(Row)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dc.asdict(row) for row in rows)


def rows_of(run: str, report: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of one JSON file.

    Args:
        run: the file's name.
        report: its content.
        about: columns that the content does not tell.
    """
    readers = {
        "after": _conversion,
        "variants": _swapped,
        "runs": _key_temperature,
        "compare": _selection,
        "ruler": _ruler,
    }
    reader = next((reader for key, reader in readers.items() if key in report), _evaluation)
    for row in reader(run, report):
        yield dc.replace(row, **about)


def _conversion(run: str, report: Mapping[str, Any]) -> Iterator[Row]:
    """What `convert.py` writes."""
    recipe, layers = report["recipe"], report["layers"]
    about = {
        "commit": report["commit"],
        "date": report["date"],
        "seed": recipe["train"]["seed"],
        "command": report["command"],
        "softmax_layers": words.softmax_layers(layers),
        "other_layers": words.other_layers(layers, recipe["mixers"]),
    }
    if report.get("before"):
        yield from _models(run, "untrained", report["before"], {**about, "tokens": 0})
    trained = {
        "training": words.training(recipe, layers, books=report.get("books")),
        "tokens": report["training_tokens"],
    }
    asked = _ruler_words(report.get("ruler", ()))
    for row in _models(run, "trained", report["after"], {**about, **trained}):
        notes = "; ".join(filter(None, (row.notes, _cut(report))))
        yield dc.replace(row, ruler=asked.get(row.context, ""), notes=notes)
    for control in (report.get("controls") or {}).get("runs", ()):
        if control["status"] == "measured":
            where = {"teacher": _teacher(report["after"]), "hardware": _device(report["after"])}
            yield from _control(run, control, {**about, **trained, **where})


def _control(run: str, control: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[Row]:
    """A control of a run, whose figures are in words: the gap as a number, needles of all kinds in the notes."""
    for name, text in control["figures"].items():
        if name.startswith("loss gap at "):
            length = name.removeprefix("loss gap at ")
            gap, half = (float(part) for part in text.split(" ± "))
            found = control["figures"].get(f"needles at {length}", "")
            yield Row(
                **{**about, "other_layers": "", "softmax_layers": "all"},
                run=run,
                model=control["meaning"],
                context=int(length.replace(",", "")),
                gap=gap,
                gap_low=round(gap - half, 6),
                gap_high=round(gap + half, 6),
                notes=f"needles of all kinds together: {found}" if found else "",
            )


def _ruler(run: str, report: Mapping[str, Any]) -> Iterator[Row]:
    """What `wordings` writes of a teacher."""
    for context, text in _ruler_words(report["ruler"]).items():
        yield Row(
            run=run,
            model="teacher",
            commit=report["commit"],
            date=report["date"],
            seed=report.get("seed", 0),
            hardware=_place(report["ruler"][0]["device"]),
            command=report["command"],
            teacher=parts.TEACHERS[parts.parse(report["part"]).teacher].folder,
            softmax_layers="all",
            context=context,
            ruler=text,
        )


def _ruler_words(entries: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Scores of RULER's tasks by context length."""
    found: dict[int, list[str]] = {}
    for entry in entries:
        scores = entry["scores"]
        found.setdefault(entry["length"], []).append(
            f"{entry['task']} {sum(scores) / len(scores):.1%} of {len(scores)}"
        )
    return {length: ", ".join(texts) for length, texts in found.items()}


def _cut(report: Mapping[str, Any]) -> str:
    """That `wordings` ended a training before its last step, in words."""
    return "cut short at " + ", ".join(f"{k} {n:,}" for k, n in report["cut"].items()) if "cut" in report else ""


def _evaluation(run: str, report: Mapping[str, Any]) -> Iterator[Row]:
    """What `sse-convert eval` writes."""
    yield from _models(run, "trained", report, {"seed": report["conditions"]["seed"]})


def _models(run: str, model: str, report: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[Row]:
    """One row a context length of an evaluation."""
    student, teacher = (_needles(report[name].get("needles", ())) for name in ("student", "teacher"))
    gaps = {gap["length"]: gap for gap in report["loss_gaps"]}
    divergences = {part["length"]: round(part["kl"], 6) for part in report["student"].get("agreement", ())}
    caches = {cache["length"]: cache for cache in report["cache"]}
    for context in sorted(gaps.keys() | student.keys()):
        figures: dict[str, Any] = {"kl": divergences.get(context)}
        if context in gaps:
            figures |= _gap(gaps[context])
        for length, column in ((context, "cache_bytes"), (LONG, "cache_bytes_128k")):
            if length in caches:
                figures[column] = caches[length]["student_bytes"]
                figures[f"teacher_{column}"] = caches[length]["teacher_bytes"]
        figures |= student.get(context, {})
        figures |= {f"teacher_{kind}": n for kind, n in teacher.get(context, {}).items() if kind in KINDS}
        where = {"hardware": _device(report), "teacher": _teacher(report)}
        yield Row(run=run, model=model, context=context, **where, **about, **figures)


def _swapped(run: str, report: Mapping[str, Any]) -> Iterator[Row]:
    """What `swapped_layers.py` writes: a layer or several trained inside their frozen teacher."""
    environment, settings = report["environment"], report["settings"]
    layers = " ".join(map(str, settings["layers"]))
    for variant in report["variants"]:
        about = {
            "run": run,
            "commit": variant["commit"],
            "date": environment["date"],
            "seed": variant["seed"],
            "hardware": environment["device"],
            "command": environment["command"],
            "teacher": _swapped_teacher(settings),
            "softmax_layers": f"all but {layers}",
            "other_layers": f"{words.ALONE.get(variant['mixer'], variant['mixer'])}: {variant['name']}",
            "training": _swapped_training(variant),
            "tokens": variant["trained"]["tokens"],
        }
        gaps = {gap["length"]: round(gap["gap"], 6) for gap in variant["text"]}
        for key, model in (("needles", "trained"), ("needles_reset", "states reset every 64 tokens")):
            needles = variant.get(key) or ()
            teacher = _needles([{**n, "correct": round(n["teacher"] * n["samples"])} for n in needles])
            for context, found in _needles(needles).items():
                yield Row(
                    **about,
                    model=model,
                    context=context,
                    gap=gaps.get(context) if key == "needles" else None,
                    **found,
                    **{f"teacher_{kind}": n for kind, n in teacher[context].items() if kind in KINDS},
                )


def _swapped_teacher(settings: Mapping[str, Any]) -> str:
    """Its name, which is that of the recipe unless the command names another model."""
    models = [text.partition("=")[2] for text in settings["overrides"] if text.startswith("model=")]
    return Path(models[-1]).name if models else Path(settings["recipe"]).stem


def _swapped_training(variant: Mapping[str, Any]) -> str:
    optimizer = "Muon" if variant.get("optimizer") == "muon" else "AdamW"
    return f"{optimizer}, {variant['trained']['steps']:,} steps, attention of these layers alone"


def _key_temperature(run: str, report: Mapping[str, Any]) -> Iterator[Row]:
    """What a script of 0.1 wrote that fitted the temperature of keys, a setting that is gone."""
    for one in report["runs"]:
        decay = "" if one["decay"] else ", decay not calibrated"
        about = {
            "run": run,
            "commit": report["commit"],
            "date": report["date"],
            "seed": one["seed"],
            "hardware": f"CPU ({report['processor']})",
            "command": report["command"],
            "teacher": one["teacher"],
            "other_layers": f"SSE: {one['k_feature_map']} keys, key scale {one['key_scale']}{decay}",
        }
        for model, gap in (("untrained", one["gap_untrained"]), ("trained", one["gap"])):
            yield Row(**about, model=model, context=gap["length"], **_gap(gap))


def _selection(run: str, report: Mapping[str, Any]) -> Iterator[Row]:
    """What `select_layers.py` writes: sets of kept layers, untrained, on rows that none was chosen on."""
    compared, stand_in = report["compare"], report["choose"]["stand_in"]
    for one in compared["sets"]:
        kept = [str(i) for i in one["kept"]]
        yield Row(
            run=run,
            model="teacher" if one["name"] == "teacher" else f"chosen by {one['name']}",
            commit=report["commit"],
            date=report["date"],
            seed=compared["seed"],
            hardware=f"CPU ({report['processor']})",
            command=report["command"],
            teacher=Path(report["choose"]["model"]).name,
            softmax_layers="all" if one["name"] == "teacher" else " ".join(kept) or "none",
            other_layers=words.mixer(stand_in),
            training="untrained",
            tokens=0,
            context=compared["length"],
            kl=round(one["text_kl"], 6),
            samples=compared["samples"],
            number_x4=round(one["recall_accuracy"] * compared["samples"]),
        )


def _gap(gap: Mapping[str, Any]) -> dict[str, float]:
    half = Z95 * gap["gap_se"]
    ends = {"gap": gap["gap"], "gap_low": gap["gap"] - half, "gap_high": gap["gap"] + half}
    return {name: round(value, 6) for name, value in ends.items()}


def _needles(needles: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, int]]:
    """Columns of needles by context length."""
    found: dict[int, dict[str, int]] = {}
    for needle in needles:
        row = found.setdefault(needle["length"], {"samples": needle["samples"]})
        row[f"{needle['kind']}_x{needle['keys']}"] = round(needle["correct"])
    return found


def _device(report: Mapping[str, Any]) -> str:
    return _place(str(report["conditions"]["device"]))


def _place(name: str) -> str:
    return name.removeprefix("cuda (").removesuffix(")") if name.startswith("cuda") else name.replace("cpu", "CPU")


def _teacher(report: Mapping[str, Any]) -> str:
    return Path(report["teacher"]["name"]).name
