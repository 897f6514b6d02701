"""What `import sse_convert` offers, and the ten lines of README and home page."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sse_convert
from docs.examples import PAGES, ROOT, blocks
from tests.surgery.models import save_teacher

README = ROOT / "README.md"
PUBLIC = ["SSEAttention", "__version__", "calibrate", "convert_model", "kl_loss", "peft_targets", "sse_attention"]


def test_the_package_shows_its_public_names_alone():
    assert dir(sse_convert) == sorted(sse_convert.__all__) == PUBLIC
    assert all(getattr(sse_convert, name).__doc__ for name in PUBLIC)
    with pytest.raises(AttributeError, match="calibrate_model"):
        _ = sse_convert.calibrate_model


def shown(path: Path) -> str:
    """The ten lines of a page."""
    (found,) = [block.body for block in blocks(path.read_text("utf-8")) if "convert_model" in block.body]
    return found


def test_readme_and_home_show_the_same_lines() -> None:
    """But for the model, its text and its layers: the home page's are at hand where the pages are tested."""
    of_home = shown(PAGES / "index.md").splitlines()
    different = [line for line in shown(README).splitlines() if line not in of_home]
    assert [re.match(r"\w+", line)[0] for line in different] == ["name", "student"]


def test_the_lines_of_the_readme_convert_distil_and_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny Llama: the divergence falls, what is saved loads as the hybrid that was trained."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    save_teacher(LlamaForCausalLM(config).eval(), tmp_path / "teacher")
    (tmp_path / "my-text.txt").write_text(" ".join(f"w{3 + (i * i) % 94}" for i in range(2500)))
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    lines = shown(README).replace("HuggingFaceTB/SmolLM2-135M-Instruct", "teacher")
    assert lines != shown(README)
    exec(lines, made)
    loaded = AutoModelForCausalLM.from_pretrained("out/hybrid")
    assert loaded.config.sse["layers"] == ["full", *["sse+sliding"] * 6, "full", "sse+sliding"]
    batch = {"input_ids": made["rows"][0][None]}
    assert torch.equal(loaded(**batch).logits, made["student"].eval()(**batch).logits)
    before = sse_convert.convert_model(made["teacher"], keep=[0, 7])
    sse_convert.calibrate(before, made["rows"][:8])
    losses = [sse_convert.kl_loss(model, made["teacher"], batch).item() for model in (before, loaded)]
    assert losses[1] < losses[0]
