"""What is found in wordings that training never saw: the README's table of quality, and the page about it."""

import dataclasses as dc
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from benchmarks.quality import collect
from benchmarks.quality.rows import Row
from docs import figures_in_words as say
from docs.examples import ROOT
from docs.markdown import table
from sse_convert.evaluation.intervals import wilson

SINGLE = ("number_x1", "code_x1", "niah_single_1", "niah_single_2")
"""one needle in the row: kinds of our own and tasks of RULER"""
SEVERAL = ("number_x4", "number_x8", "code_x4", "code_x8", "niah_multikey_1")
"""one of four or eight"""
OF_TEACHER = "wordings_llama-teacher"
"""RULER's tasks answered by the teacher that knows their wording"""


@dc.dataclass(frozen=True, slots=True)
class Line:
    """A conversion."""

    run: str
    teacher: str
    layers: str
    """that stay softmax attention"""
    trained: str = ""
    """what, and on what"""


QWEN, LLAMA = ("Qwen3, 32M", "2 of 10, chosen by `select`"), ("Llama, 30M", "2 of 9, chosen by `select`")
BLIND, LLAMA_BLIND = ("Qwen3, 32M", "2 of 10 that retrieve nothing"), ("Llama, 30M", "2 of 9 that retrieve nothing")
ALONE, ALL = "converted layers", "all weights"
TEXT, PLANTED, ROW = "text", "text, planted rows", "text, planted rows and their answers"
FACTS, QUOTES = "nine rows in ten of facts and tables, and their answers", "nine rows in ten of repeated passages"
MUON = f"{ALL}, by Muon; {FACTS}"
KEYS = f"{ALL}, by Muon, keys choose; {FACTS}"
KEYS_TEXT = f"{ALL}, by Muon, keys choose; {TEXT}"
MANY = f"{KEYS}, of many openings and in text that repeats"
WITH_ONE = MANY.replace("many openings", "many openings, often One,")
LOW = ", at low rates"
TAUGHT_BEST, TAUGHT_LOW = "wordings_qwen-none-facts-one", "wordings_qwen-none-facts-low"
TAUGHT_ALONE = "wordings_qwen-none-frozenfacts"
TWO_BEST = "wordings_qwen-blind-facts-one"
LLAMA_LOW, LLAMA_HIGH = "wordings_llama-none-facts-low", "wordings_llama-none-facts-one"
QWEN_CHOSEN = Line("wordings_qwen-select-frozentext", *QWEN, f"{ALONE}; {TEXT}")
LLAMA_CHOSEN = Line("wordings_llama-select-frozentext", *LLAMA, f"{ALONE}; {TEXT}")
LLAMA_TWO = Line("wordings_llama-blind-facts-openings-10M", *LLAMA_BLIND, MANY)
LLAMA_NONE = Line(LLAMA_LOW, "Llama, 30M", "none", f"{WITH_ONE}{LOW}")
QWEN_TWO = Line(TWO_BEST, *BLIND, WITH_ONE)
QWEN_NONE = Line(TAUGHT_BEST, "Qwen3, 32M", "none", WITH_ONE)
LINES = (QWEN_CHOSEN, LLAMA_CHOSEN, LLAMA_TWO, LLAMA_NONE, QWEN_TWO, QWEN_NONE)
"""what the README shows"""
TRIALS = (
    QWEN_CHOSEN,
    Line("wordings_qwen-select-frozentext-keys", *QWEN, f"{ALONE}, keys choose; {TEXT}"),
    Line("wordings_qwen-select-frozenteacher", *QWEN, f"{ALONE}; {PLANTED}"),
    Line("wordings_qwen-select-text", *QWEN, f"{ALL}; {TEXT}"),
    Line("wordings_qwen-select-teacher", *QWEN, f"{ALL}; {PLANTED}"),
    Line("wordings_qwen-select-row", *QWEN, f"{ALL}; {ROW}"),
    Line("wordings_qwen-select-frozentext-16M", *QWEN, f"{ALONE}; {TEXT}"),
    Line("wordings_qwen-select-row-26M", *QWEN, f"{ALL}; {ROW}"),
    LLAMA_CHOSEN,
    Line("wordings_llama-select-frozenteacher", *LLAMA, f"{ALONE}; {PLANTED}"),
    Line("wordings_llama-select-row", *LLAMA, f"{ALL}; {ROW}"),
    Line("wordings_llama-select-row-26M", *LLAMA, f"{ALL}; {ROW}"),
    Line("wordings_llama-blind-frozentext-9M", *LLAMA_BLIND, f"{ALONE}; {TEXT}"),
    Line("wordings_llama-blind-row-9M", *LLAMA_BLIND, f"{ALL}; {ROW}"),
    Line("wordings_llama-blind-facts-muon", *LLAMA_BLIND, MUON),
    Line("wordings_llama-blind-facts-keys", *LLAMA_BLIND, KEYS),
    LLAMA_TWO,
    Line("wordings_llama-blind-facts-low", *LLAMA_BLIND, f"{WITH_ONE}{LOW}"),
    Line("wordings_llama-none-row-16M", "Llama, 30M", "none", f"{ALL}; {ROW}"),
    Line("wordings_llama-none-facts-muon-12M", "Llama, 30M", "none", MUON),
    Line("wordings_llama-none-facts-keys", "Llama, 30M", "none", KEYS),
    Line("wordings_llama-none-facts-openings-10M", "Llama, 30M", "none", MANY),
    Line(LLAMA_HIGH, "Llama, 30M", "none", WITH_ONE),
    Line("wordings_llama-none-frozenfacts", "Llama, 30M", "none", WITH_ONE.replace(ALL, ALONE)),
    Line("wordings_llama-none-facts-low-10M", "Llama, 30M", "none", f"{WITH_ONE}{LOW}"),
    LLAMA_NONE,
    Line("wordings_qwen-blind-text-20M", *BLIND, f"{ALL}; {TEXT}"),
    Line("wordings_qwen-blind-text-20M-seed1", *BLIND, f"{ALL}; {TEXT}, other seed"),
    Line("wordings_qwen-blind-text-keys", *BLIND, KEYS_TEXT),
    Line("wordings_qwen-blind-text-low", *BLIND, f"{KEYS_TEXT}{LOW}"),
    Line("wordings_qwen-blind-text-low-seed1", *BLIND, f"{KEYS_TEXT}{LOW}, other seed"),
    Line("wordings_qwen-blind-facts-24M", *BLIND, f"{ALL}; {FACTS}"),
    Line("wordings_qwen-blind-facts-keys", *BLIND, KEYS),
    QWEN_TWO,
    Line("wordings_qwen-none-text-17M", "Qwen3, 32M", "none", f"{ALL}; {TEXT}"),
    Line("wordings_qwen-none-text-17M-seed1", "Qwen3, 32M", "none", f"{ALL}; {TEXT}, other seed"),
    Line("wordings_qwen-none-text-keys-9M", "Qwen3, 32M", "none", KEYS_TEXT),
    Line("wordings_qwen-none-text-half-9M", "Qwen3, 32M", "none", f"{KEYS_TEXT}, steps of half the tokens"),
    Line("wordings_qwen-none-text-keys", "Qwen3, 32M", "none", KEYS_TEXT),
    Line("wordings_qwen-none-text-low-9M", "Qwen3, 32M", "none", f"{KEYS_TEXT}{LOW}"),
    Line("wordings_qwen-none-text-low", "Qwen3, 32M", "none", f"{KEYS_TEXT}{LOW}"),
    Line("wordings_qwen-none-text-low-seed1", "Qwen3, 32M", "none", f"{KEYS_TEXT}{LOW}, other seed"),
    Line("wordings_qwen-none-text-low-seed2", "Qwen3, 32M", "none", f"{KEYS_TEXT}{LOW}, third seed"),
    Line("wordings_qwen-none-row-16M", "Qwen3, 32M", "none", f"{ALL}; {ROW}"),
    Line("wordings_qwen-none-quotes-11M", "Qwen3, 32M", "none", f"{ALL}; {QUOTES}"),
    Line("wordings_qwen-none-facts-21M", "Qwen3, 32M", "none", f"{ALL}; {FACTS}"),
    Line("wordings_qwen-none-facts-muon", "Qwen3, 32M", "none", MUON),
    Line("wordings_qwen-none-facts-keys-10M", "Qwen3, 32M", "none", KEYS),
    Line("wordings_qwen-none-facts-openings-10M", "Qwen3, 32M", "none", MANY),
    Line("wordings_qwen-none-facts-keys-six", "Qwen3, 32M", "none", KEYS.replace("nine", "six")),
    Line("wordings_qwen-none-facts-keys", "Qwen3, 32M", "none", KEYS),
    Line(TAUGHT_LOW, "Qwen3, 32M", "none", f"{WITH_ONE}{LOW}"),
    Line(TAUGHT_ALONE, "Qwen3, 32M", "none", WITH_ONE.replace(ALL, ALONE)),
    QWEN_NONE,
)
"""what the page shows"""
SLOW, FAST = "0.0004, 0.004, 0.00005", "0.001, 0.006, 0.0002"
BOTH = "facts and tables of numbers and words"
ONCE, OFTEN = "facts of four kinds, asked once", f"{BOTH}, asked up to four times"
CODES = "facts and tables of numbers, words and codes, asked up to four times"
BY_KEYS = "facts and tables of numbers and codes, asked up to four times, half in other words"
TAUGHT = {
    "wordings_qwen-none-facts-16M": ("none", ONCE, SLOW),
    "wordings_qwen-none-facts-12M-once": ("none", f"{BOTH}, asked once", SLOW),
    "wordings_qwen-none-facts-12M-slow": ("none", OFTEN, SLOW),
    "wordings_qwen-none-facts-12M": ("none", OFTEN, FAST),
    "wordings_qwen-none-facts-21M": ("none", OFTEN, FAST),
    "wordings_qwen-none-facts-muon-14M": ("none", CODES, f"{FAST}, Muon"),
    "wordings_qwen-none-facts-muon": ("none", CODES, f"{FAST}, Muon"),
    "wordings_qwen-none-facts-keys-10M": ("none", BY_KEYS, f"{FAST}, Muon, keys choose"),
    "wordings_qwen-none-facts-openings-10M": ("none", f"{BY_KEYS}, many openings", f"{FAST}, Muon, keys choose"),
    "wordings_qwen-none-facts-keys-six": ("none", f"{BY_KEYS}, in six rows of ten", f"{FAST}, Muon, keys choose"),
    "wordings_qwen-none-facts-keys": ("none", BY_KEYS, f"{FAST}, Muon, keys choose"),
    TAUGHT_BEST: ("none", f"{BY_KEYS}, many openings, often One", f"{FAST}, Muon, keys choose"),
    TAUGHT_LOW: ("none", f"{BY_KEYS}, many openings, often One", "0.0003, 0.006, 0.00005, Muon, keys choose"),
    TAUGHT_ALONE: ("none", f"{BY_KEYS}, many openings, often One", "0.001, 0.006, none, Muon, keys choose"),
    "wordings_qwen-blind-facts-19M": ("4 and 9", ONCE, SLOW),
    "wordings_qwen-blind-facts-13M": ("4 and 9", OFTEN, FAST),
    "wordings_qwen-blind-facts-24M": ("4 and 9", OFTEN, FAST),
    "wordings_qwen-blind-facts-keys": ("4 and 9", BY_KEYS, f"{FAST}, Muon, keys choose"),
    TWO_BEST: ("4 and 9", f"{BY_KEYS}, many openings, often One", f"{FAST}, Muon, keys choose"),
}
"""runs on rows of facts and tables: softmax layers, what was planted, and rates of mixers, new tensors and the rest"""
ENDS = {
    "wordings_qwen-none-facts-keys": "none",
    TAUGHT_BEST: "none, many openings, often One",
    TAUGHT_LOW: "none, the same at low rates",
    TAUGHT_ALONE: "none, the same, converted layers alone",
    "wordings_qwen-blind-facts-keys": "4 and 9",
    TWO_BEST: "4 and 9, many openings, often One",
}
"""runs whose misses are looked at: softmax layers, and what differs in the rows"""


