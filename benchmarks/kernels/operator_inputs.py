"""Random inputs of one case, the same for all who take part. T tokens, N partitions, H heads, D = V."""

import dataclasses as dc
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.operator_cases import Case
from sse_convert.kernels.triton.config import CHUNK


@dc.dataclass(frozen=True)
class Inputs:
    """Tensors of a call; those in `leaves` want gradients."""

    case: Case
    leaves: dict[str, Tensor]
    """q, k, v, log_decay ([T, H] for one decay per head), router_logits of the partitions; shared q, shared k, shared
    log_decay of the shared one, if any; and write_strength for the delta rule"""
    d_o: Tensor
    """[T, Hq, V], the gradient that comes into a backward"""
    cu_seqlens: Tensor
    """[S + 1] int64, on the device"""

    @cached_property
    def sequences(self) -> Tensor:
        """[T], the sequence of each token."""
        return torch.repeat_interleave(torch.arange(len(self.case.lengths), device=self.d_o.device), self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """[T], where in its sequence each token is."""
        tokens = torch.arange(self.case.tokens, device=self.d_o.device)
        return tokens - self.cu_seqlens[:-1].index_select(0, self.sequences)

    @cached_property
    def lengths(self) -> Tensor:
        """[S], tokens of each sequence."""
        return self.cu_seqlens.diff()


def make(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Queries, values and incoming gradient are normal, keys softmax of normal, log decays logsigmoid / 16 in float32.

    Router logits are float32: in bfloat16 a token in twenty-five has two equal largest ones of 64, and who breaks ties
    differently computes something else.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    T, N, H, Hq, D = case.tokens, case.partitions, case.heads, case.query_heads, case.dim
    leaves = {"q": normal(T, Hq, D).to(dtype), "shared q": normal(T, Hq, D).to(dtype), "v": normal(T, H, D).to(dtype)}
    for name in ("k", "shared k"):
        leaves[name] = _keys(normal(T, H, D), case).to(dtype)
    strong = torch.rand(-(-T // CHUNK), generator=generator, device=device) < case.strong if case.strong else None
    for name in ("log_decay", "shared log_decay"):
        leaves[name] = _decays(normal(T, H) if case.scalar else normal(T, H, D), case, strong, dtype)
    leaves["router_logits"] = _logits(normal(T, N), case.busiest, generator)
    if case.delta:
        leaves["write_strength"] = normal(T, H).sigmoid()
    cu_seqlens = torch.tensor([0, *accumulate(case.lengths)], device=device)
    if not case.shared:
        leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith("shared")}
    for leaf in leaves.values():
        leaf.requires_grad_()
    return Inputs(case, leaves, normal(T, Hq, D).to(dtype), cu_seqlens)


def _keys(normal_THD: Tensor, case: Case) -> Tensor:
    if case.k_map != "identity":
        return normal_THD
    return F.normalize(normal_THD, dim=-1) if case.delta else normal_THD.softmax(-1)


def _decays(normal_THD: Tensor, case: Case, strong: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Gate logits, or log decays in float32; in strong chunks logsigmoid without a normalizer, for zero-mean logits."""
    if case.normalizer is not None:
        return (normal_THD + 3).to(dtype)
    mild = F.logsigmoid(normal_THD + 3) / 16
    if strong is None:
        return mild
    return torch.where(strong.repeat_interleave(CHUNK)[: case.tokens, None, None], F.logsigmoid(normal_THD), mild)


def _logits(logits_TN: Tensor, busiest: float | None, generator: torch.Generator) -> Tensor:
    if busiest is not None:
        first = torch.rand(len(logits_TN), generator=generator, device=logits_TN.device) < busiest
        logits_TN[:, 0] = torch.where(first, logits_TN.amax(1) + 1, logits_TN.amin(1) - 1)
    return logits_TN


def make_state(case: Case, device: torch.device) -> Tensor:
    """States before a decoding step [S, N + 1, H, D, V], float32; the shared partition is the last."""
    shape = len(case.lengths), case.partitions + case.shared, case.heads, case.dim, case.dim
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(1), device=device)
