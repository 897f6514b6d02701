"""`kl`: the student learns the teacher's next-token distribution; teacher and student run in one process.

Loss: KL(teacher || student) per token, plus the balance loss. With `data.needles.answers: row`, answers that the
teacher does not know are learned from the row, by cross entropy.

With `loss_mask: assistant` the divergence is that of the tokens that predict an assistant
turn.
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.data.packing import IGNORED
from sse_convert.modeling.head import Head
from sse_convert.recipe.schema import Stage, Train
from sse_convert.training.compiling import compile_layers
from sse_convert.training.frozen_matrices import share
from sse_convert.training.losses import linear_kl
from sse_convert.training.model_objective import Student, WholeModel, held_out_sums, hidden_and_balance
from sse_convert.training.objective import Frozen, frozen_teacher
from sse_convert.training.setup import decoder_layers
from sse_convert.training.sharding import is_sharded


class DistillLoss(nn.Module):
    """Student, teacher and loss in one forward; the teacher is not registered, so nobody wraps, moves or saves it.

    Args:
        student: the converted model.
        teacher: what it learns from.
        picks: only tokens that have targets count.

    Attributes:
        recorded: in passes whose sizes are fixed. Nothing is taken out then: what does not count is zeros for both
            models, whose logits are zeros.
    """

    def __init__(self, student: PreTrainedModel, teacher: Frozen, *, picks: bool = False) -> None:
        super().__init__()
        self.student = student
        self._teacher = (teacher,)
        self._picks, self.recorded = picks, False

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
        sse_offsets: Tensor | None = None,
        answers: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        held_out: bool = False,
    ) -> dict[str, Tensor]:
        """`loss`, summed over tokens, and `balance`; 0-d each. For held-out text `held_out_sums`."""
        with torch.no_grad():
            told, teacher_head = self._teacher[0](input_ids, position_ids, sse_offsets, attention_mask)
        hidden, balance = hidden_and_balance(self.student, input_ids, position_ids, sse_offsets, attention_mask)
        head = Head.of(self.student)
        if held_out:
            return held_out_sums(hidden, head, targets, (told, teacher_head))
        flat, told, known = hidden.flatten(0, 1), told.flatten(0, 1), None if answers is None else answers.flatten()
        if self._picks:
            kept = targets.flatten() != IGNORED
            if self.recorded:
                flat, told = (states.masked_fill(~kept[:, None], 0) for states in (flat, told))
                known = None if known is None else known.masked_fill(~kept, IGNORED)
            else:
                flat, told, known = flat[kept], told[kept], None if known is None else known[kept]
        return {"loss": linear_kl(flat, head, told, teacher_head, known), "balance": balance}


class Distill(WholeModel):
    """Distillation of the whole model.

    Args:
        accelerator: of the stage.
        student: the converted model.
        teacher: the original model.
        stage: settings.
        train: whether layers are compiled.
    """

    judged = "valid_kl"

    def __init__(
        self,
        accelerator: Accelerator,
        student: Student,
        teacher: PreTrainedModel,
        stage: Stage,
        train: Train,
    ) -> None:
        if train.compile is True:
            compile_layers(teacher)
        frozen = frozen_teacher(teacher, accelerator, decoder_layers(teacher))
        loss = DistillLoss(student.model, frozen, picks=stage.loss_mask != "all")
        super().__init__(accelerator, student, loss, stage, train)
        loss.recorded = self._recorded is not None
        if not is_sharded(accelerator):
            share(student.model, teacher)