def quality() -> str:
    """Six conversions, asked in wordings that training never saw."""
    head = ("teacher", "softmax layers", "training tokens", "loss above teacher, 8K", "one needle, 2K (teacher)",
            "one of four or eight, 2K (teacher)", "cache at 128K (teacher)")  # fmt: skip
    notes = (
        "Loss is in nats per token on held-out books, with its 95% interval. One seed each, one NVIDIA H200 or H100.",
        f"Without a softmax layer the Qwen3-shaped one finds {_kind('number_x1')} of single numbers and "
        f"{_kind('code_x1')} of codes. Whole values are {_whole('number', 1)} and {_whole('code', 1)}: most of what is "
        "missed is the full stop behind them.",
        f"Rates were low for the Llama-shaped one without any, high for the Qwen3-shaped one. The other way round they "
        f"find {_single(LLAMA_HIGH)} and {_single(TAUGHT_LOW)} of single needles.",
        "The Llama-shaped teacher is asked as RULER asks, the other one in our own wording. "
        "[More](docs/pages/results/wordings.md).",
    )
    return "\n".join([*table(head, [_line(line) for line in LINES]), "", *notes])


def _kind(kind: str) -> str:
    """Needles of a kind that the student taught by facts finds at 2K."""
    return _share(say.picked([TAUGHT_BEST], 2048)[0], [kind])


