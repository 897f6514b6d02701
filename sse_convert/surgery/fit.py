"""Whether a well-formed recipe fits its model: lengths, ranks, windows, gates."""

from sse_convert.errors import RecipeError, UsageError
from sse_convert.mixers import Mixer, SlidingMixer, SSEMixer
from sse_convert.modeling.tensors import as_sse
from sse_convert.recipe.schema import Recipe
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
    problems += _length_problems(recipe, teacher.config.max_position_embeddings)
    if problems:
        raise RecipeError(
            "\n".join(problems),
            expected=f"a recipe that fits {teacher.files.name}: {teacher.dims.query_heads} heads of "
            f"{teacher.dims.head_dim}, {teacher.config.max_position_embeddings} positions",
            fix="correct these keys in the recipe, or use --set",
        )


def _mixer_problems(mixer: Mixer, teacher: Teacher) -> list[str]:
    limit = teacher.config.max_position_embeddings
    if isinstance(mixer, SlidingMixer):
        return [f"window is {mixer.window}, the model has {limit} positions"] if mixer.window > limit else []
    sse, head_dim, problems = as_sse(mixer), teacher.dims.head_dim, []
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


def _length_problems(recipe: Recipe, limit: int) -> list[str]:
    problems = []
    rows = recipe.calibrate.seq_len
    if recipe.calibrate.enabled and rows > MAX_CALIBRATION_LENGTH:
        problems.append(f"calibrate.seq_len is {rows}, at most {MAX_CALIBRATION_LENGTH}: attention is held whole")
    lengths = {f"stages.{i}.seq_len": [stage.seq_len] for i, stage in enumerate(recipe.stages)}
    if recipe.calibrate.enabled:
        lengths["calibrate.seq_len"] = [recipe.calibrate.seq_len]
    lengths["eval.lengths"] = recipe.eval.lengths
    lengths["eval.needle.lengths"] = recipe.eval.needle.lengths if recipe.eval.needle else []
    lengths["eval.throughput"] = recipe.eval.throughput
    return problems + [
        f"{key} is {length}, beyond the {limit} positions of the teacher"
        for key, values in lengths.items()
        for length in values
        if length > limit
    ]
