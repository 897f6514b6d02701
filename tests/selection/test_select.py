"""`sse-convert select` on the demo's teacher: finds the layer that retrieves, resumes, refuses what cannot work."""

import csv
import dataclasses as dc
import json

import pytest
import torch
import yaml

from sse_convert import api
from sse_convert.checkpoints.load_model import load_model
from sse_convert.checkpoints.run_lock import run_lock
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.console import Bar
from sse_convert.errors import CheckpointError, DataError, OutputError, RecipeError, TrainingError, UsageError
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.recipe import load_recipe, recipe_from_dict
from sse_convert.recipe.choosing import chosen_recipe, open_choice
from sse_convert.recipe.pattern import resolve
from sse_convert.selection import setup
from sse_convert.selection.layer_swap import Swap
from sse_convert.selection.measure import Meter
from sse_convert.selection.select import settle_recall
from sse_convert.surgery import choice_cost
from sse_convert.surgery.compatibility import with_layers_of
from sse_convert.surgery.cpu_speed import fast_in_bfloat16
from tests.selection.conftest import RETRIEVES, TEACHER, TEXT
from tests.surgery.models import save_source

SMALL = {"text": TEXT, "length": 256, "tokens": 512, "samples": 6, "device": "cpu"}
WINDOW = ["mixers.sse+sliding.window=32"]


def choose(out, keep=1, source=TEACHER, overrides=WINDOW, **changes):
    return api.select(source, keep, out, overrides=overrides, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("select") / "out"
    return out, choose(out)


def test_the_layer_that_retrieves_is_found(done):
    _, report = done
    assert (report.chosen.method, report.chosen.kept) == ("greedy", (RETRIEVES,))
    assert report.chosen.measured.recall_accuracy == report.teacher.recall_accuracy == 1.0
    assert report.nothing.recall_accuracy < 0.5
    assert report.chosen.measured.text_kl < report.nothing.text_kl


def test_a_cpu_without_time_finds_it_by_one_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(choice_cost, "CPU_FLOPS", 0)
    report = choose(tmp_path / "out", device="cpu", length=None, tokens=2048, samples=None)
    assert (report.chosen.method, report.chosen.kept) == ("retrieval", (RETRIEVES,))
    assert (report.conditions["length"], report.conditions["tries"]) == (1024, 0)
    stored = "bfloat16" if fast_in_bfloat16() else "float32"
    assert report.conditions["dtype"] == stored


def test_heads_are_chosen_and_kept(tmp_path):
    """One of 18 heads finds what the layer that retrieves does; the recipe with it converts to that."""
    data = {"recipe_version": 1, "model": str(TEACHER), "export": {"dir": str(tmp_path / "out")}}
    data["mixers"] = {"sliding": {"window": 32}}
    asked = recipe_from_dict({**data, "layers": {"select": {"keep": 1, "by": "heads"}}})
    report = choose(tmp_path / "heads", keep=None, source=asked, overrides=None)
    choice = report.chosen
    layer, head = divmod(choice.kept[0], 3)
    assert (choice.method, layer) == ("retrieval", RETRIEVES)
    assert choice.measured.recall_accuracy == report.teacher.recall_accuracy == 1.0
    assert report.nothing.recall_accuracy < 0.5
    assert f"keep heads {layer}:{head} (retrieval)" in report.lines()[0]
    chosen = recipe_from_dict({**data, **yaml.safe_load((tmp_path / "heads" / "layers.yaml").read_text())})
    api.convert(chosen, tmp_path / "converted")
    mixers = layer_mixers(load_model(str(tmp_path / "converted"), device="cpu").config)
    assert [mixer.full_heads for mixer in mixers] == [(head,) if i == layer else () for i in range(6)]
    assert with_layers_of(tmp_path / "converted", asked).layers == chosen.layers


def test_a_layer_of_which_all_heads_are_kept_converts_to_a_softmax_layer(tmp_path):
    data = {"recipe_version": 1, "model": str(TEACHER), "export": {"dir": str(tmp_path / "out")}}
    asked = recipe_from_dict({**data, "layers": {"select": {"keep": 4, "by": "heads"}}})
    chosen = chosen_recipe(asked, (1, 6, 7, 8), open_choice(asked, 6, (3,) * 6))
    api.convert(chosen, tmp_path / "converted")
    mixers = layer_mixers(load_model(str(tmp_path / "converted"), device="cpu").config)
    assert mixers[2] is None
    assert mixers[0].full_heads == (1,)
    assert with_layers_of(tmp_path / "converted", asked).layers == chosen.layers
    share = recipe_from_dict({**data, "layers": {"select": {"keep": "10%", "by": "heads"}}})
    with pytest.raises(RecipeError, match="keeps 4 of 18 heads as softmax"):
        with_layers_of(tmp_path / "converted", share)


def test_files(done, tmp_path):
    out, report = done
    assert {path.suffix for path in out.iterdir()} == {".csv", ".json", ".yaml"}
    with (out / "scores.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 6
    assert all(int(r["cache_bytes_saved"]) == report.cache_bytes_saved[0] != 0 for r in rows)
    assert all(int(r["tokens"]) > 0 and float(r["seconds"]) > 0 for r in rows)
    data = json.loads((out / "selection.json").read_text())
    assert data["choices"][0]["kept"] == [RETRIEVES]
    text = "\n".join(report.lines())
    assert f"keep layers {RETRIEVES} (greedy)" in text
    reach, rest = " of the teacher's 2,048 positions", ": other layers may find what lies farther back (--length)"
    assert f"chosen on rows of 256{reach}{rest}" in report.lines()
    whole = dc.replace(report, conditions={**report.conditions, "length": 2048})
    assert not any("farther back" in line for line in whole.lines())
    endless = dc.replace(report, conditions={**report.conditions, "context": None})
    assert f"chosen on rows of 256{rest}" in endless.lines()


def test_the_fragment_is_a_recipe_s_layers(done, tmp_path):
    out, _ = done
    rest = {"recipe_version": 1, "model": str(TEACHER), "export": {"dir": "out/x"}}
    path = tmp_path / "recipe.yaml"
    path.write_text((out / "layers.yaml").read_text() + yaml.safe_dump(rest))
    names, _ = resolve(load_recipe(path), 6)
    assert names == ["sse+sliding"] * RETRIEVES + ["full"] + ["sse+sliding"] * (5 - RETRIEVES)


def test_a_finished_run_needs_no_model(done, monkeypatch):
    out, report = done
    monkeypatch.setattr(setup, "load_model", None)
    again, before = choose(out).chosen, report.chosen
    assert (again.kept, again.scores, again.tokens) == (before.kept, before.scores, before.tokens)


def test_an_interrupted_run_goes_on(done, tmp_path, monkeypatch):
    _, report = done
    out, measured = tmp_path / "out", []
    real = Meter._measure

    def interrupted(meter, kept):
        if len(measured) == 5:
            raise KeyboardInterrupt
        measured.append(kept)
        return real(meter, kept)

    monkeypatch.setattr(Meter, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose(out)
    assert len((out / "measurements.csv").read_text().splitlines()) == 1 + 5
    measured.clear()
    monkeypatch.setattr(Meter, "_measure", lambda m, kept: measured.append(kept) or real(m, kept))
    found = choose(out).chosen
    assert len(measured) == 6 + 2 - 5  # each layer alone kept, all and none; without the five
    assert found.scores == report.chosen.scores


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"samples": 5}, "probe"), ({"overrides": ["mixers.sse+sliding.window=24"]}, "stand_in.window")],
)
def test_changed_inputs_are_refused(done, changes, key):
    with pytest.raises(TrainingError, match=f"made from other inputs:\n  {key} was"):
        choose(done[0], **changes)


