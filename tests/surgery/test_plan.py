import json
import time

import pytest
from transformers import Gemma4TextConfig

from sse_convert.checkpoints import open as opening
from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.meta_model import skeleton
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import RecipeError
from sse_convert.recipe import recipe_from_dict
from sse_convert.report import format_bytes, time_in_words
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from sse_convert.surgery.speed import training_flops
from tests.model_configs import model_config
from tests.surgery import models, synthetic

QWEN3 = model_config("qwen3-0.6b")
STAGE = {"name": "s", "loss": "ce", "tokens": 1_000_000, "seq_len": 4096, "lr": 1e-4, "batch_tokens": 65536}


def plan_of(config, **changes):
    data = {"data": {"train": [{"path": "some/dataset"}]}, "calibrate": {"enabled": False}, **changes}
    return make_plan(
        Job.of(recipe_from_dict(models.recipe_data("m", **data)), lambda *_: synthetic.teacher_from_config(config, "m"))
    )


def test_405_billion_parameters(tmp_path):
    """By the headers of 191 sparse shards: under 3 s, and nothing but shapes is made."""
    config = model_config("llama-3.1-405b")
    source = synthetic.checkpoint(tmp_path / "teacher", config, shards=191)
    recipe = models.recipe(
        source,
        layers={"pattern": ["sse+sliding*3", "full"], "keep": [0, -1]},
        mixers={},
        stages=[STAGE],
        data={"train": [{"path": "x"}]},
        calibrate={"enabled": False},
    )
    start = time.process_time()
    plan = make_plan(Job.of(recipe, open_for_planning))
    assert time.process_time() - start < 3
    assert plan.parameters == 405_853_388_800
    assert len(plan.layers) == 126
    assert all(parameter.is_meta for parameter in skeleton(open_teacher(source).config).parameters())


@pytest.fixture(scope="module")
def qwen3():
    layers = {"pattern": ["sse", "sliding", "full"], "keep": [-1]}
    mixers = {"sse": {"kind": "sse"}, "sliding": {"kind": "sliding"}}
    return plan_of(QWEN3, layers=layers, mixers=mixers, stages=[STAGE])


def test_qwen3(qwen3):
    """The published 596 million parameters, and the cache of 28 layers of 8 heads of 128 in bfloat16."""
    assert qwen3.parameters == 596_049_920
    assert qwen3.layer_names[:4] == ["sse", "sliding", "full", "sse"]
    assert qwen3.layer_names[-1] == "full"
    assert [row.teacher_bytes for row in qwen3.cache] == [28 * 2 * 8 * 128 * 2 * n for n in (40960, 10240, 2560)]
    assert qwen3.layers[0].constant_bytes == 5 * 8 * 128 * 128 * 4
    assert qwen3.layers[1].constant_bytes == 2 * 8 * 128 * (127 + 4) * 2
    assert (qwen3.layers[2].bytes_per_token, qwen3.layers[2].constant_bytes) == (2 * 8 * 128 * 2, 0)
    assert qwen3.added_parameters == sum(row.added_parameters for row in qwen3.layers)
    assert qwen3.new_shard_bytes == 2 * qwen3.added_parameters


def test_plan_as_text_and_as_data(qwen3):
    lines = qwen3.lines()
    assert lines[0] == "m: qwen3, 28 layers, 596M parameters"
    assert "becomes 9 sse, 9 sliding, 10 full" in lines[1]
    assert any(line.startswith("no larger than the teacher's from") for line in lines)
    assert any(line.split()[:4] == ["s", "ce", "1M", "16"] for line in lines)
    data = json.loads(json.dumps(qwen3.to_dict()))
    assert data["mixers"]["sliding"] == {"kind": "sliding", "window": 128, "sinks": 4}
    assert data["stages"][0]["longest"].keys() == {"24", "48", "80", "141"}


