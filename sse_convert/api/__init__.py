"""What the commands do, as functions of the same names. Heavy imports happen inside, so importing this is quick."""

from sse_convert.api.arguments import checked
from sse_convert.api.conversion import calibrate, convert, dequantize, plan, select
from sse_convert.api.recipes import RecipeLike, recipes_copy, recipes_list, recipes_new, recipes_schema, recipes_show
from sse_convert.api.results import chat, compare, doctor, export, generate, inspect, join, push, verify
from sse_convert.api.running import align, distill, evaluate, run, uptrain

__all__ = [
    "RecipeLike",
    "align",
    "calibrate",
    "chat",
    "compare",
    "convert",
    "dequantize",
    "distill",
    "doctor",
    "evaluate",
    "export",
    "generate",
    "inspect",
    "join",
    "plan",
    "push",
    "recipes_copy",
    "recipes_list",
    "recipes_new",
    "recipes_schema",
    "recipes_show",
    "run",
    "select",
    "uptrain",
    "verify",
]
globals().update({name: checked(globals()[name]) for name in __all__ if name != "RecipeLike"})
