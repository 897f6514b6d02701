"""A stage by itself, as the commands `align`, `distill` and `uptrain` run it."""

from sse_convert.surgery.job import Job
from sse_convert.training.setup import make_accelerator
from sse_convert.training.stage import run_stage


def run_alone(recipe, stage, checkpoint, out):
    return run_stage(Job.of(recipe), stage, checkpoint, out, make_accelerator(recipe.train))
