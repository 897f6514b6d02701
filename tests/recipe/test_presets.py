"""Every packaged recipe loads, and plans against the published configuration of its model, without a download."""

import json

import pytest

from sse_convert import api
from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.errors import OutputError, RecipeError
from sse_convert.mixers import SSEMixer
from sse_convert.recipe import load_recipe, resolve
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.choosing import draft_recipe
from sse_convert.recipe.pattern import pattern_unit
from sse_convert.recipe.presets import copy_preset, preset_names, preset_path, preset_summary, preset_text
from tests.model_configs import CONFIGS, config_path, model_config
from tests.surgery.synthetic import saved_layout, write_zeros
from tools.packaged_recipes import MODELS, packaged_text

LARGEST = "llama-3.1-405b"
"""planned for its size; no recipe is"""
LOCAL = ("teacher-qwen3-32m",)
"""a recipe for a checkpoint in ../shared"""
HEADS = ("smollm2-135m-heads",)
"""recipes that keep heads, on the model of another recipe"""
SCRATCH = ("paper-600m",)
"""recipes that train from random weights: no teacher, and no layer need stay"""
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
}
"""published parameter counts, tied embeddings counted once"""


@pytest.fixture
def model(tmp_path):
    """Makes a checkpoint folder from a fixture: the real config and headers, weights that take no disk space."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        text = config_path(name).read_text()
        (folder / "config.json").write_text(text)
        write_zeros(folder / "model.safetensors", saved_layout(json.loads(text)))
        return folder

    return make


@pytest.mark.parametrize("name", preset_names())
def test_it_loads_and_can_run(name):
    recipe = load_recipe(name)
    assert list(check_run(recipe)) == []
    assert preset_summary(name).endswith((".", ":", "`model`."))
    assert "sse-convert run" in preset_text(name) or "sse_convert run" in preset_text(name)
    if name in SCRATCH:
        assert {stage.loss for stage in recipe.stages} == {"ce"}
        assert not recipe.calibrate.enabled
        return
    assert len(recipe.stages) >= 2
    assert recipe.stages[0].loss == ("kl" if "sse+sliding" in pattern_unit(recipe.layers) else "layer_mse")


def test_every_recipe_has_a_config_and_every_config_a_recipe():
    assert {path.stem for path in CONFIGS.glob("*.json")} - {LARGEST} == set(preset_names()) - {*LOCAL, *HEADS}


@pytest.mark.parametrize("name", sorted(set(preset_names()) - set(LOCAL)))
def test_it_plans(name, model):
    folder = model(name.removesuffix("-heads"))
    config = json.loads((folder / "config.json").read_text())
    plan = api.plan(name, overrides=[f"model={folder}"])
    recipe = draft_recipe(load_recipe(name), config["num_hidden_layers"], open_for_planning(folder).separable_heads)
    assert [row.mixer for row in plan.layers] == resolve(recipe, config["num_hidden_layers"])[0]
    names = [row.mixer for row in plan.layers if row.source == "full"]
    assert any(mixer == "full" or "@" in mixer for mixer in names) == (name not in SCRATCH)
    assert names.count("full") < len(names) / 2
    assert plan.cache[0].hybrid_bytes < plan.cache[0].teacher_bytes / 2
    assert json.dumps(plan.to_dict(), allow_nan=False)
    assert plan.lines()
    if name in PARAMETERS:
        assert plan.parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_the_rule_writes(name):
    """Else run `python -m tools.packaged_recipes`."""
    assert preset_text(name) == packaged_text(name)


def test_every_recipe_of_a_hub_model_chooses_what_stays():
    assert set(preset_names()) - set(MODELS) - set(LOCAL) == {"paper-2b", "paper-12b", *SCRATCH, *HEADS}
    kept = {name: (select.keep, select.by) for name in MODELS if (select := load_recipe(name).layers.select)}
    assert kept == dict.fromkeys(MODELS, ("10%", "heads")) | {"gpt-oss-20b": ("25%", "layers")}  # it has learned sinks


@pytest.mark.shared
@pytest.mark.parametrize("name", LOCAL)
def test_local_ones_plan(name, monkeypatch):
    root = preset_path(name).parent.parent
    if not (root / load_recipe(name).model).is_dir():
        pytest.skip("needs the checkpoints in ../shared")
    monkeypatch.chdir(root)
    assert api.plan(name).layers


@pytest.mark.parametrize(("name", "kept"), [("paper-2b", [5, 11, 17]), ("paper-12b", list(range(4, 40, 5)))])
def test_the_papers_layouts(name, kept):
    layers = model_config(name)["num_hidden_layers"]
    names, mixers = resolve(load_recipe(name), layers)
    assert [i for i, mixer in enumerate(names) if mixer == "full"] == kept
    assert mixers["paper"] == SSEMixer(kind="paper")


@pytest.mark.parametrize("name", ["paper-2b", "paper-12b"])
def test_the_papers_recipes_plan_on_8_gpus_by_config_alone(tmp_path, name):
    (tmp_path / "config.json").write_text(config_path(name).read_text())
    plan = api.plan(name, overrides=[f"model={tmp_path}"])
    assert plan.costs.way(8, 80) is not None
    assert any("holds no weights" in note for note in plan.notes)
    if name == "paper-2b":
        assert plan.stages[-1].seq_len == 128 * 1024
        assert plan.costs.way(1, 141).how == "as it is"


def test_the_papers_600m_trains_from_random_weights(tmp_path):
    """Its parameters are those of the paper's table, half of them embeddings, and a small GPU is enough."""
    (tmp_path / "config.json").write_text(config_path("paper-600m").read_text())
    plan = api.plan("paper-600m", overrides=[f"model={tmp_path}"])
    assert [row.mixer for row in plan.layers] == ["paper"] * 24
    assert plan.parameters == pytest.approx(600e6, rel=0.03)
    assert plan.parameters - 2 * 151936 * 1024 == pytest.approx(300e6, rel=0.02)
    assert plan.costs.way(1, 24).how == "as it is"


