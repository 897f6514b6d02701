"""GGUF files become Hugging Face folders in bfloat16, or are refused by name and leave nothing behind."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sse_convert import api
from sse_convert.errors import CheckpointError
from sse_convert.files import digest

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed")
WIDTH, WORDS = 64, ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ"]


def write_llama(path: Path, architecture: str = "llama", *, without: str = "") -> Path:
    """A Llama of one layer with 4-bit projections."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(32)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rng = np.random.default_rng(0)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("token_embd.weight", rng.standard_normal((len(WORDS), WIDTH), np.float32))
    kind = GGMLQuantizationType.Q4_0
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        if name != without:
            made = quantize(rng.standard_normal((WIDTH, WIDTH), np.float32), kind)
            writer.add_tensor(f"blk.0.{name}.weight", made, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path, match: str) -> None:
    out = path.parent / "out"
    with pytest.raises(CheckpointError, match=match) as caught:
        api.dequantize(path, out)
    assert caught.value.expected
    assert caught.value.fix
    assert not out.exists()
    assert not list(path.parent.glob("*.partial"))


@needs_gguf
def test_a_gguf_file_becomes_a_folder_of_what_transformers_reads(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_llama(tmp_path / "tiny.gguf")
    report = api.dequantize(path, tmp_path / "out")
    assert (report.dequantised_tensors, report.source_sha256) == (7, digest(path))
    assert any(digest(path) in line for line in report.lines())
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).state_dict()
    made = load_file(tmp_path / "out/model.safetensors")
    assert made.keys() == read.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, read[name].bfloat16()) for name, tensor in made.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


@needs_gguf
def test_a_file_that_is_cut_off_is_refused(tmp_path):
    path = write_llama(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    for length in (4, 20, len(whole) // 8, len(whole) - 1000):
        path.write_bytes(whole[:length])
        refused(path, "cut off")


@needs_gguf
def test_an_architecture_that_transformers_does_not_read_is_refused(tmp_path):
    refused(write_llama(tmp_path / "tiny.gguf", "rwkv6"), "architecture rwkv6")


@needs_gguf
def test_a_file_without_one_of_its_tensors_is_refused(tmp_path):
    refused(write_llama(tmp_path / "tiny.gguf", without="ffn_up"), "lacks 1 tensor")


def test_a_missing_file_is_refused(tmp_path):
    refused(tmp_path / "none.gguf", "does not exist")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("no weights")
    refused(tmp_path / "text.gguf", "is no GGUF file")


def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    refused(tmp_path / "a.gguf", "needs the package gguf")
