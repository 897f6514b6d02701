"""Needles beyond the trained length: softmax layers that were kept, with other positions or sharper scores.

    python -m benchmarks.quality.beyond_length CHECKPOINT --recipe RECIPE --out out/beyond.json
    python -m benchmarks.quality.beyond_length CHECKPOINT --recipe benchmarks/quality/beyond_length.yaml \\
        --out out/beyond.json --train 4M --row 32K

CHECKPOINT is a trained hybrid of the recipe, whose model is its teacher. Each variant of `beyond_variants` is put on
the layers that the hybrid keeps as softmax, in the hybrid and in its teacher, and once on all layers of each: as a
stage's `rope` does. Rows are 2, 4 and 8 times as long as the teacher's context, and as long, for comparison. With
--train hybrid and teacher are first trained with the variant in the recipe's stage of loss `ce`, for so many tokens in
rows of --row tokens.
The JSON is rewritten after each part. Started again it goes on; trainings go on from their checkpoints in --work.
A part ends early after --limit seconds of scoring, and says how many samples it had. COMMIT names the commit where the
checkout has no git.
"""

import argparse
import dataclasses as dc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from benchmarks.quality.beyond_variants import VARIANTS, apply, varied
from benchmarks.quality.needle_rows import needle_rows
from benchmarks.quality.resumed_report import resumed_report
from sse_convert.checkpoints.load_model import load_model
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.data.needle import NeedleSample
from sse_convert.errors import UsageError
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.files import write_json
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.recipe import Recipe, load_recipe
from sse_convert.recipe.pattern import UNTOUCHED
from sse_convert.recipe.schema import NeedleEval, Stage
from sse_convert.recipe.stage_settings import Rope
from sse_convert.recipe.units import parse_count
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.training import stage as training
from sse_convert.training.stage import pick_stage, run_stage

MODELS = ("hybrid", "teacher", "hybrid, all layers", "teacher, all layers")
"""what variants are put on: kept layers of the hybrid, the same of its teacher, all layers of each"""
KEPT_ALONE = MODELS[:2]
TIMES = (1, 2, 4, 8)
"""lengths, as multiples of the teacher's context"""
STEP = 5
"""samples between two looks at the clock: one of each depth"""


