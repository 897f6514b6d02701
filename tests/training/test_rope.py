"""Rotary embeddings stretched for rows beyond the trained positions: those of transformers, stored, or refused."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sse_convert.errors import RecipeError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe.schema import Rope, Stage
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from sse_convert.surgery.positions import stretched_rope
from sse_convert.training import setup
from sse_convert.training.setup import stretch_rope
from tests.modeling.tiny import FAMILIES, tiny_model, tiny_source
from tests.training.conftest import losses, make_llama, make_tokenizer
from tests.training.test_resume import same

FOUR = {"factor": 4.0}
YARN = {"rope_type": "yarn", **FOUR}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def stage(seq_len=512, **rope):
    settings = {"rope": Rope(**rope)} if rope else {}
    return Stage(name="long", loss="ce", tokens=seq_len, seq_len=seq_len, lr=1e-3, **settings)


def logits(model, length=40):
    ids = torch.arange(length)[None] % 90
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("rope", "parameters", "positions"),
    [
        ({"rope_theta": 5e6}, {"rope_type": "default", "rope_theta": 5e6}, 1024),
        (FOUR, {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_frequencies_are_those_of_transformers(rope, parameters, positions):
    model = make_llama()
    assert model.config.max_position_embeddings == 512
    fields = {**model.config.to_dict(), "rope_parameters": parameters, "max_position_embeddings": positions}
    expected = LlamaForCausalLM(LlamaConfig(**fields))
    expected.load_state_dict(model.state_dict())
    stretch_rope(model, stage(1024, **rope))
    assert model.config.rope_parameters == parameters
    assert model.config.max_position_embeddings == positions
    assert torch.equal(logits(model, 600), logits(expected, 600))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_every_family(family, tmp_path):
    model = tiny_source(family)
    before = logits(model)
    stretch_rope(model, stage(256))
    assert torch.equal(logits(model), before)
    layers = getattr(model.config, "rope_parameters", {})
    theta = layers.get("full_attention", layers)["rope_theta"]
    stretch_rope(model, stage(256, rope_theta=theta))
    assert torch.equal(logits(model), before)
    stretch_rope(model, stage(300, rope_theta=100.0))
    after = logits(model)
    assert not torch.allclose(after, before, atol=1e-4)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["max_position_embeddings"] == 300
    torch.testing.assert_close(logits(type(model).from_pretrained(tmp_path)), after)


def test_only_the_layers_that_see_everything_are_stretched():
    model = tiny_source("gemma3_text")
    local = dict(model.config.rope_parameters["sliding_attention"])
    stretch_rope(model, stage(256, factor=8.0))
    assert model.config.rope_parameters["sliding_attention"] == local
    assert model.config.rope_parameters["full_attention"]["factor"] == 8.0


def test_what_a_family_refuses_is_found_at_once():
    """Phi-3's configuration knows one rope type; without the check its result could not be saved."""
    with pytest.raises(RecipeError, match=r"phi3 refuses this rope: .*longrope"):
        stretch_rope(tiny_source("phi3"), stage(1024, **FOUR))


def test_learned_positions_cannot_be_stretched():
    with pytest.raises(RecipeError, match="gpt2 has no rotary embedding"):
        stretch_rope(tiny_source("gpt2"), stage(256, rope_theta=1e6))


def test_what_is_kept_of_the_old_parameters():
    llama3 = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    assert stretched_rope(llama3, Rope(rope_theta=1e6), 131072) == {**llama3, "rope_theta": 1e6}
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    found = stretched_rope(half, Rope(**FOUR), 4096)
    assert found == {**half, **YARN, "original_max_position_embeddings": 4096}
    assert stretched_rope(llama3, Rope(**FOUR), 131072) == {
        **YARN,
        "rope_theta": 5e5,
        "original_max_position_embeddings": 131072,
    }


def test_packed_documents_start_at_position_zero():
    """Beyond the old range as well, a packed row is its documents one by one."""
    model = tiny_model("llama").eval()
    stretch_rope(model, stage(600, **FOUR))
    lengths = (300, 200, 100)
    ids = torch.randint(2, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_a_stage_stretches_and_stores(train, converted, monkeypatch):
    long = {"seq_len": 1024, "batch_tokens": 1024, "micro_batch": 1, "tokens": 2048, "rope": FOUR}
    folder, report = train("uptrain", "long", **long)
    model = load_pretrained(folder)
    assert model.config.max_position_embeddings == 2048
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert report.steps == 2
    after, _ = train("uptrain", "more", checkpoint=folder, **{**long, "rope": None})
    assert load_pretrained(after).config.rope_parameters == model.config.rope_parameters
    distill = {**long, "rope": None, "lr": 1e-3}
    with pytest.raises(RecipeError, match="seq_len is 1024, the model has 512 positions"):
        train("distill", "short", checkpoint=folder, **distill)
    with pytest.raises(RecipeError, match="seq_len is 4096, the model has 2048 positions") as caught:
        train("uptrain", "longer", **{**long, "seq_len": 4096, "batch_tokens": 4096, "tokens": 4096})
    assert "raise rope.factor" in caught.value.fix


def test_a_refused_rope_leaves_no_folder_behind(make, train, tmp_path):
    """So the corrected recipe starts anew."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=320, n_positions=512)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    settings = {
        "model": str(tmp_path / "gpt2"),
        "layers": {"pattern": ["sse", "full"]},
        "mixers": {"sse": {"qk_rank": 4}},
    }
    convert_checkpoint(Job.of(make("uptrain", **settings)), tmp_path / "converted")
    make_tokenizer().save_pretrained(tmp_path / "converted")
    recipe = make(("uptrain", {"rope": {"rope_theta": 1e6}}), **settings)
    with pytest.raises(RecipeError, match="gpt2 has no rotary embedding"):
        train("uptrain", recipe=recipe, checkpoint=tmp_path / "converted")
    assert not (tmp_path / "result.work").exists()


def test_without_rope_nothing_is_touched(train, monkeypatch, converted):
    plain, _ = train("uptrain", "plain", tokens=256)
    monkeypatch.setattr(setup, "stretch", lambda *args: pytest.fail("touched") if args[1].rope else False)
    again, _ = train("uptrain", "again", tokens=256)
    assert same(plain, again)
    assert losses(plain) == losses(again)
    keys = ("rope_parameters", "max_position_embeddings")
    before, after = (json.loads((path / "config.json").read_text()) for path in (converted, plain))
    assert [before[key] for key in keys] == [after[key] for key in keys]


def test_too_long_rows_name_the_way_out(train):
    with pytest.raises(RecipeError, match="the model has 512 positions") as caught:
        train("uptrain", seq_len=1024, batch_tokens=2048, tokens=2048)
    assert "set the stage's rope" in caught.value.fix
    with pytest.raises(RecipeError, match="the model has 512 positions") as caught:
        train("distill", seq_len=1024, batch_tokens=2048, tokens=2048)
    assert "the teacher knows no more" in caught.value.fix
