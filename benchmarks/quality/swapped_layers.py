"""Layers swapped inside their otherwise frozen teacher: what a mixer learns to do in place of attention, in minutes.

    python -m benchmarks.quality.swapped_layers capacity --out out/swapped_capacity.json

The teacher runs once up to the first swapped layer. Each variant of a set is converted and calibrated like any model,
then its swapped attention is trained by KL to the teacher's predictions, through the frozen layers above, on the same
rows (18.9M tokens in rows of 512, 2,048 and 8,192, needles planted as the recipe says). Scored are held-out loss and
needles, also with recurrent states that start anew every 64 tokens: what is left then was not carried by them. With
--short it is a third of the rows in smaller steps (5.8M tokens, 64 needles each), for many variants, with --long 25.7M
tokens in such steps. The JSON is rewritten after each variant; --resume keeps what it has. --jobs trains several
variants side by side on the device, and --minutes begins none that would not be done by then. A variant that the GPU
has no memory for beside others is run alone, and one that it has none for then is left out, with a word. COMMIT
names the commit where the checkout has no git.
"""

import argparse
import dataclasses as dc
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from benchmarks.kernels.hybrid_measure import environment
from benchmarks.quality.swapped_plot import draw
from benchmarks.quality.swapped_scores import needle_scores, text_scores
from benchmarks.quality.swapped_states import Bed, Sizes, make_bed
from benchmarks.quality.swapped_team import Team
from benchmarks.quality.swapped_training import PHASES, Phase, train
from benchmarks.quality.swapped_variants import SETS, Variant
from sse_convert import api
from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.errors import UsageError
from sse_convert.files import write_json
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe import Recipe, load_recipe

