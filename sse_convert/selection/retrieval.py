"""Keep what attends from answers to what they repeat: one pass ranks layers or heads, then a few swaps lower the KL.

A head retrieves as far as it attends, where the next token of an answer is predicted, to that token further back
(retrieval heads, arXiv:2404.15574). Heads that find the place without copying look far there as well. Both are counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sse_convert.compat import attending_by
from sse_convert.mixers import SlidingMixer
from sse_convert.modeling.window.window_attention import WindowConfig
from sse_convert.selection.choice import Choice
from sse_convert.selection.measure import Meter, passes, scored_hidden
from sse_convert.selection.recall_probes import Rows

WATCHED = "sse_watched"
"""name under which transformers finds the attention that is watched"""


def retrieval(meter: Meter, keep: int, tries: int) -> Choice:
    """Score: attention on answers to copies of their tokens, and to all that is far, each as a share of the largest.

    The best by score are kept; each of the next `tries` may take the place of one of their later half, where that
    lowers the KL of text and recall most.
    """
    scores = retrieval_scores(meter)
    order = sorted(scores, key=lambda unit: (-scores[unit], unit))
    kept = order[:keep]
    best = meter.measure(sorted(kept)).kl(meter.recall_weight)
    for unit in order[keep : keep + tries]:
        swaps = [sorted({*kept, unit} - {out}) for out in kept[keep // 2 :]]
        found = meter.measure_all(swaps, beside=sorted(kept))
        costs = [one.kl(meter.recall_weight) for one in found]
        if min(costs) < best:
            out = kept[keep // 2 + costs.index(min(costs))]
            kept, best = [*(own for own in kept if own != out), unit], min(costs)
    return Choice(method="retrieval", kept=tuple(sorted(kept)), scores=scores)


@torch.no_grad()
def retrieval_scores(meter: Meter) -> dict[int, float]:
    """Score of each layer, or head, of the rows that the meter asks."""
    rows, swap = meter.probe.recall[meter.recall], meter.swap
    watch = _Watch(swap.window)
    with swap.keeping(meter.layers) as model, _watched(model, watch):
        for part in passes(rows, model.device):
            watch.rows = Rows(part.ids.to(model.device), part.asked.to(model.device))
            scored_hidden(model, part)
    meter.count_pass(rows.ids.numel())
    found: dict[int, float] = {}
    for sums in (watch.copied, watch.far):
        largest = max(float(mass.max()) for mass in sums.values())
        for unit in meter.layers:
            layer, head = divmod(unit, meter.span)
            mass = sums[layer].sum() if meter.span == 1 else sums[layer][head]
            found[unit] = found.get(unit, 0.0) + float(mass) / max(largest, torch.finfo(torch.float32).tiny)
    return found


class _Watch:
    """Sums of attention by layer, [key-value heads] each: of a head's query heads the one with most.

    Args:
        mixer: whose window and sinks are not far.
    """

    def __init__(self, mixer: SlidingMixer) -> None:
        self.window, self.sinks = mixer.window, mixer.sinks
        self.rows: Rows | None = None
        self.copied: dict[int, Tensor] = {}
        self.far: dict[int, Tensor] = {}

    def add(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """Add one layer's attention.

        Args:
            layer: its index.
            query: [B, Hq, T, D].
            key: [B, H, T, D].
            scaling: of the products.
        """
        assert self.rows is not None
        for row, (ids, asked) in enumerate(zip(self.rows.ids, self.rows.asked, strict=True)):
            at = asked.nonzero()[:, 0]
            distance = at[:, None] - torch.arange(len(ids), device=ids.device)
            grouped = query[row][:, at].float()
            grouped = grouped.view(key.shape[1], -1, *grouped.shape[1:])
            scores = torch.einsum("hgtd,hsd->hgts", grouped, key[row].float()) * scaling
            weights = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)
            far = (distance >= self.window) & (distance <= at[:, None] - self.sinks)
            for sums, counts in ((self.copied, far & (ids == ids[at + 1][:, None])), (self.far, far)):
                mass = (weights * counts).sum(-1).mean(-1).amax(1).cpu()
                sums[layer] = sums.get(layer, torch.zeros_like(mass)) + mass


@contextmanager
def _watched(model: PreTrainedModel, watch: _Watch) -> Iterator[None]:
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("scaling")
        watch.add(int(module.layer_idx), query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)  # type: ignore[arg-type]
        own = ALL_ATTENTION_FUNCTIONS.get_interface(before, WindowConfig(module).eager)
        return own(module, query, key, value, mask, **kwargs)

    before = model.config._attn_implementation
    with attending_by(model, WATCHED, attend):
        yield
