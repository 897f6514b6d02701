"""The whole way through the real command line on a tiny checkpoint: step by step, and as one `run`."""

import io
import json

import pytest
import yaml

from sse_convert import api, pipeline
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from tests.recipe.recipes import entries
from tests.surgery.models import MIXERS, recipe_data, save_source

STAGE = {"tokens": 128, "seq_len": 32, "batch_tokens": 64, "micro_batch": 2, "lr": 0.001}
LAYERS = ["sse", "sliding", "sse+sliding@1", "full"]
STAGES = [
    {"name": "align", "loss": "layer_mse", **STAGE},
    {"name": "distill", "loss": "kl", **STAGE},
    {"name": "uptrain", "loss": "ce", **STAGE},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny teacher, text, and a recipe."""
    folder = tmp_path_factory.mktemp("pipeline")
    save_source(folder / "teacher")
    (folder / "text.txt").write_text(" ".join(f"w{(i * i) % 90 + 3}" for i in range(4000)))
    recipe = recipe_data(
        folder / "teacher",
        layers={"pattern": ["sse", "sliding", "sse+sliding", "full"], "overrides": {2: {"full_heads": [1]}}},
        mixers={**MIXERS, "sse+sliding": {"qk_rank": 4, "window": 4, "sinks": 2}},
        stages=STAGES,
        data={"train": [{"path": str(folder / "text.txt")}], "valid": [{"path": str(folder / "text.txt")}]},
        eval={"lengths": [32], "tokens": 256, "throughput": [32]},
        export={"dir": str(folder / "final")},
    )
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def finished(place):
    """The steps of the recipe, run once for the tests that need its result, in whatever order and process they run."""
    return api.run(place / "r.yaml").steps


@pytest.fixture
def does(capsys):
    """Run a command that must succeed; its JSON result."""

    def run(*arguments):
        capsys.readouterr()
        code = run_app(app, [*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)["result"]

    return run


def test_step_by_step(place, does):
    recipe = place / "r.yaml"
    assert [row["mixer"] for row in does("plan", recipe)["layers"]] == LAYERS
    assert does("convert", recipe, "-o", place / "0")["layers"] == LAYERS
    assert all(check["passed"] for check in does("verify", place / "0")["checks"])
    assert does("inspect", place / "0")
    does("calibrate", recipe, "-c", place / "0", "-o", place / "1")
    for number, stage in enumerate(STAGES, start=1):
        report = does(stage["name"], recipe, "-c", place / str(number), "-o", place / str(number + 1))
        assert report["steps"] == 2
    again = does("uptrain", recipe, "-c", place / "3", "-o", place / "4")
    assert again["already_done"]
    scores = does("eval", recipe, "-c", place / "4", "-o", place / "e.json")
    assert scores == json.loads((place / "e.json").read_text())
    does("export", recipe, "-c", place / "4", "-o", place / "5", "--evaluation", place / "e.json")
    assert "dry_run" in does("push", place / "5", "someone/tiny", "--dry-run")
    assert does("generate", place / "5", "w5 w6 w7", "--max-new-tokens", "4")["new_tokens"] == 4


def test_baseline_mixers_step_by_step(place, does):
    """Plan to generation, with a layer of every kind that writes by the delta rule."""
    unit = {"kind": "sse", "update": "delta", "k_feature_map": "l2", "qk_rank": 4}
    kinds = {
        "gdn": {"kind": "gdn"},
        "mixed": {
            **unit,
            "num_partitions": 3,
            "top_k": 2,
            "gate": {"write": False},
        },
        "delta": {**unit, "decay": "scalar"},
    }
    recipe, folder, layers = place / "baselines.yaml", place / "baselines", [*kinds, "full"]
    data = yaml.safe_load((place / "r.yaml").read_text())
    recipe.write_text(yaml.safe_dump({**data, "layers": {"pattern": layers}, "mixers": entries(kinds)}))
    folder.mkdir()
    heads, matrix, float32 = 2, 8 * 8, 4
    states = [row["constant_bytes"] for row in does("plan", recipe)["layers"]]
    assert states[:3] == [partitions * heads * matrix * float32 for partitions in (1, 4, 5)]
    assert does("convert", recipe, "-o", folder / "0")["layers"] == layers
    assert all(check["passed"] for check in does("verify", folder / "0", "--teacher", place / "teacher")["checks"])
    assert does("inspect", folder / "0")["mixers"].keys() == kinds.keys()
    calibrated = does("calibrate", recipe, "-c", folder / "0", "-o", folder / "1")["layers"]
    assert all(layer["half_life"] and layer["output_scale"] for layer in calibrated)
    for number, stage in enumerate(STAGES[:2], start=1):
        assert does(stage["name"], recipe, "-c", folder / str(number), "-o", folder / str(number + 1))["steps"] == 2
    does("export", recipe, "-c", folder / "3", "-o", folder / "4")
    new_tokens = does("generate", folder / "4", "w5 w6 w7", "--max-new-tokens", "4")["new_tokens"]
    assert 1 <= new_tokens <= 4  # two of the 97 tokens end a text


def test_run_and_run_again(finished, place, does, capsys):
    assert [step["name"] for step in finished] == [
        "convert",
        "calibrate",
        "align",
        "distill",
        "uptrain",
        "eval",
        "export",
    ]
    assert not any(step["already_done"] for step in finished)
    assert all(step["already_done"] for step in does("run", place / "r.yaml")["steps"])
    does("generate", place / "final", "w5 w6 w7", "--max-new-tokens", "4")

    changed = ["run", str(place / "r.yaml"), "--set", "stages.align.lr=2.0e-3"]
    capsys.readouterr()
    assert run_app(app, changed) == 9
    assert "stage.lr was 0.001" in capsys.readouterr().err
    assert run_app(app, ["run", str(place / "r.yaml"), "--no-resume"]) == 8


def test_run_wants_the_text_that_later_steps_need(place, capsys):
    assert run_app(app, ["run", str(place / "r.yaml"), "--set", "stages=[]", "--set", "data={}"]) == 3
    err = capsys.readouterr().err
    assert "data.train: calibrate needs text" in err
    assert "data.valid: eval needs held-out text" in err


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"data.valid": "[{path: short.txt}]"}, "the held-out text is shorter than one row of 32 tokens"),
        ({"data.needles": "{share: 0.5, words: words.json}"}, "needle words words.json are not JSON"),
        ({"data.needles": "{share: 0.5, words: absent.json}"}, "needle words absent.json cannot be read"),
        ({"data.train": "[{path: table.csv}]"}, "table.csv is a .csv file, not running text"),
    ],
)
def test_text_is_checked_before_the_first_step(place, tmp_path, monkeypatch, capsys, changes, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("w3 w4 w5")
    (tmp_path / "words.json").write_text("[")
    (tmp_path / "table.csv").write_text("text\nw3 w4\n" * 100)
    options = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    assert run_app(app, ["run", str(place / "r.yaml"), *options, "--set", "export.dir=out"]) == 7
    assert what in capsys.readouterr().err
    assert not list(tmp_path.glob("out.stages/*"))


def test_a_folder_that_no_run_made_is_never_removed(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "out.stages" / "00-convert"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("mine")
    assert run_app(app, ["run", str(place / "r.yaml"), "--set", "export.dir=out"]) == 8
    assert "thesis.txt was not made by one" in capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("name", [".evaluation.png.5559.tmp", ".model.x1_y.partial"])
def test_what_a_kill_left_half_written_is_not_taken_for_the_users(tmp_path, name):
    (tmp_path / "01-eval").mkdir()
    (tmp_path / "01-eval" / name).touch()
    pipeline._remove_step(tmp_path / "01-eval")
    assert not (tmp_path / "01-eval").exists()


@pytest.mark.usefixtures("finished")
def test_chat_reads_lines(place, does, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\nw7\n"))
    assert does("chat", place / "final", "--max-new-tokens", "3")["turns"] == 2
