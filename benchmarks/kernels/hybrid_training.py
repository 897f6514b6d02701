"""The training step of the end-to-end benchmark: forward, backward and optimizer, teacher and hybrid alike."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.kernels.hybrid_measure import GIB, attention, measure, peak_memory
from sse_convert.data.packing import IGNORED
from sse_convert.modeling.head import Head
from sse_convert.training.losses import linear_cross_entropy

RATE = 1e-5
COLD_LIMIT = 8.0
"""seconds; a softmax step that takes longer is not repeated: it compiles nothing, so its first run counts"""


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Token ids [batch, length]; the same for every model of a vocabulary."""
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean cross entropy of the next token, and a hybrid's balance loss, as the `ce` stage computes them, 0-d."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    total = linear_cross_entropy(hidden.flatten(0, 1), Head.of(model), targets.flatten())
    loss = total / (ids.numel() - ids.shape[0])
    return loss + model.sse_balance_loss() if hasattr(model, "sse_balance_loss") else loss


class Trainer:
    """A model under training: AdamW on all weights, its state in their dtype; gradient checkpointing of every layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=model.device.type == "cuda")

    def step(self, ids: Tensor) -> None:
        """One optimizer step on rows of one document each."""
        next_token_loss(self.model, ids).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, context: int, batch: int, choice: str, *, budget: float, compiles: bool) -> dict[str, Any]:
        """Speed and memory of a step with one attention kernel.

        Args:
            context: tokens per row.
            batch: rows.
            choice: attention kernel of softmax layers.
            budget: seconds for the repeats.
            compiles: a first run may compile kernels, so it never counts.
        """
        device, ids = self.model.device, random_ids(self.model, batch, context)
        figures: dict[str, Any] = {}
        limit = float("inf") if compiles else COLD_LIMIT
        with attention(choice), peak_memory(device, figures, "peak_gib"):
            timing = measure(lambda: self.step(ids), device, budget=budget, cold_limit=limit)
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return {
            "seconds": timing.seconds,
            "tokens_per_s": ids.numel() / timing.seconds,
            "spread": timing.spread,
            "repeats": timing.repeats,
            "warm": timing.warm,
            **figures,
            "weights_gib": weights / GIB,
        }
