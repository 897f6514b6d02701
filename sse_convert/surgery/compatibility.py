"""Whether a recipe fits its model, and whether it describes the checkpoint it is used with, before anything is loaded.

The first asks for lengths, ranks, windows and gates. The second compares layer by layer and key by key: what decides a
layer's tensors or outputs must agree. What training alone reads may differ: a stage takes it from the recipe.
"""

import copy
import dataclasses as dc
import json
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.open import CheckpointFiles, open_checkpoint
from sse_convert.checkpoints.teacher import SourceModel, Teacher, source_view
from sse_convert.errors import CheckpointError, RecipeError
from sse_convert.mixers import (
    BY_LAYER,
    FULL,
    Mixer,
    SSESlidingMixer,
    WindowMixer,
    mixer_to_dict,
    recipe_entry,
)
from sse_convert.modeling.arch_spec import SSE_PREFIX
from sse_convert.modeling.configuration import FORMAT, stored_mixers
from sse_convert.recipe import resolve
from sse_convert.recipe.choosing import chosen_recipe, open_choice
from sse_convert.recipe.pattern import expand_pattern, named_heads
from sse_convert.recipe.schema import Calibrate, Recipe, Stage
from sse_convert.surgery.positions import stage_limits, stretch, stretched_context

TRAINING_ONLY = ("balance", "balance_coef")
"""mixer settings that only training reads"""
MAX_CALIBRATION_LENGTH = 4096
"""tokens; calibration looks at attention weights, whose size is the square of the length"""


def check_fit(recipe: Recipe, teacher: Teacher, mixers: dict[str, Mixer]) -> None:
    """Make sure that a well-formed recipe fits its model, and that the model is what its family's entry describes.

    Raises:
        CheckpointError: see `check_family`.
        RecipeError: with every problem found.
    """
    from sse_convert.surgery.family_guard import check_family

    check_family(teacher.config, teacher.spec)
    problems = [
        f"mixers.{name}.{problem}" for name, mixer in mixers.items() for problem in mixer_problems(mixer, teacher)
    ]
    problems += _linear_layer_problems(recipe, teacher)
    problems += _heads_problems(recipe, teacher)
    problems += _stage_problems(recipe, teacher)
    problems += [
        f"stages.{i}.{problem}"
        for i, stage in enumerate(recipe.stages)
        for problem in context_problems(stage, teacher, mixers)
    ]
    problems += _length_problems(recipe, teacher.text.max_position_embeddings)
    if recipe.calibrate.enabled:
        problems += calibration_problems(recipe, mixers, teacher.text.max_position_embeddings)
    if problems:
        raise RecipeError(
            "\n".join(problems),
            expected=f"a recipe that fits {teacher.files.name}: {teacher.dims.query_heads} heads of "
            f"{teacher.dims.head_dim}, {teacher.text.max_position_embeddings} positions",
            fix="correct these keys in the recipe, or use --set",
        )


def mixer_problems(mixer: Mixer, source: SourceModel) -> list[str]:
    """Settings of a mixer that do not fit a model."""
    limit, problems = source.text.max_position_embeddings, []
    if isinstance(mixer, WindowMixer) and mixer.window > limit:
        problems.append(f"window is {mixer.window}, the model has {limit} positions")
    return problems


def _linear_layer_problems(recipe: Recipe, teacher: Teacher) -> list[str]:
    names, _ = resolve(recipe, teacher.num_layers)
    if recipe.layers.select is not None:  # whatever was chosen, none may be chosen among layers without softmax
        names = expand_pattern(recipe.layers, recipe.known_mixers, teacher.num_layers)
    wrong = [i for i, name in enumerate(names) if name != FULL and i not in teacher.softmax_layers]
    if not wrong:
        return []
    return [
        f"layers.pattern gives layers {', '.join(map(str, wrong))} a mixer, and these have linear attention already; "
        f"layers with softmax are {', '.join(map(str, teacher.softmax_layers))}: write {FULL} for the others"
    ]


def _heads_problems(recipe: Recipe, teacher: Teacher) -> list[str]:
    """Layers that cannot have heads that see the whole row, and have some in the recipe."""
    from sse_convert.modeling.attention_dims import heads_problem

    names, mixers = resolve(recipe, teacher.num_layers)
    given = [(i, getattr(mixers.get(name), BY_LAYER, ())) for i, name in enumerate(names)]
    return [
        f"layers: layer {i} has full_heads {list(heads)}, and {problem}"
        for i, heads in given
        if heads and (problem := heads_problem(teacher.config, i, heads)) is not None
    ]


def _stage_problems(recipe: Recipe, teacher: Teacher) -> list[str]:
    problems = []
    limits, config = stage_limits(recipe, teacher.text.max_position_embeddings), copy.deepcopy(teacher.config)
    learned = not teacher.spec.rotary
    for i, (stage, limit) in enumerate(zip(recipe.stages, limits, strict=True)):
        try:
            stretch(config, stage)
        except RecipeError as error:
            problems.append(f"stages.{i}.rope: {error.what}; {error.fix}")
            continue
        if stage.seq_len > limit:
            of = "the teacher" if stage.rope is None else "the model with this rope"
            longer = "" if stage.rope or learned or stage.loss != "ce" else f" (stages.{i}.rope stretches them)"
            problems.append(f"stages.{i}.seq_len is {stage.seq_len}, beyond the {limit} positions of {of}{longer}")
    return problems


