"""`results.csv` is what the kept JSON says, a new report becomes rows of it, and its plots draw."""

import dataclasses as dc
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.quality import collect, plots, rows, words
from benchmarks.quality.rows import Row
from benchmarks.quality.wordings import jobs, misses, parts, shares
from benchmarks.quality.wordings import measure as wordings
from sse_convert.checkpoints.identity import STAGE_FILE
from sse_convert.errors import TrainingError
from sse_convert.evaluation.controls import stages_folder
from sse_convert.recipe import load_recipe
from sse_convert.training.schedule import Schedule
from sse_convert.training.stage_record import write_record

TABLE = rows.read(collect.TABLE)
REPORTS = collect.reports()


@pytest.mark.smoke
def test_the_table_is_what_the_kept_files_say() -> None:
    assert collect.collected() == TABLE, "if the new rows are right: python -m benchmarks.quality.collect"


@pytest.mark.parametrize("name", sorted(name for name, report in REPORTS.items() if "after" in report))
def test_a_run_has_its_figures(name: str) -> None:
    report = REPORTS[name]
    gaps = {row.context: row.gap for row in TABLE if (row.run, row.model) == (name, "trained")}
    assert gaps == {gap["length"]: round(gap["gap"], 6) for gap in report["after"]["loss_gaps"]}
    for needle in report["after"]["student"].get("needles", ()):
        row = rows.pick(TABLE, name, needle["length"])
        found = getattr(row, f"{needle['kind']}_x{needle['keys']}")
        assert (found, row.samples) == (needle["correct"], needle["samples"])
    assert {row.commit for row in TABLE if row.run == name} == {report["commit"]}


def test_every_row_says_where_it_comes_from() -> None:
    for row in TABLE:
        assert row.run, row
        assert row.commit, row
        assert row.command, row
        assert row.teacher, row
        assert row.hardware, row
        assert row.seed is not None, row


def test_rows_survive_the_file(tmp_path: Path) -> None:
    one = Row(run="a", model="trained", seed=0, gap=-0.5, notes='with, a comma and "quotes"')
    rows.write(tmp_path / "table.csv", [one])
    assert rows.read(tmp_path / "table.csv") == [one]


def test_picking_wants_one_row() -> None:
    one = Row(run="a", model="trained", context=8)
    assert rows.pick([one], "a", 8) is one
    with pytest.raises(LookupError, match="0 rows of a"):
        rows.pick([one], "a", 16)
    with pytest.raises(LookupError, match="2 rows of a"):
        rows.pick([one, dc.replace(one, seed=1)], "a", 8)


def test_needles_add_up() -> None:
    one = Row(run="a", model="trained", samples=50, number_x1=40, code_x8=0, teacher_number_x1=50, teacher_code_x8=10)
    assert (one.found(), one.asked(), one.found(teacher=True)) == (40, 100, 60)
    assert (one.found(kinds=["code_x8"]), one.asked(["code_x8"])) == (0, 50)


def kept_folder(folder: Path) -> Path:
    """A folder of results with one run that is not packed yet."""
    (folder / "raw").mkdir()
    report = REPORTS["keep-4-9_window"]
    (folder / "raw" / "keep-4-9_window.json").write_text(json.dumps(report), encoding="utf-8")
    (folder / "about.yaml").write_text("keep-4-9_window: {notes: a note}\n", encoding="utf-8")
    return folder


def test_packing_keeps_every_row(tmp_path: Path) -> None:
    folder = kept_folder(tmp_path)
    before = collect.collected(folder)
    archive = collect.pack("9", folder)
    assert not list((folder / "raw").iterdir())
    assert collect.collected(folder) == before
    assert [row.notes for row in before] == ["a note"] * 2
    first = archive.read_bytes()
    (folder / "raw").rmdir()
    assert collect.pack("10", kept_folder(folder)).read_bytes() == first
    (folder / "raw").rmdir()
    with pytest.raises(FileExistsError):
        collect.pack("10", kept_folder(folder))


