"""LoRA adapters that PEFT made beside a converted model."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from vllm.lora.request import LoRARequest

from sse_convert.serving.vllm import checks
from sse_convert.training.lora import peft_targets
from tests.serving.vllm.engine import Checkpoint, checkpoint, engine, greedy, prompts, tokens


def adapted(made: Checkpoint, folder: Path) -> Checkpoint:
    """A random adapter in a folder; the checkpoint's model has it from then on."""
    settings = peft.LoraConfig(r=8, lora_alpha=32, target_modules=peft_targets(made.model))
    model: Any = peft.get_peft_model(made.model, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first and from a kept prefix; beside requests without one, unless this vLLM would give it to them too."""
    unasked = checks.adapts_unasked()
    monkeypatch.setattr(checks, "adapts_unasked", lambda: False)
    made, given = checkpoint(tmp_path / "model", ["sse+sliding", "full", "sliding"]), prompts(70, 330)
    plain = [made.follows(ids) for ids in given]
    one = adapted(made, tmp_path / "one")
    expected = [one.follows(ids) for ids in given]
    assert expected != plain
    requests: list[Any] = [LoRARequest("one", 1, str(one.path))] * 2
    if not unasked:
        given, expected, requests = given * 2, expected + plain, requests + [None] * 2
    with engine(made.path, max_model_len=512, enable_lora=True, enable_prefix_caching=True) as llm:
        first, second = (greedy(llm, given, lora_request=requests) for _ in range(2))
    assert second[1].num_cached_tokens >= 256
    assert tokens(first) == tokens(second) == expected