def short(**settings):
    """A plan of Qwen3's shape at 4K positions, whose layers all get `sse+sliding` with these settings, or as it is."""
    config = {**QWEN3, "max_position_embeddings": 4096}
    return plan_of(config, layers={"pattern": ["sse+sliding"]}, mixers={"sse+sliding": settings} if settings else {})


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({"num_partitions": 60, "state_heads": "query"}, "fewer num_partitions, state_heads: kv, "),
        ({"num_partitions": 60}, "fewer num_partitions, "),
        ({"window": 4096, "num_partitions": 1}, ""),
    ],
)
def test_a_cache_larger_than_the_teachers_is_warned_of(settings, ways):
    plan = short(**settings)
    own = plan.cache[0]
    sizes = f"{format_bytes(own.hybrid_bytes)} for {format_bytes(own.teacher_bytes)}"
    assert plan.warnings == [
        "the cache of 4K tokens, the whole context, is larger than the teacher's: "
        f"{sizes}; smaller with {ways}fewer converted layers"
    ]
    assert f"warning: {plan.warnings[0]}" in plan.lines()
    assert plan.to_dict()["warnings"] == plan.warnings


def test_one_state_is_no_larger():
    plan = short()
    assert plan.warnings == plan.to_dict()["warnings"] == []
    assert not any(line.startswith("warning") for line in plan.lines())


def test_layers_to_be_chosen():
    """Costs of any choice of as many, and what choosing takes."""
    stages = [{**STAGE, "seq_len": 2048}]
    chooses = plan_of(QWEN3, layers={"select": {"keep": "25%"}}, mixers={}, stages=stages)
    fixed = plan_of(QWEN3, layers={"pattern": ["sse+sliding*3", "full"]}, mixers={}, stages=stages)
    assert (chooses.cache, chooses.stages, chooses.added_parameters) == (
        fixed.cache,
        fixed.stages,
        fixed.added_parameters,
    )
    choice = chooses.choice
    assert (choice.keep, choice.among, choice.passes, choice.tokens) == (
        7,
        list(range(28)),
        2 + 28 + 27 + 26 + 25 + 24 + 23 + 22,
        40960,
    )
    assert choice.flops == pytest.approx(choice.passes * 40960 * 2 * 596_049_920, rel=0.3)
    assert choice.bytes == 2 * 596_049_920
    lines = chooses.lines()
    assert lines[2].startswith(
        "to be chosen: 7 of 28 softmax layers stay; at most 177 forward passes over 40,960 tokens, "
    )
    assert f" FLOPs ({time_in_words(choice.gpu_hours)} on one GPU), with " in lines[2]
    assert [line.split()[0] for line in lines[6:8]] == ["21", "7"]
    assert fixed.choice is None
    assert json.loads(json.dumps(chooses.to_dict()))["choice"]["keep"] == 7


def test_of_experts_a_token_meets_a_few():
    """128 experts, 8 for each token: the published 30.5 billion parameters, 3.3 billion of them active."""
    config = model_config("qwen3-30b-a3b")
    plan = plan_of(config, layers={"pattern": ["sse", "full"]}, mixers={"sse": {"kind": "sse"}})
    idle = 48 * 120 * 3 * 2048 * 768
    assert (plan.parameters, plan.active_parameters) == (30_532_122_624, 30_532_122_624 - idle)
    assert plan.active_bytes == 2 * (plan.active_parameters - 151936 * 2048)
    assert plan.lines()[0] == "m: qwen3_moe, 48 layers, 30.5B parameters, 3.35B of them active (6.08 GB read per token)"
    attention = 4 * 32 * 128 * 1280.5
    flops = 2 * (plan.active_parameters - 151936 * 2048) + 48 * attention
    assert plan.cache[-1].teacher_flops == pytest.approx(flops)


def test_stage_flops(qwen3):
    """A teacher of P parameters without its context: 6 P per token for full training, 2 P more with its forward."""
    from sse_convert.surgery.geometry import geometry_of

    geometry = geometry_of(synthetic.teacher_from_config(QWEN3, "m"))
    plain = [None] * 28
    stage = recipe_from_dict(
        models.recipe_data("m", stages=[{**STAGE, "seq_len": 1}], data={"train": [{"path": "x"}]})
    ).stages[0]
    assert training_flops(stage, geometry, plain) == pytest.approx(6 * 596_049_920, rel=1e-3)
    assert qwen3.stages[0].flops > 1_000_000 * 6 * 596_049_920


