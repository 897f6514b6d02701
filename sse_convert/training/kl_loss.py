"""The loss of the stage `kl` as one call, for loops of one's own and transformers' Trainer."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.data.packing import IGNORED
from sse_convert.errors import ShapeError, UsageError
from sse_convert.training.distill import DistillLoss
from sse_convert.training.objective import Frozen


def kl_loss(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    batch: Mapping[str, Tensor],
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Mean KL(teacher || student) in nats per token, plus the balance loss of the routers: what `distill` minimises.

    Logits exist for one chunk of tokens at a time. No gradient reaches the teacher, which computes in its own dtype.

    Args:
        student: from `convert_model`; not wrapped for several GPUs, for which there is `sse-convert distill`.
        teacher: the original model, in evaluation mode, on the same device.
        batch: `input_ids` int64 [B, T]; if there are any, `attention_mask` [B, T], 0 in the padding, `position_ids`
            [B, T], which restart with each packed document, and `labels` [B, T], -100 where nothing is to be learned.
            Tokens that are no padding count; with labels, those before a label.
        num_items_in_batch: tokens of the whole step where gradients are accumulated, as Trainer counts them; the loss
            is this batch's share of the step's mean then.

    Returns:
        0-d, float32.

    Raises:
        UsageError: the student is not converted or is wrapped, or there are no `input_ids`.
        ShapeError: the two models have different vocabularies, or parts of the batch different shapes.
    """
    _check_models(student, teacher)
    given = _on_device(batch, student.device)
    targets = _targets(given)
    picks = given["labels"] is not None or given["attention_mask"] is not None
    sums = DistillLoss(student, Frozen(teacher), picks=picks)(
        given["input_ids"], targets, given["position_ids"], attention_mask=given["attention_mask"]
    )
    counted = (targets != IGNORED).sum()
    items = counted.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    result: Tensor = sums["loss"] / items + sums["balance"] * (counted / items)
    return result


def _check_models(student: Any, teacher: Any) -> None:
    """Make sure that both are models themselves: what is around one has a forward of its own, which is not run."""
    for name, model in (("student", student), ("teacher", teacher)):
        if not isinstance(model, PreTrainedModel):
            kinds = {kind.__name__ for kind in type(model).__mro__}
            raise UsageError(
                f"{name} is a {type(model).__name__}",
                expected="a transformers model by itself: kl_loss(student, teacher, batch)",
                fix=f"give {name}.get_base_model(), which has the adapters"
                if "PeftModel" in kinds
                else "train on one GPU (CUDA_VISIBLE_DEVICES=0), or use `sse-convert distill` on several",
            )
    if not hasattr(student, "sse_balance_loss"):
        raise UsageError(
            f"student is a {type(student).__name__}, which is not converted",
            expected="the hybrid first: kl_loss(student, teacher, batch)",
            fix="student = sse_convert.convert_model(teacher, keep=[...])",
        )


def _on_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """What the loss reads of a batch, None for what it has not; no mask where nothing is padded."""
    if "input_ids" not in batch:
        raise UsageError(f"a batch of {', '.join(batch) or 'nothing'}", expected="input_ids [B, T]", fix="tokenize it")
    ids = batch["input_ids"]
    found: dict[str, Any] = {}
    for name in ("input_ids", "attention_mask", "position_ids", "labels"):
        tensor = batch.get(name)
        if tensor is not None and (tensor.dim() != 2 or tensor.shape != ids.shape):
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}", expected=f"[B, T] like input_ids {tuple(ids.shape)}"
            )
        found[name] = None if tensor is None else tensor.to(device)
    if found["attention_mask"] is not None and bool(found["attention_mask"].all()):
        found["attention_mask"] = None
    return found


def _targets(given: dict[str, Any]) -> Tensor:
    """[B, T], -100 where a token does not count."""
    ids, mask, labels = given["input_ids"], given["attention_mask"], given["labels"]
    targets = ids if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    targets_masked: Tensor = targets if mask is None else targets.masked_fill(mask == 0, IGNORED)
    return targets_masked
