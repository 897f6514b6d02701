"""The command line: exit codes, JSON on stdout, messages on stderr, for every kind of outcome."""

import inspect
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from sse_convert import __version__, api, errors
from sse_convert.cli.app import app
from sse_convert.cli.commands import described
from sse_convert.cli.runner import EXIT_CODES, hush_libraries, reporting_errors, run_app
from sse_convert.kernels.dispatch import BACKENDS
from sse_convert.recipe.presets import preset_names
from sse_convert.report import TextReport, found_before
from tests.cli.conftest import run_json
from tests.recipe.recipes import small, write

TRAINING = ["calibrate", "align", "distill", "uptrain", "run"]
COMMANDS = ["plan", "convert", *TRAINING, "eval", "export", "push", "generate", "chat", "inspect", "verify", "doctor"]
COMMANDS += ["select", "dequantize"]
LM_EVAL_TWO = "eval.lm_eval.tasks=[piqa, arc]"
ERRORS = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.SSEConvertError) and cls is not errors.SSEConvertError
]


def sse_convert(*arguments, **options):
    """Run the command in a fresh process."""
    return subprocess.run(
        [sys.executable, "-m", "sse_convert", *arguments], capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize("error", [errors.OutputError("full"), OSError(30, "Read-only file system"), ValueError("x")])
def test_what_was_found_before_an_error_is_told(monkeypatch, capsys, error):
    def plan(*_, **__):
        with found_before(TextReport({"loss": 2}, ["loss 2"])):
            raise error

    monkeypatch.setattr(api, "plan", plan)
    code = run_app(app, ["plan", "x"])
    assert capsys.readouterr().err.startswith(f"loss 2\n{'internal ' * (code == 1)}error: ")
    code, answer = run_json(capsys, "plan", "x")
    assert (code, answer["result"]) == (1 if isinstance(error, ValueError) else 8, {"loss": 2})


def test_all_lines_of_a_result_are_told(outcome, capsys):
    outcome(TextReport({}, ["one", "two"]))
    assert run_app(app, ["plan", "recipe.yaml"]) == 0
    assert capsys.readouterr() == ("", "one\ntwo\n")


def test_help_is_light():
    code = (
        "import sys; sys.argv = ['sse-convert', '--help']\n"
        "from sse_convert.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_what_libraries_look_at_when_the_process_ends_is_gone():
    """nanobind, which Triton is bound with, tells of every object that is left then, in thirty lines."""
    code = (
        "import sys; sys.argv = ['sse-convert', '--version']\n"
        "class Left:\n    def __del__(self): print('gone')\n"
        "left = Left(); left.itself = left\n"
        "from sse_convert.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [__version__, "gone"]


def test_help_names_every_command_and_exit_code():
    text = sse_convert("--help").stdout
    assert [name for name in [*COMMANDS, "recipes"] if f"\n  {name} " not in text] == []
    assert [code for code, meaning in EXIT_CODES.items() if f"    {code:<4} {meaning}" not in text] == []
    assert sse_convert().stdout == text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name):
    text = sse_convert(name, "--help").stdout
    assert "--json" in text
    assert f"Usage: sse-convert {name} " in text


def shown(name):
    """Options of a command by the API's parameter, with their flags and defaults."""
    command = get_command(app).commands[name]
    return {p.name: (p.opts, p.default) for p in command.params if p.param_type_name == "option"}


def test_a_command_takes_its_options_and_words_from_the_api():
    words = described(api.generate)[1]
    assert words["top_p"].startswith("sample from the likeliest tokens")
    found = shown("generate")
    assert list(found) == [*list(inspect.signature(api.generate).parameters)[2:], "as_json", "debug"]
    assert found["top_p"] == (["--top-p"], 1.0)
    found = shown("select")
    assert found["out"][0] == ["--out", "-o"]
    assert "as_json" in shown("run")


@pytest.mark.parametrize("name", [name for name in api.__dict__ if name in COMMANDS or name.startswith("recipes_")])
def test_every_parameter_has_words(name):
    function = getattr(api, name)
    summary, words = described(function)
    assert summary
    assert [p for p in inspect.signature(function).parameters if not words.get(p)] == []


def test_what_is_not_given_keeps_the_default_of_the_api(monkeypatch):
    seen = []

    def new(model, *, text=(), seed=3, **_):
        seen.append((model, text, seed))
        return TextReport({}, [])

    monkeypatch.setattr(api, "recipes_new", new)
    assert run_app(app, ["recipes", "new", "m", "--text", "a", "--text", "b"]) == 0
    assert run_app(app, ["recipes", "new", "m"]) == 0
    assert seen == [("m", ["a", "b"], 3), ("m", (), 3)]


def test_a_prompt_from_stdin(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once"))
    monkeypatch.setattr(api, "generate", lambda **given: seen.append(given["prompt"]) or TextReport({}, []))
    assert run_app(app, ["generate", "x", "-"]) == 0
    assert seen == ["Once"]


def test_exit_codes_are_those_of_the_errors():
    assert {cls.exit_code for cls in ERRORS} | {0, 1, 129, 130, 143} == set(EXIT_CODES)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_each_kind_of_error(capsys, outcome, cls):
    outcome(cls("width is [3]", expected="[bold]4[/bold]", fix="set width: 4"))
    code, answer = run_json(capsys, "plan", "x")
    assert code == cls.exit_code
    assert answer["command"] == "plan"
    assert answer["error"]["kind"] == cls.kind
    assert answer["error"]["exit_code"] == code
    assert answer["error"]["what"] == "width is [3]"
    assert run_app(app, ["plan", "x"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    options = "; or make it whole: `sse-convert join --teacher FOLDER`" if cls is errors.TeacherError else ""
    assert err == f"error: width is [3]\nexpected: [bold]4[/bold]\nfix: set width: 4{options}\n"


@pytest.mark.parametrize(
    ("name", "arguments", "overrides"),
    [
        ("evaluate", ["eval", "r", "-c", "x", "--tasks", "piqa, arc", "--set", "a=1"], ["a=1", LM_EVAL_TWO]),
    ],
)
def test_options_that_stand_for_recipe_keys(monkeypatch, name, arguments, overrides):
    seen = []
    monkeypatch.setattr(api, name, lambda *_, **options: seen.append(options["overrides"]) or TextReport({}, []))
    assert run_app(app, arguments) == 0
    assert seen == [overrides]


def test_success(capsys, outcome):
    outcome(TextReport({"layers": 3, "loss": float("nan")}, ["[red]three[/red] layers", "[/x]"]))
    assert run_json(capsys, "plan", "x") == (
        0,
        {"schema": 1, "ok": True, "command": "plan", "result": {"layers": 3, "loss": None}},
    )
    assert run_app(app, ["plan", "x"]) == 0
    assert capsys.readouterr() == ("", "[red]three[/red] layers\n[/x]\n")


def test_json_is_alone_even_if_a_library_prints(capsys, monkeypatch):
    def chatty(recipe, **_):
        print("downloading 3 files")
        return TextReport({}, [])

    monkeypatch.setattr(api, "plan", chatty)
    assert run_json(capsys, "plan", "x")[0] == 0


def test_a_bug_says_how_to_report_it(capsys, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome(KeyError("q_proj"))
    assert run_app(app, ["plan", "x", "--json"]) == 1
    out, err = capsys.readouterr()
    (kept,) = tmp_path.iterdir()
    assert json.loads(out)["error"]["what"] == "KeyError: 'q_proj'"
    assert err.splitlines()[0] == "internal error: KeyError: 'q_proj'"
    assert f"report it with {kept}" in err
    assert "Traceback" not in err
    assert "Traceback (most recent call last)" in kept.read_text()


def test_a_bug_shows_its_traceback_with_debug(capsys, outcome, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome(KeyError("q_proj"))
    assert run_app(app, ["plan", "x", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(36, "File name too long", "nnn"), 2),
        (NotADirectoryError(20, "Not a directory", "file/x"), 2),
        (MemoryError(), 5),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:13729"), 5),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), 5),
    ],
)
def test_what_the_machine_refuses_is_no_bug(capsys, outcome, error, code):
    outcome(error)
    assert run_json(capsys, "plan", "x")[0] == code


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["generate", "x", "y", "--temperature", "nan"], "--temperature"),
        (["recipes", "new", "x", "--hours", "inf"], "inf is not a finite number"),
        (["generate", "x", "y", "--max-new-tokens", "9" * 30], "--max-new-tokens"),
        (["generate", "x", "y", "--seed", "-1"], "--seed"),
        (["inspect", "~nobody-here/x"], "there is no home folder for ~nobody-here"),
        (["convert", "x", "-o", "$UNSET_HERE/x"], "variable UNSET_HERE is not set"),
    ],
)
def test_arguments_have_ranges(capsys, arguments, what):
    code, answer = run_json(capsys, *arguments)
    assert code == 2
    assert what in answer["error"]["what"]


@pytest.mark.parametrize("number", ["ENOSPC", "EACCES", "EROFS"])
def test_disk_trouble_is_no_bug(capsys, outcome, number):
    import errno

    outcome(OSError(getattr(errno, number), os.strerror(getattr(errno, number)), "out/x"))
    code, answer = run_json(capsys, "plan", "x")
    assert (code, answer["error"]["kind"]) == (8, "output")
    assert answer["error"]["what"].startswith("out/x: ")


def test_out_of_memory_is_hardware(capsys, outcome):
    import torch

    outcome(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."))
    code, answer = run_json(capsys, "plan", "x")
    assert (code, answer["error"]["kind"]) == (5, "hardware")


@pytest.mark.parametrize(
    ("arguments", "command", "what"),
    [
        (["plan"], "plan", "Missing argument 'RECIPE'."),
        (["plan", "x", "y"], "plan", "Got unexpected extra argument"),
        (["plan", "x", "--sett", "a=b"], "plan", "No such option: --sett"),
        (["plann", "x"], "", "No such command 'plann'."),
        (["convert", "x"], "convert", "Missing option '--out'"),
        (["convert", "x", "-o", "y", "--link", "soft"], "convert", "Invalid value for '--link'"),
        (["recipes", "lst"], "recipes", "No such command 'lst'."),
        (["generate", "x", "hello", "--max-new-tokens", "0"], "generate", "Invalid value for '--max-new-tokens'"),
    ],
)
def test_wrong_arguments(capsys, arguments, command, what):
    code, answer = run_json(capsys, *arguments)
    assert (code, answer["command"], answer["error"]["kind"]) == (2, command, "usage")
    assert answer["error"]["what"].startswith(what)
    assert run_app(app, arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {what}")
    assert "--help`" in err


def test_a_script_reports_errors_as_commands_do(capsys):
    @reporting_errors
    def main(number):
        if number < 0:
            raise errors.UsageError(f"number is {number}", expected="at least 0", fix="raise it")
        if number > 9:
            raise OSError(28, "No space left on device", "out/x") if number == 10 else KeyError(number)

    assert main(1) == 0
    assert main(10) == 8
    assert "out/x: No space left on device" in capsys.readouterr().err
    with pytest.raises(KeyError):
        main(11)
    assert main(-1) == 2
    said = capsys.readouterr()
    assert said.err.splitlines() == ["error: number is -1", "expected: at least 0", "fix: raise it"]
    assert said.out == ""


def test_only_the_first_process_prints(capsys, outcome, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    outcome(TextReport({}, ["done"]))
    assert run_app(app, ["plan", "x"]) == 0
    assert run_app(app, ["plan", "x", "--json"]) == 0
    assert capsys.readouterr() == ("", "")


def test_no_colour_off_a_terminal_or_by_wish(tmp_path):
    done = sse_convert("plan", "nope", env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 3
    assert "\x1b" not in done.stderr + sse_convert("plan", "nope").stderr


def test_the_root_script_and_the_version():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "cli.py", "--version"], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    script = sse_convert(env={**os.environ, "_SSE_CONVERT_COMPLETE": f"source_{shell}"})
    assert script.returncode == 0
    assert "sse-convert" in script.stdout


def test_completion_of_recipe_names():
    environment = {
        **os.environ,
        "_SSE_CONVERT_COMPLETE": "complete_bash",
        "COMP_WORDS": "sse-convert plan qwen3-",
        "COMP_CWORD": "2",
    }
    assert sse_convert(env=environment).stdout.split() == [n for n in preset_names() if n.startswith("qwen3-")]


def test_recipes_list_show_copy_schema(capsys, tmp_path):
    code, answer = run_json(capsys, "recipes", "list")
    assert (code, answer["command"]) == (0, "recipes list")
    names = [recipe["name"] for recipe in answer["result"]["recipes"]]
    assert {"qwen3-0.6b", "llama-3.2-1b", "smollm2-135m", "paper-2b", "paper-12b"} <= set(names)
    assert all(recipe["summary"] for recipe in answer["result"]["recipes"])

    assert run_app(app, ["recipes", "show", "qwen3-0.6b"]) == 0
    shown = capsys.readouterr().out
    assert run_app(app, ["recipes", "copy", "qwen3-0.6b", str(tmp_path)]) == 0
    assert (tmp_path / "qwen3-0.6b.yaml").read_text() == shown
    code, answer = run_json(capsys, "recipes", "copy", "qwen3-0.6b", str(tmp_path))
    assert (code, answer["error"]["kind"]) == (8, "output")
    assert run_app(app, ["recipes", "copy", "qwen3-0.6b", str(tmp_path), "--overwrite"]) == 0
    capsys.readouterr()

    assert run_app(app, ["recipes", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == run_json(capsys, "recipes", "schema")[1]["result"]
    assert run_json(capsys, "recipes", "show", "nope")[0] == 3


def test_doctor(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code, answer = run_json(capsys, "doctor")
    assert code == 0
    result = answer["result"]
    assert result["versions"]["torch"]
    assert list(result["backends"]) == list(BACKENDS)
    if not torch.cuda.is_available():
        assert result["backends"]["triton"] == "not available: there is no CUDA device"
    assert result["hub_login"] is True
    assert 1 <= result["idle_cores"] <= (os.cpu_count() or 1)
    assert "hf_secret" not in json.dumps(answer)


def test_a_bad_recipe_lists_its_problems(capsys, tmp_path):
    path = write(tmp_path, small(layers={"pattern": ["nope"]}, train={"backnd": 1}))
    code, answer = run_json(capsys, "plan", str(path), "--set", "stages.0.tokens=1e6")
    assert code == 3
    assert len(answer["error"]["problems"]) == 3


def test_nobody_is_told_of_formats_that_no_product_uses() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hush_libraries()
        warnings.warn(
            "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.", stacklevel=1
        )
        warnings.warn("anything else", stacklevel=1)
    assert [str(one.message) for one in told] == ["anything else"]