def test_native_windows_are_counted():
    config = {
        **synthetic.LLAMA,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 100,
    }
    plan = plan_of(config, layers={"pattern": ["sse", "sliding", "full"]})
    assert plan.layers[2].source == "sliding 100"
    assert plan.layers[2].constant_bytes == 2 * 2 * 8 * 99 * 2
    assert plan.cache[0].teacher_bytes == 3 * 2 * 2 * 8 * 99 * 2


def test_what_no_layer_uses_or_is_not_here_is_said(tmp_path):
    text = tmp_path / "here.txt"
    text.write_text("a")
    plan = plan_of(
        synthetic.LLAMA,
        layers={"pattern": ["sse*2", "full"]},
        mixers={"sse": {"num_partitions": 4}, "sse+sliding": {"window": 64}},
        data={"train": [{"path": str(text)}, {"path": "nope.txt"}], "valid": [{"path": "nope.txt"}]},
    )
    assert plan.notes[:2] == [
        "mixers.sse+sliding is the mixer of no layer",
        "nope.txt does not exist here: `run` needs it",
    ]
    assert "does not exist" not in str(plan.notes[2:])


def test_notes():
    config = {
        **synthetic.LLAMA,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 100,
    }
    plan = plan_of(
        config, mixers={"sliding": {"kind": "sliding", "window": 200}}, layers={"pattern": ["sliding", "sse", "full"]}
    )
    assert plan.notes == [
        "layer 0: window 200 is wider than the teacher's own 100",
        "no training stages: the new layers keep their initial values",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": {"pattern": ["sse"], "keep": [3]}}, "layers.keep: 3 is out of range, the model has 3 layers"),
        ({"layers": {"pattern": ["sse"], "overrides": {"-4": "full"}}}, "layers.overrides: -4 is out of range"),
        ({"layers": {"pattern": ["sse"], "keep": ["0--1"]}}, "so nothing is converted"),
        (
            {"mixers": {"sliding": {"kind": "sliding", "window": 513}}},
            "mixers.sliding.window is 513, the model has 512",
        ),
        ({"stages": [{**STAGE, "seq_len": 1024}]}, "stages.0.seq_len is 1024, beyond the 512 positions of the teacher"),
        (
            {"stages": [{**STAGE, "loss": "ce", "seq_len": 1024}]},
            r"stages.0.seq_len is 1024, beyond the 512 positions of the teacher \(stages.0.rope stretches them\)",
        ),
        (
            {"stages": [{**STAGE, "loss": "ce", "seq_len": 2048, "rope": {"factor": 2.0}}]},
            "stages.0.seq_len is 2048, beyond the 1024 positions of the model with this rope",
        ),
        (
            {
                "stages": [{**STAGE, "loss": "ce", "seq_len": 1024, "rope": {"rope_theta": 1e6}}],
                "eval": {"lengths": [1024, 1025]},
            },
            "eval.lengths is 1025, beyond the 1024 positions of the model with its stages' rope",
        ),
        ({"calibrate": {"seq_len": 1024}}, "calibrate.seq_len is 1024, beyond the 512 positions"),
        ({"eval": {"lengths": [256, 600]}}, "eval.lengths is 600, beyond"),
        ({"eval": {"needle": {"lengths": [4096]}}}, "eval.needle.lengths is 4096, beyond"),
        ({"eval": {"throughput": [4096]}}, "eval.throughput is 4096, beyond"),
    ],
)
def test_recipes_that_do_not_fit(changes, message):
    base = {"mixers": {"sse": {"kind": "sse", "qk_rank": 4}}, "layers": {"pattern": ["sse", "sliding", "full"]}}
    with pytest.raises(RecipeError, match=message) as error:
        plan_of(synthetic.LLAMA, **{**base, **changes})
    assert error.value.fix


def test_calibration_is_short():
    with pytest.raises(RecipeError, match=r"calibrate\.seq_len is 8192, at most 4096: attention is held whole"):
        plan_of({**synthetic.LLAMA, "max_position_embeddings": 16384}, calibrate={"seq_len": 8192})


