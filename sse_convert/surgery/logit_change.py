"""How far the logits of one checkpoint are from those of another on the same tokens."""

import dataclasses as dc
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.checkpoints.load_model import load_model, pick_device
from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.head import Head

LOGITS_AT_ONCE = 2**24
"""elements of the largest logits tensor"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LogitChange:
    """Over all tokens."""

    tokens: int
    kl: float
    """KL(before || after), nats per token, mean"""
    max_abs: float
    """largest change of a log probability"""
    mean_abs: float
    """mean change of a log probability"""
    same_choice: float
    """share of tokens whose likeliest next token stays"""


@torch.no_grad()
def logit_change(before: str | Path, after: str | Path, ids: Tensor) -> LogitChange:
    """Compare two checkpoints with one vocabulary, the body of one in memory at a time, in float32.

    Args:
        before: folder or hub id.
        after: folder or hub id.
        ids: int64 [R, T] token ids.

    Raises:
        CheckpointError, HubError: a checkpoint cannot be loaded.
    """
    device = str(pick_device())
    ends: list[tuple[Head, Tensor]] = []
    for source in (before, after):
        model = load_model(source, dtype=torch.float32, device=device)
        rows = [backbone_of(model)(input_ids=row[None].to(device), use_cache=False).last_hidden_state[0] for row in ids]
        ends.append((Head.of(model), torch.cat(rows)))
    step = max(1, LOGITS_AT_ONCE // ends[0][0].weight.shape[0])
    sums = torch.zeros(3, dtype=torch.float64)
    largest = 0.0
    for i in range(0, ids.numel(), step):
        p, q = (F.log_softmax(head.logits(hidden[i : i + step]), -1) for head, hidden in ends)
        difference, same = (p - q).abs(), p.argmax(1) == q.argmax(1)
        sums += torch.stack([(p.exp() * (p - q)).sum(), difference.mean(1).sum(), same.sum().to(p)]).double().cpu()
        largest = max(largest, float(difference.max()))
    kl, mean_abs, same_choice = (sums / ids.numel()).tolist()
    return LogitChange(tokens=ids.numel(), kl=kl, max_abs=largest, mean_abs=mean_abs, same_choice=same_choice)
