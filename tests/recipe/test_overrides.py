import pytest

from sse_convert.errors import RecipeError, UsageError
from sse_convert.recipe import load_recipe
from tests.recipe.recipes import small, write


def test_values_are_yaml_and_lists_take_indices_and_names(tmp_path):
    recipe = load_recipe(
        write(tmp_path, small()),
        [
            "model=other/model",
            "mixers.sse.num_partitions=8",
            "mixers.local={kind: sliding, window: 64}",
            "layers.keep=[0, -1]",
            "stages.0.tokens=1M",
            "stages.-1.lr=2.0e-3",
            "stages.align.seq_len=1K",
            "eval.needle.lengths=[4K]",
            "train.lora_rank=8",
            "revision=",
            "data.train.0.path=a=b",
        ],
    )
    assert recipe.model == "other/model"
    assert recipe.mixers["sse"].num_partitions == 8
    assert recipe.mixers["local"].window == 64
    assert recipe.layers.keep == [0, -1]
    assert (recipe.stages[0].tokens, recipe.stages[0].seq_len) == (10**6, 1024)
    assert recipe.stages[1].lr == 0.002
    assert recipe.eval.needle.lengths == [4096]
    assert recipe.train.lora_rank == 8
    assert recipe.revision is None
    assert recipe.data.train[0].path == "a=b"


def test_later_wins(tmp_path):
    assert load_recipe(write(tmp_path, small()), ["model=a", "model=b"]).model == "b"


def test_layer_keys_match_by_their_text(tmp_path):
    recipe = small(layers={"pattern": ["sse"], "overrides": {3: "full"}})
    assert load_recipe(write(tmp_path, recipe), ["layers.overrides.3=sliding"]).layers.overrides == {3: "sliding"}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "stages.0.lr=1e-3",
            "--set stages.0.lr=1e-3: expected a number, got text '1e-3' (YAML reads 1e-3 as text; write 1.0e-3)",
        ),
        ("stage.0.lr=1", "--set stage.0.lr=1: unknown key; did you mean 'stages'?"),
        ("mixers.sse.num_partition=8", "--set mixers.sse.num_partition=8: unknown key; did you mean 'num_partitions'?"),
        ("eval.needle.length=[4K]", "--set eval.needle.length=[4K]: unknown key; did you mean 'lengths'?"),
        ("train={compil: auto}", "--set train={compil: auto}: train.compil: unknown key; did you mean 'compile'?"),
    ],
)
def test_problems_name_the_override(tmp_path, override, problem):
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, small()), [override])
    assert problem in caught.value.problems


NO_MULTIPLE = "stages.0.batch_tokens: {} is not a multiple of seq_len * micro_batch ({} * {}); use"
BATCHED = {**small()["stages"][0], "batch_tokens": 65536}


@pytest.mark.parametrize(
    ("stage", "overrides", "problem"),
    [
        ({}, ["stages.0.seq_len=100"], "--set stages.0.seq_len=100: " + NO_MULTIPLE.format(65536, 100, 1)),
        (
            {},
            ["model=x", "stages.align.micro_batch=3", "train.seed=2"],
            "--set stages.align.micro_batch=3: " + NO_MULTIPLE.format(65536, 512, 3),
        ),
        (
            {},
            ["stages.0.seq_len=100", "stages.0.micro_batch=3"],
            "--set stages.0.seq_len=100: " + NO_MULTIPLE.format(65536, 100, 3),
        ),
        ({}, ["layers.pattern=[full]"], "--set layers.pattern=[full]: layers: every layer stays 'full'"),
        ({"batch_tokens": 1000}, ["stages.0.micro_batch=3"], "line 17: " + NO_MULTIPLE.format(1000, 512, 3)),
        ({"batch_tokens": 1000, "lr": "fast"}, ["stages.0.lr=0.1"], "line 17: " + NO_MULTIPLE.format(1000, 512, 1)),
    ],
)
def test_a_problem_that_follows_from_an_override_names_it(tmp_path, stage, overrides, problem):
    recipe = small(stages=[{**BATCHED, **stage}])
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, recipe), overrides)
    (found,) = caught.value.problems
    assert found.startswith(problem)


def test_what_the_file_lacks_because_of_an_override_names_it(tmp_path):
    recipe = {key: value for key, value in small().items() if key not in ("stages", "data")}
    stages = "stages=[{name: x, loss: kl, tokens: 64K, seq_len: 512, lr: 0.1}]"
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, recipe), [stages])
    (found,) = caught.value.problems
    assert found.startswith(f"--set {stages[:80]}")
    assert "data.train: training stages need a source of text" in found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model", "--set model: not of the form path=value"),
        ("=3", "--set =3: not of the form path=value"),
        ("stages..lr=3", "not of the form path=value"),
        ("stages.2.lr=1", "stages has no item '2'\nexpected: 0 to 1, or a name: align, distill"),
        ("stages.alin.lr=1", "stages has no item 'alin'"),
        ("stages.alin.lr=1", "or a name: align, distill\nfix: did you mean align?"),
        ("model.name=x", "model is 'some/model' and has no keys"),
        ("layers.keep.0=1", "layers.keep has no item '0'"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path, override, message):
    recipe = small(layers={"pattern": ["sse"], "keep": []})
    with pytest.raises(UsageError) as caught:
        load_recipe(write(tmp_path, recipe), [override])
    assert message in str(caught.value)


def test_a_value_that_is_not_yaml(tmp_path):
    with pytest.raises(RecipeError, match="--set model="):
        load_recipe(write(tmp_path, small()), ["model=[1"])
