"""Positions a model can be trained at, and what a stage's `rope` makes of its configuration."""

from typing import Any

from sse_convert.errors import RecipeError
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import source_spec
from sse_convert.recipe.schema import Recipe, Rope, Stage

_STRETCHED = "full_attention"
"""where rope_parameters differ by layer type (Gemma 3), the type that sees the whole context"""
_KEPT = ("rope_theta", "partial_rotary_factor")
"""parameters that yarn takes over from another type"""


def position_limit(config: Any) -> int | None:
    """Positions that a configuration, as an object or as a dict, gives its model; None where it names none."""
    fields = config if isinstance(config, dict) else config.to_dict()
    fields = fields.get("text_config", fields)
    limit = fields.get("max_position_embeddings") or fields.get("n_positions")
    return None if limit is None else int(limit)


def stretched_rope(before: dict[str, Any], rope: Rope, limit: int) -> dict[str, Any]:
    """`rope_parameters` after a stage's `rope`.

    Args:
        before: the model's, nested by layer type or not.
        rope: what the stage asks for.
        limit: positions the model has before.
    """
    if any(isinstance(value, dict) for value in before.values()):
        return {**before, _STRETCHED: stretched_rope(before[_STRETCHED], rope, limit)}
    kind = before.get("rope_type", "default") if rope.factor is None else "yarn"
    kept = before if kind == before.get("rope_type") else {key: before[key] for key in _KEPT if key in before}
    new = {**kept, "rope_type": kind, **rope.given()}
    if kind in ("yarn", "llama3"):
        new.setdefault("original_max_position_embeddings", limit)
    return new


def stretched_limit(rope: Rope, limit: int, seq_len: int) -> int:
    """Positions after a stage's `rope`: `factor` times those before; without a factor, as many as its rows need."""
    if rope.factor is None:
        return max(limit, seq_len)
    return max(limit, int(rope.factor * limit))


def stretch(config: Any, stage: Stage) -> bool:
    """Write a stage's `rope` into a configuration. Returns whether anything changed.

    Args:
        config: a transformers configuration; changed in place.
        stage: settings.

    Raises:
        RecipeError: the model has no rotary embedding, or its family refuses this one.
    """
    if stage.rope is None:
        return False
    config = decoder_config(config)
    if not source_spec(config.model_type).rotary:
        raise RecipeError(
            f"stage {stage.name}: {config.model_type} has no rotary embedding that `rope` could change",
            expected=f"rows of at most {position_limit(config)} tokens, its learned positions",
            fix="remove rope from the stage",
        )
    limit = config.max_position_embeddings
    parameters = stretched_rope(config.rope_parameters, stage.rope, limit)
    longest = stretched_limit(stage.rope, limit, stage.seq_len)
    if (parameters, longest) == (config.rope_parameters, limit):
        return False
    config.rope_parameters, config.max_position_embeddings = parameters, longest
    _check_accepted(config, stage)
    return True


def _check_accepted(config: Any, stage: Stage) -> None:
    """Make sure that the family's own checks let a stretched configuration pass (Phi-3's know `longrope` alone).

    Raises:
        RecipeError: they do not.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        type(config).from_dict(config.to_dict())
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(
            f"stage {stage.name}: {config.model_type} refuses this rope: {str(error).strip().splitlines()[-1].strip()}",
            expected="a rope that transformers knows for this family",
            fix="use rope_theta, or remove rope from the stage",
        ) from error


def stage_limits(recipe: Recipe, limit: int) -> list[int]:
    """Longest row of each stage: the model's positions where it is the teacher as well, else the student's by then.

    Args:
        recipe: stages.
        limit: the model's positions.
    """
    student = _student_limits(recipe, limit)
    return [own if stage.loss == "ce" else limit for stage, own in zip(recipe.stages, student, strict=True)]


def stretched_context(recipe: Recipe, limit: int) -> int:
    """Positions of the student after the last stage, up to which teacher and student are measured.

    A teacher is measured as it is, also beyond its own positions: rotations have no end, and `rope` is for them alone.

    Args:
        recipe: stages.
        limit: the teacher's positions.
    """
    return max(_student_limits(recipe, limit), default=limit)


def _student_limits(recipe: Recipe, limit: int) -> list[int]:
    """The student's positions in each stage; they never shrink."""
    limits = []
    for stage in recipe.stages:
        limit = limit if stage.rope is None else stretched_limit(stage.rope, limit, stage.seq_len)
        limits.append(limit)
    return limits


def check_row_length(stage: Stage, limit: int | None) -> None:
    """Make sure that a stage's rows fit the positions its models know.

    Raises:
        RecipeError: they do not.
    """
    if limit is None or stage.seq_len <= limit:
        return
    longer = "raise rope.factor" if stage.rope else "set the stage's rope (rope_theta: 5.0e+6, or factor: 4)"
    raise RecipeError(
        f"stage {stage.name}: seq_len is {stage.seq_len}, the model has {limit} positions",
        expected=f"at most {limit}",
        fix=f"lower seq_len, or {longer}" if stage.loss == "ce" else "lower seq_len: the teacher knows no more",
    )
