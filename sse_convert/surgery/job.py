"""What a command works on: a recipe and its model, which is opened once and handed on."""

import dataclasses as dc
import functools
from collections.abc import Callable

from sse_convert.checkpoints.identity import checkpoint_identity
from sse_convert.checkpoints.open import CheckpointFiles, download
from sse_convert.checkpoints.teacher import Teacher, open_teacher
from sse_convert.data.teacher_samples import SamplingTeacher
from sse_convert.recipe.schema import Recipe
from sse_convert.surgery.budget import Geometry
from sse_convert.surgery.geometry import geometry_of


@dc.dataclass(frozen=True, slots=True)
class Job:
    """A recipe and the model that it is for; `dataclasses.replace` gives the same model another recipe.

    What it offers raises the errors of `open_teacher`.
    """

    recipe: Recipe
    teacher: Callable[[], Teacher]
    """the recipe's model, opened when it is first asked for, and once"""
    files: Callable[[], CheckpointFiles]
    """its files, all of them on this machine; downloaded when they are first asked for"""
    geometry: Callable[[], Geometry]
    """its sizes"""

    @staticmethod
    def of(recipe: Recipe, opening: Callable[[str, str | None], Teacher] = open_teacher) -> "Job":
        """The job of a recipe.

        Args:
            recipe: names the model.
            opening: opens it.
        """
        teacher = functools.cache(lambda: opening(recipe.model, recipe.revision))
        files = functools.cache(lambda: download(teacher().files))
        return Job(recipe, teacher, files, functools.cache(lambda: geometry_of(teacher())))

    @property
    def identity(self) -> str:
        """What tells the model apart, without opening it."""
        return checkpoint_identity(self.recipe.model, self.recipe.revision)

    @property
    def sampler(self) -> SamplingTeacher:
        """The model as a source of text."""
        return SamplingTeacher(self.recipe.model, self.recipe.revision, self.files)
