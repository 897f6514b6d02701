"""Checks of commands that tests cannot run (hub, GPU, installation): do they exist, and do their options parse?"""

import re
import runpy
import shlex
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

from typer.main import get_command

from docs.examples import ROOT
from sse_convert.cli.app import app


def check(command: str) -> None:
    """Check one command line.

    Raises:
        ValueError: it names something that does not exist, or a program that is not known here.
        Exception: Typer's, if an option does not exist or a value is not accepted.
    """
    command = command.partition(" 2>&1 | ")[0]  # what trims the output is not looked at
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case ["sse-convert", *arguments] | ["python", "-m", "sse_convert", *arguments]:
            _check_ours(arguments)
        case ["accelerate", "launch", *arguments]:
            _check_launch(arguments)
        case ["python", "-m", module, *arguments]:
            _check_module(module, arguments)
        case ["python", script, *arguments]:
            _check_script(ROOT / script, arguments)
        case ["sbatch", *arguments]:
            _check_job(arguments)
        case ["make", target, *_]:
            _check_listed(f"{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"))
        case ["pip", "install", *packages]:
            _check_extras(packages)
        case ["vllm", "serve", _, *_]:
            pass  # tests/serving/vllm/test_page.py asks vLLM's own parser
        case ["git", "clone", _] | ["cd", _] | ["hf", "auth", "login"]:
            pass
        case _:
            raise ValueError(f"no check is known for the command {command!r}")


def _check_ours(arguments: Sequence[str]) -> None:
    """Typer accepts the arguments; nothing is called."""
    command, words = get_command(app), list(arguments)
    if words[:1] in (["--install-completion"], ["--show-completion"]):
        return
    while commands := getattr(command, "commands", {}):
        if not words or words[0] not in commands:
            raise ValueError(f"{' '.join(words[:1])!r} is no command of sse-convert")
        command, words = commands[words[0]], words[1:]
    command.make_context(command.name, words)


def _check_launch(arguments: Sequence[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args(list(arguments))
    if not parsed.module or parsed.training_script != "sse_convert":
        raise ValueError(f"expected `-m sse_convert` after the options of accelerate: {arguments}")
    _check_ours(parsed.training_script_args)


def _check_job(arguments: Sequence[str]) -> None:
    """The job script exists, sets what the options change, and gets a recipe."""
    script = next(i for i, word in enumerate(arguments) if word.endswith(".sbatch"))
    text = (ROOT / arguments[script]).read_text(encoding="utf-8")
    for option in (word for word in arguments[:script] if word.startswith("--")):
        _check_listed(f"#SBATCH {option}=", text)
    if len(arguments) != script + 2:
        raise ValueError(f"expected one recipe after the script: {arguments}")


def _module_file(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {module}")
    return Path(spec.origin)


def _what_runs(module: str) -> str:
    """The module that `python -m` runs: of a package its `__main__`."""
    spec = find_spec(module)
    return module if spec is None or spec.submodule_search_locations is None else f"{module}.__main__"


def _check_module(module: str, arguments: Sequence[str]) -> None:
    module = _what_runs(module)
    _check_options(_module_file(module), arguments, lambda: import_module(module).parser())


def _check_script(script: Path, arguments: Sequence[str]) -> None:
    with mock.patch.object(sys, "path", [str(script.parent), *sys.path]):
        _check_options(script, arguments, lambda: runpy.run_path(str(script))["parser"]())


def _check_options(script: Path, arguments: Sequence[str], parser: Callable[[], ArgumentParser]) -> None:
    """The script's own parser accepts the arguments, where it offers one; else it names the options."""
    text = script.read_text(encoding="utf-8")
    if "\ndef parser(" not in text:
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            _check_listed(f'"{option}"', text)
        return
    try:
        parser().parse_args(list(arguments))
    except SystemExit as error:
        raise ValueError(f"{script.stem} refuses {shlex.join(arguments)}") from error


def _check_extras(packages: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for extra in re.findall(r"\.\[([^]]+)\]", " ".join(packages)):
        if unknown := set(extra.split(",")) - extras.keys():
            raise ValueError(f"pyproject.toml has no extra {sorted(unknown)}")


def _check_listed(word: str, text: str) -> None:
    if word not in text:
        raise ValueError(f"{word} is not there")