def test_the_papers_2b_converts_at_128k(tmp_path, model):
    """At full width and depth, from sparse files: 15 of 18 layers become the paper's; its positions hold the rows."""
    told = [f"model={model('paper-2b')}"]
    report = api.convert("paper-2b", tmp_path / "out", link="hard", defer_digests=True, overrides=told)
    assert (report.layers.count("paper"), report.layers.count("full")) == (15, 3)
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 128 * 1024
    assert max(stage.seq_len for stage in load_recipe("paper-2b").stages) == 128 * 1024


def test_names_with_or_without_suffix():
    assert preset_path("qwen3-4b") == preset_path("qwen3-4b.yaml")
    with pytest.raises(RecipeError, match=r"recipe 'qwen3-4' does not exist") as caught:
        preset_path("qwen3-4")
    assert caught.value.fix == "did you mean qwen3-4b?"


@pytest.mark.parametrize("given", ["folder", "configuration", "hub id"])
def test_a_model_in_the_place_of_a_recipe(given, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    named = {"folder": tmp_path, "configuration": tmp_path / "config.json", "hub id": "Qwen/Qwen3-4B"}[given]
    with pytest.raises(RecipeError) as caught:
        load_recipe(named)
    model = named if given == "hub id" else tmp_path
    assert caught.value.fix.endswith(f"write a recipe for it: sse-convert recipes new {model}")


def test_copying(tmp_path):
    written = copy_preset("qwen3-4b", tmp_path / "mine.yaml")
    assert written.read_text() == preset_text("qwen3-4b")
    with pytest.raises(OutputError, match="exists"):
        copy_preset("qwen3-4b", written)
    with pytest.raises(OutputError, match="cannot be written"):
        copy_preset("qwen3-4b", written / "mine.yaml")
