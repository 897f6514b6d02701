"""`kl`: the student learns the teacher's next-token distribution; teacher and student run in one process.

Loss: KL(teacher || student) per token, plus the balance loss. With `data.needles.answers: row`, answers that the
teacher does not know are learned from the row, by cross entropy. With `offline` the teacher's predictions come with the
batch, cut to the likeliest tokens, and no teacher is there.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.modeling.head import Head
from sse_convert.modeling.layer_arguments import OFFSETS
from sse_convert.recipe.schema import Stage, Train
from sse_convert.training.losses import linear_kl
from sse_convert.training.model_objective import WholeModel, held_out_sums, hidden_and_balance
from sse_convert.training.objective import Batch, Frozen, frozen_teacher
from sse_convert.training.setup import compile_layers, decoder_layers
from sse_convert.training.topk_kl import Truncated, linear_truncated_kl


class DistillLoss(nn.Module):
    """Student, teacher and loss in one forward; the teacher is not registered, so nobody wraps, moves or saves it."""

    def __init__(self, student: PreTrainedModel, teacher: Frozen) -> None:
        super().__init__()
        self.student = student
        self._teacher = (teacher,)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
        sse_offsets: Tensor | None = None,
        answers: Tensor | None = None,
        *,
        held_out: bool = False,
    ) -> dict[str, Tensor]:
        """`loss`, summed over tokens, and `balance`; 0-d each. For held-out text `held_out_sums`."""
        known = None if answers is None else answers.flatten()
        with torch.no_grad():
            teacher_hidden, teacher_head = self._teacher[0](input_ids, position_ids, sse_offsets)
        hidden, balance = hidden_and_balance(self.student, input_ids, position_ids, sse_offsets)
        if held_out:
            return held_out_sums(hidden, Head.of(self.student), targets, (teacher_hidden, teacher_head))
        loss = linear_kl(hidden.flatten(0, 1), Head.of(self.student), teacher_hidden.flatten(0, 1), teacher_head, known)
        return {"loss": loss, "balance": balance}


class Distill(WholeModel):
    """Distillation of the whole model.

    Args:
        accelerator: of the stage.
        student: the converted model.
        teacher: the original model.
        stage: settings.
        train: LoRA settings, and whether layers are compiled.
    """

    judged = "valid_kl"

    def __init__(
        self,
        accelerator: Accelerator,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        stage: Stage,
        train: Train,
    ) -> None:
        if train.compile is True:
            compile_layers(teacher)
        frozen = frozen_teacher(teacher, accelerator, decoder_layers(teacher))
        super().__init__(accelerator, student, DistillLoss(student, frozen), stage, train)


class OfflineDistillLoss(nn.Module):
    """Student and loss in one forward."""

    def __init__(self, student: PreTrainedModel) -> None:
        super().__init__()
        self.student = student

    def forward(
        self,
        input_ids: Tensor,
        teacher: Truncated | None = None,
        position_ids: Tensor | None = None,
        sse_offsets: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        held_out: bool = False,
    ) -> dict[str, Tensor]:
        """`loss`, summed over tokens, and `balance`; 0-d each. For held-out text, which needs `targets` and no teacher,
        `held_out_sums`."""
        hidden, balance = hidden_and_balance(self.student, input_ids, position_ids, sse_offsets)
        if held_out and targets is not None:
            return held_out_sums(hidden, Head.of(self.student), targets)
        assert teacher is not None, "training has the teacher's predictions"
        loss = linear_truncated_kl(hidden.flatten(0, 1), Head.of(self.student), teacher)
        return {"loss": loss, "balance": balance}


class OfflineDistill(WholeModel):
    """Distillation from the teacher's predictions on disk.

    Args:
        accelerator: of the stage.
        student: the converted model.
        stage: settings.
        train: LoRA settings, and whether layers are compiled.
    """

    def __init__(self, accelerator: Accelerator, student: PreTrainedModel, stage: Stage, train: Train) -> None:
        super().__init__(accelerator, student, OfflineDistillLoss(student), stage, train)

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Tokens, and the teacher's predictions of them as one object."""
        tokens = {name: batch[name] for name in ("input_ids", "position_ids", OFFSETS) if name in batch}
        return {**tokens, "teacher": Truncated.of_batch(batch)}
