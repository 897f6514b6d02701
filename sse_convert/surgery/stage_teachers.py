"""The models that stages learn from in place of the recipe's own, by headers: whether they can be."""

from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.checkpoints.vocabulary import check_same_tokens, has_tokenizer
from sse_convert.errors import RecipeError
from sse_convert.recipe.schema import Recipe, Stage
from sse_convert.recipe.stage_teacher import StageTeacher, stage_teacher
from sse_convert.surgery.compatibility import context_problems


def open_stage_teachers(recipe: Recipe, model: Teacher) -> dict[str, Teacher]:
    """Stage name -> the other model it learns from; stages that learn from the recipe's model are left out.

    Args:
        recipe: stages are read.
        model: the recipe's model, opened.

    Raises:
        RecipeError: a teacher has other tokens, or cannot read the stage's rows.
        CheckpointError: it cannot be opened, or is of no known family, quantised or converted.
        HubError: the hub refused or cannot be reached.
    """
    opened: dict[StageTeacher, Teacher] = {}
    found = {}
    for stage in recipe.stages:
        if stage.teacher is None:
            continue
        source = stage_teacher(recipe, stage)
        if source not in opened:
            opened[source] = open_for_planning(source.name, source.revision)
            if has_tokenizer(model.files) and has_tokenizer(opened[source].files):
                check_same_tokens(model.files, opened[source].files, stage.name)
        check_reads(stage, opened[source])
        found[stage.name] = opened[source]
    return found


def check_reads(stage: Stage, teacher: Teacher) -> None:
    """Make sure that a teacher can read a stage's rows, and parts of them where processes share a row.

    Raises:
        RecipeError: it cannot.
    """
    limit, name = teacher.text.max_position_embeddings, teacher.files.name
    if stage.seq_len > limit:
        raise RecipeError(
            f"stage {stage.name}: seq_len is {stage.seq_len}, its teacher {name} has {limit} positions",
            expected=f"at most {limit}",
            fix="lower seq_len, or name another teacher",
        )
    if problems := context_problems(stage, teacher, {}):
        raise RecipeError(
            f"stage {stage.name}: its teacher {name}: {'; '.join(problems)}",
            expected="what the teacher's heads and layers can have as well",
            fix="set context_parallel: 1, or another number",
        )
