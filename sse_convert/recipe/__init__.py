"""Recipes: schema, strict loader, pattern expansion and the packaged presets. Never imports torch."""

from sse_convert.recipe.loader import load_recipe, recipe_from_dict, recipe_hash
from sse_convert.recipe.pattern import resolve
from sse_convert.recipe.schema import Recipe

__all__ = ["Recipe", "load_recipe", "recipe_from_dict", "recipe_hash", "resolve"]
