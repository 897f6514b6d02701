"""The tables of the pages under `results/`, from `results.csv`."""

import dataclasses as dc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.quality.rows import Row
from docs import figures_in_words as say
from docs.markdown import table

SEEDS_0_7 = tuple(f"keep-0-7_seed{seed}" for seed in range(5))
"""two layers that `select` chose"""
SEEDS_4_9 = ("keep-4-9_muon_8k-steps", "keep-4-9_seed1", *(f"keep-4-9_muon_8k-steps_seed{seed}" for seed in (2, 3, 4)))
"""two layers that retrieve nothing"""
RUNS_32K = ("context-32k_muon", "context_32k_muon", "context_32k_low")
"""three runs from two starts, 4 and 9 kept"""
SEEDS_YARN = ("context_yarn", "context_yarn_seed1", "context_yarn_seed2")
"""0 and 7 kept, yarn in all layers"""
SEEDS_4_9_ADAMW = ("keep-4-9_delta", "keep-4-9_delta_seed1", "keep-4-9_delta_seed2")
NEEDLES = {"number_x1": "one number", "number_x8": "one of eight", "code_x1": "one code", "code_x8": "code of eight"}
Column = Callable[["Entry"], str]


@dc.dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of a table: runs that differ in their seed alone."""

    words: tuple[str, ...]
    """cells of the first columns"""
    runs: tuple[str, ...] = ()
    model: str = "trained"
    teacher: bool = False
    """the teacher in the same rows, not the converted model"""
    rows: tuple[tuple[int, tuple[Row, ...]], ...] = ()
    """rows by context, where they are no runs of their own"""

    def at(self, context: int) -> list[Row]:
        """Its rows at a context length."""
        return list(dict(self.rows)[context]) if self.rows else say.picked(self.runs, context, self.model)


def gaps(context: int) -> tuple[str, Column]:
    """Column of the loss above the teacher."""
    return f"loss above the teacher, {_size(context)}", lambda e: "" if e.teacher else say.gap(e.at(context))


def divergences(context: int) -> tuple[str, Column]:
    """Column of the KL divergence."""
    return f"KL, {_size(context)}", lambda e: "" if e.teacher else say.divergence(e.at(context))


def needles(context: int, kind: str | None = None) -> tuple[str, Column]:
    """Column of needles of a kind, or of all kinds together."""
    kinds = [kind] if kind else list(NEEDLES)
    name = NEEDLES[kind] if kind else "needles"
    return f"{name}, {_size(context)}", lambda e: say.needles(e.at(context), kinds, teacher=e.teacher)


def cache(context: int) -> tuple[str, Column]:
    """Column of bytes of cache and state."""
    column = "cache_bytes_128k" if context == 131_072 else "cache_bytes"

    def cell(entry: Entry) -> str:
        row = entry.at(8192 if context == 131_072 else context)[0]
        return say.megabytes(getattr(row, f"teacher_{column}" if entry.teacher else column))

    return f"cache, {_size(context)}", cell


def seeds() -> tuple[str, Column]:
    """Column of the number of seeds."""
    return "seeds", lambda e: "" if e.teacher else str(len(e.runs))


def entry(*words: str, runs: str | Sequence[str], **settings: Any) -> Entry:
    """A line of one run or of several seeds."""
    return Entry(words=words, runs=(runs,) if isinstance(runs, str) else tuple(runs), **settings)


def lines(head: Sequence[str], columns: Iterable[tuple[str, Column]], entries: Iterable[Entry]) -> str:
    """A table of entries."""
    columns = list(columns)
    cells = [(*one.words, *(column(one) for _, column in columns)) for one in entries]
    return "\n".join(table((*head, *(name for name, _ in columns)), cells))


PURE, PURE_GLA, PURE_ADAMW = "keep-none_muon_8k-steps", "keep-none", "keep-none_delta"
SSE_WINDOW = "SSE beside a window"


def keeps_quality() -> str:
    """The best conversion for each choice of softmax layers."""
    return lines(
        ("softmax layers", "the others", "tokens"),
        [seeds(), gaps(2048), gaps(8192), divergences(8192), needles(8192), cache(8192), cache(131_072)],
        [
            entry("all ten (teacher)", "", "", runs="keep-0-7_500", teacher=True),
            entry("0 and 7", f"{SSE_WINDOW}, 16 partitions", "9M", runs=SEEDS_0_7),
            entry("4 and 9", f"{SSE_WINDOW}, 60 partitions, delta rule", "26M", runs=SEEDS_4_9),
            entry("none", f"{SSE_WINDOW}, 60 partitions, delta rule", "26M", runs=PURE),
        ],
    )


def softmax_layers() -> str:
    """With and without softmax layers, trained alike."""
    return lines(
        ("softmax layers", "trained with"),
        [seeds(), gaps(2048), gaps(8192), divergences(8192), needles(8192), cache(131_072)],
        [
            entry("none", "gated linear attention, AdamW", runs=PURE_GLA),
            entry("4 and 9", "the same", runs="keep-4-9"),
            entry("none", "delta rule, AdamW", runs=PURE_ADAMW),
            entry("4 and 9", "the same", runs=SEEDS_4_9_ADAMW),
            entry("none", "delta rule, Muon, steps of 8K tokens", runs=PURE),
            entry("4 and 9", "the same", runs=SEEDS_4_9),
            entry("0 and 7, chosen", "gated linear attention, AdamW, 9M tokens", runs=SEEDS_0_7),
        ],
    )


def find_needles() -> str:
    """Needles by kind at the teacher's context."""
    kinds = [needles(8192, kind) for kind in NEEDLES]
    return lines(
        ("softmax layers", "the others"),
        [seeds(), *kinds, cache(8192)],
        [
            entry("all ten (teacher)", "", runs="keep-0-7_500", teacher=True),
            entry("0 and 7, one of which retrieves", SSE_WINDOW, runs="keep-0-7_500"),
            entry("none", f"{SSE_WINDOW}, 60 partitions, delta rule", runs=PURE),
            entry("4 and 9", f"{SSE_WINDOW}, 60 partitions, delta rule", runs=SEEDS_4_9),
            entry("none", f"{SSE_WINDOW}, 16 partitions", runs="keep-none_N16"),
            entry("4 and 9", "SSE alone, 16 partitions, 14M tokens", runs="keep-4-9_sse"),
            entry("4 and 9", "windows alone", runs="keep-4-9_window"),
            entry("4 and 9", "gated linear attention alone, 14M tokens", runs="keep-4-9_gla"),
        ],
    )


