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


def coder() -> str:
    """Programs that pass, needles and KL of the second teacher and its conversions."""
    models, lines, lengths = _load("coder.json")["models"], [], (1024, 4096, 16384)
    whole = models[0]["cache_bytes"]["8192"]
    for model in models:
        passed = ", ".join(f"{found['passed']} of {found['of']}" for found in model["programs"].values())
        kl = ", ".join(_nats(model["kl"][length]) for length in ("2048", "8192"))
        asked = model if model["needles"] else _load("heads_coder.json")["plans"][0]  # the teacher, asked there
        *_, of_four = _found(asked, lengths)
        lines.append((model["name"], _size(model, whole), passed, of_four, kl))
    names = ("HumanEval, MBPP", f"one of four, {_places(lengths)}", "KL, 2K, 8K")
    return "\n".join(table(("what stays softmax; the others", "cache at 8K", *names), lines))


def coder_rates() -> str:
    """Held-out KL of the second teacher's conversion by the rates of its weights."""
    lines = []
    for run in _load("coder_rates.json")["runs"]:
        first, second = run["held_out_kl"].values()
        after = [_nats(min(first, key=lambda at: abs(at[0] - tokens))[1]) for tokens in (3e6, 10e6, 16e6)]
        mixers, rest = (f"{run['rates']['distill'][group]:.1e}" for group in ("mixers", "rest"))
        lines.append((run["name"], f"{mixers}, {rest}", *after, _nats(min(kl for _, kl in second))))
    head = ("rates", "of attention, of the rest", "KL after 3M", "10M", "16M", "in the second stage")
    return "\n".join(table(head, lines))


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
    "real-coder": coder,
    "real-coder-rates": coder_rates,
    "real-step-kinds": step_kinds,
    "real-decoding": decoding,
}
