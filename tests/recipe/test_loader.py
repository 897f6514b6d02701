import dataclasses as dc
import json

import pytest

from sse_convert.errors import RecipeError
from sse_convert.mixers import BUILT_IN, SlidingMixer
from sse_convert.recipe import Recipe, load_recipe, recipe_from_dict, recipe_hash
from sse_convert.recipe.build import build
from sse_convert.recipe.checks import check_run
from sse_convert.recipe.loader import recipe_or_model
from sse_convert.recipe.schema import LearningRates, Rope
from tests.recipe.recipes import small, write

BAD = """\
recipe_version: 1
modle: some/model
layers:
  patern: [sse]
mixers:
  sse: {num_partitions: 4, top_k: 9}
  both: {kind: sse+sliding, window: 0, sinks: -1}
  local: {window: 64}
  full: {}
stages:
  - {name: align, loss: layer_mse, tokens: 100M, seq_len: 512, lr: 1e-3}
  - {name: distill, loss: klx, tokens: 1e6, seq_len: 4K, lr: {mixers: 1.0e-4, rests: 1.0e-5}}
train: {mixed_precision: no, cuda_graphs: 1}
export: {dir: 3}
"""


def problems_of(path, overrides=None):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 3
    return caught.value.problems


def test_all_problems_at_once_in_order_with_lines(tmp_path):
    path = write(tmp_path, BAD)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert (
        str(caught.value)
        == f"""\
{path}: 15 problems in the recipe
  model: required key is missing
  data.train: training stages need a source of text, for example [{{path: texts/}}]
  line 2: modle: unknown key; did you mean 'model'?
  line 4: layers.patern: unknown key; did you mean 'pattern'?
  line 6: mixers.sse: top_k is 9, expected 1 to num_partitions (4)
  line 7: mixers.both: window is 0, expected at least 1
  line 7: mixers.both: sinks is -1, expected 0 or more
  line 8: mixers.local.kind: required, because 'local' is not one of sse, sse+sliding, sliding, paper, gla, gdn
  line 9: mixers.full: 'full' is the untouched layer and has no settings; choose another name
  line 11: stages.0.lr: expected a number, got text '1e-3' (YAML reads 1e-3 as text; write 1.0e-3)
  line 12: stages.1.loss: expected one of layer_mse, kl, ce, got text 'klx'; did you mean 'kl'?
  line 12: stages.1.tokens: expected a whole number such as 4096, 4K or 100M, got text '1e6' \
(YAML reads 1e6 as text; write the number out, or use K, M or B)
  line 12: stages.1.lr.rests: unknown key; did you mean 'rest'?
  line 13: train.cuda_graphs: expected auto or true or false, got number 1
  line 14: export.dir: expected text, got number 3; put it in quotes
fix: `sse-convert recipes schema` describes every key, `sse-convert recipes show NAME` prints a working recipe"""
    )
    assert len(caught.value.to_dict()["problems"]) == 15


def test_a_good_recipe(tmp_path):
    recipe = load_recipe(write(tmp_path, small()))
    assert isinstance(recipe, Recipe)
    assert recipe.mixers == {"sse": dc.replace(BUILT_IN["sse"], num_partitions=4, top_k=1)}
    assert recipe.stages[1].lr == LearningRates(mixers=0.001, rest=0.0001)
    assert recipe.export.dtype == "keep"


def test_layer_mse_trains_mixers_and_batches_are_whole_rows(tmp_path):
    stage = {"name": "a", "loss": "layer_mse", "tokens": "1M", "seq_len": 3000, "micro_batch": 4, "lr": 0.001}
    stages = load_recipe(
        write(tmp_path, small(stages=[stage, {**stage, "name": "b", "seq_len": "128K", "micro_batch": 1}]))
    ).stages
    assert [stage.train for stage in stages] == ["mixers", "mixers"]
    assert [stage.batch_tokens for stage in stages] == [72000, 131072]


def test_no_is_text_and_true_is_true(tmp_path):
    text = """\
recipe_version: 1
model: m
layers: {pattern: [sse]}
train: {mixed_precision: no}
calibrate: {enabled: true}
export: {dir: out}
"""
    assert load_recipe(write(tmp_path, text)).train.mixed_precision == "no"
    assert problems_of(write(tmp_path, text.replace("true", "yes"))) == [
        "line 5: calibrate.enabled: expected true or false, got text 'yes'"
    ]