def wordings() -> str:
    """All trials with intervals, at both lengths."""
    head = ("teacher", "softmax layers", "trained; on", "training tokens", "KL, 2K", "KL, 8K",
            *(f"{what}, {size}" for size in ("2K", "8K") for what in ("one needle", "one of several")))  # fmt: skip
    return "\n".join(table(head, [_long_line(line) for line in TRIALS]))


def _line(line: Line) -> tuple[str, ...]:
    row, long = (say.picked([line.run], context)[0] for context in (2048, 8192))
    caches = say.megabytes(long.cache_bytes_128k), say.megabytes(long.teacher_cache_bytes_128k)
    found = (f"{_share(row, tasks)} ({_share(row, tasks, teacher=True)})" for tasks in (SINGLE, SEVERAL))
    return (line.teacher, line.layers, say.tokens(row.tokens), say.gap([long]), *found, f"{caches[0]} ({caches[1]})")


def _long_line(line: Line) -> tuple[str, ...]:
    rows = [say.picked([line.run], context)[0] for context in (2048, 8192)]
    cells = (_cell(row, tasks) for row in rows for tasks in (SINGLE, SEVERAL))
    divergences = (say.divergence([row]) for row in rows)
    return line.teacher, line.layers, line.trained, say.tokens(rows[0].tokens), *divergences, *cells


