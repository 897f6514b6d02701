"""Norms of a model that generates on a CPU: one operator of torch each, with the family's result."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.inference.cuda_graphs import graphed
from tests.modeling.tiny import prompts, tiny_source


@pytest.mark.parametrize(
    ("model_type", "one_each"), [("qwen3", True), ("llama", True), ("olmo2", True), ("gemma3_text", False)]
)
@torch.no_grad()
def test_on_a_cpu(model_type: str, one_each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny_source(model_type).float(), []
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    fused = F.rms_norm

    def counted(x: Tensor, *args: object) -> Tensor:
        calls.append(x.dtype)
        return fused(x, *args)

    monkeypatch.setattr(F, "rms_norm", counted)
    ids = prompts()[0]
    expected, before = model(ids).logits, len(calls)
    with graphed(model, slots=64):
        found = model(ids).logits
        with torch.enable_grad():
            model(ids)
    assert (len(calls) > before) == one_each
    assert set(calls) <= {torch.float32}
    torch.testing.assert_close(found, expected)
    assert torch.equal(model(ids).logits, expected), "afterwards norms are as they were"
