"""Tables of the page on real models, from `benchmarks/real/`."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docs.examples import ROOT
from docs.markdown import table

FOLDER = ROOT / "benchmarks" / "real"
LENGTHS = (1024, 2048, 4096, 8192)
TASKS = {"noise": "in noise", "book": "in a book", "one of four": "one of four"}
CHOICES = ("all", "none", "layers", "select", "refined", "attention at 8,192")
"""of heads, as the table shows them"""
COUNTS = {"digits": "", "with the space": ", with the space"}
"""what counts as a needle found -> how a row says so"""
Entry = Mapping[str, Any]
"""what a report says of one choice of heads, or of one training"""


def heads() -> str:
    """Needles and KL of SmolLM2 by what sees the whole row."""
    return _heads("heads_smollm2.json", LENGTHS)


def heads_of_two() -> str:
    """Needles and KL of a teacher with two KV heads a layer."""
    return _heads("heads_coder.json", (1024, 4096, 16384))


def _heads(name: str, lengths: Sequence[int]) -> str:
    report, lines = _load(name), []
    for plan in report["plans"]:
        if plan["choice"] in CHOICES:
            kept = report["kv_heads"] if plan["kept"] is None else len(plan["kept"])
            words = f"{plan['choice']}, {kept} heads" if plan["kept"] else plan["choice"]
            kl = ", ".join(_nats(plan["kl"][str(length)]) for length in (2048, lengths[-1]))
            lines.append((words, f"{kept / report['kv_heads']:.0%}", *_found(plan, lengths), kl))
    last = f"KL, 2K, {lengths[-1] // 1024}K"
    return "\n".join(table(("what sees the whole row", "growing cache", *_tasks(lengths), last), lines))


def none_kept() -> str:
    """Needles and KL of trainings without a softmax layer, by what stands beside the window."""
    teacher = _load("digits_smollm2.json")["models"][0]
    whole, own = teacher["cache_bytes"]["8192"], {"needles": _counted(teacher, "digits")}
    lines = [("the teacher", f"{whole / 1e6:.0f} MB", *_found(own, LENGTHS), "0")]
    for trial in _load("none_smollm2.json")["trials"]:
        lines.append((trial["lever"], _size(trial, whole), *_found(trial, LENGTHS), _nats(trial["kl"]["2048"])))
    return "\n".join(table(("every layer, beside its window", "cache at 8K", *_tasks(LENGTHS), "KL, 2K"), lines))


def digits() -> str:
    """Needles of SmolLM2 and of a conversion, by what counts as found."""
    return _digits(LENGTHS, tuple(COUNTS))


def first_page() -> str:
    """The digits of the longest trainings at the shortest and the longest rows."""
    return _digits((LENGTHS[0], LENGTHS[-1]), ("digits",), fewest=60_000_000)


def _digits(lengths: Sequence[int], counts: Sequence[str], fewest: int = 0) -> str:
    models = [model for model in _load("digits_smollm2.json")["models"] if not 0 < _tokens(model) < fewest]
    lines: list[Sequence[str]] = []
    whole = models[0]["cache_bytes"]["8192"]
    for count in counts:
        for model in models:
            if (needles := _counted(model, count)) is not None:
                words = model["name"] + (f", {_millions(model)} tokens" if _tokens(model) else "")
                found = _found({"needles": needles}, lengths)
                lines.append((words + COUNTS[count], _size(model, whole), *found, _nats(model["kl"]["2048"])))
    return "\n".join(table(("what stays softmax; the others", "cache at 8K", *_tasks(lengths), "KL, 2K"), lines))


def _counted(model: Entry, count: str) -> dict[str, Any] | None:
    """Needles by what counts as found; None where a model was not asked so."""
    needles = model["needles"]
    if not all(count in found for found in needles.values()):
        return None
    return {key: {"right": found[count], "of": found["of"]} for key, found in needles.items()}


def steps() -> str:
    """Time and memory of a training step by what stays softmax, with CUDA graphs and without."""
    lines = []
    for name, row in _load("steps_smollm2.json")["models"].items():
        step = 1000 * row["batch_tokens"] / row["tokens_per_second"]
        memory = max(row["peak_mib"]) / 1024
        lines.append((name, f"{step:.0f}", f"{row['tokens_per_second']:,.0f}", f"{memory:.0f}"))
    return "\n".join(table(("what stays softmax; one state, if not told", "ms a step", "tokens/s", "GiB"), lines))


def coder_run() -> str:
    """What conversions of the second teacher keep, by the recipe that `recipes new` writes and with windows alone."""
    report = _load("coder_run.json")
    teacher, runs = report["teacher"], report["runs"]
    lengths, every = (1024, 4096, 16384, 32000), (teacher, *runs)
    rows: list[tuple[str, list[str]]] = [("six tasks, mean", [f"{one['six_tasks']['mean']:.2f}" for one in every])]
    for name, words in (("humaneval", "HumanEval, of 164"), ("mbpp", "MBPP, of 200")):
        rows.append((words, [str(one["programs"][name]["passed"]) for one in every]))
    for task in ("book", "one of four"):
        found = [" ".join(_share(one["needles"][f"{task} {length}"]) for length in lengths) for one in every]
        rows.append((f"{TASKS[task]}, 1K 4K 16K 32K, %", found))
    for length, words in (("4096", "4K"), ("32768", "32K")):
        rows.append((f"KL, {words}", ["0", *(_nats(run["kl"][length][0]) for run in runs)]))
        gaps = (f"{run['loss_gap'][length][0]:.3f} ± {run['loss_gap'][length][1]:.3f}" for run in runs)
        rows.append((f"loss above the teacher's, {words}", ["0", *gaps]))
    sizes = [teacher["cache_bytes"]["32768"], *(run["cache_bytes"]["32768"] for run in runs)]
    rows.append(("cache at 32K", [f"{size / 1e6:.0f} MB" for size in sizes]))
    names = ["the teacher", *(run["name"] for run in runs)]
    return "\n".join(table(("", *names), [(words, *cells) for words, cells in rows]))


def step_kinds() -> str:
    """Milliseconds of the GPU in a training step, by kind of kernel."""
    parts = _load("../training/step_smollm2.json")["parts"]
    kinds = list(next(iter(parts.values()))["kinds"])
    lines = [(kind, *(_milliseconds(part["kinds"].get(kind)) for part in parts.values())) for kind in kinds]
    lines.append(("all", *(f"{part['busy_ms']:.0f}" for part in parts.values())))
    return "\n".join(table(("kind of kernel", *parts), lines))


def _milliseconds(found: dict[str, float] | None) -> str:
    return "-" if found is None else f"{found['ms']:.1f}"


def decoding() -> str:
    """Time of a decoding step and bytes of a row's cache, by what stays softmax, context and rows of a step."""
    report = _load("decoding_smollm2.json")
    steps = {
        name: {(row["context"], row["batch"]): row for row in rows if "batch" in row}
        for name, rows in report["models"].items()
    }
    places = list(next(iter(steps.values())))
    lines = []
    for context in sorted({context for context, _ in places}):
        batches = [batch for at, batch in places if at == context]
        for name, found in sorted(steps.items(), key=lambda item: -item[1][context, 1]["cache_gib"]):
            cache = f"{found[context, 1]['cache_gib'] * 2**30 / 1e6:.0f} MB"
            lines.append(
                (
                    f"{context // 1024}K, {name}",
                    cache,
                    *(f"{found[context, batch]['step_ms']:.1f}" for batch in batches),
                )
            )
    names = ("1 row, ms" if batch == 1 else f"{batch} rows" for batch in dict.fromkeys(batch for _, batch in places))
    return "\n".join(table(("context, what stays softmax; the others", "cache of a row", *names), lines))


