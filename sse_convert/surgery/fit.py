"""Whether a well-formed recipe fits its model: lengths, ranks, windows, gates."""

import copy

from sse_convert.errors import RecipeError, UsageError
from sse_convert.mixers import Mixer, SlidingMixer, SSEMixer, SSESlidingMixer, WindowMixer
from sse_convert.modeling.tensors import as_sse
from sse_convert.recipe.schema import Calibrate, Recipe
from sse_convert.surgery.positions import stage_limits, stretch, stretched_context
from sse_convert.surgery.teacher import Teacher

MAX_CALIBRATION_LENGTH = 4096
"""tokens; calibration looks at attention weights, whose size is the square of the length"""


def check_fit(recipe: Recipe, teacher: Teacher, mixers: dict[str, Mixer]) -> None:
    """Make sure that a well-formed recipe fits its model.

    Raises:
        RecipeError: with every problem found.
    """
    problems = [
        f"mixers.{name}.{problem}" for name, mixer in mixers.items() for problem in _mixer_problems(mixer, teacher)
    ]
    problems += _stage_problems(recipe, teacher)
    problems += _length_problems(recipe, teacher.config.max_position_embeddings)
    if recipe.calibrate.enabled:
        problems += calibration_problems(recipe, mixers, teacher.config.max_position_embeddings)
    if problems:
        raise RecipeError(
            "\n".join(problems),
            expected=f"a recipe that fits {teacher.files.name}: {teacher.dims.query_heads} heads of "
            f"{teacher.dims.head_dim}, {teacher.config.max_position_embeddings} positions",
            fix="correct these keys in the recipe, or use --set",
        )


def _mixer_problems(mixer: Mixer, teacher: Teacher) -> list[str]:
    limit, problems = teacher.config.max_position_embeddings, []
    if isinstance(mixer, WindowMixer) and mixer.window > limit:
        problems.append(f"window is {mixer.window}, the model has {limit} positions")
    if isinstance(mixer, SlidingMixer):
        return problems
    sse, head_dim = as_sse(mixer), teacher.dims.head_dim
    if sse.row_top_k is not None and sse.row_top_k > head_dim:
        problems.append(f"row_top_k is {sse.row_top_k}, a key has {head_dim} entries")
    if sse.rope == "keep" and teacher.spec.rotary == "none":
        problems.append(f"rope is 'keep', and {teacher.spec.model_type} has no rotary embedding; use rope: none")
    if sse.row_decay == "selected" and not sse.shared_params:
        problems.append("row_decay is 'selected' with shared_params: false; use row_decay: all, or shared_params: true")
    return problems + _gate_problems(sse)


def _gate_problems(mixer: SSEMixer) -> list[str]:
    from sse_convert.kernels.gates import partition_gate

    try:
        partition_gate(mixer.partition_gate)
    except UsageError as error:
        return [f"partition_gate: {error.what}; {error.expected}"]
    return []


def _stage_problems(recipe: Recipe, teacher: Teacher) -> list[str]:
    problems = []
    limits, config = stage_limits(recipe, teacher.config.max_position_embeddings), copy.deepcopy(teacher.config)
    learned = teacher.spec.rotary == "none"
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
        vocabulary = teacher.config.vocab_size
        if stage.offline is not None and stage.offline.top_k > vocabulary:
            problems.append(f"stages.{i}.offline.top_k is {stage.offline.top_k}, the model has {vocabulary} tokens")
    return problems


def calibration_problems(recipe: Recipe, mixers: dict[str, Mixer], limit: int) -> list[str]:
    """Calibration rows that are too long, or too short for what is to be measured beside a window; and a key scale that
    is to be fitted where none matters.

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
    return problems + _key_scale_problems(recipe.calibrate, mixers)


def _key_scale_problems(calibrate: Calibrate, mixers: dict[str, Mixer]) -> list[str]:
    """A fit that no layer has a use for; where some have, the others are left alone."""
    maps = {name: as_sse(mixer).k_feature_map for name, mixer in mixers.items() if not isinstance(mixer, SlidingMixer)}
    if calibrate.key_scale == "none" or not maps or any(map(calibrate.fits_keys, maps.values())):
        return []
    found = ", ".join(f"mixers.{name}.k_feature_map is {kind}" for name, kind in maps.items())
    return [
        f"calibrate.key_scale is fit, and {found}: scaled keys only scale the output, which has a scale of its own; "
        "use calibrate.key_scale: none, or another k_feature_map"
    ]


def _window_problems(calibrate: Calibrate, key: str, mixer: SSESlidingMixer, longest: int) -> list[str]:
    """Rows too short to show what a window misses: two windows for a scale, more than one for a decay."""
    outputs, decays = calibrate.output_scale != "none", calibrate.decay and mixer.decay != "none"
    keys = calibrate.fits_keys(mixer.k_feature_map)
    beyond = mixer.window + mixer.sinks + 1
    of_scale = max(2 * mixer.window, beyond)
    needed = {"output scale": outputs * of_scale, "key scale": keys * of_scale, "decay": decays * beyond}
    rows, asked = calibrate.seq_len, max(needed.values())
    if rows >= asked:
        return []
    off = {
        "output scale": "calibrate.output_scale: none",
        "key scale": "calibrate.key_scale: none",
        "decay": "calibrate.decay: false",
    }
    short = [name for name, length in needed.items() if rows < length]
    ways = [f"raise calibrate.seq_len to {asked}"] if asked <= longest else []
    if (window := min(rows // 2, rows - mixer.sinks - 1) if outputs or keys else rows - mixer.sinks - 1) >= 1:
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
