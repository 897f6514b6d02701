"""Centroids of the keys that heads have on the calibration text, for partitions that keys choose.

Shape letters: T tokens, H state heads, D key dim, N partitions.
"""

import functools
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.calibration.attention_statistics import layer_inputs
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import document_starts, sequence_layout
from sse_convert.modeling.window.masks import packed_arguments

ROUNDS = 15
MOST_KEYS = 16384
"""of a layer, those of its first tokens"""


def key_centroids(keys_THD: Tensor, count: int) -> Tensor:
    """Directions [H, N, D] of norm 1 about which the keys of each head lie: k-means on the sphere, in float32.

    Partitions that no key is near keep a direction that one had, or a random one where there are fewer keys.

    Args:
        keys_THD: [T, H, D].
        count: N.
    """
    x_HTD = F.normalize(keys_THD.float().transpose(0, 1), dim=-1)
    H, T, D = x_HTD.shape
    generator = torch.Generator().manual_seed(0)
    random = F.normalize(torch.randn(H, count, D, generator=generator), dim=-1).to(x_HTD.device)
    first = torch.randperm(T, generator=generator)[:count].to(x_HTD.device)
    c_HND = torch.cat([x_HTD[:, first], random[:, len(first) :]], 1)
    for _ in range(ROUNDS):
        nearest_HT = (x_HTD @ c_HND.mT).argmax(-1)
        sums = torch.zeros_like(c_HND).scatter_add_(1, nearest_HT[..., None].expand_as(x_HTD), x_HTD)
        c_HND = torch.where(sums.any(-1, keepdim=True), F.normalize(sums, dim=-1), c_HND)
    return c_HND


class KeyCollector:
    """Runs a teacher and keeps the keys that new layers would have in its place.

    Args:
        model: causal language model of the family `spec`.
        spec: the family.
        layers: new layers by index, built on the teacher's modules.
    """

    def __init__(self, model: PreTrainedModel, spec: ArchSpec, layers: dict[int, SSEAttention]) -> None:
        self.model, self._spec, self._layers = model, spec, layers
        self._keys: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    @torch.no_grad()
    def run(self, batch: dict[str, Tensor]) -> None:
        """Add one batch, `input_ids` and `position_ids` [B, T]; positions restart at each packed document."""
        if all(self._has_enough(layer) for layer in self._layers):
            return
        with ExitStack() as hooks:
            for layer in self._layers:
                attention = self.model.get_submodule(self._spec.attention_path(layer))
                keep = functools.partial(self._keep, layer, batch["position_ids"])
                hooks.callback(attention.register_forward_pre_hook(keep, with_kwargs=True).remove)
            backbone_of(self.model)(**batch, use_cache=False, **packed_arguments(self.model, batch["position_ids"]))

    @torch.no_grad()
    def place(self) -> dict[int, Tensor]:
        """Give every layer its centroids; `sse_centroids` [H, N, D] of each, float32 on the CPU."""
        found = {}
        for layer, new in self._layers.items():
            keys = torch.cat(self._keys[layer])[:MOST_KEYS].to(self.model.device)
            found[layer] = key_centroids(keys, new.mixer.num_partitions).cpu()
            new.sse_centroids.copy_(found[layer])
        return found

    def _has_enough(self, layer: int) -> bool:
        return sum(map(len, self._keys[layer])) >= MOST_KEYS

    def _keep(self, layer: int, positions: Tensor, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._has_enough(layer):
            return
        x_BTC = args[0] if args else kwargs["hidden_states"]
        batch, length = x_BTC.shape[:2]
        layout = sequence_layout((batch, length), x_BTC.device, starts=document_starts(positions, batch))
        inputs = layer_inputs(self._layers[layer], x_BTC, kwargs.get("position_embeddings"), layout)
        self._keys[layer].append(inputs["k"].cpu())
