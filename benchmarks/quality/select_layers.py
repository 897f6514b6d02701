"""Choose layers by every method, then compare the choices with uniform and random sets on other rows. No training.

    python -m benchmarks.quality.select_layers RECIPE --keep 2 --text BOOK --check-text ANOTHER --out RESULT.json

The choices are made on one book and one set of needles, and compared on another book, other needles and longer rows.
What was measured is kept in WORK, so that an interrupted run goes on. COMMIT names the commit where there is no git.
"""

import argparse
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.convert import commit
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.files import replacing, write_json
from sse_convert.recipe.loader import recipe_or_model
from sse_convert.report import json_ready
from sse_convert.selection.measure import Measurement
from sse_convert.selection.select import settle_recall
from sse_convert.selection.setup import SelectSettings, set_up

METHODS = ("greedy", "kl-restore", "sensitivity", "recall-ratio", "uniform")
CHOOSE = {"length": 512, "tokens": 1024, "samples": 6}
COMPARE = {"length": 1024, "tokens": 2048, "samples": 8}
CHECK_SEED = 1
FLOOR = 1e-4
"""of the plot: smaller shares, and negative ones, are drawn here"""


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def compare(options: argparse.Namespace, sets: dict[tuple[int, ...], str]) -> tuple[str, list[dict[str, Any]]]:
    """Every set on rows that no method has seen: what recall was, and one entry per set."""
    recipe = recipe_or_model(options.recipe, [*options.set, f"data.seed={CHECK_SEED}"])
    settings = SelectSettings(keep=options.keep, **COMPARE)
    setup = set_up(recipe, options.work / "compare", settings, text=options.check_text, device=options.device)
    recall, _ = settle_recall(setup.meter, 1.0)
    results = []
    for kept, name in sets.items():
        found = setup.meter.measure(kept)
        say(f"{name}: keeping {' '.join(map(str, kept)) or 'none'}: {line(found)}")
        results.append({"name": name, **json_ready(found)})
    return recall, results


def line(found: Measurement) -> str:
    """The figures of one set in words."""
    return f"text KL {found.text_kl:.4f}, recall loss {found.recall_loss:.4f}, recalled {found.recall_accuracy:.0%}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Choose, compare, and collect everything."""
    start, cpu = time.monotonic(), time.process_time()
    report = api.select(
        options.recipe, options.keep, options.work / "choose", methods=METHODS, text=options.text,
        overrides=options.set, device=options.device, stand_in="sliding", **CHOOSE,
    )  # fmt: skip
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu
    say("\n".join(report.lines()))
    layers = range(len(report.teacher.kept))
    sets: dict[tuple[int, ...], str] = {tuple(layers): "teacher", (): "none"}
    for choice in report.choices:
        sets[choice.kept] = ", ".join(filter(None, (sets.get(choice.kept), choice.method)))
    rng, wanted = random.Random(0), len(sets) + options.random
    while len(sets) < wanted:
        sets.setdefault(tuple(sorted(rng.sample(layers, options.keep))), "random")
    recall, results = compare(options, sets)
    return {
        "schema": 1,
        "command": " ".join(["python", "-m", "benchmarks.quality.select_layers", *sys.argv[1:]]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "choose_seconds": round(seconds, 1),
        "choose_cpu_seconds": round(cpu_seconds, 1),
        "choose": report.to_dict(),
        "compare": {**COMPARE, "text": str(options.check_text), "seed": CHECK_SEED, "recall": recall, "sets": results},
    }


def draw(data: dict[str, Any], png: Path) -> None:
    """Left: what each layer is worth, by single replacements. Right: sets on the comparison's rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    scored = [choice for choice in data["choose"]["choices"] if choice["scores"] and choice["method"] != "greedy"]
    for choice in scored:
        scores = {int(layer): score for layer, score in choice["scores"].items()}
        shares = [max(scores[i] / max(scores.values()), FLOOR) for i in sorted(scores)]
        left.plot(sorted(scores), shares, marker="o", label=choice["method"])
    left.set(xlabel="layer", ylabel="score, as a share of the best", title="what each method sees", yscale="log")
    left.legend(fontsize=7, loc="upper center", ncols=2)
    for entry in data["compare"]["sets"]:
        chosen = entry["name"] != "random"
        right.plot(entry["text_kl"], entry["recall_loss"], "o", color="C3" if chosen else "0.6")
        if chosen:
            bound = entry["name"] in ("teacher", "none")
            label = entry["name"] if bound else f"{entry['name']} ({' '.join(map(str, entry['kept']))})"
            right.annotate(label, (entry["text_kl"], entry["recall_loss"]), fontsize=7, xytext=(0, 7), rotation=30,
                           textcoords="offset points")  # fmt: skip
    right.set(xlabel="KL to the teacher on text, nats per token", ylabel="loss of needle answers, nats per token",
              title="kept sets, no training; grey: random", yscale="log")  # fmt: skip
    figure.suptitle(f"{data['choose']['model']}, {data['processor']}, commit {data['commit']}", fontsize=8)
    figure.tight_layout()
    with replacing(png) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


@reporting_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="recipe or model")
    parser.add_argument("--keep", type=int, required=True, help="layers to keep")
    parser.add_argument("--text", type=Path, required=True, help="text to choose by")
    parser.add_argument("--check-text", type=Path, required=True, help="other text, to compare on")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; the plot lies beside it")
    parser.add_argument("--work", type=Path, default=Path("out/select_layers"), help="folder for measurements")
    parser.add_argument("--random", type=int, default=10, help="random sets of the same size")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    options = parser.parse_args()
    hush_libraries()
    data = run(options)
    write_json(options.out, data)
    draw(data, options.out.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
