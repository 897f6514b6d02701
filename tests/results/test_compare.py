"""`compare` from the command line: one table, and no mixing."""

import json
import shutil

import pytest

from sse_convert import api
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import UsageError
from sse_convert.results.compare import compare_runs, labels


def test_names_are_as_short_as_they_can_be(tmp_path):
    assert labels(["a/x", "a/y"]) == ["x", "y"]
    assert labels(["a/x", "b/x"]) == ["a/x", "b/x"]
    assert labels(["a/x/evaluation.json", "b/y/evaluation.json"]) == ["x", "y"]
    with pytest.raises(UsageError, match="given twice"):
        labels([tmp_path, tmp_path / "." / "."])


def test_a_run_a_checkpoint_and_a_file(made, place, capsys):
    shutil.copy(place / "out" / "evaluation.json", place / "other.json")
    sources = [made / "out", place / "out.stages" / "02-align", place / "other.json"]
    assert run_app(app, ["compare", *map(str, sources)]) == 0
    table, err = capsys.readouterr()
    header = table.splitlines()[0].split()
    assert header == ["teacher", "out", "02-align", "other.json"]
    assert "held-out loss" in table
    assert err == ""


def test_json_on_stdout(made, place, edit, capsys):
    file = place / "out.stages" / "04-eval" / "evaluation.json"
    edit(file, lambda data: data["conditions"].update(text="other"))
    assert run_app(app, ["compare", str(made / "out"), str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["columns"] == ["teacher", "out", "04-eval"]
    assert any("[b] text other" in note for note in result["notes"])
    for row in result["rows"]:
        if row["note"]:
            assert sum(cell is not None for cell in row["cells"][1:]) == 1


def test_nothing_in_common(made, place, edit):
    def foreign(data):
        data["conditions"].update(text="other", device="another", seed=3)
        data["cache"] = []
        data["teacher"]["name"] = "someone"

    shutil.copy(place / "out" / "evaluation.json", place / "a.json")
    shutil.copy(place / "out" / "evaluation.json", place / "b.json")
    edit(place / "b.json", foreign)
    with pytest.raises(UsageError, match=r"a\.json, b\.json have no figure in common") as caught:
        compare_runs([place / "a.json", place / "b.json"])
    assert "not comparable: held-out loss (nats per token): " in caught.value.fix
    assert "text other" in caught.value.fix
    assert "teacher someone" in caught.value.fix


@pytest.mark.parametrize(
    ("sources", "code", "what"),
    [
        (["out"], 2, "nothing to set beside"),
        (["out", "out"], 2, "is given twice"),
        (["out", "none"], 2, "does not exist"),
        (["out", "text.txt"], 4, "cannot be read"),
        (["out", "out/config.json"], 4, "config.json is no report of `eval`: name is missing"),
    ],
)
def test_mistakes(made, capsys, sources, code, what):
    assert run_app(app, ["compare", *(str(made / source) for source in sources), "--json"]) == code
    out, err = capsys.readouterr()
    assert what in json.loads(out)["error"]["what"]
    assert "Traceback" not in err


def test_the_teachers_column_is_for_one_teacher(made, place, edit):
    """A checkpoint that was never measured also counts: its cache must not stand beside another teacher's."""
    other = place / "out.stages" / "02-align"
    assert compare_runs([made / "out", other]).columns == ("teacher", "out", "02-align")
    edit(other / "config.json", lambda config: config["sse"].update(base_model="another"))
    assert compare_runs([made / "out", other]).columns == ("out", "02-align")


def test_an_export_and_an_evaluation_of_it(made, place):
    """The export's paths are shortened; what was measured on the same text stands in one row."""
    recipe = place / "out" / "recipe.yaml"
    told = [f"model={place / 'teacher'}", f"data.valid=[{{path: {place / 'text.txt'}}}]"]
    api.evaluate(recipe, place / "out", out=place / "e.json", overrides=told)
    rows = compare_runs([place / "out", place / "e.json"]).rows
    losses = [row for row in rows if row.quantity.startswith("held-out loss")]
    assert losses
    assert all(None not in row.cells[1:] for row in losses)
