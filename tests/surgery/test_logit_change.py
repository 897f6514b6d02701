"""The change of logits between two checkpoints, against whole logits."""

import pytest
import torch

from sse_convert.surgery.logit_change import logit_change
from tests.modeling.tiny import tiny_model
from tests.surgery.models import tokens


@pytest.fixture
def folders(tmp_path):
    for seed in (0, 1):
        tiny_model("gemma2", seed=seed).save_pretrained(tmp_path / str(seed))  # soft-caps its logits
    return tmp_path / "0", tmp_path / "1"


def test_nothing_changes(folders):
    change = logit_change(folders[0], folders[0], tokens())
    assert (change.kl, change.max_abs, change.mean_abs, change.same_choice) == (0, 0, 0, 1)
    assert change.tokens == 48


def test_by_whole_logits(folders):
    change = logit_change(*folders, tokens())
    models = [tiny_model("gemma2", seed=seed) for seed in (0, 1)]
    with torch.no_grad():
        p, q = (model(tokens(), use_cache=False).logits.log_softmax(-1) for model in models)
    assert change.kl == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)
    assert change.max_abs == pytest.approx((p - q).abs().max().item(), rel=1e-4)
    assert change.mean_abs == pytest.approx((p - q).abs().mean().item(), rel=1e-4)
    assert change.same_choice == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