def test_mixers_are_told_apart_by_kind_or_name(tmp_path):
    mixers = {
        "wide": {"kind": "sliding", "window": 512},
        "gla": {},
        "sse": None,
        "mine": {"kind": "sse", "update": "gla"},
    }
    mixers |= {"gdn": {"advanced": {"decay": "gla"}}}
    recipe = load_recipe(write(tmp_path, small(mixers=mixers)))
    assert recipe.mixers == {
        "wide": SlidingMixer(window=512),
        "gla": BUILT_IN["gla"],
        "sse": BUILT_IN["sse"],
        "mine": dc.replace(BUILT_IN["sse"], update="gla"),
        "gdn": dc.replace(BUILT_IN["gdn"], decay="gla"),
    }


STAGE = {"name": "s", "loss": "kl", "tokens": 131072, "seq_len": 512, "lr": 0.001}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"recipe_version": 2}, "recipe_version: expected 1, got number 2"),
        ({"recipe_version": True}, "recipe_version: expected 1, got true"),
        ({"model": None}, "model: expected text, got nothing"),
        ({"model": " "}, "model: is empty, expected a hub id or a local folder"),
        ({"layers": {"pattern": "sse"}}, "layers.pattern: expected a list, got text 'sse'"),
        ({"layers": []}, "layers: expected a mapping (key: value), got a list"),
        ({"layers": {"pattern": ["ssee"]}}, "layers.pattern: mixer 'ssee' is not defined; did you mean 'sse'?"),
        (
            {"layers": {"overrides": {3: "sse+slidng"}, "pattern": ["sse"]}},
            "layers.overrides: mixer 'sse+slidng' is not defined; did you mean 'sse+sliding'?",
        ),
        ({"layers": {"pattern": []}}, "layers.pattern: is empty, name at least one"),
        ({"layers": {"pattern": ["full"]}}, "layers: every layer stays 'full', so nothing is converted"),
        ({"layers": {}}, "layers: every layer stays 'full', so nothing is converted"),
        ({"layers": {"pattern": ["sse"], "keep": ["3..5"]}}, "layers.keep.0: '3..5' is neither an index nor a range"),
        ({"layers": {"pattern": ["sse"], "keep": [1.5]}}, "layers.keep.0: expected text, got number 1.5"),
        ({"mixers": {"a b": {"kind": "sse"}}}, "mixers.a b: a mixer name is letters, digits, -, + and _"),
        ({"mixers": {"sse": {"kind": "gla"}}}, "mixers.sse.kind: 'sse' cannot be of kind 'gla'; choose another name"),
        ({"mixers": {"x": {"kind": "sliding", "window": 0}}}, "mixers.x: window is 0, expected at least 1"),
        ({"mixers": {"x": {"kind": "slidng"}}}, "mixers.x.kind: unknown mixer kind 'slidng'; did you mean 'sliding'?"),
        (
            {"mixers": {"sse": {"advanced": {"gate": {"wirte": False}}}}},
            "mixers.sse.advanced.gate.wirte: unknown key; did you mean 'write'?",
        ),
        (
            {"mixers": {"sse": {"advanced": {"decay": "gated"}}}},
            "mixers.sse.advanced.decay: expected one of gla, scalar, got text 'gated'",
        ),
        ({"mixers": {"sse": {"advanced": {"top_k": 2}}}}, "mixers.sse.advanced.top_k: unknown key"),
        ({"mixers": {"sse": {"advanced": [1]}}}, "mixers.sse.advanced: expected a mapping (key: value), got a list"),
        ({"mixers": {"sliding": {"advanced": {"decay": "scalar"}}}}, "mixers.sliding.advanced.decay: unknown key"),
        (
            {"mixers": {"paper": {"qk_rank": 0, "advanced": {"gate": {"write": False}, "shared_partition": False}}}},
            "mixers.paper: a read gate alone on one partition, without shared partition, cancels in the output norm",
        ),
        (
            {"mixers": {"paper": {"advanced": {"gate": {"renormalise": True}}}}},
            "mixers.paper.advanced.gate.renormalise: was retired, layers have false; remove it",
        ),
        (
            {"mixers": {"sse": {"update": "delta", "k_feature_map": "silu"}}},
            "keys have norm 1 or less: use l2 or softmax",
        ),
        ({"mixers": {"gdn": {"top_k": 2}}}, "mixers.gdn: top_k is 2, kind gdn has 1"),
        ({"mixers": {"gla": {"update": "delta"}}}, "mixers.gla: update is delta, kind gla has gla"),
        ({"stages": [STAGE, STAGE]}, "stages.1.name: 's' is already the name of stage 0"),
        ({"stages": [{**STAGE, "name": "a/b"}]}, "stages.0.name: 'a/b': expected letters, digits, - and _"),
        ({"stages": [{**STAGE, "tokens": 100}]}, "stages.0.tokens: 100 is less than one row (seq_len is 512)"),
        (
            {"stages": [{**STAGE, "tokens": 1024}]},
            "stages.0.tokens: 1024 is less than one optimizer step (batch_tokens is 65536)",
        ),
        (
            {"stages": [{**STAGE, "batch_tokens": 5000, "micro_batch": 4}]},
            "stages.0.batch_tokens: 5000 is not a multiple of seq_len * micro_batch (512 * 4); use 4K or 6K",
        ),
        ({"stages": [{**STAGE, "tokens": 0}]}, "stages.0.tokens: 0 is too small, expected 1 or more"),
        ({"stages": [{**STAGE, "lr": 0}]}, "stages.0.lr: 0.0 is too small, expected more than 0"),
        ({"stages": [{**STAGE, "lr": float("nan")}]}, "stages.0.lr: expected a finite number, got nan"),
        ({"stages": [{**STAGE, "lr": {"mixers": -1, "rest": 1}}]}, "stages.0.lr.mixers: -1.0 is too small"),
        (
            {"stages": [{**STAGE, "train": "mixers", "lr": {"mixers": 1, "rest": 1}}]},
            "stages.0.lr.rest: given, but only",
        ),
        ({"stages": [{**STAGE, "lr": {"mixers": 1, "new": 2}}]}, "stages.0.lr.rest: not given, and train: all trains"),
        ({"stages": [{**STAGE, "lr": {"mixers": 1, "new": 0, "rest": 1}}]}, "stages.0.lr.new: 0.0 is too small"),
        ({"stages": [{**STAGE, "warmup": 1}]}, "stages.0.warmup: 1.0 is not a share of the steps"),
        ({"stages": [{**STAGE, "min_lr": 2}]}, "stages.0.min_lr: 2.0 is too large, expected 1 or less"),
        (
            {"stages": [{**STAGE, "loss": "layer_mse", "train": "mixers", "loss_mask": "assistant"}]},
            "stages.0.loss_mask: is for losses kl and ce, this stage's loss is layer_mse",
        ),
        (
            {"stages": [{**STAGE, "loss": "layer_mse", "train": "lora"}]},
            "stages.0.train: 'lora': loss layer_mse trains",
        ),
        (
            {"stages": [{**STAGE, "loss_mask": "assistant"}]},
            "data.train: loss_mask: assistant needs a source",
        ),
        (
            {"stages": [{**STAGE, "needle_keys": [4]}]},
            "stages.0.needle_keys: was retired; data.needles.keys counts",
        ),
        (
            {"data": {"needles": {"share": 0.1, "forms": {"facts": 1.0, "quote": 1.0}}}},
            "data.needles.forms.quote: was retired; facts, numbered, table are left: remove it",
        ),
        ({"data": {}}, "data.train: training stages need a source of text"),
        ({"data": {"train": [{}]}}, "data.train.0.path: a text source needs a file, folder or hub dataset"),
        (
            {"data": {"train": [{"kind": "teacher", "path": "x"}]}},
            "data.train.0.path: a teacher source samples its text",
        ),
        ({"data": {"train": [{"path": "x", "length": 64}]}}, "data.train.0.length: is for kind: teacher; remove it"),
        ({"data": {"train": [{"path": "x", "weight": 0}]}}, "data.train.0.weight: 0.0 is too small"),
        (
            {"data": {"train": [{"path": "x"}], "needles": {"share": 2}}},
            "data.needles.share: 2.0 is too large, expected 1",
        ),
        ({"data": {"train": [{"path": "x"}], "needles": {"early": -1}}}, "data.needles.early: -1.0 is too small"),
        ({"data": {"train": [{"path": "x"}], "needles": {"keys": []}}}, "data.needles.keys: is empty"),
        (
            {"data": {"train": [{"path": "x"}], "needles": {"forms": {"fact": 1}}}},
            "data.needles.forms.fact: unknown form; did you mean 'facts'?",
        ),
        (
            {"data": {"train": [{"path": "x"}], "needles": {"forms": {"facts": 0}}}},
            "data.needles.forms: no form has a weight above 0",
        ),
        ({"eval": {"needle": {"lengths": []}}}, "eval.needle.lengths: is empty, name at least one"),
        ({"eval": {"lm_eval": {}}}, "eval.lm_eval.tasks: required key is missing"),
        ({"eval": {"lm_eval": {"tasks": []}}}, "eval.lm_eval.tasks: is empty, name at least one"),
        ({"eval": {"lm_eval": {"tasks": ["piqa"], "limit": 0}}}, "eval.lm_eval.limit: 0 is too small"),
        ({"eval": {"lm_eval": {"tasks": ["piqa"], "num_fewshot": -1}}}, "eval.lm_eval.num_fewshot: -1 is too small"),
        ({"eval": {"lengths": [1]}}, "eval.lengths.0: 1 is too small, expected 2 or more"),
        ({"train": {"lora_rank": 0}}, "train.lora_rank: 0 is too small, expected 1 or more"),
        ({"export": {"dir": ""}}, "export.dir: is empty, expected a folder"),
        (
            {"export": {"dir": "o", "delta": True}, "stages": [{**STAGE, "train": "all"}]},
            "leaves nothing to the teacher",
        ),
        ({"calibrate": {"rows": 0}}, "calibrate.rows: 0 is too small, expected 1 or more"),
        ({"calibrate": {"enabled": "off"}}, "calibrate.enabled: expected true or false, got text 'off'"),
    ],
)
def test_each_problem(tmp_path, changes, problem):
    found = problems_of(write(tmp_path, small(**changes)))
    assert any(problem in line for line in found), "\n".join(found)


