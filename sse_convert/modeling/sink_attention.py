"""Softmax attention with learned sinks: each head has one more logit, which takes weight and gives nothing.

    o_t = sum_j exp(s_tj) v_j / (exp(sink) + sum_j exp(s_tj))

Families write this out for all pairs of tokens. Here torch's kernels do it: the sink is one more key
(`sink_attention`, which `use_kernels` sets), and in packed documents flash attention runs as without sinks, with its
log-sum-exp put right.

Shape letters: T tokens, S documents, Hq query heads, H heads of keys and values, D width of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sse_convert.modeling.arch_spec import SSE_PREFIX
from sse_convert.modeling.architectures import ARCHITECTURES
from sse_convert.modeling.compat import varlen_backward, varlen_forward

SINK_ATTENTION = "sse_learned_sinks"
"""name under which transformers finds `sink_attention`; its masks are sdpa's"""
_ALIGNED = 8
"""kernels take heads whose width is a multiple of it"""


def use_kernels(model: Any) -> None:
    """Let a model whose attention has learned sinks use torch's kernels, unless it was loaded with another attention
    than its family's own, which writes out all pairs of tokens.

    Args:
        model: plain or converted.
    """
    family = ARCHITECTURES.get(model.config.model_type.removeprefix(SSE_PREFIX))
    if family is not None and family.softmax_parameters and model.config._attn_implementation == "eager":
        model.set_attn_implementation(SINK_ATTENTION)


def sink_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a family's attention module calls.

    Args:
        module: the attention module.
        query: [B, Hq, T, D].
        key: [B, H, keys, D]; H divides Hq.
        value: [B, H, keys, D].
        attention_mask: [B or 1, 1, T, keys], True where the query sees the key, or added to the scores; None where one
            query sees all keys, and several, the first of their rows, those up to their own.
        s_aux: the sinks [Hq], logits after scaling.
        scaling: of the products; None for D ** -0.5.
        dropout: of the weights.
        kwargs: what families pass to their attention functions.

    Returns:
        [B, T, Hq, D], and None for the weights.
    """
    return attend_with_sinks(query, key, value, attention_mask, s_aux, scaling, dropout), None


def attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Tensor | None,
    sinks: Tensor,
    scaling: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """The same: [B, T, Hq, D]. Arguments as of `sink_attention`."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    causal = sees is None and length > 1
    if causal:
        key, value = key[:, :, :length], value[:, :, :length]  # a cache of fixed size has empty slots behind them
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))  # kernels share keys under no mask alone
    q, k, v = with_sink_key(query, key, value, sinks, scaling)
    if sees is not None:
        sees = F.pad(sees, (1, 0), value=True if sees.dtype == torch.bool else 0.0)
    elif causal:
        q = F.pad(q, (0, 0, 1, 0))  # a query that sees the sink alone, so that the others see theirs and the sink
    o = F.scaled_dot_product_attention(q, k, v, sees, dropout, causal, scale=scaling)
    return o[:, :, -length:, : value.shape[-1]].transpose(1, 2).contiguous()


def with_sink_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values such that plain attention of the same scaling has the sinks: its first key is theirs.
    All are as wide, as flash attention wants them; heads end in zeros then.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hq, keys, D].
        v: [B, Hq, keys, D].
        sinks: [Hq], logits after scaling.
        scaling: of the products.
    """
    batch, heads, length, width = q.shape
    more = -width % _ALIGNED
    more += _ALIGNED * (more < 2)
    logits = sinks / scaling
    rounded = logits.to(q.dtype)
    both = torch.stack([rounded, (logits - rounded).to(q.dtype)], 1)  # what rounding took off is added again
    q = torch.cat([q, F.pad(both, (0, more - 2)).view(1, heads, 1, more).expand(batch, -1, length, -1)], 3)
    sink = F.pad(k.new_ones(2), (width, more - 2)).expand(batch, heads, 1, -1)
    k = torch.cat([sink, F.pad(k, (0, more))], 2)
    return q, k, F.pad(v, (0, width + more - v.shape[3], 1, 0))


def documents_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, offsets: Tensor, longest: int, scaling: float, window: int | None
) -> Tensor:
    """Causal attention with sinks within documents, by the flash kernel: [T, Hq, D].

    Args:
        q: [T, Hq, D].
        k: [T, H, D].
        v: [T, H, D].
        sinks: [Hq].
        offsets: int32 [S + 1], where documents begin, then T.
        longest: no document has more tokens.
        scaling: of the products.
        window: tokens a query sees, itself included; None for all.
    """
    found: Tensor = _Documents.apply(q, k, v, sinks, offsets, longest, scaling, window)  # type: ignore[no-untyped-call]
    return found


class _Documents(torch.autograd.Function):
    """The kernel gives attention without sinks and the log-sum-exp of its scores. With the sink's logit in that sum,
    the weights are those with sinks, and the output shrinks in proportion. The kernel's backward makes its weights of
    the log-sum-exp and the gradient of its scores of that and the output, so it is right when it is given both."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        offsets: Tensor,
        longest: int,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        o, scores, state = varlen_forward(q, k, v, offsets, longest, scaling, window)
        whole = torch.logaddexp(scores, sinks.to(scores.dtype)[:, None])
        o = (o * (scores - whole).exp().T[..., None]).to(o.dtype)
        ctx.save_for_backward(q, k, v, sinks, offsets, o, whole, *state)
        ctx.settings = longest, scaling, window
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, offsets, o, whole, *state = ctx.saved_tensors
        do = grads[0].contiguous()
        longest, scaling, window = ctx.settings
        dq, dk, dv = varlen_backward(do, q, k, v, o, whole, offsets, longest, scaling, window, state)
        dsinks = None
        if ctx.needs_input_grad[3]:
            weight = (sinks.to(whole.dtype)[:, None] - whole).exp()
            dsinks = -(weight * (do.to(whole.dtype) * o).sum(2).T).sum(1).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None, None


AttentionInterface.register(SINK_ATTENTION, sink_attention)
AttentionMaskInterface.register(SINK_ATTENTION, sdpa_mask)