def windows() -> str:
    """SSE beside windows, and windows alone on the same tokens and rates."""
    return lines(
        ("softmax layers", "the others", "tokens"),
        [gaps(2048), gaps(8192), divergences(8192), needles(8192), cache(8192), cache(131_072)],
        [
            entry("0 and 7", "windows", "9M", runs="keep-0-7_window_seed0"),
            entry("", SSE_WINDOW, "9M", runs="keep-0-7_500"),
            entry("0 and 7, a fifth of the books", "windows", "9M", runs="keep-0-7_window"),
            entry("", SSE_WINDOW, "9M", runs="keep-0-7_fifth"),
            entry("4 and 9", "windows", "26M", runs="keep-4-9_window"),
            entry("", SSE_WINDOW, "26M", runs="keep-4-9"),
            entry("", f"{SSE_WINDOW}, delta rule, three seeds", "26M", runs=SEEDS_4_9_ADAMW),
        ],
    )


def _swapped(words: tuple[str, ...], run: str, name: str, *seeds: int) -> Entry:
    by_context = (
        (context, tuple(say.variant(run, name, context, seed=seed) for seed in seeds or (0,)))
        for context in (2048, 8192)
    )
    return Entry(words=words, rows=tuple(by_context))


def rules() -> str:
    """SSE, gated linear attention and the delta rule: whole models, equal bytes of state, one layer."""
    whole, equal, one = "whole model, 4 and 9 softmax", "eight layers, equal bytes of state", "layer 7 alone"
    kinds = [needles(8192, kind) for kind in ("number_x1", "number_x8", "code_x1")]
    beside = "beside, N=64, k=4, scale by size, own decay"
    return lines(
        ("trained", "as"),
        [gaps(8192), *kinds],
        [
            entry(whole, "gated linear attention", runs="keep-4-9_gla"),
            entry("", "SSE over it, 17 times the state", runs="keep-4-9_sse"),
            entry(f"{whole}, beside windows", "SSE over gated linear attention", runs="keep-4-9"),
            entry("", "SSE over the delta rule, three seeds", runs=SEEDS_4_9_ADAMW),
            _swapped((equal, "gated linear attention in all eight"), "swapped_bytes", "GLA in all"),
            _swapped(("", "SSE in layer 7, windows elsewhere"), "swapped_bytes", "SSE in 7, N=7"),
            _swapped(("", "the same over the delta rule"), "swapped_bytes", "SSE in 7, N=7, delta rule"),
            _swapped((one, "gated linear attention"), "swapped_mixers", "gla"),
            _swapped(("", "gated delta rule"), "swapped_mixers", "gdn"),
            _swapped(("", "mixture of memories"), "swapped_mixers", "mom"),
            _swapped((f"{one}, beside a window", "SSE over gated linear attention"), "swapped_windows", beside),
            _swapped(("", "SSE over the delta rule"), "swapped_windows", f"{beside}, delta rule"),
        ],
    )


