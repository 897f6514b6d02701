"""Models with experts in training: their routers' own loss, and what is never trained by gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sse_convert.recipe.schema import Stage, Train
from sse_convert.training.model_objective import hidden_and_balance
from sse_convert.training.objective import Frozen
from sse_convert.training.prefetch import with_targets
from sse_convert.training.setup import prepare_parameters
from sse_convert.training.uptrain import UptrainLoss
from tests.modeling.tiny import LAYOUT, prompts, tiny_model, tiny_source
from tests.modeling.tiny_images import tiny_image_model


@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoe"])
def test_experts_are_balanced_where_the_checkpoint_says_so(model_type: str) -> None:
    model = tiny_model(model_type, dtype=torch.float64, output_router_logits=True).train()
    ids = prompts((20, 20))[0]
    theirs = model(ids, labels=ids)
    assert theirs.aux_loss > 0
    targets = with_targets({"input_ids": ids, "labels": ids, "position_ids": None})["targets"]
    sums = UptrainLoss(model)(ids, targets)
    expected = model.sse_balance_loss() + model.config.router_aux_loss_coef * theirs.aux_loss
    torch.testing.assert_close(sums["balance"], expected)
    whole = sums["loss"] / 38 + sums["balance"]
    torch.testing.assert_close(whole, theirs.loss, atol=0, rtol=1e-6)  # theirs is of float32 logits
    grads = torch.autograd.grad(sums["balance"], [p for name, p in model.named_parameters() if _routes(name)])
    assert all(grad.any() for grad in grads)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_of_models_of_images_and_text_are_balanced_as_well(model_type: str) -> None:
    model: Any = tiny_image_model(model_type, LAYOUT).train()
    model.config.text_config.output_router_logits = True
    ids = prompts((20, 20))[0]
    balance: Tensor = hidden_and_balance(model, ids, None)[1]
    theirs = model(input_ids=ids, output_router_logits=True).router_logits
    share = model.sse_expert_loss(theirs)
    assert share > 0
    torch.testing.assert_close(balance, model.sse_balance_loss() + share)


def _routes(name: str) -> bool:
    return name.endswith(("mlp.gate.weight", "block_sparse_moe.router.weight"))


@pytest.mark.parametrize(("model_type", "said"), [("qwen3_moe", False), ("glm4_moe", True)])
def test_nothing_is_added_without_the_word_or_the_loss(model_type: str, said: bool) -> None:
    model = tiny_model(model_type, dtype=torch.float64, output_router_logits=said).train()
    balance: Tensor = hidden_and_balance(model, prompts((20,))[0], None)[1]
    assert balance == model.sse_balance_loss()


def test_what_a_family_freezes_stays_frozen() -> None:
    model = tiny_model("ernie4_5_moe")
    stage = Stage(name="s", loss="ce", tokens=64, seq_len=16, lr=1e-3)
    prepare_parameters(model, stage, Train())
    frozen = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"e_score_correction_bias"}


@torch.no_grad()
def test_a_teacher_that_mixes_packed_documents_is_made_to_keep_them_apart() -> None:
    """transformers' gpt-oss does not look where positions restart."""
    teacher, ids = tiny_source("gpt_oss", dtype=torch.float64), prompts((12,))[0]
    apart = torch.cat([Frozen(teacher)(part, None)[0] for part in (ids[:, :5], ids[:, 5:])], 1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    torch.testing.assert_close(Frozen(teacher)(ids, positions)[0], apart)