def test_problems_of_separate_parts_come_together(tmp_path):
    found = problems_of(
        write(tmp_path, small(layers={"pattern": ["nope"]}, train={"backnd": 1}, stages=[STAGE, STAGE]))
    )
    assert [line.partition(": ")[2].partition(":")[0] for line in found] == [
        "layers.pattern",
        "stages.1.name",
        "train.backnd",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model: required key is missing"),
        ("[1, 2]", "expected a mapping (key: value), got a list"),
        ("a: [1, 2", "line 1, column 9: expected ',' or ']'"),
        ("model: a\nmodel: b\n", "the same key is given twice\n  line 2: model"),
        ("layers:\n  keep: [1]\n  keep: [2]\n", "line 3: layers.keep"),
        (
            "model: !!python/object/apply:os.system [ls]",
            "line 1, column 8: python/object/apply:os.system is not plain data",
        ),
        ("a: &x [*x]", "line 1, column 4: more than 50 levels"),
        ("a: " + "[" * 100_000, "more than 50 levels"),
        ("a: [" + "0," * 20_000 + "]", "more than 10000 values"),
        ("x" * 300_000, "expected: a recipe of at most 262144"),
        ("a: &a [0,0,0,0,0,0,0,0]\nb: &b [" + "*a," * 99 + "]\nc: [" + "*b," * 99 + "]", "more than 10000 values"),
        ("model: !!timestamp 2020-01-01", "line 1, column 8: timestamp is not plain data"),
        ("model: !!int x", "line 1, column 8: x cannot be read as int"),
        ("model: " + "9" * 5000, "cannot be read as int"),
        ("recipe_version: 2020-13-45", "expected 1, got text '2020-13-45'"),
        ("train: {seed: 017}", "train.seed: expected a whole number such as 4096, 4K or 100M, got text '017'"),
        ("train: {seed: 0x" + "f" * 5000 + "}", "cannot be read as int"),
        ("train: {seed: 0x" + "f" * 500 + "}", "train.seed: a number of 603 digits is too large"),
        ("layers: {overrides: {true: sse}}", "'true' is neither an index nor a range"),
        ('model: "a\\0b"', "model: expected text without control characters, got U+0000 in it"),
        ('model: "\\ud800"', "model: expected text without control characters, got U+D800 in it"),
        ("model: ~nobody-here/x", "model: there is no home folder for ~nobody-here"),
        ("model: $UNSET_HERE/x", "model: variable UNSET_HERE is not set"),
        ("export: {dir: .}", "export.dir: '.' has no name of its own"),
        ("export: {dir: a/../..}", "export.dir: 'a/../..' has no name of its own"),
        ("export: {dir: " + "n" * 252 + "}", "export.dir: the folder's name has 252 bytes, expected at most 200"),
        ("layers: {pattern: [sse*9999, sse*9999]}", "pattern names 19998 layers, expected at most 10000"),
        ("a: \x00", "unacceptable character"),
    ],
)
def test_not_a_recipe(tmp_path, text, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    assert message in str(caught.value)


def test_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RUNS", "/runs")
    recipe = load_recipe(write(tmp_path, small(model="~/teacher", export={"dir": "$RUNS/x"})))
    assert (recipe.model, recipe.export.dir) == ("/home/me/teacher", "/runs/x")


def test_every_number_has_a_range():
    """Nothing that counts is without end: a hint for a number names its `Range`, or has the general one."""
    for kind, largest in ((int, 2**53 + 1), (float, 1e31)):
        problems = []
        build(kind, largest, ("x",), problems)
        assert "is too large" in problems[0].message


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (binary, "is not UTF-8 text"),
        (tmp_path, "is a folder"),
        ("/dev/null", "/dev/null is no regular file"),
        ("nope.yaml", "'nope.yaml' does not exist"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe(path)
    with pytest.raises(RecipeError, match=r"did you mean qwen3-0.6b\?"):
        load_recipe("qwen3-0.6")


def test_merge_keys_and_anchors(tmp_path):
    text = """\
recipe_version: 1
model: m
layers: {pattern: [sse]}
stages:
  - &first {name: a, loss: kl, tokens: 1M, seq_len: 512, lr: 0.001}
  - {<<: *first, name: b, lr: 0.002}
data: {train: [{path: x}]}
export: {dir: out}
"""
    stages = load_recipe(write(tmp_path, text)).stages
    assert [(stage.name, stage.lr, stage.tokens) for stage in stages] == [("a", 0.001, 10**6), ("b", 0.002, 10**6)]


def test_the_hash_is_of_the_meaning(tmp_path):
    first = load_recipe(write(tmp_path, small()))
    reordered = dict(reversed(list(small(stages=small()["stages"]).items())))
    assert recipe_hash(load_recipe(write(tmp_path, reordered))) == recipe_hash(first)
    spelled = small()
    spelled["stages"][0]["tokens"] = "64K"
    assert recipe_hash(load_recipe(write(tmp_path, spelled))) == recipe_hash(first)
    assert recipe_hash(load_recipe(write(tmp_path, small(model="other")))) != recipe_hash(first)


def test_a_recipe_survives_json(tmp_path):
    recipe = load_recipe(write(tmp_path, small(layers={"pattern": ["sse"], "overrides": {3: "full", "5-6": "full"}})))
    copied = recipe_from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert recipe_hash(copied) == recipe_hash(recipe)
    assert copied.stages == recipe.stages
    assert copied.mixers == recipe.mixers


def test_run_needs_text(tmp_path):
    recipe = load_recipe(write(tmp_path, small(stages=[], data={})))
    assert [problem.message for problem in check_run(recipe)] == [
        "calibrate needs text; add a source or set calibrate.enabled: false",
        "eval needs held-out text; add a source or set eval.tokens: 0, no needle",
    ]
    assert list(check_run(load_recipe(write(tmp_path, small())))) == []


def test_a_model_stands_for_a_recipe_that_names_it(tmp_path):
    (tmp_path / "model").mkdir()
    for source in ("some/model", tmp_path / "model"):
        recipe = recipe_or_model(source, ["mixers.sliding.window=32"])
        assert recipe.model == str(source)
        assert recipe.mixers["sliding"].window == 32
    path = write(tmp_path, small())
    assert recipe_or_model(path) == load_recipe(path)
    assert recipe_or_model("qwen3-0.6b").model == "Qwen/Qwen3-0.6B"
    for missing in ("missing.yaml", "missing.yml"):
        with pytest.raises(RecipeError, match=missing):
            recipe_or_model(missing)
    with pytest.raises(RecipeError, match="some/model without a recipe"):
        recipe_or_model("some/model", ["mixers.sliding.windw=32"])


SIZE = {"name": "s", "tokens": "1M", "seq_len": 512, "lr": 1.0e-3}


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        ({"loss": "kl", "rope": {"rope_theta": 1e6}}, "stages.0.rope: is for loss ce, this stage's loss is kl"),
        ({"loss": "ce", "rope": {}}, "stages.0.rope: is empty, give it a rope_theta or a factor"),
        ({"loss": "ce", "rope": {"rope_theta": 1}}, "stages.0.rope.rope_theta: 1.0 is too small, expected more than 1"),
        ({"loss": "ce", "rope": {"factor": 0.5}}, "stages.0.rope.factor: 0.5 is too small, expected 1 or more"),
        (
            {"loss": "ce", "rope": {"rope_type": "yarn", "factor": 4}},
            "stages.0.rope.rope_type: was retired; a factor alone",
        ),
    ],
)
def test_each_problem_of_a_stages_rope(stage, problem):
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict(small(stages=[{**SIZE, **stage}]))
    (found,) = caught.value.problems
    assert found.startswith(problem)


def test_rope_is_off_by_default_and_gives_what_is_set():
    assert recipe_from_dict(small(stages=[{**SIZE, "loss": "layer_mse"}])).stages[0].rope is None
    assert Rope(rope_theta=5e6).given() == {"rope_theta": 5e6}