def mixed() -> str:
    """KL of trainings that keep some heads, by what was kept and what the other heads are."""
    report = _load("mixed_smollm2.json")
    whole = report["teacher"]["cache_bytes"]["8192"]
    lines = []
    for trial in sorted(_pooled(), key=lambda trial: trial["kl"]):
        seeds = trial["seeds"]
        words = f"{trial['lever']}, {seeds} seeds" if seeds > 1 else trial["lever"]
        lines.append((words, _size(trial, whole), _nats(trial["kl"])))
    return "\n".join(table(("what stays softmax; the others", "cache at 8K", "KL, 2K"), lines))


def _pooled() -> list[dict[str, Any]]:
    """Trainings with kept heads, those that differ in their seed as one, with their mean KL at 2K."""
    found: dict[str, list[Entry]] = {}
    for trial in _load("mixed_smollm2.json")["trials"]:
        found.setdefault(trial["lever"], []).append(trial)
    return [
        {
            "lever": lever,
            "seeds": len(trials),
            "cache_bytes": trials[0]["cache_bytes"],
            "kl": sum(trial["kl"]["2048"] for trial in trials) / len(trials),
        }
        for lever, trials in found.items()
    ]


def _tokens(trial: Entry) -> int:
    return sum(stage["tokens"] for stage in trial.get("stages", ()))


def _millions(trial: Entry) -> str:
    return f"{_tokens(trial) / 1e6:.0f}M"


def _size(entry: Entry, whole: int) -> str:
    """Bytes of a row's cache at 8K, and their share of the teacher's."""
    cache = entry["cache_bytes"]["8192"]
    return f"{cache / 1e6:.0f} MB" + (f", {cache / whole:.0%}" if cache < whole else "")


def _nats(kl: float) -> str:
    return f"{kl:.3f}" if kl else "0"


def _tasks(lengths: Sequence[int]) -> list[str]:
    return [f"{words}, {_places(lengths)}" for words in TASKS.values()]


def _places(lengths: Sequence[int]) -> str:
    return " ".join(f"{length // 1024}K" for length in lengths)


def _found(entry: Entry, lengths: Sequence[int]) -> list[str]:
    """Needles found in percent, a cell a task with all lengths; a dash where a length was not asked."""
    return [" ".join(_share(entry["needles"].get(f"{task} {length}")) for length in lengths) for task in TASKS]


def _share(found: Mapping[str, Any] | None) -> str:
    return "–" if found is None else f"{100 * found['right'] / found['of']:.0f}"


def _load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


BLOCKS: dict[str, Callable[[], str]] = {
    "real-heads": heads,
    "real-heads-of-two": heads_of_two,
    "real-none": none_kept,
    "real-mixed": mixed,
    "real-first": first_page,
    "real-digits": digits,
    "real-steps": steps,
    "real-coder-run": coder_run,
    "real-step-kinds": step_kinds,
    "real-decoding": decoding,
}
