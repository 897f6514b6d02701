"""How far one converted layer's attention is from its teacher's."""

from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from sse_convert.modeling.layer import SSEAttention
from sse_convert.training.losses import squared_error
from sse_convert.training.objective import Batch, Call


class LayerError(nn.Module):
    """One layer's attention and how far it is from its teacher's, in one forward for data-parallel wrappers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, call: Call) -> dict[str, Tensor]:
        """Squared error and the target's square, summed over tokens, and the balance loss; all 0-d."""
        output = self.attention(*call.args, **call.kwargs)[0]
        error, power = squared_error(output, call.output)
        balance = self.attention.balance_loss() if isinstance(self.attention, SSEAttention) else None
        return {"error": error, "power": power, "balance": error.new_zeros(()) if balance is None else balance}


@torch.no_grad()
def error_sums(
    errors: dict[int, LayerError],
    batches: Iterable[Batch],
    teacher_calls: Callable[[Batch], dict[int, Call]],
    accelerator: Accelerator,
) -> dict[int, list[float]]:
    """Squared error, square of the target, and tokens, of each layer over the micro batches of all processes.

    Args:
        errors: the layers, by index; they are left on the accelerator's device.
        batches: this process's micro batches, on the accelerator's device.
        teacher_calls: the teacher's attention in a micro batch.
        accelerator: of the stage.
    """
    sums = {i: torch.zeros(3, dtype=torch.float64) for i in errors}
    for batch in batches:
        calls = teacher_calls(batch)
        for i, error in errors.items():
            error.to(accelerator.device).eval()
            with accelerator.autocast():
                found = error(calls.pop(i))
            error.train()
            tokens = torch.tensor(float(batch["input_ids"].numel()))
            sums[i] += torch.stack([found["error"].cpu(), found["power"].cpu(), tokens]).double()
    total: Tensor = accelerator.reduce(torch.stack(list(sums.values())).to(accelerator.device), "sum")
    return dict(zip(errors, total.tolist(), strict=True))
