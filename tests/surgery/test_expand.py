"""Growing N and k: what must stay to the bit, what changes by a known factor, and what is refused."""

import dataclasses as dc
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from sse_convert import api
from sse_convert.checkpoints.provenance import read_provenance
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.errors import CheckpointError, OutputError, UsageError
from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.routing import route
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.auto import load_pretrained
from sse_convert.surgery.convert import NEW_SHARD, convert_checkpoint
from sse_convert.surgery.expand import expand_checkpoint
from sse_convert.surgery.growth import Growth, grown_tensors, kept_share
from sse_convert.surgery.verify import verify_checkpoint
from tests.modeling.tiny import randomise
from tests.surgery.models import digests, recipe, save_source, tokens

OFF = {"write": False, "read": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_source(tmp_path_factory.mktemp("expand") / "teacher")


def converted(source, folder, value_size=1.0, **settings):
    """A converted model whose new tensors were moved away from their start, as training would."""
    mixer = {"kind": "sse", "qk_rank": 4, **settings}
    layers = {"pattern": [mixer["kind"]]}
    convert_checkpoint(recipe(source, layers=layers, mixers={mixer["kind"]: mixer}), folder / "converted")
    model = load_pretrained(folder / "converted", dtype=torch.float64)
    randomise(model)
    for layer in model.sse_layers().values():
        layer.v_proj.weight.data *= value_size
    model.save_pretrained(folder / "trained", max_shard_size="20KB")
    return folder / "trained"


def logits(folder):
    with torch.no_grad():
        return load_pretrained(folder, dtype=torch.float64)(tokens(), use_cache=False).logits


def grow(checkpoint, out, layers=(), **changes):
    return expand_checkpoint(checkpoint, out, Growth(**{"num_partitions": 8, **changes}), layers=layers)


@pytest.mark.parametrize("kind", [{}, {"kind": "sse+sliding", "window": 4}])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_far_shift_changes_nothing(source, tmp_path, top_k, kind):
    trained = converted(source, tmp_path, top_k=top_k, **kind)
    grow(trained, tmp_path / "grown", shift=40.0)
    torch.testing.assert_close(logits(tmp_path / "grown"), logits(trained), rtol=0, atol=1e-12)


def test_without_gates_a_shift_of_zero_changes_nothing(source, tmp_path):
    trained = converted(source, tmp_path, gate=OFF)
    grow(trained, tmp_path / "grown", shift=0.0)
    assert torch.equal(logits(tmp_path / "grown"), logits(trained))


def test_without_shared_partition_the_output_norm_undoes_the_scale(source, tmp_path):
    trained = converted(source, tmp_path, shared_partition=False, qk_rank=0, value_size=1e6)
    grow(trained, tmp_path / "grown", num_partitions=12, shift=0.0)
    torch.testing.assert_close(logits(tmp_path / "grown"), logits(trained), rtol=0, atol=1e-6)  # the epsilon is left


def test_renormalised_gates_lose_nothing(source, tmp_path):
    trained = converted(source, tmp_path, top_k=2, gate={"renormalise": True})
    grow(trained, tmp_path / "grown", shift=12.0)
    torch.testing.assert_close(logits(tmp_path / "grown"), logits(trained), rtol=0, atol=1e-12)


@pytest.mark.parametrize("update", ["gla", "delta"])
def test_a_smaller_shift_changes_more(source, tmp_path, update):
    feature_map = "l2" if update == "delta" else "softmax"
    trained = converted(source, tmp_path, update=update, k_feature_map=feature_map)
    changes = []
    for shift in (12.0, 6.0, 0.0):
        grow(trained, tmp_path / f"grown-{shift}", shift=shift)
        changes.append((logits(tmp_path / f"grown-{shift}") - logits(trained)).abs().max())
    assert 0 < changes[0] < changes[1] < changes[2]


def test_separate_projections_are_copied_too(source, tmp_path):
    trained = converted(source, tmp_path, shared_params=False)
    grow(trained, tmp_path / "grown", shift=40.0)
    torch.testing.assert_close(logits(tmp_path / "grown"), logits(trained), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("partitions", "shift"), [(8, 0.0), (8, 2.0), (16, 3.0)])
def test_the_sparse_part_is_scaled_by_the_known_factor(partitions, shift):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old, dims = SSEMixer(), _Dims()
    growth = Growth(num_partitions=partitions, shift=shift)
    new = growth.mixer(old, "layer 0")
    x, router = random(30, dims.hidden), random(4, dims.hidden)
    grown = grown_tensors({"sse_router.weight": router}, old, new, dims, growth, 0)
    bias = grown.get("sse_router.bias", torch.zeros(partitions)).double()
    before, after = x @ router.T, x @ grown["sse_router.weight"].T + bias
    inputs = {"q": random(30, 2, 4), "k": random(30, 2, 4), "v": random(30, 2, 4), "top_k": 1}
    inputs["log_decay"] = -random(30, 2, 4).abs()
    share = kept_share(old, new, growth)
    assert share == pytest.approx(1 / (1 + (partitions // 4 - 1) * math.exp(-shift)))
    first, second = (sse_attention(router_logits=logits, **inputs)[0] for logits in (before, after))
    torch.testing.assert_close(second, share**2 * first, rtol=1e-10, atol=1e-14)
    assert torch.equal(route(before, 1).write_TK, route(after, 1).write_TK)


@dc.dataclass
class _Dims:
    hidden: int = 6
    query_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 4
    value_dim: int = 4


def test_selection_biases_let_no_new_partition_overtake():
    old, growth = SSEMixer(balance="bias", top_k=2), Growth(num_partitions=8, shift=0.0)
    router, bias = torch.randn(4, 6), torch.tensor([0.3, -0.2, 0.0, 0.1])
    new = growth.mixer(old, "layer 0")
    grown = grown_tensors({"sse_router.weight": router, "sse_router_bias": bias}, old, new, _Dims(), growth, 0)
    x = torch.randn(200, 6)
    before = route(x @ router.T, 2, router_bias=bias).write_TK
    after = route(x @ grown["sse_router.weight"].T, 2, router_bias=grown["sse_router_bias"]).write_TK
    assert torch.equal(before, after)


def test_random_rows_depend_on_seed_and_layer():
    old, router = SSEMixer(), {"sse_router.weight": torch.randn(4, 6)}

    def rows(seed, layer):
        growth = Growth(num_partitions=6, init="random", seed=seed)
        return grown_tensors(router, old, growth.mixer(old, ""), _Dims(), growth, layer)["sse_router.weight"]

    assert torch.equal(rows(0, 0)[:4], router["sse_router.weight"])
    assert torch.equal(rows(0, 0), rows(0, 0))
    assert not torch.equal(rows(0, 0)[4:], rows(1, 0)[4:])
    assert not torch.equal(rows(0, 0)[4:], rows(0, 1)[4:])


def test_one_partition_grows_from_random_rows(source, tmp_path):
    trained = converted(source, tmp_path, num_partitions=1)
    with pytest.raises(UsageError, match="no router to copy"):
        grow(trained, tmp_path / "grown")
    grow(trained, tmp_path / "grown", init="random", shift=40.0)
    torch.testing.assert_close(logits(tmp_path / "grown"), logits(trained), rtol=0, atol=1e-12)


def test_the_folder_keeps_the_checkpoint_contract(source, tmp_path):
    convert_checkpoint(recipe(source), tmp_path / "converted")
    report = grow(tmp_path / "converted", tmp_path / "grown", top_k=2)
    before, after = digests(tmp_path / "converted"), digests(tmp_path / "grown")
    assert report.written == [NEW_SHARD]
    assert {name for name in before if before[name] != after[name]} == {NEW_SHARD}
    for name in report.linked:
        assert (tmp_path / "grown" / name).samefile(tmp_path / "converted" / name)
    provenance = read_provenance(tmp_path / "grown")
    assert provenance.stage == "expand"
    assert set(provenance.shards) == set(report.linked)
    sse = json.loads((tmp_path / "grown" / "config.json").read_text())["sse"]
    assert sse["mixers"]["sse"]["num_partitions"] == 8
    assert sse["mixers"]["sse"]["top_k"] == 2
    assert sse["recipe"]["mixers"]["sse"]["num_partitions"] == 8
    assert provenance.recipe_hash == sse["recipe_hash"]
    assert (tmp_path / "grown" / "tokenizer.json").is_file()
    verify_checkpoint(tmp_path / "grown", teacher=source)
    assert not list(tmp_path.glob(".*"))


def test_some_layers_get_a_mixer_of_their_own(source, tmp_path):
    convert_checkpoint(recipe(source, layers={"pattern": ["sse"]}), tmp_path / "converted")
    report = grow(tmp_path / "converted", tmp_path / "grown", layers=["0", "2-2", "-1"])
    config = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert config["sse"]["layers"] == ["sse-n8k1", "sse", "sse-n8k1", "sse-n8k1"]
    assert [g.index for g in report.layers] == [0, 2, 3]
    assert config["sse"]["recipe"]["layers"]["overrides"] == {"0": "sse-n8k1", "2": "sse-n8k1", "3": "sse-n8k1"}
    router = "model.layers.{}.self_attn.sse_router.weight"
    shard = load_file(tmp_path / "grown" / NEW_SHARD)
    assert [len(shard[router.format(i)]) for i in range(4)] == [8, 4, 8, 8]


def test_more_partitions_per_token_change_settings_alone(source, tmp_path):
    convert_checkpoint(recipe(source), tmp_path / "converted")
    report = grow(tmp_path / "converted", tmp_path / "grown", num_partitions=None, top_k=2)
    assert report.written == []
    assert load_pretrained(tmp_path / "grown").config.sse["mixers"]["sse"]["top_k"] == 2


def test_a_grown_checkpoint_trains_its_new_partitions(source, tmp_path):
    trained = converted(source, tmp_path)
    grow(trained, tmp_path / "grown", shift=2.0)
    model = load_pretrained(tmp_path / "grown", dtype=torch.float64).train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    router = model.sse_layers()[0].sse_router
    assert router.bias.grad[4:].abs().min() > 0
    assert router.weight.grad[4:].abs().sum(1).min() > 0


@pytest.mark.parametrize(
    ("changes", "layers", "match"),
    [
        ({"num_partitions": 2}, (), "num_partitions would shrink from 4 to 2"),
        ({"top_k": 0}, (), "top_k would shrink from 1 to 0"),
        ({"num_partitions": 4}, (), "has 4 partitions and top_k 1 already"),
        ({"top_k": 9}, (), "top_k is 9"),
        ({"shift": -1.0}, (), "shift is -1.0"),
        ({"shift": math.inf}, (), "shift is inf"),
        ({"init": "zeros"}, (), "init is 'zeros'"),
        ({}, ("7",), "layer 7 does not exist"),
        ({}, ("x",), "layer x does not exist"),
        ({}, ("1",), "layer 1 is 'sliding'"),
    ],
)
def test_what_cannot_grow_is_refused(source, tmp_path, changes, layers, match):
    convert_checkpoint(recipe(source), tmp_path / "converted")
    with pytest.raises(UsageError, match=match):
        grow(tmp_path / "converted", tmp_path / "grown", layers, **changes)
    assert not (tmp_path / "grown").exists()


def test_partitions_chosen_by_keys_do_not_grow():
    old = SSEMixer(router="keys", balance="none")
    with pytest.raises(UsageError, match="layer 0: router is 'keys'") as error:
        Growth(num_partitions=8).mixer(old, "layer 0")
    assert error.value.fix == "convert the teacher anew, with num_partitions 8 in the recipe's mixer"
    assert Growth(top_k=2).mixer(old, "layer 0").top_k == 2


def test_other_models_are_refused(source, tmp_path):
    with pytest.raises(CheckpointError, match="plain qwen3 checkpoint"):
        grow(source, tmp_path / "grown")
    convert_checkpoint(recipe(source, layers={"pattern": ["sliding"]}), tmp_path / "converted")
    with pytest.raises(UsageError, match="no SSE layer"):
        grow(tmp_path / "converted", tmp_path / "grown")
    with pytest.raises(OutputError, match="exists"):
        grow(tmp_path / "converted", tmp_path)


def test_command_measures_the_change(source, tmp_path, capsys):
    trained = converted(source, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (trained / name).write_bytes((source / name).read_bytes())
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * 7 % 90 + 3}" for i in range(400)))
    found = {}
    for shift in ("1", "30"):
        arguments = ["expand", str(trained), "-o", str(tmp_path / f"grown-{shift}"), "--num-partitions", "8"]
        arguments += ["--shift", shift, "--text", str(tmp_path / "text.txt"), "--json"]
        assert run_app(app, arguments) == 0
        found[shift] = json.loads(capsys.readouterr().out)["result"]["change"]
    assert found["1"]["kl"] > 1e-3
    assert found["1"]["max_abs"] > found["1"]["mean_abs"] > 1e-3
    assert found["30"]["kl"] < 1e-6
    assert found["30"]["max_abs"] < 1e-3
    assert found["30"]["same_choice"] == 1.0
    assert found["30"]["tokens"] == 256
    assert api.inspect(tmp_path / "grown-30").to_dict()
