"""What makes well-formed settings senseless, found without the model; problems are relative to their part."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from sse_convert.mixers import BUILT_IN, FULL
from sse_convert.recipe.pattern import MOST_LAYERS, layer_range, mixer_name_problems, pattern_runs
from sse_convert.recipe.problems import Path, Problem, shortened, suggest
from sse_convert.recipe.retired import RETIRED_FORMS
from sse_convert.recipe.schema import (
    FORM_WEIGHTS,
    Data,
    Export,
    Layers,
    LearningRates,
    LMEval,
    NeedleEval,
    Needles,
    Recipe,
    Rope,
    Select,
    Source,
    Stage,
    Train,
)
from sse_convert.recipe.units import format_count

_SHARE = re.compile(r"\d{1,2}(\.\d{1,6})?%", re.ASCII)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
_MIXER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,99}")


def check(part: Any) -> Iterator[Problem]:
    """The problems of one part of a recipe by itself."""
    checks: dict[type, Callable[[Any], Iterator[Problem]]] = {
        Layers: _layers,
        Select: _select,
        Stage: _stage,
        Source: _source,
        Needles: _needles,
        NeedleEval: _needle_eval,
        LMEval: _lm_eval,
        Rope: _rope,
        Recipe: _recipe,
    }
    if type(part) in checks:
        yield from checks[type(part)](part)


def check_together(parts: dict[str, Any]) -> Iterator[Problem]:
    """The problems between parts of a recipe; a part that could not be built is None and is left out."""
    mixers = parts.get("mixers", {}) or {}
    for name in mixers:
        if not _MIXER_NAME.fullmatch(str(name)):
            yield Problem(
                ("mixers", name), "a mixer name is letters, digits, -, + and _, 100 at most, starting with a letter"
            )
    if (layers := parts.get("layers")) is not None:
        for message in mixer_name_problems(layers, dict.fromkeys((*BUILT_IN, *map(str, mixers)))):
            where, _, text = message.partition(": ")
            yield Problem(tuple(where.split(".")), text)
    stages = parts.get("stages", []) or []
    yield from _stage_names(stages)
    yield from _lends(parts.get("export"), stages)
    if (data := parts.get("data", Data())) is not None:
        if stages and not data.train:
            yield Problem(("data", "train"), "training stages need a source of text, for example [{path: texts/}]")
        if (train := parts.get("train", Train())) is not None:
            yield from _held_out(train, data)
        masked = any(stage is not None and stage.loss_mask == "assistant" for stage in stages)
        if masked and not any(source is None or source.kind == "chat" for source in data.train):
            yield Problem(("data", "train"), "loss_mask: assistant needs a source with kind: chat")


def check_run(recipe: Recipe) -> Iterator[Problem]:
    """What `run` needs beyond a valid recipe, so that it cannot fail for want of text after days of training."""
    if recipe.calibrate.enabled and not recipe.data.train:
        yield Problem(("data", "train"), "calibrate needs text; add a source or set calibrate.enabled: false")
    if (recipe.eval.tokens or recipe.eval.needle) and not recipe.data.valid:
        yield Problem(("data", "valid"), "eval needs held-out text; add a source or set eval.tokens: 0, no needle")


def _lends(export: Export | None, stages: list[Stage | None]) -> Iterator[Problem]:
    """`export` would refuse a small checkpoint that holds everything, after all training."""
    whole = next((stage for stage in stages if stage is not None and stage.train == "all"), None)
    if export is not None and export.delta and whole is not None:
        text = f"leaves nothing to the teacher: stage {whole.name} trains all weights; remove it, or train: mixers"
        yield Problem(("export", "delta"), text)


def _stage_names(stages: list[Stage | None]) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for i, stage in enumerate(stages):
        if stage is None:
            continue
        if stage.name in first:
            yield Problem(("stages", i, "name"), f"'{stage.name}' is already the name of stage {first[stage.name]}")
        first.setdefault(stage.name, i)


def _not_empty(part: Any, *keys: str) -> Iterator[Problem]:
    for key in keys:
        if not getattr(part, key):
            yield Problem((key,), "is empty, name at least one")


def _layers(layers: Layers) -> Iterator[Problem]:
    if layers.pattern is not None:
        yield from _not_empty(layers, "pattern")
    kept: list[tuple[Path, int | str]] = [(("keep", i), index) for i, index in enumerate(layers.keep)]
    overridden: list[tuple[Path, int | str]] = [(("overrides", index), index) for index in layers.overrides]
    for path, index in kept + overridden:
        if layer_range(index) is None:
            yield Problem(path, f"{index!r} is neither an index nor a range such as 3-5 or -4--1")
    runs = pattern_runs(layers)
    if (named := sum(count for _, count in runs)) > MOST_LAYERS:
        yield Problem((), f"pattern names {named} layers, expected at most {MOST_LAYERS}")
    converted = {name for name, _ in runs} | {name for name in layers.overrides.values() if isinstance(name, str)}
    if not converted - {FULL} and (runs or layers.select is None):
        yield Problem((), "every layer stays 'full', so nothing is converted; use for example pattern: [sse, full]")


def _select(select: Select) -> Iterator[Problem]:
    if isinstance(select.keep, str) and not (_SHARE.fullmatch(select.keep) and float(select.keep[:-1])):
        text = f"{shortened(repr(select.keep))}: expected a number, or a share such as 25%"
        yield Problem(("keep",), text)
    for layer, heads in select.chosen.items() if isinstance(select.chosen, dict) else ():
        if layer_range(layer) is None or (heads != FULL and len(set(heads)) < len(heads)) or not heads:
            yield Problem(("chosen", layer), f"{heads}: expected heads of one layer, each once")
    chosen = select.chosen if isinstance(select.chosen, list) else []
    for i, index in enumerate(chosen):
        if index in chosen[:i]:
            yield Problem(("chosen", i), f"layer {index} is named twice")


def _stage(stage: Stage) -> Iterator[Problem]:
    if not _NAME.fullmatch(stage.name):
        yield Problem(
            ("name",),
            f"{shortened(stage.name)!r}: expected letters, digits, - and _, 100 at most, starting with a letter",
        )
    if not 0 <= stage.warmup < 1:
        yield Problem(("warmup",), f"{stage.warmup} is not a share of the steps, expected 0 to less than 1")
    if stage.seq_len % stage.context_parallel:
        yield Problem(("context_parallel",), f"{stage.context_parallel} does not divide seq_len ({stage.seq_len})")
    yield from _stage_rates(stage)
    yield from _stage_budget(stage)
    yield from _stage_loss(stage)


def _stage_rates(stage: Stage) -> Iterator[Problem]:
    if isinstance(stage.lr, LearningRates):
        only_mixers = stage.train == "mixers" or stage.loss == "layer_mse"
        if only_mixers and stage.lr.rest is not None:
            yield Problem(("lr", "rest"), "given, but only mixers are trained; leave it out")
        if not only_mixers and stage.lr.rest is None:
            yield Problem(("lr", "rest"), f"not given, and train: {stage.train} trains more than mixers")


def _stage_budget(stage: Stage) -> Iterator[Problem]:
    rows = 1 if stage.micro_batch == "auto" else stage.micro_batch
    row = stage.seq_len * rows
    if stage.tokens < stage.seq_len:
        yield Problem(("tokens",), f"{stage.tokens} is less than one row (seq_len is {stage.seq_len})")
    elif stage.tokens < stage.batch_tokens:
        yield Problem(
            ("tokens",), f"{stage.tokens} is less than one optimizer step (batch_tokens is {stage.batch_tokens})"
        )
    if stage.batch_tokens % row:
        below, above = stage.batch_tokens // row * row, -(-stage.batch_tokens // row) * row
        near = " or ".join(format_count(value) for value in (below, above) if value)
        product = f"seq_len * micro_batch ({stage.seq_len} * {rows})"
        yield Problem(("batch_tokens",), f"{stage.batch_tokens} is not a multiple of {product}; use {near}")


def _stage_loss(stage: Stage) -> Iterator[Problem]:
    if stage.loss_mask != "all" and stage.loss == "layer_mse":
        yield Problem(("loss_mask",), "is for losses kl and ce, this stage's loss is layer_mse; remove it")
    if stage.rope is not None and stage.loss != "ce":
        yield Problem(("rope",), f"is for loss ce, this stage's loss is {stage.loss}; remove it")
    if stage.loss == "layer_mse" and stage.train != "mixers":
        yield Problem(("train",), f"'{stage.train}': loss layer_mse trains converted layers only; use train: mixers")


def _rope(rope: Rope) -> Iterator[Problem]:
    if not rope.given():
        yield Problem((), "is empty, give it a rope_theta or a factor")


def _source(source: Source) -> Iterator[Problem]:
    if source.kind == "teacher" and source.path is not None:
        yield Problem(("path",), "a teacher source samples its text; remove path, or use kind: text")
    if source.kind != "teacher" and not source.path:
        yield Problem(("path",), f"a {source.kind} source needs a file, folder or hub dataset")
    if source.kind != "teacher" and source.length is not None:
        yield Problem(("length",), "is for kind: teacher; remove it")


def _needles(needles: Needles) -> Iterator[Problem]:
    yield from _not_empty(needles, "keys", "kinds")
    for form in needles.forms:
        if form in RETIRED_FORMS:
            if needles.share:
                yield Problem(("forms", form), f"was retired; {', '.join(FORM_WEIGHTS)} are left: remove it")
        elif form not in FORM_WEIGHTS:
            yield Problem(("forms", form), "unknown form" + suggest(form, FORM_WEIGHTS))
    if not needles.drawn_forms:
        yield Problem(("forms",), f"no form has a weight above 0; weigh one of {', '.join(FORM_WEIGHTS)}")


def _needle_eval(needle: NeedleEval) -> Iterator[Problem]:
    yield from _not_empty(needle, "lengths", "keys", "kinds")


def _lm_eval(settings: LMEval) -> Iterator[Problem]:
    yield from _not_empty(settings, "tasks", "lengths")


def _held_out(train: Train, data: Data) -> Iterator[Problem]:
    """What looks at held-out text need."""
    if train.validate_every not in ("auto", None) and not data.valid:
        yield Problem(("train", "validate_every"), "needs held-out text; add a source to data.valid, or leave it out")


def _recipe(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.model.strip():
        yield Problem(("model",), "is empty, expected a hub id or a local folder")
