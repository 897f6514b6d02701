import json

import pytest

from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import UsageError
from sse_convert.evaluation.comparison import ControlRun, ControlTable
from sse_convert.evaluation.controls import chosen_controls, control_table
from sse_convert.evaluation.intervals import Accuracy, newcombe, wilson
from sse_convert.files import write_json
from sse_convert.recipe import recipe_from_dict
from tests.evaluation.test_report import make_report
from tests.surgery.models import recipe_data, save_source


def figures(sums, hits):
    data = make_report(hits=((20, hits), (20, hits)), student_sums=sums).to_dict()
    return {**data, "conditions": {"text": "books", "seed": 0, "dtype": "float32"}}


OURS = figures((390.4, 398.4), 10)  # a gap of 0.05, 20 of 40 needles
RUNS = {
    "teacher_tuned": figures((384.0, 392.0), 20),
    "window": figures((512.0, 520.0), 0),
    "window_trained": figures((390.4, 398.4), 10),
    "gla": figures((385.28, 393.28), 19),
}


def table(runs=RUNS):
    measured = [ControlRun(name=name, status="measured", note="x", report=report) for name, report in runs.items()]
    return ControlTable(
        main=OURS, runs=(*measured, ControlRun(name="pure_sse", status="not run", note="sse-convert run"))
    )


def test_newcombe_against_its_published_example():
    # Newcombe 1998, Statistics in Medicine 17, 873-890, table II, example (a), method 10: 56/70 - 48/80
    assert newcombe(Accuracy(56, 70), Accuracy(48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    low, high = newcombe(Accuracy(48, 80), Accuracy(56, 70))
    assert (low, high) == pytest.approx((-0.3339, -0.0524), abs=5e-5)


def test_shares_of_a_hit_have_an_interval():
    assert wilson(1.5, 4)[0] < 1.5 / 4 < wilson(1.5, 4)[1]


def test_who_is_ahead():
    judged = {(j.control, j.figure): j.verdict for j in table().judgements()}
    assert judged == {
        ("window", "loss gap at 129"): "ahead of",
        ("window", "needles at 512"): "ahead of",
        ("window_trained", "loss gap at 129"): "not ahead of",
        ("window_trained", "needles at 512"): "not ahead of",
        ("gla", "loss gap at 129"): "behind",
        ("gla", "needles at 512"): "behind",
    }


def test_words_hold_both_figures_with_their_intervals():
    lines = table().lines()
    assert "not ahead of the window_trained control, loss gap at 129: 0.050 ± 0.000 against 0.050 ± 0.000" in lines
    assert "ahead of the window control, needles at 512: 50% [35, 65] against 0% [0, 9]" in lines
    assert "loss gap to teacher_tuned at 129: 0.050 ± 0.000" in lines
    assert any(line.startswith("pure_sse (SSE in every layer): not run; sse-convert run") for line in lines)
    rows = {line.split("  ")[0]: line for line in lines}
    assert {"teacher", "this model", "window", "gla"} <= rows.keys()


def test_runs_on_other_text_are_listed_and_not_judged():
    for change in ({"text": "stories"}, {"held_out_tokens": 7}):
        other = {**RUNS["window"], "conditions": {**OURS["conditions"], **change}}
        found = table({"window": other})
        assert found.judgements() == []
    assert any("measured on other text" in line for line in found.lines())


def test_a_gap_without_standard_error_decides_nothing():
    one = {**OURS, "loss_gaps": [{"length": 129, "gap": 0.5, "gap_se": None}]}
    judged = [j for j in table({"window": one}).judgements() if j.figure.startswith("loss")]
    assert [j.verdict for j in judged] == ["not ahead of"]
    assert table({"window": one}).to_dict()["judgements"][0]["low"] is None


def test_json(tmp_path):
    write_json(tmp_path / "deep" / "comparison.json", table().to_dict())
    data = json.loads((tmp_path / "deep" / "comparison.json").read_text())
    assert data == table().to_dict()
    assert [(run["name"], run["status"]) for run in data["runs"]][-2:] == [("gla", "measured"), ("pure_sse", "not run")]
    assert data["judgements"][0]["verdict"] == "ahead of"


def test_which_controls_are_asked_for_and_found(tmp_path):
    teacher = open_teacher(str(save_source(tmp_path / "teacher")))
    data = recipe_data(tmp_path / "teacher", export={"dir": str(tmp_path / "out")})
    recipe = recipe_from_dict({**data, "controls": ["all"]})
    assert chosen_controls(recipe_from_dict(data), teacher) == {}
    assert list(chosen_controls(recipe, teacher)) == ["window", "gla", "pure_sse"]
    with pytest.raises(UsageError, match="'window_trained' is asked for: the recipe has no training stages"):
        chosen_controls(recipe_from_dict({**data, "controls": ["window_trained"]}), teacher)
    folder = tmp_path / "out.controls" / "gla.stages" / "02-eval"
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps(RUNS["gla"]))
    runs = {run.name: run for run in control_table(recipe, teacher, OURS, "sse-convert run r.yaml").runs}
    assert runs["gla"].report == RUNS["gla"]
    assert runs["window"].note == "sse-convert run r.yaml --controls window"
    assert runs["teacher_tuned"].status == "none"
