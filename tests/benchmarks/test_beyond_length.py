"""Needles beyond the trained length, in miniature."""

import json

import pytest
import torch

from benchmarks.quality import beyond_length
from benchmarks.quality.beyond_variants import VARIANTS, varied
from sse_convert import api
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe import load_recipe

STAGE = {"name": "long", "loss": "ce", "tokens": "1K", "seq_len": 128, "batch_tokens": 128, "lr": 1e-4}
LAYER = ["layers.pattern=[sse, full]", f"stages={json.dumps([STAGE])}"]


@pytest.fixture(scope="module")
def hybrid(given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("beyond") / "hybrid"
    api.convert(load_recipe(given, LAYER), folder)
    return folder


@pytest.mark.smoke
def test_parts_are_measured_and_a_run_goes_on(given, hybrid, tmp_path, capsys):
    """Without training, then after a step of rows twice as long as the context, in hybrid and teacher."""
    out = tmp_path / "result.json"
    changes = [part for change in LAYER for part in ("--set", change)]
    asked = [str(hybrid), "--recipe", str(given), *changes, "--out", str(out), "--samples", "1"]
    assert beyond_length.main([*asked, "--times", "1", "--variants", "as it is"]) == 0
    first = json.loads(out.read_text())["parts"]
    assert [part["model"] for part in first] == ["hybrid", "teacher", "hybrid, all layers", "teacher, all layers"]
    assert [first[0]["answer_loss"], first[1]["answer_loss"]] == [part["answer_loss"] for part in first[2:]]
    assert all(part["samples"] == 1 for part in first)
    capsys.readouterr()
    assert beyond_length.main([*asked, "--times", "1", "2", "--variants", "as it is"]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert parts[:4] == first
    assert {part["length"] for part in parts[4:]} == {1024}
    assert beyond_length.main([*asked, "--samples", "2"]) == 2
    assert "has other settings" in capsys.readouterr().err
    trained = tmp_path / "trained.json"
    more = ["--times", "2", "--variants", "NoPE, log length", "--train", "1K", "--row", "1K"]
    assert beyond_length.main([*asked[:-4], "--out", str(trained), "--samples", "1", *more]) == 0
    assert [part["model"] for part in json.loads(trained.read_text())["parts"]] == ["hybrid", "teacher"]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--set", "stages.0.loss=kl", "--train", "1K"], 3, "the recipe has 0 stages with loss ce"),
        (["--models", "teacher, all layers", "--train", "1K"], 2, "'teacher, all layers'"),
    ],
)
def test_what_cannot_be_trained_is_refused(given, hybrid, tmp_path, capsys, more, code, said):
    """Before anything is."""
    changes = [part for change in LAYER for part in ("--set", change)]
    asked = [str(hybrid), "--recipe", str(given), *changes, "--out", str(tmp_path / "result.json"), "--times", "1"]
    assert beyond_length.main([*asked, *more]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "result.work").exists()


@torch.no_grad()
def test_what_variants_change(given):
    """Beyond the trained length all of them change something; within it, scales and yarn nothing."""
    always = {name for name in VARIANTS if "NoPE" in name} | {"longer base"}
    model = load_pretrained(load_recipe(given).model, dtype=torch.float32).eval()
    ids = torch.arange(3, 67)[None] % 90
    plain = model(ids).logits
    for name, variant in VARIANTS.items():
        for length, trained in ((64, 64), (64, 16)):
            with varied(model, [0, 1], variant, trained=trained, length=length):
                changed = not torch.equal(model(ids).logits, plain)
            assert changed == (name in always or (trained < length and name != "as it is")), (name, trained)
    assert torch.equal(model(ids).logits, plain)
