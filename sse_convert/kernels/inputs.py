"""What the operator was given, checked: the caller's tensors in their own dtypes, nothing copied, in one layout."""

import dataclasses as dc

import torch
from torch import Tensor

from sse_convert.kernels.feature_maps import KeyFeatureMap, key_feature_map


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class SharedInputs:
    """Inputs of the partition that every token uses, without gate."""

    q: Tensor
    """[T, Hq, D], before the scale"""
    k: Tensor
    """[T, H, D], before k_scale and k_map"""
    v: Tensor
    """[T, H, V]"""
    log_decay: Tensor
    """[T, H, D], as `Inputs.log_decay`"""
    write_strength: Tensor | None
    """[T, H], as `Inputs.write_strength`"""
    own_values: bool
    """whether v was given for this partition; if not, it is the v of the others"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call of `sse_attention`, whose docstring explains them."""

    q: Tensor
    """[T, P, Hq, D], before the scale"""
    k: Tensor
    """[T, P, H, D], before k_scale and k_map"""
    v: Tensor
    """[T, P, H, V]"""
    log_decay: Tensor
    """[T, H, D], natural log of the decay, or gate logits if `decay_normalizer` is set"""
    write_strength: Tensor | None
    """[T, H], beta of the delta rule; None for gated linear attention"""
    router_logits: Tensor
    """[T, N]"""
    shared: SharedInputs | None
    """the shared partition, or None"""
    scale: float
    """multiplies q"""
    cu_seqlens: Tensor
    """[S + 1] integer offsets of the sequences, any device"""
    max_seqlen: int | None
    """no sequence is longer; None where only the device knows"""
    initial_state: Tensor | None
    """[S, M, H, D, V], the shared partition last; None for zeros"""
    state_slots: Tensor | None = None
    """[S] rows of `initial_state`, which has more of them, where the states are; below 0 for none"""
    top_k: int
    """partitions written and read"""
    write_gate: bool
    """scale what is written by e"""
    read_gate: bool
    """scale what is read by e"""
    k_map: KeyFeatureMap
    """applied to each key, of the shared partition too"""
    k_scale: Tensor | None
    """[H], multiplies keys before the map"""
    decay_normalizer: float | None
    """if set, the log decay is logsigmoid(log_decay) / decay_normalizer"""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.router_logits.shape[0]

    @property
    def num_partitions(self) -> int:
        """N, without the shared partition."""
        return self.router_logits.shape[-1]

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_states(self) -> int:
        """M, partitions in the state."""
        return self.num_partitions + (self.shared is not None)

    @property
    def dtype(self) -> torch.dtype:
        """What the torch backends compute in: float64 if q, k or v is float64, else float32."""
        double = torch.float64 in (self.q.dtype, self.k.dtype, self.v.dtype)
        return torch.float64 if double else torch.float32

    @property
    def one_token_each(self) -> bool:
        """Whether the host knows that every sequence has one token."""
        return self.max_seqlen is not None and self.max_seqlen <= 1 and self.num_tokens == self.num_sequences

    def tensors(self) -> dict[str, Tensor]:
        """Every float tensor that was given, by argument name."""
        own = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "log_decay": self.log_decay,
            "write_strength": self.write_strength,
            "router_logits": self.router_logits,
            "initial_state": self.initial_state,
            "k_scale": self.k_scale,
        }
        if self.shared is not None:
            own |= {
                f"shared {name}": getattr(self.shared, name) for name in ("q", "k", "v", "log_decay", "write_strength")
            }
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def wants_grad(self) -> bool:
        """Whether a gradient to any input is recorded."""
        if not torch.is_grad_enabled():
            return False
        return any(tensor.requires_grad for tensor in self.tensors().values())

    def of_heads(self, first: int, end: int) -> "Inputs":
        """The same call for state heads `first` to `end` and the query heads that read them; states start at zero."""
        assert self.initial_state is None, "the state of some heads is asked for"
        per_head = self.q.shape[2] // self.k.shape[2]
        own, queries = slice(first, end), slice(first * per_head, end * per_head)
        shared = self.shared and SharedInputs(
            q=self.shared.q[:, queries],
            k=self.shared.k[:, own],
            v=self.shared.v[:, own],
            log_decay=self.shared.log_decay[:, own],
            write_strength=None if self.shared.write_strength is None else self.shared.write_strength[:, own],
            own_values=self.shared.own_values,
        )
        return dc.replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, own],
            v=self.v[:, :, own],
            log_decay=self.log_decay[:, own],
            write_strength=None if self.write_strength is None else self.write_strength[:, own],
            shared=shared,
            k_scale=None if self.k_scale is None else self.k_scale[own],
        )

    def with_mapped_keys(self, dtype: torch.dtype) -> "Inputs":
        """The same call on keys that are scaled and mapped already, in float32, and then are of `dtype`."""
        if self.k_map == "identity" and self.k_scale is None:
            return self

        def mapped(k: Tensor) -> Tensor:
            scaled = k.float() if self.k_scale is None else k.float() * self.k_scale.float()[:, None]
            return key_feature_map(scaled, self.k_map).to(dtype)

        shared = None if self.shared is None else dc.replace(self.shared, k=mapped(self.shared.k))
        return dc.replace(self, k=mapped(self.k), shared=shared, k_map="identity", k_scale=None)


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int, device: torch.device) -> Tensor:
    """int64 [T] index of the sequence each token belongs to."""
    return torch.searchsorted(cu_seqlens[1:].to(device), torch.arange(num_tokens, device=device), right=True)