def _cell(row: Row, tasks: Iterable[str]) -> str:
    """Share found with its 95% interval, and the teacher's; nothing where it was not measured."""
    found, asked = scores(row, tasks)
    if not asked:
        return "not measured"
    low, high = wilson(found, asked)
    return f"{found / asked:.0%} ({low:.0%} to {high:.0%}) for {_share(row, tasks, teacher=True)}"


def _share(row: Row, tasks: Iterable[str], *, teacher: bool = False) -> str:
    found, asked = scores(row, tasks, teacher=teacher)
    return f"{found / asked:.0%}"


def scores(row: Row, tasks: Iterable[str], *, teacher: bool = False) -> tuple[int, int]:
    """Needles found and asked for, of several tasks together."""
    if not row.ruler:
        kinds = [task for task in tasks if hasattr(row, task)]
        return row.found(teacher=teacher, kinds=kinds), row.asked(kinds)
    if teacher:
        row = say.picked([OF_TEACHER], row.context, "teacher")[0]
    pairs = [(float(share), int(count)) for task, share, count in _TASK.findall(row.ruler) if task in tasks]
    return round(sum(share * count for share, count in pairs) / 100), sum(count for _, count in pairs)


def taught() -> str:
    """What the Qwen3-shaped student finds after rows of facts and tables, by what they asked for and its rates."""
    kinds = {"one number": "number_x1", "of four": "number_x4", "of eight": "number_x8", "one code": "code_x1"}
    asked = [(size, context, kind) for size, context in (("2K", 2048), ("8K", 8192)) for kind in kinds]
    head = (
        "softmax layers",
        "planted",
        "rates",
        "training tokens",
        "KL, 2K",
        *(f"{k}, {size}" for size, _, k in asked),
    )
    lines = []
    for run, made in TAUGHT.items():
        rows = {context: say.picked([run], context)[0] for context in (2048, 8192)}
        found = (scores(rows[context], [kinds[kind]]) for _, context, kind in asked)
        cells = (f"{right / of:.0%}" if of else "-" for right, of in found)
        lines.append((*made, say.tokens(rows[2048].tokens), say.divergence([rows[2048]]), *cells))
    return "\n".join(table(head, lines))