def long_context() -> str:
    """After a stage of rows of 32K tokens."""
    tuned = "the teacher through the same training"
    kinds = [needles(32768, kind) for kind in NEEDLES]
    return lines(
        ("model", "last stage"),
        [gaps(8192), gaps(32768), needles(8192), *kinds],
        [
            entry("the teacher as it was", "", runs="context-32k_muon", teacher=True),
            entry("the teacher", "AdamW", runs="context_32k_teacher", model=tuned),
            entry("hybrid, 0 and 7 kept, three seeds", "Muon, today's rates, yarn", runs=SEEDS_YARN),
            entry("hybrid, 4 and 9 kept, seed 0", "Muon, high rates", runs=RUNS_32K[0]),
            entry("the same, seed 1", "Muon, high rates", runs=RUNS_32K[1]),
            entry("the same, seed 1", "Muon, today's rates", runs=RUNS_32K[2]),
            entry("the same, earlier start", "AdamW", runs="context-32k_delta"),
            entry("the same over gated linear attention", "AdamW", runs="context-32k"),
        ],
    )


def second_teacher() -> str:
    """The Llama-shaped teacher."""
    kinds = [needles(2048, kind) for kind in NEEDLES]
    return lines(
        ("softmax layers", "the others", "trained with"),
        [gaps(1024), gaps(2048), *kinds],
        [
            entry("all six (teacher)", "", "", runs="second-teacher_muon", teacher=True),
            entry("0 and 4, chosen on rows of 2K", "windows", "Muon, 13M tokens", runs="second-teacher_muon_window"),
            entry("", SSE_WINDOW, "the same", runs="second-teacher_muon"),
            entry("", "windows", "AdamW, 9M tokens", runs="second-teacher_0-4_window"),
            entry("", SSE_WINDOW, "the same", runs="second-teacher_0-4"),
            entry("4 and 5, chosen on rows of 512", "windows", "AdamW, 9M tokens", runs="second-teacher_window"),
            entry("", SSE_WINDOW, "the same", runs="second-teacher"),
        ],
    )