RESET = 64
"""tokens; half of the window that some variants have"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", choices=sorted(SETS), help="set of variants")
    p.add_argument("--out", type=Path, required=True, help="JSON file to write; the plot lies beside it")
    add_settings(p)
    return p


def add_settings(p: argparse.ArgumentParser) -> None:
    """What a `Runner` is told, beside sets and files."""
    p.add_argument("--recipe", default="recipes/teacher-qwen3-32m.yaml", help="teacher, text and mixers")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--layers", type=int, nargs="+", default=[7], help="layers to swap")
    p.add_argument("--seeds", type=int, default=1, help="seeds per variant")
    p.add_argument("--variants", nargs="+", metavar="NAME", help="of the set; default: all")
    p.add_argument("--resume", action="store_true", help="keep the variants that the JSON has")
    p.add_argument("--jobs", type=int, default=1, help="variants that are trained side by side")
    p.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would take longer")
    amount = p.add_mutually_exclusive_group()
    amount.add_argument("--short", action="store_true", help="a third of the rows, in smaller steps")
    amount.add_argument("--long", action="store_true", help="a third more tokens, in smaller steps")
    amount.add_argument("--tiny", action="store_true", help="a few short rows, to see that it runs")


class Runner:
    """Trains and scores sets of variants on the same rows; a variant that stands in several sets is run once.

    A context, at whose end the processes of --jobs end.

    Args:
        options: what `add_settings` adds.
        clock: of several runners; None for one that starts now.

    Raises:
        UsageError: no job, or no seed.
    """

    def __init__(self, options: argparse.Namespace, clock: "Clock | None" = None) -> None:
        if options.jobs < 1 or options.seeds < 1:
            raise UsageError(f"{options.jobs} jobs, {options.seeds} seeds", expected="at least one of each")
        self._options = options
        self._sizes, self._phases = _amount(options)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._clock = clock or Clock(options.minutes)
        self._bed: Bed | None = None
        self._team: Team | None = None
        self._known: dict[str, tuple[str, dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._team is not None:
            self._team.close()

    def run(self, name: str, variants: dict[str, Variant], out: Path) -> dict[str, Any]:
        """The report of a set, written after each variant.

        Args:
            name: of the set.
            variants: by name.
            out: JSON file.

        Raises:
            UsageError: a variant is asked for that there is not, or the report has other settings.
            RecipeError, DataError, CheckpointError: recipe, text or teacher do not do.
        """
        names = _names(self._options, name, variants)
        report = self._report(name, out)
        kept = {(entry["name"], entry["seed"]): entry for entry in report["variants"]}
        for (own, seed), entry in kept.items():
            if own not in variants:  # a set that has changed since
                continue
            self._known.setdefault(_identity(variants[own], seed), (name, entry))
        wanted = [(own, seed) for seed in range(self._options.seeds) for own in names if (own, seed) not in kept]
        for entry in self._entries(variants, wanted):
            report["variants"].append({"commit": report["environment"]["commit"], **entry})
            own, seed = entry["name"], entry["seed"]
            self._known.setdefault(_identity(variants[own], seed), (name, report["variants"][-1]))
            write_json(out, report)
            say(_line(entry))
        if left := len(wanted) + len(kept) - len(report["variants"]):
            say(f"{name}: {left} variants and seeds are left; the same command with --resume goes on")
        return report

    def _entries(self, variants: dict[str, Variant], wanted: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
        """Figures of variants and seeds, those first that have been run in another set."""
        copies = [(own, seed, self._copy(own, variants[own], seed)) for own, seed in wanted]
        yield from (entry for _, _, entry in copies if entry is not None)
        tasks = [
            (own, _recipe(self._options, variants[own], seed), variants[own], seed, self._phases)
            for own, seed, entry in copies
            if entry is None
        ]
        for found in self._results(tasks):
            if isinstance(found, LeftOut):
                say(f"{found.name} (seed {found.seed}): left out, {found.why}")
            else:
                self._clock.took(found["seconds"])
                yield found

    def _results(self, tasks: list[tuple[Any, ...]]) -> Iterator["dict[str, Any] | LeftOut"]:
        """Figures of trainings; those that had no memory beside others are run again, alone."""
        if not tasks or not self._clock.may_start():
            return
        if self._bed is None:
            self._bed = _bed(tasks[0][1], self._options, self._device, self._sizes)
        alone, crowded = tasks, set[tuple[str, int]]()
        if self._options.jobs > 1:
            if self._team is None:
                self._team = Team(self._bed, self._options.jobs)
            for found in self._team.results(_figures, tasks, self._clock.may_start):
                if isinstance(found, LeftOut):
                    crowded.add((found.name, found.seed))
                else:
                    yield found
            alone = [task for task in tasks if (task[0], task[3]) in crowded]
        yield from (_figures(*task, self._bed) for task in alone if self._clock.may_start())

    def _copy(self, name: str, variant: Variant, seed: int) -> dict[str, Any] | None:
        """Figures of a variant that has been run, of this set or another; None if it has not."""
        if (known := self._known.get(_identity(variant, seed))) is None:
            return None
        of, entry = known
        return {**entry, "name": name, "run_of": entry.get("run_of", f"{of}: {entry['name']}")}

    def _report(self, name: str, out: Path) -> dict[str, Any]:
        """A new report, or the one that is there with other surroundings."""
        options = self._options
        settings = {
            "set": name, "recipe": options.recipe, "overrides": options.set, "layers": options.layers,
            "reset_every": RESET, "phases": [dc.asdict(phase) for phase in self._phases],
        }  # fmt: skip
        report = {"schema": 1, "environment": environment(self._device), "settings": settings, "variants": []}
        if options.resume and out.is_file():
            earlier = json.loads(out.read_text(encoding="utf-8"))
            if earlier["settings"] != settings:
                raise UsageError(f"{out} was measured with other settings", fix="leave out --resume")
            report["variants"] = [entry for entry in earlier["variants"] if _is_complete(entry)]
        return report


class Clock:
    """Whether there is time for one more training.

    Args:
        minutes: from now on.
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._longest = 0.0

    def took(self, seconds: float) -> None:
        """Note how long a training was."""
        self._longest = max(self._longest, seconds)

    def may_start(self) -> bool:
        """Whether one as long as the longest so far would be done in time."""
        return time.monotonic() + self._longest < self._end


@dc.dataclass(frozen=True, slots=True)
class LeftOut:
    """A variant that the GPU had no memory for."""

    name: str
    seed: int
    why: str
    """what PyTorch says"""


def _figures(
    name: str, recipe: Recipe, variant: Variant, seed: int, phases: tuple[Phase, ...], bed: Bed
) -> dict[str, Any] | LeftOut:
    """What a variant learns and scores."""
    try:
        return {"name": name, **_measure(recipe, bed, variant, seed, phases)}
    except torch.OutOfMemoryError as error:
        return LeftOut(name, seed, str(error).splitlines()[0])
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # nothing on a CPU