@dc.dataclass(frozen=True, slots=True)
class Part:
    """What is measured at once."""

    model: str
    """of `MODELS`"""
    variant: str
    tokens: int
    """of training with the variant"""
    length: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells parts apart."""
        return dc.astuple(self)


class Experiment:
    """The parts of one hybrid.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._recipe = load_recipe(options.recipe, options.set)
        self._teacher = open_teacher(self._recipe.model, self._recipe.revision)
        self._trained = int(self._teacher.text.max_position_embeddings)
        self._work = options.work or options.out.with_suffix(".work")
        hybrid = load_model(options.checkpoint, device="cpu")
        self._kept = [i for i, mixer in enumerate(layer_mixers(hybrid.config)) if mixer is None]
        self._all = self._teacher.softmax_layers
        self._samples: dict[int, Sequence[NeedleSample]] = {}

    def run(self) -> None:
        """Measure what the report lacks."""
        report = self._report()
        done = {tuple(entry[name] for name in ("model", "variant", "tokens", "length")) for entry in report["parts"]}
        for part in self._parts():
            if part.key in done:
                continue
            entry = dc.asdict(part) | self._measure(part)
            report["parts"].append(entry)
            write_json(self._options.out, report)
            say(
                f"{part.model}, {part.variant}, {part.tokens:,} tokens, {part.length:,}: {entry['right']} of "
                f"{entry['samples']}, {entry['answer_loss']:.3f} nats, {entry['seconds']:.0f} s"
            )

    def _parts(self) -> Iterator[Part]:
        if not self._kept:
            raise UsageError(
                f"{self._options.checkpoint} keeps no softmax layer", expected="one whose layers can be changed"
            )
        options = self._options
        if options.train and (whole := [model for model in options.models if model not in KEPT_ALONE]):
            raise UsageError(f"--train with {whole[0]!r}", expected="models whose kept layers alone have the variant")
        if options.train:
            self._stage(options.train)  # a recipe without one is refused now
        for name, model, times in itertools.product(options.variants, options.models, options.times):
            yield Part(model, name, options.train, times * self._trained)

    def _report(self) -> dict[str, Any]:
        options = self._options
        settings = {
            "checkpoint": str(options.checkpoint),
            "model": self._recipe.model,
            "seed": self._recipe.train.seed,
            "context": self._trained,
            "layers": self._kept,
            "samples": options.samples,
            "keys": options.keys,
            "kind": options.kind,
            "row": options.row if options.train else None,
        }
        return resumed_report(options.out, settings, "parts")

    def _measure(self, part: Part) -> dict[str, Any]:
        folder = self._folder(part)
        model = load_model(folder, dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        layers = self._kept if part.model in KEPT_ALONE else self._all
        with varied(model, layers, VARIANTS[part.variant], trained=self._trained, length=part.length):
            return scores(model, self._needles(part.length), self._options.limit)

    def _needles(self, length: int) -> Sequence[NeedleSample]:
        """The rows of a length, the same for all models and variants."""
        if length not in self._samples:
            needle = NeedleEval(
                lengths=[length], samples=self._options.samples, kinds=[self._options.kind], keys=[self._options.keys]
            )
            asked = dc.replace(self._recipe.eval, needle=needle)
            (self._samples[length],) = needle_rows(dc.replace(self._recipe, eval=asked))
        return self._samples[length]

    def _folder(self, part: Part) -> Path | str:
        """The checkpoint of a part, trained first where that is asked for."""
        if not part.tokens:
            return self._options.checkpoint if part.model.startswith("hybrid") else self._recipe.model
        start = self._options.checkpoint if part.model == "hybrid" else self._untouched()
        recipe = self._recipe if part.model == "hybrid" else _untouched(self._recipe)
        stage = self._stage(part.tokens)
        out = self._work / f"{part.model} {part.variant} {part.tokens}".replace(",", "").replace(" ", "-")
        length, variant = stage.seq_len, VARIANTS[part.variant]
        load = training.load_student

        def changed(*args: Any) -> PreTrainedModel:
            model = load(*args)
            apply(model, self._kept, variant, trained=self._trained, length=length)
            return model

        with mock.patch.object(training, "load_student", changed):
            run_stage(recipe, stage, Path(start), out)
        return out

    def _untouched(self) -> Path:
        """The teacher as a checkpoint that stages take."""
        folder: Path = self._work / "teacher"
        if not folder.exists():
            self._work.mkdir(parents=True, exist_ok=True)
            convert_checkpoint(_untouched(self._recipe), folder)
        return folder

    def _stage(self, tokens: int) -> Stage:
        row, stage = self._options.row, pick_stage(self._recipe, "ce")
        theta = self._teacher.text.rope_parameters["rope_theta"]  # as it is; `rope` lets rows be longer
        return dc.replace(
            stage, tokens=tokens, seq_len=row, batch_tokens=row, micro_batch=1, rope=Rope(rope_theta=theta)
        )


def _untouched(recipe: Recipe) -> Recipe:
    calibrate = dc.replace(recipe.calibrate, enabled=False)
    return dc.replace(recipe, layers=UNTOUCHED, mixers={}, calibrate=calibrate)


@torch.no_grad()
def scores(model: PreTrainedModel, samples: Sequence[NeedleSample], limit: float) -> dict[str, Any]:
    """Needles found, and the loss of their answers in nats per token, which tells models apart that find none.

    Args:
        model: in evaluation mode.
        samples: rows of one length.
        limit: seconds after which no further samples are begun.
    """
    began, right, nats, tokens, done = time.monotonic(), 0, 0.0, 0, 0
    for sample in samples:
        if done and done % STEP == 0 and time.monotonic() - began > limit:
            break
        row = torch.tensor([sample.token_ids], device=model.device)
        size = sample.answer_len
        logits = model(input_ids=row, use_cache=False, logits_to_keep=size + 1).logits[0, :-1].float()
        answer = row[0, -size:]
        right += bool((logits.argmax(-1) == answer).all())
        nats += float(F.cross_entropy(logits, answer, reduction="sum"))
        tokens, done = tokens + size, done + 1
    found = Accuracy(right, done).to_dict()
    seconds = time.monotonic() - began
    return {**found, "right": right, "samples": done, "answer_loss": nats / tokens, "seconds": round(seconds, 1)}


def _count(text: str) -> int:
    """A number as recipes write it."""
    if (count := parse_count(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 4M or 32K")
    return count


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path, help="the trained hybrid")
    p.add_argument("--recipe", required=True, help="its recipe: model, text, key words, rates")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--out", type=Path, required=True, help="JSON file to write, and to go on with")
    p.add_argument("--work", type=Path, help="folder of trainings; default: beside the JSON")
    p.add_argument("--times", type=int, nargs="+", default=list(TIMES), help="lengths, in contexts of the teacher")
    p.add_argument("--samples", type=int, default=100, help="rows per part")
    p.add_argument("--keys", type=int, default=1, help="needles in a row")
    p.add_argument("--kind", default="number", choices=("number", "word", "code"))
    p.add_argument("--models", nargs="+", choices=MODELS, help="default: all, with --train those of kept layers")
    p.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), default=list(VARIANTS))
    p.add_argument("--limit", type=float, default=600, help="seconds of scoring for a part")
    p.add_argument("--train", type=_count, default=0, metavar="TOKENS", help="train with each variant first, e.g. 4M")
    p.add_argument("--row", type=_count, default=32 * 1024, help="tokens of a training row")
    return p


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    options.models = options.models or (KEPT_ALONE if options.train else MODELS)
    hush_libraries()
    Experiment(options).run()


if __name__ == "__main__":
    sys.exit(main())
