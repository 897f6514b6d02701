"""The command line: exit codes, JSON on stdout, messages on stderr, for every kind of outcome."""

import importlib
import inspect
import io
import json
import os
import resource
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from sse_convert import __version__, api, errors
from sse_convert.cli import runner
from sse_convert.cli.app import app
from sse_convert.cli.commands import described
from sse_convert.cli.runner import EXIT_CODES, hush_libraries, reporting_errors, run_app
from sse_convert.kernels.dispatch import BACKENDS
from sse_convert.recipe.presets import preset_names
from sse_convert.report import TextReport, found_before
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


def run_json(capsys, *arguments):
    """Run in this process with --json: exit code and the object, which must be alone on stdout."""
    code = run_app(app, [*arguments, "--json"])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert answer["schema"] == 1
    assert answer["ok"] == (code == 0)
    return code, answer


@pytest.fixture
def outcome(monkeypatch):
    """Make `plan` return or raise what the test says."""

    def set_outcome(result):
        def plan(recipe, **_):
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr(api, "plan", plan)

    return set_outcome


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


def test_help_is_quick_and_light():
    code = (
        "import sys; sys.argv = ['sse-convert', '--help']\n"
        "from sse_convert.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    seconds = []  # of processor time, which other tests running beside this one do not stretch
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert sse_convert("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5, seconds


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


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-", "| true", "2>&1 | true"])
def test_streams_may_be_closed(closed):
    shell = f"set -o pipefail; {sys.executable} -m sse_convert recipes list {closed}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_behind_stdout_is_said():
    command = f"{sys.executable} -m sse_convert recipes list > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 8
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


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


def test_interrupt(capsys, outcome):
    outcome(KeyboardInterrupt())
    code, answer = run_json(capsys, "plan", "x")
    assert (code, answer["error"]["kind"]) == (130, "interrupted")
    assert run_app(app, ["plan", "x"]) == 130
    assert capsys.readouterr() == ("", "interrupted; nothing was changed\n")


def test_interrupt_says_how_to_go_on(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "run", interrupted)
    assert run_app(app, ["run", "x"]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to continue where it stopped\n"


@pytest.mark.parametrize(
    ("number", "code", "what"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
)
def test_a_signal_that_ends_a_command(capsys, monkeypatch, number, code, what):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(api, "run", lambda *a, **k: signal.raise_signal(number))
    assert run_app(app, ["run", "x"]) == code
    assert capsys.readouterr().err == f"{what}; run the same command again to continue where it stopped\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_outside_our_own_code(monkeypatch, capsys, number, code):
    with monkeypatch.context() as patch:

        def plan(*a, **k):
            patch.setattr(runner, "_is_first_process", lambda: signal.raise_signal(number))
            return TextReport({}, ["done"])

        patch.setattr(api, "plan", plan)
        assert run_app(app, ["plan", "x"]) == code
    assert capsys.readouterr().err == {130: "interrupted\n", 143: "ended by SIGTERM\n"}[code]


IMPORTS = {
    "made another error": "try:\n    raise_signal({0})\nexcept BaseException:\n    raise ImportError('no')",
    "lost": "try:\n    raise_signal({0})\nexcept BaseException:\n    pass",
    "in C": "import _weakref\nclass G: ...\ngone = G()\nr = _weakref.ref(gone, lambda _: raise_signal({0}))\ndel gone",
    "twice": "raise_signal({0})\nraise_signal({0})\nraise SystemExit(3)",
}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("what", IMPORTS)
def test_a_signal_while_a_library_is_imported(monkeypatch, capsys, tmp_path, what, number, code):
    (tmp_path / "library.py").write_text(f"from signal import raise_signal\n{IMPORTS[what].format(number)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "library", raising=False)

    def imports(*_, **__):
        importlib.import_module("library")
        return TextReport({}, ["done"])

    monkeypatch.setattr(api, "plan", imports)
    assert run_app(app, ["plan", "x"]) == code
    assert capsys.readouterr().err.endswith("; nothing was changed\n")
    assert sys.gettrace() is None


def test_an_error_that_a_library_makes_of_a_signal(monkeypatch, capsys):
    def plan(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("initialisation failed") from error

    monkeypatch.setattr(api, "plan", plan)
    assert run_app(app, ["plan", "x"]) == 143
    assert capsys.readouterr().err == "ended by SIGTERM\n"


def test_an_ignored_hangup_stays_ignored(monkeypatch):
    monkeypatch.setattr(api, "run", lambda *a, **k: [signal.raise_signal(signal.SIGHUP), TextReport({}, [])][1])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert run_app(app, ["run", "x"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_real_sigint(tmp_path):
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background shells start us with it ignored
        "from sse_convert import api\n"
        "from sse_convert.cli.app import main\n"
        "def slow(*a, **k):\n    print('started', file=sys.stderr, flush=True)\n    time.sleep(60)\n"
        "api.run = slow\n"
        "sys.argv = ['sse-convert', 'run', 'x']\n"
        "main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted; run the same command again to continue where it stopped\n"


def test_only_the_first_process_prints(capsys, outcome, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    outcome(TextReport({}, ["done"]))
    assert run_app(app, ["plan", "x"]) == 0
    assert run_app(app, ["plan", "x", "--json"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_is_quiet():
    command = f"{sys.executable} -m sse_convert recipes schema | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


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
