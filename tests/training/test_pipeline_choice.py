"""`layers.select` in a run: layers are chosen first, once, in a folder that a killed run goes on with."""

import csv
import io
import json

import pytest
import yaml
from accelerate import PartialState, debug_launcher
from torch.multiprocessing import ProcessExitedException

from sse_convert import api, pipeline
from sse_convert.errors import DataError, RecipeError, TrainingError, UsageError
from sse_convert.pipeline import run_recipe
from sse_convert.recipe import choosing, load_recipe
from sse_convert.recipe.choosing import chosen_recipe
from sse_convert.recipe.pattern import resolve
from sse_convert.selection import setup
from sse_convert.selection.measure import Meter
from tests.training.launched import fresh_accelerate
from tests.training.test_resume import Killed, steps_then

TINY = {"tokens": 128, "batch_tokens": 128}
SELECT = {"pattern": ["sse"], "select": {"keep": "34%"}}


@pytest.fixture(autouse=True)
def _short_probe(monkeypatch):
    """A quarter of the rows by which layers are chosen, and the shortest that hold the needles."""
    monkeypatch.setattr(choosing, "SHORTEST", 320)
    monkeypatch.setattr(choosing, "TEXT_TOKENS", 1280)
    monkeypatch.setattr(choosing, "RECALL_ROWS", 4)


@pytest.fixture
def recipe(make, text_folder):
    def build(stages=(("uptrain", TINY),), **settings):
        parts = {
            "layers": SELECT,
            "calibrate": {"enabled": False},
            "data": {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]},
        }
        return make(*stages, **(parts | settings))

    return build


def test_a_run_chooses_first_and_says_what(recipe, tmp_path, monkeypatch, capsys):
    real = Meter._measure
    monkeypatch.setattr(Meter, "_measure", steps_then(real, 3, Killed()))
    with pytest.raises(Killed):
        run_recipe(recipe())
    assert "no better than guessing one of 320 tokens" in capsys.readouterr().err  # random weights, here
    folder = tmp_path / "out.stages" / "00-select"
    assert not (folder / "stage.json").exists()
    before = (folder / "measurements.csv").read_text().splitlines()
    assert len(before) == 1 + 3
    monkeypatch.setattr(Meter, "_measure", real)
    report = run_recipe(recipe())
    assert (folder / "measurements.csv").read_text().splitlines()[: len(before)] == before  # none was made again
    assert [step["name"] for step in report.steps] == ["select", "convert", "uptrain", "export"]
    (kept,) = report.steps[0]["report"]["choices"][0]["kept"]
    assert f"keep layers {kept} (greedy)" in capsys.readouterr().err
    names = ["full" if i == kept else "sse" for i in range(3)]
    for made in (tmp_path / "out.stages" / "01-convert", tmp_path / "out"):
        config = json.loads((made / "config.json").read_text())["sse"]
        assert config["layers"] == names
        assert config["recipe"]["layers"]["select"] == {"keep": "34%", "by": "layers", "chosen": [kept]}
    assert yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["layers"]["select"]["chosen"] == [kept]
    assert f"Layers {kept} stay softmax." in (tmp_path / "out" / "README.md").read_text()
    assert api.verify(tmp_path / "out.stages").checks

    monkeypatch.setattr(pipeline, "choose_layers", lambda *args: pytest.fail("chosen twice"))
    monkeypatch.setattr(pipeline, "guessing_teacher", lambda *args: pytest.fail("tried twice"))
    assert all(step["already_done"] for step in run_recipe(recipe()).steps)
    with pytest.raises(TrainingError, match=r"layers\.select\.keep was '34%', is 2"):
        run_recipe(recipe(layers={"pattern": ["sse"], "select": {"keep": 2}}))


def test_the_recipe_beside_the_steps_runs_on_in_them(recipe, tmp_path, monkeypatch):
    run_recipe(recipe())
    stages = tmp_path / "out.stages"
    before = {path.name for path in stages.iterdir()}
    monkeypatch.setattr(pipeline, "choose_layers", lambda *args: pytest.fail("chosen twice"))
    written = load_recipe(stages / "recipe.yaml")
    report = run_recipe(written)
    assert [(step["name"], step["already_done"]) for step in report.steps] == [
        (name, True) for name in ("select", "convert", "uptrain", "export")
    ]
    assert {path.name for path in stages.iterdir()} == before
    (kept,) = written.layers.select.chosen
    other = chosen_recipe(written, [(kept + 1) % 3])
    with pytest.raises(TrainingError, match=rf"select\.chosen was \[{kept}\], is \[{(kept + 1) % 3}\]"):
        run_recipe(other)
    assert {path.name for path in stages.iterdir()} == before


def forked(recipe):
    """What each of several processes does."""
    PartialState._reset_state()  # the test's own
    fresh_accelerate()
    run_recipe(recipe)
    PartialState().destroy_process_group()