def test_notes_on_unknown_runs_are_refused(tmp_path: Path) -> None:
    folder = kept_folder(tmp_path)
    (folder / "about.yaml").write_text("other: {notes: a note}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="not kept"):
        collect.collected(folder)


def test_a_report_of_eval_becomes_rows_by_its_recipe(given: Path) -> None:
    delta = ["mixers.sse.update=delta", "mixers.sse.k_feature_map=l2"]
    report = collect.with_recipe(REPORTS["keep-4-9_seed1"], str(given), delta, "sse-convert eval")
    found = list(rows.rows_of("new", report, {}))
    assert [row.context for row in found] == [2048, 8192]
    assert {row.command for row in found} == {"sse-convert eval"}
    assert found[0].other_layers.startswith("SSE: 4 partitions, 1 per token, delta rule; window of ")


def test_settings_in_words() -> None:
    layers = ["full", "sse+sliding", "sliding"]
    sse = {"kind": "sse+sliding", "num_partitions": 4, "top_k": 2, "update": "delta", "window": 64}
    mixers = {"sse+sliding": sse, "sliding": {"kind": "sliding", "window": 32}}
    assert words.softmax_layers(layers) == "0"
    assert words.softmax_layers(["full"]) == "all"
    assert words.softmax_layers(["gla"]) == "none"
    assert words.other_layers(layers, mixers) == (
        "SSE beside a window of 64 tokens: 4 partitions, 2 per token, delta rule; window of 32 tokens"
    )


def test_the_plots_draw(tmp_path: Path) -> None:
    plots.draw_runs(TABLE, tmp_path / "runs.png")
    plots.draw_frontier(TABLE, tmp_path / "frontier.png")
    plots.draw_gains(json.loads(plots.SPEED.read_text(encoding="utf-8")), tmp_path / "gains.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("runs.png", "frontier.png", "gains.png"))


def test_ruler_stands_in_words(tmp_path: Path) -> None:
    entries = [{"task": "niah_single_1", "length": n, "scores": [1.0, 0.5], "device": "cuda (X)"} for n in (2048, 8192)]
    report = {"ruler": entries, "commit": "a", "date": "b", "command": "c", "part": "llama-teacher"}
    teacher = list(rows.rows_of("of-llama", report, {}))
    assert [(row.model, row.context, row.hardware, row.teacher, row.command) for row in teacher] == [
        ("teacher", context, "X", "teacher-llama-30m", "c") for context in (2048, 8192)
    ]
    assert teacher[0].ruler == "niah_single_1 75.0% of 2"


def test_a_part_that_was_cut_short_says_so_in_its_rows() -> None:
    report = {**REPORTS["keep-none_muon_8k-steps"], "cut": {"distill": 8192}}
    needles = report["after"]["student"]["needles"]
    of_four = [{**needle, "keys": 4} for needle in needles if (needle["kind"], needle["keys"]) == ("code", 8)]
    student = {**report["after"]["student"], "needles": [*needles, *of_four]}
    found = list(rows.rows_of("x", {**report, "before": None, "after": {**report["after"], "student": student}}, {}))
    assert [row.code_x4 for row in found if row.model == "trained"] == [needle["correct"] for needle in of_four]
    assert {row.notes for row in found if row.model == "trained"} == {"cut short at distill 8,192"}


def test_parts_in_held_out_wordings_have_names() -> None:
    for name in parts.all_parts(["row", "text"], cheap=True) + parts.all_parts(["row"], cheap=False):
        assert parts.parse(name).name == name
    of_16 = parts.parse("qwen-none-row-16M")
    assert (of_16.name, of_16.stages) == ("qwen-none-row-16M", ("10M", "6M"))
    assert parts.parse("qwen-none-row").stages == ("16M", "10M")
    for wrong in ("qwen-all-row", "gpt-none-row", "qwen-none-other", "qwen-none"):
        with pytest.raises(ValueError, match="expected"):
            parts.parse(wrong)


def test_shares_of_the_teacher() -> None:
    ruler = [{"task": "niah_single_2", "length": 2048, "scores": [1.0] * 8 + [0.0] * 2}]
    teacher = {"ruler": [{**ruler[0], "scores": [1.0] * 20}, {**ruler[0], "task": "other", "scores": [1.0]}]}
    (one,) = shares.tasks({"ruler": ruler}, teacher)
    value, low, high = shares.share(one)
    assert (one.name, one.teacher.samples, value) == ("niah_single_2 2048", 10, 0.8)
    assert 0.4 < low < 0.8 < high < 1


class EndedProcess:
    """Stands for a process of a part; `statuses` are those that processes end with, one after another."""

    statuses: ClassVar[list[int]] = []
    commands: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], **_: Any) -> None:
        self.commands.append(command)
        self.returncode = self.statuses.pop(0)

    def poll(self) -> int:
        return self.returncode


