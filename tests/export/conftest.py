"""The tiny teacher, its converted student and a recipe for them are those of the evaluation tests."""

from tests.evaluation.conftest import llama, recipe, student_folder, teacher_folder, tokenizer

__all__ = ["llama", "recipe", "student_folder", "teacher_folder", "tokenizer"]
