"""What tests of the command line share: a command in this process, and what `plan` comes to."""

import json

import pytest

from sse_convert import api
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app


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