def ends() -> str:
    """Of needles at 2K the share whose value is whole, and of those the share that ends with the full stop."""
    asked = {(kind, keys): f"{kind}s, one of {keys}" for kind in ("number", "code") for keys in (1, 4, 8)}
    lines = []
    for run, layers in ENDS.items():
        counts = (_misses(run, *one) for one in asked)
        cells = (f"{_with_end(at):.0%}, {at['right'] / sum(at.values()):.0%}" for at in counts)
        lines.append((layers, *cells))
    return "\n".join(table(("softmax layers", *asked.values()), lines))


def _single(run: str) -> str:
    """Single needles that a student finds at 2K."""
    return _share(say.picked([run], 2048)[0], SINGLE)


def _whole(kind: str, keys: int) -> str:
    """Needles at 2K whose value is whole in the student taught by facts."""
    return f"{_with_end(_misses(TAUGHT_BEST, kind, keys)):.0%}"


def _with_end(places: dict[str, int]) -> float:
    """Share of answers that are right, or all but the last token."""
    return (places["right"] + places.get("last", 0)) / sum(places.values())


@cache
def _reports() -> dict[str, dict[str, Any]]:
    """The kept reports, which stand in an archive."""
    return collect.reports()


def _misses(run: str, kind: str, keys: int) -> dict[str, int]:
    """Of needles of a kind, how many are first wrong at each place."""
    every = _reports()[run]["misses"]
    found: dict[str, int] = next(m["first_wrong"] for m in every if (m["kind"], m["keys"]) == (kind, keys))
    return found


def retrieving_heads() -> str:
    """The teachers' strongest head in rows of each kind, and how far its keys stand out under each key map."""
    record = json.loads((ROOT / "benchmarks/quality/retrieving_heads.json").read_text(encoding="utf-8"))
    maps = list(next(iter(record["teachers"].values()))["deviations"])
    head = ("teacher", "the wording it knows", "the other wording", "passages that come again",
            *(f"keys by {name}" for name in maps))  # fmt: skip
    rows = []
    for name, found in record["teachers"].items():
        other = next(kind for kind in ("needle", "ruler") if kind != found["known"])
        kinds = (found["heads"][kind][0] for kind in (found["known"], other, "repeated"))
        weights = (f"layer {one['layer']}, head {one['head']}: {one['weight']:.0%}" for one in kinds)
        rows.append((f"`{name}`", *weights, *(f"{found['deviations'][name]:.1f}" for name in maps)))
    return "\n".join([*table(head, rows), "", f"Commit {record['commit']}, {record['hardware']}."])


_TASK = re.compile(r"(\w+) ([\d.]+)% of (\d+)")
BLOCKS: dict[str, Callable[[], str]] = {
    "quality": quality,
    "wordings": wordings,
    "taught": taught,
    "ends": ends,
    "retrieving-heads": retrieving_heads,
}
