"""The commands that a page names: what made a run, and what makes the parts it lacks."""

import shlex
from pathlib import Path

from sse_convert.evaluation.report import EVALUATION_FILE
from sse_convert.pages.collect import RECIPE, Run


def recipe_file(run: Run) -> str:
    """The recipe as a command line names it: the run's, the exported one, or a placeholder."""
    found = [path for path in (run.root / RECIPE, run.out / RECIPE) if path.is_file()]
    return shlex.quote(str(found[0])) if found else "RECIPE"


def run_command(run: Run) -> str:
    """Makes or continues the run."""
    return f"sse-convert run {recipe_file(run)}"


def eval_command(run: Run, folder: Path) -> str:
    """Measures a checkpoint of the run, beside the checkpoint, where the page finds it."""
    place = shlex.quote(str(folder))
    return f"sse-convert eval {recipe_file(run)} -c {place} -o {shlex.quote(str(folder / EVALUATION_FILE))}"


def samples_command(run: Run) -> str:
    """Generates texts side by side."""
    return f"sse-convert report {shlex.quote(str(run.out))} --prompt 'Once upon a time'"


def report_command(run: Run) -> str:
    """Makes the page."""
    return f"sse-convert report {shlex.quote(str(run.out))}"
