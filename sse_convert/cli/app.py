"""The command line: parse, call `sse_convert.api`, print. Nothing heavy is imported before a command runs."""

import gc
import sys
from typing import Annotated

import typer

from sse_convert import __version__
from sse_convert.cli.commands import Shorthand, shell_form
from sse_convert.cli.runner import add_command, exit_code_table, run_app
from sse_convert.cli.streams import open_streams
from sse_convert.trust import OPTION, trust_code

app = typer.Typer(
    name="",
    help="Turn a pretrained Transformer into a hybrid with Sparse State Expansion linear attention.\n\n"
    "Start with `sse-convert recipes list`, then `sse-convert plan RECIPE`, then `sse-convert run RECIPE`.",
    epilog=exit_code_table(),
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(
    name="recipes",
    help="List, show or copy the packaged recipes, write one for a model, or print their JSON schema.",
    rich_markup_mode=None,
)
app.add_typer(recipes_app)

OBJECTS_PER_COLLECTION = 20_000
"""new objects between two looks for garbage; by Python's 700, the imports of torch and transformers take half as long
again, since what they make stays"""
CONTINUES = "run the same command again to continue from the last checkpoint"
NOTHING_LEFT = "no half-made folder was left; run the same command again"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    trust_remote_code: Annotated[
        bool, typer.Option(OPTION, help="Let code run that a model or a task file carries. Read it first.")
    ] = False,
) -> None:
    if trust_remote_code:
        trust_code()
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def _add(
    name: str,
    function: str = "",
    *,
    to: typer.Typer = app,
    after_interrupt: str = "nothing was changed",
    to_stdout: bool = False,
    **shorthands: Shorthand,
) -> None:
    """A function of the API becomes a command, by its own name or another."""
    form = shell_form(function or name, shorthands)
    add_command(to, name, form, after_interrupt=after_interrupt, to_stdout=to_stdout)


_add("plan")
_add("select", after_interrupt="run the same command again; what was measured is kept")
_add("convert", after_interrupt=NOTHING_LEFT)
_add("calibrate", after_interrupt=NOTHING_LEFT)
_add("align", after_interrupt=CONTINUES)
_add("distill", after_interrupt=CONTINUES)
_add("uptrain", after_interrupt=CONTINUES)
_add("run", after_interrupt="run the same command again to continue where it stopped")
_add(
    "eval",
    "evaluate",
    tasks=Shorthand("eval.lm_eval.tasks", "lm-eval tasks (eval.lm_eval.tasks): names with commas, or paper."),
)
_add("export", after_interrupt=NOTHING_LEFT)
_add("join", after_interrupt=NOTHING_LEFT)
_add("push", after_interrupt="run the same command again; finished files are not sent twice")
_add("generate", to_stdout=True)
_add("chat")
_add("inspect")
_add("compare", to_stdout=True)
_add("dequantize", after_interrupt=NOTHING_LEFT)
_add("verify")
_add("doctor", to_stdout=True)
_add("list", "recipes_list", to=recipes_app, to_stdout=True)
_add("show", "recipes_show", to=recipes_app, to_stdout=True)
_add("copy", "recipes_copy", to=recipes_app)
_add("new", "recipes_new", to=recipes_app)
_add("schema", "recipes_schema", to=recipes_app, to_stdout=True)


def main() -> None:
    """Entry point of `sse-convert`, `python -m sse_convert` and the root `cli.py`."""
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    open_streams()
    try:
        sys.exit(run_app(app, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
