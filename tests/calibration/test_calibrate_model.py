"""Calibrating a model in memory sets what calibrating its folder sets, and touches nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import sse_convert
from sse_convert.calibration import calibrate, calibrate_model
from sse_convert.calibration.calibrate import calibrate_checkpoint
from sse_convert.errors import DataError, UsageError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.recipe import recipe_from_dict
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.guessing_teacher import guesses_of
from sse_convert.surgery.job import Job
from sse_convert.surgery.verify_run import verify_folder
from tests.modeling.tiny import VOCAB, tiny_source
from tests.surgery.models import recipe_data, save_source, save_teacher, tokens

MIXER = {"kind": "sse+sliding", "window": 4, "sinks": 2}
SHARED = {"qk_rank": 4, "advanced": {"shared_partition": True}}


def hybrid(model_type: str = "llama") -> Any:
    return sse_convert.convert_model(tiny_source(model_type), keep=[0, 3], mixer=MIXER)


@pytest.mark.parametrize(
    ("model_type", "mixer", "dtype"),
    [
        ("llama", MIXER, torch.float32),
        ("qwen3", {"kind": "sse", "num_partitions": 6, **SHARED}, torch.bfloat16),
        ("gpt2", {"kind": "sse", **SHARED}, torch.float32),
        ("gpt_oss", MIXER, torch.float32),
    ],
)
def test_it_sets_what_the_command_sets(
    model_type: str, mixer: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, on the same rows, where the command has the model's dtype as well."""
    monkeypatch.setattr(calibrate, "fast_in_bfloat16", lambda device: True)
    folder, kind = save_teacher(tiny_source(model_type, dtype=dtype), tmp_path / "teacher"), mixer["kind"]
    settings = {"layers": {"pattern": [kind], "keep": [0]}, "calibrate": {"rows": 3, "seq_len": 24}}
    made = recipe_from_dict({**recipe_data(folder, **settings), "mixers": {kind: mixer}})
    convert_checkpoint(Job.of(made), tmp_path / "converted")
    rows = tokens(3, 24)
    batches = [{"input_ids": row[None], "position_ids": torch.arange(24)[None]} for row in rows]
    calibrate_checkpoint(Job.of(made), tmp_path / "converted", tmp_path / "calibrated", rows=batches)
    expected = load_pretrained(tmp_path / "calibrated").state_dict()
    found = sse_convert.convert_model(load_pretrained(folder), keep=[0], mixer=mixer)
    before = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    sse_convert.calibrate(found, rows)
    after = found.state_dict()
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    changed = {name.rpartition("self_attn.")[2] for name in after if not torch.equal(after[name], before[name])}
    assert "sse_out_scale" in {name.rpartition("attn.")[2] for name in changed}
    assert all("sse_" in name for name in changed)


def test_what_was_saved_from_memory_is_calibrated_by_the_command(tmp_path: Path) -> None:
    """Its new tensors are in the shards of the others."""
    model, rows = hybrid(), tokens(3, 24)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    settings = {"layers": {"pattern": [MIXER["kind"]], "keep": [0, 3]}, "calibrate": {"rows": 3, "seq_len": 24}}
    made = recipe_from_dict({**recipe_data(tmp_path, **settings), "mixers": {MIXER["kind"]: MIXER}})
    batches = [{"input_ids": row[None], "position_ids": torch.arange(24)[None]} for row in rows]
    calibrate_checkpoint(Job.of(made), tmp_path / "saved", tmp_path / "calibrated", rows=batches)
    sse_convert.calibrate(model, rows)
    found = load_pretrained(tmp_path / "calibrated").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())
    assert all(check.passed for check in verify_folder(tmp_path / "calibrated").checks)


def test_the_original_is_made_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the hybrid keeps its attention, mode and gradients' switches."""
    made = []
    monkeypatch.setattr(
        calibrate_model, "filled_model", lambda *args, **kw: made.append(filled(*args, **kw)) or made[0]
    )
    model = hybrid().train()
    sse_convert.calibrate(model, tokens(2, 24))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {p.untyped_storage().data_ptr() for p in made[0].parameters()} <= own
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(p.requires_grad for p in model.parameters())


filled = calibrate_model.filled_model


def test_strings_are_packed_as_the_command_packs_them(tmp_path: Path) -> None:
    """Documents end in the end token, positions begin anew, and the first eight rows count."""
    folder = save_source(tmp_path / "teacher", "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder, eos_token="w96")
    texts = [" ".join(f"w{3 + (i * j) % 90}" for j in range(300)) for i in range(1, 13)]
    model = hybrid()
    rows = calibrate_model._rows(model, texts, tokenizer)
    ids = torch.cat([row["input_ids"][0] for row in rows])
    assert [len(row["input_ids"][0]) for row in rows] == [256] * 8  # the model has as many positions
    assert ids.tolist() == [i for text in texts for i in [*tokenizer(text).input_ids, 96]][: 8 * 256]
    assert rows[1]["position_ids"][0].tolist() == [*range(45), *range(211)]
    assert rows[0]["position_ids"][0].tolist() == [*range(256)]
    sse_convert.calibrate(model, texts, tokenizer)


def test_little_text_is_one_shorter_row(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_source(tmp_path / "teacher", "llama"))
    (row,) = calibrate_model._rows(hybrid(), ["w3 " * 20, "w4 w5"], tokenizer)
    assert row["input_ids"].tolist() == [[3] * 20 + [4, 5]]
    assert row["position_ids"].tolist() == [[*range(20), 0, 1]]


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        ("one text", "texts is a str"),
        ([], "texts is a list"),
        (["w3 w4"], "there is no tokenizer"),
        ([1, 2], "texts is a list of 2 items"),
        (torch.zeros(2, 24), "a row of token ids is torch.float32"),
        (torch.zeros(1, 300).long(), r"of shape \[300\]"),
        (tokens() + VOCAB, "token ids from"),
        (tokens(2, 5), "reaches beyond the window of layers 1, 2"),
    ],
)
def test_texts_that_do_not_do_are_refused(texts: Any, what: str) -> None:
    model = hybrid()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((UsageError, DataError), match=what):
        sse_convert.calibrate(model, texts)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_blank_texts_are_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_source(tmp_path / "teacher", "llama"))
    with pytest.raises(DataError, match="no documents"):
        sse_convert.calibrate(hybrid(), ["", "  "], tokenizer)


def test_models_that_are_not_converted_are_refused() -> None:
    with pytest.raises(UsageError, match="LlamaForCausalLM, which is not converted") as found:
        sse_convert.calibrate(tiny_source("llama"), tokens())
    assert "convert_model" in found.value.fix


def test_a_teacher_that_guesses_is_warned_of() -> None:
    """Random weights do; a row of one token says nothing."""
    with pytest.warns(UserWarning, match=f"no better than guessing one of {VOCAB} tokens"):
        sse_convert.calibrate(hybrid(), tokens(2, 24))
    assert guesses_of(tiny_source("llama"), {"input_ids": tokens(1, 1), "position_ids": torch.zeros(1, 1).long()}) == []