def context_problems(stage: Stage, teacher: Teacher, mixers: dict[str, Mixer]) -> list[str]:
    """What a stage whose rows are split over processes cannot have."""
    from sse_convert.modeling.context import split_problems

    if stage.context_parallel == 1:
        return []
    return split_problems(teacher.config, stage.context_parallel, mixers.values())


def calibration_problems(recipe: Recipe, mixers: dict[str, Mixer], limit: int) -> list[str]:
    """Calibration rows that are too long, or too short for what is to be measured beside a window.

    Args:
        recipe: `calibrate` is read.
        mixers: the mixers in use, by name.
        limit: positions of the model.
    """
    rows, longest, problems = recipe.calibrate.seq_len, min(limit, MAX_CALIBRATION_LENGTH), []
    if rows > MAX_CALIBRATION_LENGTH:
        problems.append(f"calibrate.seq_len is {rows}, at most {MAX_CALIBRATION_LENGTH}: attention is held whole")
    if rows > limit:
        problems.append(f"calibrate.seq_len is {rows}, beyond the {limit} positions of the teacher")
    for name, mixer in mixers.items():
        if isinstance(mixer, SSESlidingMixer):
            problems += _window_problems(recipe.calibrate, f"mixers.{name}", mixer, longest)
    return problems


def _window_problems(calibrate: Calibrate, key: str, mixer: SSESlidingMixer, longest: int) -> list[str]:
    """Rows too short to show what a window misses: two windows for a scale, more than one for a decay."""
    outputs = calibrate.output_scale != "none"
    beyond = mixer.window + mixer.sinks + 1
    needed = {"output scale": outputs * max(2 * mixer.window, beyond), "decay": beyond}
    rows, asked = calibrate.seq_len, max(needed.values())
    if rows >= asked:
        return []
    off = {
        "output scale": "calibrate.output_scale: none",
        "decay": "calibrate.enabled: false",
    }
    short = [name for name, length in needed.items() if rows < length]
    ways = [f"raise calibrate.seq_len to {asked}"] if asked <= longest else []
    if (window := min(rows // 2, rows - mixer.sinks - 1) if outputs else rows - mixer.sinks - 1) >= 1:
        ways.append(f"lower {key}.window to {window}")
    ways.append(f"keep convert's {' and '.join(short)} ({', '.join(off[name] for name in short)})")
    return [
        f"calibrate.seq_len is {rows}, at least {asked} for {key} with a window of {mixer.window}: what the window "
        f"misses sets SSE's {' and '.join(short)}; {', or '.join(ways)}"
    ]


def _length_problems(recipe: Recipe, teacher_limit: int) -> list[str]:
    limit = stretched_context(recipe, teacher_limit)
    lengths = {
        "eval.lengths": recipe.eval.lengths,
        "eval.needle.lengths": recipe.eval.needle.lengths if recipe.eval.needle else [],
        "eval.throughput": recipe.eval.throughput,
    }
    of = "the teacher" if limit == teacher_limit else "the model with its stages' rope"
    return [
        f"{key} is {length}, beyond the {limit} positions of {of}"
        for key, values in lengths.items()
        for length in values
        if length > limit
    ]


@dc.dataclass(frozen=True, slots=True)
class Match:
    """A recipe and a checkpoint that go together."""

    names: list[str]
    """the recipe's mixer name of each layer"""
    mixers: dict[str, Mixer]
    """the recipe's mixers in use, by name"""
    sse: dict[str, Any]
    """the field `sse` of the checkpoint's configuration, with the recipe's names and mixers"""
    training: dict[str, Any]
    """training settings in which the recipe differs from the checkpoint: key -> the recipe's value"""


@dc.dataclass(frozen=True, slots=True)
class _Difference:
    """One key of one recipe mixer, and what the checkpoint has in its place in some layers."""

    key: str
    """as in the recipe; empty where a layer is of another kind"""
    recipe: Any
    checkpoint: Any

    @property
    def trains(self) -> bool:
        """Whether nothing but training would notice."""
        return self.key.rpartition(".")[2] in TRAINING_ONLY


def converted_field(files: CheckpointFiles) -> dict[str, Any]:
    """The field `sse` of a converted checkpoint's configuration.

    Raises:
        CheckpointError: the checkpoint is not converted.
    """
    sse = files.config.get("sse")
    if not files.model_type.startswith(SSE_PREFIX) or not isinstance(sse, dict):
        raise CheckpointError(
            f"{files.name} is a plain {files.model_type} checkpoint",
            expected="a converted checkpoint",
            fix="run `sse-convert convert` first and give its folder",
        )
    return sse


def with_layers_of(checkpoint: Path | str, recipe: Recipe) -> Recipe:
    """A recipe whose layers are to be chosen, with those chosen that a converted checkpoint keeps; itself for another.

    Raises:
        CheckpointError, HubError: the checkpoint cannot be opened, or its configuration is damaged.
        RecipeError: the checkpoint keeps another number of them, or the recipe does not fit it.
    """
    files = open_checkpoint(checkpoint)
    if not files.model_type.startswith(SSE_PREFIX):
        return recipe
    stored = stored_mixers(converted_field(files))
    select, choice = recipe.layers.select, open_choice(recipe, len(stored), source_view(files).separable_heads)
    assert select is not None, "the caller asks for open recipes alone"
    assert choice is not None, "an open recipe has a choice"
    layers = {i for i, mixer in enumerate(stored) if mixer is None}
    heads = {
        (i, head) for i, mixer in enumerate(stored) for head in getattr(mixer, BY_LAYER, ()) if select.by == "heads"
    }
    kept = [unit for unit in choice.units if unit // choice.span in layers or divmod(unit, choice.span) in heads]
    if len(kept) != choice.keep:
        raise RecipeError(
            f"{files.name} keeps {len(kept)} of {len(choice.units)} {select.by} as softmax",
            expected=f"{choice.keep}, which layers.select asks for",
            fix="use the recipe that made the checkpoint, or convert the model anew with this one",
        )
    return chosen_recipe(recipe, kept, choice)


def match_recipe(recipe: Recipe, files: CheckpointFiles) -> Match:
    """Compare a recipe's layers with those of a converted checkpoint. Names of mixers may differ.

    Args:
        recipe: layers and mixers are read.
        files: the opened checkpoint.

    Raises:
        CheckpointError: the checkpoint is not converted, or its configuration is damaged.
        RecipeError: a layer is of another kind, or has another setting that its tensors or outputs depend on; all of
            them are named.
    """
    sse = converted_field(files)
    stored = stored_mixers(sse)
    names, mixers = resolve(recipe, len(stored))
    found: dict[_Difference, list[int]] = {}
    for layer, name in enumerate(names):
        for difference in _differences(name, mixers.get(name), stored[layer]):
            found.setdefault(difference, []).append(layer)
    if not all(difference.trains for difference in found):
        raise _refusal(files, names, found)
    plain = {name: mixer_to_dict(mixer) for name, mixer in mixers.items()}
    return Match(
        names=names,
        mixers=mixers,
        sse={**sse, "format": FORMAT, "layers": names, "mixers": plain},
        training={difference.key: difference.recipe for difference in found},
    )


def _differences(name: str, wanted: Mixer | None, stored: Mixer | None) -> list[_Difference]:
    if wanted is None or stored is None:
        kinds = [FULL if mixer is None else mixer.kind for mixer in (wanted, stored)]
        return [] if kinds[0] == kinds[1] else [_Difference("", *kinds)]
    mine, theirs, base = _settings(wanted), _settings(stored), named_heads(name)[0]
    heads = [list(getattr(mixer, BY_LAYER, ())) for mixer in (wanted, stored)]
    if heads[0] != heads[1]:
        return [_Difference("", *(f"{BY_LAYER} {found}" for found in heads))]
    if mine != theirs and _layer(wanted) != _layer(stored):
        return [_Difference("", wanted.kind, stored.kind)]
    return [_Difference(f"mixers.{base}.{key}", mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]


def _layer(mixer: Mixer) -> str:
    """The kind, but that the paper's SSE is SSE."""
    return "sse" if mixer.kind == "paper" else mixer.kind


def _settings(mixer: Mixer) -> dict[str, Any]:
    """The settings under dotted keys as of a recipe, without the kind, and heads that see the whole row."""
    plain = mixer_to_dict(mixer)
    plain.pop(BY_LAYER, None)
    del plain["kind"]
    return _dotted(recipe_entry(plain))


def _dotted(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = {f"{key}.{part}": x for part, x in _dotted(value).items()} if isinstance(value, dict) else {key: value}
        found |= inner
    return found


def _refusal(files: CheckpointFiles, names: list[str], found: dict[_Difference, list[int]]) -> RecipeError:
    lines, sets, names = [], [], [named_heads(name)[0] for name in names]
    for difference, layers in found.items():
        where = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
        values = f"{_spelled(difference.recipe)} in the recipe, {_spelled(difference.checkpoint)} in the checkpoint"
        if not difference.trains:
            lines.append(f"{difference.key}: {values} ({where})" if difference.key else f"{where}: {values}")
        if difference.key and len(layers) == names.count(names[layers[0]]):
            sets.append(f"--set {difference.key}={_spelled(difference.checkpoint)}")
    fix = "use the recipe that made the checkpoint (its config.json holds one, under sse.recipe)"
    if len(sets) == len(found):
        fix = f"go on with the checkpoint's settings: {' '.join(sets)}"
    return RecipeError(
        "\n  ".join([f"{files.name} was converted with other layers or mixers than this recipe's:", *lines]),
        expected=f"a recipe that differs at most in what only training reads ({', '.join(TRAINING_ONLY)})",
        fix=f"{fix}; or convert the model anew with this recipe",
        problems=lines,
    )


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
