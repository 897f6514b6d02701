"""Learn one gate per layer between softmax attention and its stand-in, all weights frozen, and keep the most open ones.

The gates always sum to the budget: g_l = sigmoid((theta_l - nu) / temperature) with nu solved for in every step, so no
penalty has to be weighed against the KL. The temperature falls, which drives the gates apart.

Source: FlashMorph (arXiv:2606.30562), which adds a penalty on the mean gate instead.
"""

import dataclasses as dc
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from sse_convert.console import Bar
from sse_convert.files import replacing
from sse_convert.modeling.head import Head
from sse_convert.selection.choice import Choice, best
from sse_convert.selection.measure import Meter, scored_hidden
from sse_convert.selection.probe import Rows
from sse_convert.training.losses import linear_kl

LEARNING_RATE = 0.2
TEMPERATURES = 1.0, 0.2
"""at the first and at the last step, falling evenly in the logarithm"""


@dc.dataclass(slots=True)
class Training:
    """What an interrupted training goes on from."""

    theta_L: Tensor
    optimizer: torch.optim.Adam
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def save(self, file: Path) -> None:
        """Write it, replacing an earlier state."""
        state = {f.name: getattr(self, f.name) for f in dc.fields(self) if f.name not in ("theta_L", "optimizer")}
        state |= {"theta_L": self.theta_L.detach(), "optimizer": self.optimizer.state_dict()}
        with replacing(file) as temporary:
            torch.save(state, temporary)

    @staticmethod
    def start(layers: int, file: Path) -> "Training":
        """Equal gates, or the state in `file`."""
        theta_L = torch.zeros(layers, requires_grad=True)
        training = Training(theta_L, torch.optim.Adam([theta_L], lr=LEARNING_RATE))
        if file.is_file():
            state = torch.load(file, weights_only=True)
            theta_L.data.copy_(state.pop("theta_L"))
            training.optimizer.load_state_dict(state.pop("optimizer"))
            training.step, training.tokens, training.seconds = state["step"], state["tokens"], state["seconds"]
        return training


def gates(meter: Meter, keep: int, *, steps: int, file: Path, bar: Bar | None = None) -> Choice:
    """Score: the gate after training on KL to the teacher, text plus recall, one row of each per step.

    Args:
        meter: gives rows and model.
        keep: what the gates sum to.
        steps: optimizer steps.
        file: the state after every step.
        bar: advanced by one per step.
    """
    training = Training.start(len(meter.layers), file)
    for step in range(training.step, steps):
        start = time.monotonic()
        training.tokens += _step(meter, training, keep, step, _temperature(step, steps))
        training.step = step + 1
        training.seconds += time.monotonic() - start
        training.save(file)
        if bar is not None:
            bar.update(note=f"gates, step {step + 1}")
    meter.add_cost(training.tokens, round(training.seconds, 3))
    gate_L = budgeted(training.theta_L.detach(), keep, TEMPERATURES[1])
    return best("gates", dict(enumerate(gate_L.tolist())), keep)


def budgeted(theta_L: Tensor, keep: int, temperature: float) -> Tensor:
    """Gates [layers] that sum to `keep`, differentiable through the shift nu as well.

    Args:
        theta_L: [layers].
        keep: less than the number of layers.
        temperature: of the sigmoid.
    """
    fixed = theta_L.detach().double()
    low, high = fixed.min() - 40 * temperature, fixed.max() + 40 * temperature
    for _ in range(60):
        nu = (low + high) / 2
        enough = torch.sigmoid((fixed - nu) / temperature).sum() > keep
        low, high = (nu, high) if enough else (low, nu)
    gate_L = torch.sigmoid((theta_L - nu.to(theta_L)) / temperature)
    slope_L = (gate_L * (1 - gate_L)).detach()
    shift = ((theta_L - theta_L.detach()) * slope_L).sum() / slope_L.sum()  # d nu; its value is zero
    return torch.sigmoid((theta_L - nu.to(theta_L) - shift) / temperature)


def _temperature(step: int, steps: int) -> float:
    first, last = TEMPERATURES
    return first * math.pow(last / first, step / max(1, steps - 1))


def _step(meter: Meter, training: Training, keep: int, step: int, temperature: float) -> int:
    """One optimizer step; the tokens that both models read."""
    training.optimizer.zero_grad()
    gate_L = budgeted(training.theta_L, keep, temperature)
    tokens = 0
    loss = torch.zeros(())
    for name, rows in meter.parts().items():
        at = step % len(rows.ids)
        row = Rows(rows.ids[at : at + 1], rows.asked[at : at + 1])
        with torch.no_grad(), meter.swap.keeping(meter.layers) as teacher:
            target = scored_hidden(teacher, row)
        with meter.swap.mixing(gate_L.to(target.device)) as model:
            hidden, head = scored_hidden(model, row), Head.of(model)
        weight = 1.0 if name == "text" else meter.recall_weight
        loss = loss + weight * linear_kl(hidden, head, target, head).cpu() / len(hidden)
        tokens += 2 * row.ids.numel()
    torch.autograd.backward(loss)
    training.optimizer.step()
    return tokens