@pytest.mark.parametrize(
    ("reserve", "statuses", "cut"),
    [
        (60, [jobs.CUT, 0], [False, True]),  # ended before its last step, then measured
        (0, [jobs.CUT], [False]),
        (60, [1, 1, 1], [False, False, False]),
        (60, [1, 0], [False, False]),
    ],
)
def test_a_part_is_measured_when_its_training_was_cut_short_and_tried_again_when_it_broke(
    reserve: int, statuses: list[int], cut: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndedProcess, "statuses", list(statuses))
    monkeypatch.setattr(EndedProcess, "commands", [])
    monkeypatch.setattr(jobs.subprocess, "Popen", EndedProcess)
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    ended = [status == jobs.CUT for status in statuses]
    monkeypatch.setattr(jobs.Runner, "_late", property(lambda self: any(ended[: len(EndedProcess.commands)])))
    monkeypatch.setattr(jobs.Runner, "_end_all", lambda self: None)
    jobs.Runner(tmp_path, ["--out", "x"], 3, 600, reserve).run(["llama-none-row"])
    assert ["--cut" in command for command in EndedProcess.commands] == cut
    assert not EndedProcess.statuses


def test_a_part_names_its_command() -> None:
    command = wordings._command(parts.parse("qwen-none-row-16M"), {2048: 8, 8192: 4}, ["eval.tokens=32K"])
    assert command.endswith("--parts qwen-none-row-16M --lengths 2048,8192 --samples 8,4 --set eval.tokens=32K")


@pytest.mark.parametrize(
    ("right", "place"),
    [([True] * 3, "right"), ([False, True, False], "00"), ([True, False, False], "01"), ([True, True, False], "last")],
)
def test_an_answer_goes_wrong_at_its_first_wrong_token(right: list[bool], place: str) -> None:
    assert misses.place(right) == place


def test_a_part_is_finished_unless_it_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "part.json"
    assert not jobs.finished(file)
    file.write_text('{"cut": {"distill": 1}}', encoding="utf-8")
    assert not jobs.finished(file)
    file.write_text("{}", encoding="utf-8")
    assert jobs.finished(file)


def test_a_training_that_was_stopped_ends_where_it_is_saved(tmp_path: Path) -> None:
    recipe = load_recipe(parts.ROOT / parts.PURE, [f"export.dir={tmp_path / 'model'}"])
    with pytest.raises(TrainingError, match="nothing is saved"):
        wordings.ends_of(recipe)
    stages, step = stages_folder(tmp_path / "model"), recipe.stages[0].batch_tokens
    for saved in (2, 3):
        (stages / f"02-distill.work/step-{saved}").mkdir(parents=True)
    assert wordings.ends_of(recipe) == {0: 3 * step, 1: step}
    (stages / "02-distill").mkdir()
    write_record(stages / "02-distill", {}, {"steps": Schedule.of(recipe.stages[0]).steps})
    assert wordings.ends_of(recipe) == {1: step}
    (stages / "outdated-03-long").mkdir()
    (stages / "outdated-03-long" / STAGE_FILE).touch()
    assert wordings.ends_of(recipe) == {1: step}


def test_a_training_that_was_ended_early_ends_there_again(tmp_path: Path) -> None:
    recipe = load_recipe(parts.ROOT / parts.PURE, [f"export.dir={tmp_path / 'model'}"])
    stages, step = stages_folder(tmp_path / "model"), recipe.stages[0].batch_tokens
    for name, steps in (("02-distill", 3), ("03-long", 1)):
        (stages / name).mkdir(parents=True)
        write_record(stages / name, {}, {"steps": steps})
    assert wordings.ends_of(recipe) == {0: 3 * step, 1: step}