@pytest.fixture
def random_teacher(tmp_path):
    """What `choose` needs for a teacher of random weights, which recalls nothing."""
    source = save_source(tmp_path / "random", max_position_embeddings=256)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * 7 % 90 + 3}" for i in range(2000)))
    overrides = ["mixers.sliding.window=8"]
    return {"source": source, "text": tmp_path / "text.txt", "length": 128, "overrides": overrides}


def test_a_teacher_without_recall_is_told_so(random_teacher, tmp_path):
    report = choose(tmp_path / "out", **random_teacher)
    assert report.recall.startswith("none: the teacher answers 0% of needles, ")
    assert "Text alone decides" in report.recall


def test_without_recall_a_cpu_without_time_is_greedy(random_teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(choice_cost, "CPU_FLOPS", 0)
    report = choose(tmp_path / "out", **{**random_teacher, "length": None, "device": "cpu"})
    assert report.chosen.method == "greedy"
    assert report.conditions["light"]


def test_without_recall_no_heads_are_ranked(random_teacher, tmp_path):
    asked = {"recipe_version": 1, "model": str(random_teacher["source"]), "export": {"dir": str(tmp_path / "x")}}
    asked["mixers"] = {"sliding": {"window": 8}}
    asked = recipe_from_dict({**asked, "layers": {"select": {"keep": 1, "by": "heads"}}})
    with pytest.raises(UsageError, match="heads are ranked by recall, and the teacher recalls nothing"):
        choose(tmp_path / "out", **{**random_teacher, "source": asked, "keep": None, "overrides": None})


@pytest.fixture
def bars(monkeypatch):
    """The bars that were shown; none goes beyond its end."""
    bars = []
    real = Bar.update

    def update(bar, *args, **kwargs):
        real(bar, *args, **kwargs)
        assert bar._done <= bar._total
        if bar not in bars:
            bars.append(bar)

    monkeypatch.setattr(Bar, "update", update)
    return bars


def test_the_bars_end_where_the_work_does(random_teacher, tmp_path, bars):
    """Though a teacher that recalls nothing is asked in every form first."""
    choose(tmp_path / "out", keep=2, **random_teacher)
    assert all(bar._done == bar._total for bar in bars)


@pytest.mark.parametrize("by", ["layers", "heads"])
def test_as_many_passes_are_counted_as_told(tmp_path, bars, by):
    data = {"recipe_version": 1, "model": str(TEACHER), "export": {"dir": str(tmp_path / "out")}}
    data["mixers"] = {"sliding": {"window": 32}}
    asked = recipe_from_dict({**data, "layers": {"select": {"keep": 1, "by": by}}})
    told = api.plan(asked).choice.passes
    choose(tmp_path / "chosen", keep=None, source=asked, overrides=None)
    assert [(bar._description, bar._done) for bar in bars[1:]] == [(f"choosing {by}", told)]


@pytest.fixture
def meter_of(recipe, probe, tmp_path):
    """A meter of the demo's teacher, as if it answered only the named kinds."""

    class Answers(Meter):
        def measure(self, kept):
            found = super().measure(kept)
            return dc.replace(found, recall_accuracy=float(self.recall in kinds))

    def load():
        model = load_model(TEACHER, dtype=torch.float32, device="cpu")
        return Swap(model, recipe.mixers["sliding"])

    kinds = []

    def make(*answered):
        kinds[:] = answered
        return Answers(load, probe, range(6), tmp_path / "m.csv")

    return make


def test_copies_stand_in_for_needles(meter_of):
    meter = meter_of("copy")
    why, nothing = settle_recall(meter)
    assert why.startswith("copies of random tokens: the teacher answers 0% of needles, ")
    assert nothing.probe == "copy"
    assert setup.METHODS["greedy"](meter, 1).kept == (RETRIEVES,)


def test_a_form_that_is_hardly_answered_decides_where_it_suffers_most(meter_of):
    """Each wording of a teacher of its own kind: recall decides by the likelihood of answers."""
    meter = meter_of()
    why, nothing = settle_recall(meter)
    assert why.startswith("needles, answered at 0.0")
    assert (nothing.probe, meter.recall_weight) == ("needle", 1.0)
    assert setup.METHODS["greedy"](meter, 1).kept == (RETRIEVES,)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"keep": 6}, UsageError, "keep is 6"),
        ({"keep": 0}, UsageError, "keep is 0"),
        ({"length": 10**6}, UsageError, "length is 1000000"),
        ({"tokens": 100}, UsageError, "tokens is 100"),
        ({"samples": 0}, UsageError, "samples is 0"),
        ({"text": None}, DataError, "no text to choose layers by"),
        ({"keep": None}, UsageError, "how many layers stay softmax attention is not said"),
        ({"length": 63}, UsageError, "length is 63"),
        ({"text": "nowhere.txt"}, DataError, "nowhere.txt does not exist"),
        ({"overrides": ["mixers.sliding.windw=3"]}, RecipeError, "did you mean 'window'"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(tmp_path, monkeypatch, changes, error, match):
    monkeypatch.setattr(setup, "load_model", None)
    with pytest.raises(error, match=match):
        choose(tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_rows_below_the_shortest_are_told_the_shortest(tmp_path):
    with pytest.raises(UsageError, match="length is 63") as caught:
        choose(tmp_path / "out", length=63)
    assert caught.value.fix == "give --length 64"


def test_a_foreign_folder_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "load_model", None)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        choose(tmp_path)


def test_command_with_a_recipe(tmp_path, capsys):
    recipe = {
        "recipe_version": 1,
        "model": str(TEACHER),
        "layers": {"pattern": ["narrow", "full"]},
        "mixers": {"narrow": {"kind": "sliding", "window": 32}},
        "data": {"valid": [{"path": str(TEXT)}]},
        "export": {"dir": "out/x"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["select", str(tmp_path / "recipe.yaml"), "--keep", "1", "-o", str(tmp_path / "out"), "--json"]
    arguments += ["--length", "256", "--tokens", "256", "--samples", "3"]
    assert run_app(app, arguments) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["choices"][0]["kept"] == [RETRIEVES]
    assert result["layers"] == {"pattern": ["narrow"], "keep": [RETRIEVES]}


def test_a_second_selection_into_a_folder_is_refused_by_name(tmp_path):
    with run_lock(tmp_path), pytest.raises(TrainingError, match="another run writes to it: process"):
        choose(tmp_path)


def test_layers_of_linear_attention_are_refused_by_name(tmp_path):
    source = save_source(tmp_path / "hybrid", "qwen3_next")
    with pytest.raises(CheckpointError, match="has softmax attention in 3 of 4 layers"):
        choose(tmp_path / "out", source=source, overrides=[])
