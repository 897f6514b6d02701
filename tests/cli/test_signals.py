"""Ctrl-C and other signals end every command with its code and a line, whatever runs."""

import importlib
import signal
import subprocess
import sys

import pytest

from sse_convert import api
from sse_convert.cli import runner
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.report import TextReport
from tests.cli.conftest import run_json


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
