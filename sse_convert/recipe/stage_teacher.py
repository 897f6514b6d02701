"""The model that a stage learns from: the recipe's own, or another one that the stage names."""

import dataclasses as dc
import os

from sse_convert.recipe.schema import Recipe, Stage

_PATH_STARTS = (".", "~", os.sep, "/")


@dc.dataclass(frozen=True, slots=True)
class StageTeacher:
    """Where a teacher is."""

    name: str
    """hub id or local folder"""
    revision: str | None
    """hub revision"""


def stage_teacher(recipe: Recipe, stage: Stage) -> StageTeacher:
    """The teacher of a stage. In `owner/name@revision` what follows the last @ is a hub revision; paths have none."""
    if stage.teacher is None:
        return StageTeacher(recipe.model, recipe.revision)
    name, at, revision = stage.teacher.rpartition("@")
    if not at or stage.teacher.startswith(_PATH_STARTS) or os.path.exists(stage.teacher):
        return StageTeacher(stage.teacher, None)
    return StageTeacher(name, revision)
