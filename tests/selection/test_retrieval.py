"""Attention that is watched computes what it computes else."""

import pytest
import torch

from sse_convert.mixers import SlidingMixer
from sse_convert.selection.recall_probes import Rows
from sse_convert.selection.retrieval import _Watch, _watched
from tests.modeling.tiny import prompts, tiny_source


@pytest.mark.parametrize(("model_type", "attention"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("gemma2", "eager")])
@torch.no_grad()
def test_a_watched_model_gives_the_same(model_type: str, attention: str) -> None:
    """Its bounds of scores included, which one attention function knows and another does not."""
    model, (ids, _) = tiny_source(model_type, dtype=torch.float64), prompts((23,))
    model.set_attn_implementation(attention)
    expected, watch = model(ids, use_cache=False).logits, _Watch(SlidingMixer(window=4, sinks=1))
    watch.rows = Rows(ids, torch.ones(1, 22, dtype=torch.bool))
    with _watched(model, watch):
        found = model(ids, use_cache=False).logits
    assert torch.equal(found, expected)
    assert model.config._attn_implementation == attention
    assert all((mass > 0).all() for mass in watch.far.values())
    assert len(watch.far) == 4