def training() -> str:
    """Pairs of runs that differ in how they were trained."""
    return lines(
        ("softmax layers", "trained with", "instead of"),
        [gaps(2048), gaps(8192), divergences(8192), needles(2048), needles(8192)],
        [
            entry("4 and 9, seed 0", "AdamW, steps of 16K, calibrated on 4K", "", runs="keep-4-9_delta_4k"),
            entry("", "Muon", "AdamW", runs="keep-4-9_delta_4k_muon"),
            entry("", "Muon, steps of 8K", "steps of 16K", runs="keep-4-9_muon_8k-steps"),
            entry("", "AdamW, 18M of 26M tokens in rows of 8K", "10M", runs="keep-4-9_delta_4k_long"),
            entry("4 and 9, seed 2", "Muon, steps of 16K", "", runs="keep-4-9_muon_seed2"),
            entry("", "Muon, steps of 8K", "steps of 16K", runs=SEEDS_4_9[2]),
            entry("none", "Muon, steps of 16K", "", runs="keep-none_muon"),
            entry("", "Muon, steps of 8K", "steps of 16K", runs=PURE),
            entry("0 and 7", "low rates, 9M tokens", "", runs="keep-0-7_fifth"),
            entry("", "five times the rates, 26M tokens, one partition per token", "", runs="keep-0-7_26M"),
            entry("0 and 7", "needles in 45% of rows", "", runs="keep-0-7_500"),
            entry("", "no needles in training", "45% of rows", runs="keep-0-7_no-needles"),
        ],
    )


def layer_choice() -> str:
    """Sets of two layers on rows that none was chosen on."""
    found = [row for row in say.results() if row.run == "select_layers" and row.model != "teacher"]
    cells = []
    for row in sorted(found, key=lambda row: row.kl or 0.0):
        kept = "none" if row.softmax_layers == "none" else " and ".join(row.softmax_layers.split())
        chosen = row.model.removeprefix("chosen by ")
        kl = say.divergence([row])
        cells.append((kept, "" if chosen == "none" else chosen, kl, f"{row.number_x4} of {row.samples}"))
    return "\n".join(table(("softmax layers", "chosen by", "KL on other text", "needles found"), cells))


def one_layer() -> str:
    """Layer 7 in its frozen teacher."""
    delta, muon = "own decay, delta rule", "Muon, steps of a quarter of the rows"
    kinds = [needles(8192, kind) for kind in ("number_x1", "code_x1", "number_x8")]
    return lines(
        ("layer 7 as", "tokens"),
        [gaps(8192), *kinds],
        [
            _swapped(("64 partitions, gated linear attention, short budget", "6M"), "swapped_wide", "N=64, k=4"),
            _swapped(("the same", "19M"), "swapped_long", "N=64, k=4"),
            _swapped(("the same, own decay", "19M"), "swapped_long", "N=64, k=4, own decay"),
            _swapped(("delta rule, two seeds", "26M"), "swapped_delta", f"N=64, k=4, {delta}", 0, 1),
            _swapped(("128 partitions, two seeds", "26M"), "swapped_delta", f"N=128, k=4, {delta}", 0, 1),
            _swapped(("64 partitions, Muon", "26M"), "swapped_muon", "N=64, Muon"),
            _swapped(("smaller steps", "26M"), "swapped_muon", "N=64, Muon, steps of half the rows"),
            _swapped(("smallest steps, more needles a row", "26M"), "swapped_keys", f"N=64, {muon}"),
            _swapped(("the same beside a window", "26M"), "swapped_keys", f"beside a window, N=64, {muon}"),
            _swapped(("the same, 128 partitions", "26M"), "swapped_keys", f"N=128, {muon}"),
        ],
    )


def _size(tokens: int) -> str:
    return f"{tokens // 1024}K"


BLOCKS: dict[str, Callable[[], str]] = {
    "keeps-quality": keeps_quality,
    "softmax-layers": softmax_layers,
    "needles": find_needles,
    "windows": windows,
    "rules": rules,
    "long-context": long_context,
    "second-teacher": second_teacher,
    "training": training,
    "layer-choice": layer_choice,
    "one-layer": one_layer,
}