def _is_complete(entry: dict[str, Any]) -> bool:
    """Whether it has the loss of answers, which early reports lack; such a variant is measured again."""
    return all("answer_loss" in asked for asked in entry["needles"])


def _identity(variant: Variant, seed: int) -> str:
    """Equal for runs that only their names tell apart."""
    return json.dumps([dc.asdict(variant), seed], sort_keys=True)


def _amount(options: argparse.Namespace) -> tuple[Sizes, tuple[Phase, ...]]:
    if options.tiny:
        return TINY_SIZES, TINY_PHASES
    if options.long:
        return LONG_SIZES, LONG_PHASES
    return (SHORT_SIZES, SHORT_PHASES) if options.short else (Sizes(), PHASES)


def _names(options: argparse.Namespace, set_name: str, variants: dict[str, Variant]) -> list[str]:
    names: list[str] = options.variants or list(variants)
    if unknown := [name for name in names if name not in variants]:
        raise UsageError(f"variant {unknown[0]!r}", expected=f"of {set_name}: {', '.join(variants)}")
    return names


def _recipe(options: argparse.Namespace, variant: Variant, seed: int) -> Recipe:
    swapped = {str(layer): variant.mixer_of(layer) for layer in options.layers}
    own = [f"{key}={json.dumps(value)}" for key, value in variant.set.items()]
    layers = ["layers.pattern=[full]", "layers.keep=[]", f"layers.overrides={json.dumps(swapped)}"]
    return load_recipe(options.recipe, [*options.set, *layers, *own, f"train.seed={seed}"])


def _bed(recipe: Recipe, options: argparse.Namespace, device: torch.device, sizes: Sizes) -> Bed:
    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher = load_pretrained(recipe.model, dtype=low, device=device).requires_grad_(False)
    return make_bed(teacher, load_tokenizer(recipe.model), recipe, min(options.layers), sizes)


def _measure(recipe: Recipe, bed: Bed, variant: Variant, seed: int, phases: tuple[Phase, ...]) -> dict[str, Any]:
    torch.manual_seed(seed)
    start = time.monotonic()
    student = _student(recipe, bed.teacher.device)
    before = text_scores(student, bed)
    own_phases = tuple(phase.finer(variant.finer) for phase in phases)
    trained = train(student, bed, rate=variant.rate, seed=seed, phases=own_phases, optimizer=variant.optimizer)
    figures = {
        "cache": api.plan(recipe).to_dict()["cache"],
        "before": before,
        "trained": dc.asdict(trained),
        "text": text_scores(student, bed),
        "needles": needle_scores(student, bed),
        "needles_reset": needle_scores(student, bed, reset_every=RESET),
    }
    return {"seed": seed, **dc.asdict(variant), "seconds": round(time.monotonic() - start, 1), **figures}


def _student(recipe: Recipe, device: torch.device) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "converted"
        api.convert(recipe, out=out)
        if recipe.calibrate.enabled:
            api.calibrate(recipe, out, out=(out := Path(folder) / "calibrated"))
        return load_pretrained(out, dtype=torch.float32, device=device)


def _line(entry: dict[str, Any]) -> str:
    gaps = ", ".join(f"{text['gap']:.3f} at {text['length']:,}" for text in entry["text"])
    found = ", ".join(f"{n['kind']} x{n['keys']} at {n['length']:,}: {n['accuracy']:.0%}" for n in entry["needles"])
    return f"{entry['name']} (seed {entry['seed']}, {entry['seconds']:.0f} s): gap {gaps}; {found}"


SHORT_SIZES = Sizes(rows=(1024, 2048, 128), text_rows=12, samples=64)
SHORT_PHASES = (Phase(512, 1024, 8), Phase(2048, 2048, 4), Phase(8192, 128, 1))
LONG_SIZES = Sizes(rows=(1024, 4096, 768))
LONG_PHASES = (Phase(512, 1024, 8), Phase(2048, 6144, 4), Phase(8192, 1536, 1))
TINY_SIZES = Sizes(
    lengths=(128, 192, 384), rows=(4, 2, 2), text_rows=1, samples=2, needles=(("number", 1), ("code", 1))
)
TINY_PHASES = (Phase(128, 6, 2), Phase(192, 4, 2), Phase(384, 2, 1))


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    hush_libraries()
    with Runner(options) as runner:
        report = runner.run(options.name, SETS[options.name], options.out)
    if report["variants"]:
        draw(report, options.out.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
