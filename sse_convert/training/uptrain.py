"""`ce`: the student learns the text itself; on chat text with `loss_mask: assistant`, supervised fine-tuning."""

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from sse_convert.modeling.head import Head
from sse_convert.recipe.schema import Stage, Train
from sse_convert.training.losses import linear_cross_entropy
from sse_convert.training.model_objective import Student, WholeModel, held_out_sums, hidden_and_balance


class UptrainLoss(nn.Module):
    """Student and loss in one forward."""

    def __init__(self, student: PreTrainedModel) -> None:
        super().__init__()
        self.student = student

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor | None = None,
        sse_offsets: Tensor | None = None,
        *,
        held_out: bool = False,
    ) -> dict[str, Tensor]:
        """`loss`, summed over targets, and `balance`; 0-d each. For held-out text `held_out_sums`."""
        hidden, balance = hidden_and_balance(self.student, input_ids, position_ids, sse_offsets)
        if held_out:
            return held_out_sums(hidden, Head.of(self.student), targets)
        loss = linear_cross_entropy(hidden.flatten(0, 1), Head.of(self.student), targets.flatten())
        return {"loss": loss, "balance": balance}


class Uptrain(WholeModel):
    """Training of the whole model on text.

    Args:
        accelerator: of the stage.
        student: the converted model.
        stage: settings.
        train: whether layers are compiled.
    """

    def __init__(self, accelerator: Accelerator, student: Student, stage: Stage, train: Train) -> None:
        super().__init__(accelerator, student, UptrainLoss(student.model), stage, train)