def test_two_processes_choose_together(recipe, tmp_path, monkeypatch):
    """Each measures a part of a round's sets; a killed choice goes on; one process would have chosen the same."""
    asked = recipe(stages=[("uptrain", {**TINY, "micro_batch": 1})])
    real = Meter._measure
    monkeypatch.setattr(Meter, "_measure", steps_then(real, 2, Killed()))
    with pytest.raises(ProcessExitedException, match="process 0 terminated"):
        debug_launcher(forked, (asked,), num_processes=2)
    folder = tmp_path / "out.stages" / "00-select"
    before = (folder / "measurements.csv").read_text()
    assert not (folder / "stage.json").exists()
    monkeypatch.setattr(Meter, "_measure", noted(real, tmp_path))
    debug_launcher(forked, (asked,), num_processes=2)
    first, second = (set((tmp_path / f"measured-{i}").read_text().splitlines()) for i in range(2))
    assert first
    assert second
    assert not first & second
    after = (folder / "measurements.csv").read_text()
    assert after.startswith(before)
    assert {row["kept"] for row in csv.DictReader(io.StringIO(after))} >= first | second
    (kept,) = json.loads((folder / "stage.json").read_text())["report"]["choices"][0]["kept"]
    for made in (tmp_path / "out.stages" / "02-uptrain", tmp_path / "out"):
        config = json.loads((made / "config.json").read_text())["sse"]
        assert config["layers"] == ["full" if i == kept else "sse" for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "choose_layers", lambda *args: pytest.fail("chosen twice"))
        assert all(step["already_done"] for step in run_recipe(asked).steps)
    alone = run_recipe(recipe(stages=(), export={"dir": str(tmp_path / "alone")}))
    assert alone.steps[0]["report"]["choices"][0]["kept"] == [kept]


def noted(real, folder):
    """`Meter._measure` that writes the sets that a process measures."""

    def measure(meter, kept):
        with (folder / f"measured-{PartialState().process_index}").open("a") as file:
            file.write(" ".join(map(str, kept)) + "\n")
        return real(meter, kept)

    return measure


def test_convert_chooses_and_later_commands_know(recipe, tmp_path, monkeypatch, capsys):
    out = tmp_path / "converted"
    report = api.convert(recipe(), out)
    kept = report.layers.index("full")
    assert report.layers.count("full") == 1
    assert f"keep layers {kept} (greedy)" in capsys.readouterr().err
    assert api.uptrain(recipe(), out, tmp_path / "trained").loss_last > 0
    config = json.loads((tmp_path / "trained" / "config.json").read_text())["sse"]
    assert config["recipe"]["layers"]["select"]["chosen"] == [kept]
    with pytest.raises(RecipeError, match="keeps 1 of 3 layers as softmax"):
        api.uptrain(recipe(layers={"pattern": ["sse"], "select": {"keep": 2}}), out, tmp_path / "other")
    monkeypatch.setattr(setup, "load_model", lambda *args, **kwargs: pytest.fail("measured twice"))
    out.rename(tmp_path / "elsewhere")
    assert api.convert(recipe(), out).layers == report.layers


def test_a_choice_needs_text(recipe, tmp_path):
    with pytest.raises(DataError, match="no text to choose layers by"):
        api.convert(recipe(data={}, stages=()), tmp_path / "converted")


def test_runs_without_a_choice_have_the_inputs_of_older_versions(recipe, tmp_path):
    run_recipe(recipe(layers={"pattern": ["sse", "full"]}, stages=()))
    record = json.loads((tmp_path / "out.stages" / "00-convert" / "stage.json").read_text())
    assert record["inputs"]["layers"].keys() == {"pattern", "keep", "overrides"}


def test_select_chooses_as_a_run_does(recipe, tmp_path):
    asked = recipe(stages=())
    run_recipe(asked)
    (ran,) = (tmp_path / "out.stages").glob("*-select/selection.json")
    api.select(asked, out=tmp_path / "own")
    own, whole = (json.loads(path.read_text()) for path in (tmp_path / "own" / "selection.json", ran))
    for key in ("keep", "layers", "stand_in", "recall", "conditions"):
        assert own[key] == whole[key], key
    assert [choice["kept"] for choice in own["choices"]] == [choice["kept"] for choice in whole["choices"]]


@pytest.mark.parametrize("keep", [1, 2])
def test_select_takes_another_number_than_the_recipe_s(recipe, tmp_path, keep):
    asked = recipe(stages=(), layers={"pattern": ["sse", "sse", "sse"], "select": {"keep": 1}})
    api.select(asked, keep, tmp_path / "own")
    layers = yaml.safe_load((tmp_path / "own" / "layers.yaml").read_text())["layers"]
    assert layers["select"]["keep"] == len(layers["select"]["chosen"]) == keep
    names, _ = resolve(recipe(stages=(), layers=layers), 3)
    assert names.count("full") == keep


def test_select_refuses_more_than_there_is_to_choose_from(recipe, tmp_path):
    with pytest.raises(UsageError, match="keep is 3"):
        api.select(recipe(stages=()), 3, tmp_path / "own")


def test_select_swaps_the_recipe_s_layers_for_its_window(recipe, tmp_path):
    mixers = {"sse+sliding": {"num_partitions": 4, "top_k": 1, "window": 5, "sinks": 2}}
    layers = {"pattern": ["sse+sliding", "full", "sse+sliding"], "select": {"keep": 1}}
    report = api.select(recipe(stages=(), layers=layers, mixers=mixers), out=tmp_path / "own")
    assert report.conditions["among"] == (0, 2)
    assert (report.stand_in["window"], report.stand_in["sinks"]) == (5, 2)
