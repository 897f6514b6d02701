"""Who takes part: for each candidate its tensors, how it runs on them, and the exact answer in float64."""

import dataclasses as dc
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import operator_engines, operator_slots
from benchmarks.kernels import operator_published as published
from benchmarks.kernels.operator_cases import (
    CUDNN,
    DELTA_SLOTS,
    ENGINES,
    FLASH,
    GLA,
    GLA_SLOTS,
    GLA_TWICE,
    MASK,
    OURS,
    VARLEN,
)
from benchmarks.kernels.operator_inputs import Inputs
from sse_convert.kernels.dispatch import sse_attention

Leaves = dict[str, Tensor]
SOFTMAX_CHECKED = 2**13
"""tokens up to which softmax attention is compared: its float64 reference is quadratic in memory"""
FEW_TOKENS = 64
"""up to here the published operator takes the recurrent kernel"""


@dc.dataclass(frozen=True, kw_only=True)
class Problem:
    """One candidate on one case."""

    leaves: Leaves
    """what it differentiates; heads are dimension 1, but for router_logits"""
    d_o: Tensor
    run: Callable[[], Tensor]
    exact: Callable[[Leaves], Tensor] | None
    """the same on other leaves, of a part of the heads and in float64; None where that is not feasible"""
    kind: str
    """those of one kind have the same leaves and the same exact answer"""


def problem(candidate: str, x: Inputs) -> Problem:
    """The candidate's tensors and functions."""
    if candidate in (FLASH, CUDNN):
        return _softmax(candidate, x)
    if candidate in (GLA, GLA_TWICE):
        return _plain(x, twice=candidate == GLA_TWICE)
    if candidate in (GLA_SLOTS, *DELTA_SLOTS):
        given = operator_slots.slots(candidate, x)
        return Problem(leaves=given.leaves, d_o=given.d_o, run=given.run, exact=given.exact, kind=candidate)
    return Problem(
        leaves=x.leaves, d_o=x.d_o, run=_whole(candidate, x), exact=lambda t: sse(t, x, "varlen")[0], kind="sse",
    )  # fmt: skip


def _whole(candidate: str, x: Inputs) -> Callable[[], Tensor]:
    if candidate == OURS:
        return lambda: sse(x.leaves, x, "triton")[0]
    if candidate in ENGINES:
        attend = operator_slots.library(ENGINES[candidate])
        return lambda: operator_engines.run(x, attend)
    return _published(candidate, x)


def _published(candidate: str, x: Inputs) -> Callable[[], Tensor]:
    attend = fla_attend(recurrent=x.case.tokens <= FEW_TOKENS)
    run = {VARLEN: published.varlen, MASK: published.mask}[candidate]
    return lambda: run(x, attend)


def sse(
    t: Leaves, x: Inputs, backend: str, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Our operator on leaves like those of the inputs: o [T, Hq, V], and the state where one is given, overwritten."""
    shared = (t["shared q"], t["shared k"], of_channels(t, "shared log_decay")) if x.case.shared else None
    return sse_attention(
        t["q"], t["k"], t["v"], of_channels(t, "log_decay"), t["router_logits"], shared,
        top_k=x.case.top_k, cu_seqlens=x.cu_seqlens if cu_seqlens is None else cu_seqlens,
        max_seqlen=max(x.case.lengths), backend=backend,
        k_map=x.case.k_map, decay_normalizer=x.case.normalizer, write_strength=t.get("write_strength"),
        initial_state=state, output_final_state=state is not None, inplace_state=state is not None,
    )  # fmt: skip


def of_channels(t: Leaves, name: str) -> Tensor:
    """Decays [T, H, D] of leaves that have one for each channel, or one for all."""
    return t[name] if t[name].dim() == 3 else t[name][..., None].expand_as(t["k"])


def fla_attend(*, recurrent: bool = False, states: bool = False) -> published.Attend:
    """fla-core's gated linear attention; `states` asks for the final ones."""
    from fla.ops.gla import chunk_gla, fused_recurrent_gla

    def attend(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        options = {"cu_seqlens": cu_seqlens, "initial_state": state, "output_final_state": states}
        if recurrent:
            o, final = fused_recurrent_gla(q[None], k[None], v[None], gk=log_decay[None], **options)
        else:
            o, final = chunk_gla(q[None], k[None], v[None], g=log_decay[None], **options)
        return o[0], final

    return attend


def _plain(x: Inputs, *, twice: bool) -> Problem:
    """Gated linear attention over T tokens, or over the 2 T slots that SSE with K = 1 has."""
    names = ("shared q", "shared k", "v", "shared log_decay"), ("q", "k", "v", "log_decay")
    parts = [[x.leaves[name].detach() for name in group] for group in names[: 1 + twice]]
    tensors = [torch.cat(pair).requires_grad_() for pair in zip(*parts, strict=True)]
    leaves = dict(zip(names[1], tensors, strict=True))
    cu = x.cu_seqlens if not twice else torch.cat([x.cu_seqlens, x.cu_seqlens[1:] + x.case.tokens])
    attend = fla_attend(recurrent=x.case.tokens <= FEW_TOKENS)
    return Problem(
        leaves=leaves, d_o=torch.cat([x.d_o] * (1 + twice)), run=lambda: attend(*leaves.values(), cu, None)[0],
        exact=lambda t: gla(t, cu), kind="gla twice" if twice else "gla",
    )  # fmt: skip


def gla(t: Leaves, cu: Tensor) -> Tensor:
    """Gated linear attention as SSE with one partition, no gates and no shared one."""
    logits = t["q"].new_zeros(len(t["q"]), 1)
    return sse_attention(t["q"], t["k"], t["v"], t["log_decay"], logits, top_k=1, write_gate=False, read_gate=False,
                         cu_seqlens=cu, backend="varlen")[0]  # fmt: skip


def _softmax(candidate: str, x: Inputs) -> Problem:
    """Causal softmax attention over sequences of one length; each leaf [S, heads, length, D]."""
    length = x.case.lengths[0]
    assert set(x.case.lengths) == {length}

    def batched(tensor: Tensor) -> Tensor:
        return tensor.detach().unflatten(0, (-1, length)).transpose(1, 2).contiguous()

    leaves = {name: batched(x.leaves[name]).requires_grad_() for name in ("q", "k", "v")}
    grouped = x.case.query_heads != x.case.heads
    backend = SDPBackend.FLASH_ATTENTION if candidate == FLASH else SDPBackend.CUDNN_ATTENTION

    def attention(t: Leaves, backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*t.values(), is_causal=True, enable_gqa=grouped)

    return Problem(
        leaves=leaves, d_o=batched(x.d_o), run=lambda: attention(leaves, backend), kind="softmax",
        exact=(lambda t: attention(t, SDPBackend.MATH)) if x.case.tokens <= SOFTMAX_CHECKED else None,
    )  # fmt: skip