def test_all_problems_at_once():
    wrong = {"mixers": {"sliding": {"kind": "sliding", "window": 513}}, "stages": [{**STAGE, "seq_len": 1024}]}
    with pytest.raises(RecipeError) as error:
        plan_of(synthetic.LLAMA, **wrong, layers={"pattern": ["sse", "sliding"]}, eval={"lengths": [600]})
    assert len(error.value.what.splitlines()) == 3


def test_planning_reads_headers_alone(tmp_path, capsys, monkeypatch):
    """70 billion parameters as sparse files: no data is read, nothing is downloaded."""
    config = {**synthetic.LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    config |= {"num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 8192}
    folder = synthetic.checkpoint(tmp_path / "big", config, shards=30)
    monkeypatch.setattr(opening, "download", lambda *_: pytest.fail("planning must not download"))
    assert run_app(app, ["plan", str(models.recipe_file(tmp_path / "r.yaml", folder)), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["parameters"] == 70_553_706_496
    assert len(result["layers"]) == 80


@pytest.mark.parametrize(("seq_len", "idle"), [(132, True), (133, False)])
def test_rows_that_a_window_covers_whole_are_noted(seq_len, idle):
    stage = {**STAGE, "loss": "kl", "seq_len": seq_len, "batch_tokens": 4 * seq_len}
    plan = plan_of(synthetic.LLAMA, layers={"pattern": ["sse+sliding", "sliding", "full"]}, stages=[stage])
    notes = [note for note in plan.notes if "SSE beside such a window learns nothing" in note]
    assert len(notes) == idle
    assert all(note.startswith("stage s: rows of 132 tokens lie within") and "(132 tokens" in note for note in notes)
    alone = plan_of(synthetic.LLAMA, layers={"pattern": ["sliding", "sse", "full"]}, mixers={}, stages=[stage])
    assert not any("learns nothing" in note for note in alone.notes)


@pytest.mark.parametrize(
    ("family", "rope", "message"),
    [
        ("gpt2", {"rope_theta": 1e6}, "stages.0.rope: stage s: gpt2 has no rotary embedding that `rope` could change"),
        ("phi3", {"factor": 2.0}, "stages.0.rope: stage s: phi3 refuses this rope"),
    ],
)
def test_rope_that_a_family_cannot_have(tmp_path, family, rope, message):
    stage = {**STAGE, "seq_len": 64, "batch_tokens": 64, "rope": rope}
    data = models.recipe_data(
        models.save_source(tmp_path, family),
        stages=[stage],
        data={"train": [{"path": "x"}]},
        layers={"pattern": ["sse"]},
    )
    with pytest.raises(RecipeError, match=message):
        make_plan(Job.of(recipe_from_dict(data), open_for_planning))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", "is not built for bounded attention scores"),
        ("qwen3_next", "is not built for layers that have linear attention of their own"),
    ],
)
def test_rows_cannot_be_split_over_processes_in_every_family(tmp_path, family, message):
    source = models.save_source(tmp_path / family, family)
    stage = {**STAGE, "seq_len": 64, "batch_tokens": 64, "context_parallel": 2}
    asked = models.recipe(source, stages=[stage], layers={"pattern": ["sse", "full"]}, data={"train": [{"path": "x"}]})
    with pytest.raises(RecipeError, match=message):
        make_plan(Job.of(asked, open_for_planning))


def test_layers_of_other_sizes_than_the_first():
    """States, caches and new parameters follow each layer's own heads; heads that kernels do not take get a note."""
    config = Gemma4TextConfig(
        num_hidden_layers=3, layer_types=["sliding_attention"] + ["full_attention"] * 2, attention_k_eq_v=True,
        num_global_key_value_heads=2, dtype="bfloat16",
    )  # fmt: skip
    mixers = {"sse": {"kind": "sse"}}
    made = plan_of(config.to_dict(), mixers=mixers, layers={"pattern": ["sse", "sse", "full"]})
    narrow, wide, kept = made.layers
    assert narrow.constant_bytes == 5 * 4 * 256 * 256 * 4  # partitions, heads, D, V
    assert wide.constant_bytes == 5 * 2 * 512 * 512 * 4
    assert narrow.added_parameters != wide.added_parameters
    assert kept.bytes_per_token == 2 * 2 * 512 * 2
    assert any(note.startswith("layers 1: heads are 512 wide") for note in made.notes)
