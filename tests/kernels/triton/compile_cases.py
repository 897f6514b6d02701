"""Calls whose kernels are compiled for each architecture: add one for every configuration that is pinned.

The tensors live on the CPU; only their shapes and dtypes matter.
"""

import dataclasses as dc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.triton.autograd import sse_attention_triton
from sse_convert.kernels.triton.fused_recurrent import sse_attention_decode
from sse_convert.kernels.triton.generation.added_product import added_product
from sse_convert.kernels.triton.generation.gated_product import gated_product
from sse_convert.kernels.triton.generation.norm import rms_norm
from sse_convert.kernels.triton.generation.precise_linear import precise_linear
from sse_convert.kernels.triton.generation.ring_attention import ring_attention
from sse_convert.kernels.triton.generation.row_products import row_products
from sse_convert.kernels.triton.generation.token_attention import token_attention
from sse_convert.kernels.triton.generation.token_heads import Heads, HeadWeights, token_heads
from sse_convert.kernels.triton.logit_losses import cross_entropy_, divergence_
from sse_convert.kernels.triton.routing import select_partitions, slot_layout
from sse_convert.kernels.triton.slot_sums import sum_slots
from sse_convert.kernels.triton.state_slots import clear_rows, read_rows, write_rows
from sse_convert.kernels.validation import build_inputs


@dc.dataclass(frozen=True)
class CompileCase:
    """A call that launches kernels."""

    call: Callable[[], object]
    slow: bool = False
    """not among those of every change"""


def route_tokens(N: int, K: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(16, N, dtype=dtype, requires_grad=True)
    select_partitions(logits, K)[1].sum().backward()


def lay_out(N: int, K: int, packed: bool, states: bool, offsets: torch.dtype) -> None:
    slot_layout(
        torch.zeros(100, K, dtype=torch.int32), torch.tensor([0, 30, 100], dtype=offsets), num_partitions=N,
        shared=True, packed=packed, states=states, group_chunks=8,
    )  # fmt: skip


def inputs(
    T: int, dims: tuple[int, int], dtype: torch.dtype, heads: tuple[int, int] = (2, 1), shared: bool = True,
    partitions: int = 0, states: bool = False, delta: bool = False, gates: torch.dtype | None = None, **options: Any,
) -> Inputs:  # fmt: skip
    """Inputs with H heads of G query heads, D and V channels; `partitions`: one q, k and v for each of so many;
    `gates`: type of decays, router logits and write strengths, where it is another than that of q, k and v."""
    (H, G), (D, V), N = heads, dims, partitions or 4

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, requires_grad=not torch.is_inference_mode_enabled())

    own, gates = (N,) if partitions else (), gates or dtype
    of_shared = (
        leaf(T, H * G, D), leaf(T, H, D), leaf(T, H, D, dtype=gates), *([leaf(T, H, V)] if partitions else [])
    )  # fmt: skip
    return build_inputs(
        leaf(T, *own, H * G, D), leaf(T, *own, H, D), leaf(T, *own, H, V), leaf(T, H, D, dtype=gates),
        leaf(T, N, dtype=gates), of_shared if shared else None,
        write_strength=leaf(T, H, dtype=gates) if delta else None,
        initial_state=leaf(2, N + shared, H, D, V, dtype=torch.float32) if states else None,
        cu_seqlens=torch.tensor([0, T // 2, T]), **{"top_k": 1, **options},
    )  # fmt: skip


def train(**settings: Any) -> None:
    x = inputs(256, **settings)
    o, final = sse_attention_triton(x, output_final_state=x.initial_state is not None)
    (o.sum() if final is None else o.sum() + final.sum()).backward()


def decode(**settings: Any) -> None:
    with torch.inference_mode():
        sse_attention_decode(inputs(2, **settings), inplace_state=False)


def decode_in_slots(kept: torch.dtype, **settings: Any) -> None:
    with torch.inference_mode():
        x = inputs(2, states=True, **settings)
        assert x.initial_state is not None
        slots, pages = torch.zeros(2, dtype=torch.int32), x.initial_state.to(kept)
        sse_attention_decode(dc.replace(x, initial_state=pages, state_slots=slots), inplace_state=True)


def move_rows(dtype: torch.dtype) -> None:
    pages, slots = torch.zeros(3, 5, 1000, dtype=dtype), torch.zeros(2, dtype=torch.int32)
    write_rows(pages, slots, read_rows(pages, slots))
    clear_rows(pages, slots, slots)


def attend(D: int, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        q, cached = torch.zeros(2, 4, D, dtype=dtype), torch.zeros(2, 2, 300, D, dtype=dtype)
        token_attention(q, cached, cached, torch.ones(2, 300, dtype=torch.bool), 0.1)


def attend_in_ring(D: int, dtype: torch.dtype, soft_cap: float | None) -> None:
    q, k, numbers = torch.zeros(2, 4, D, dtype=dtype), torch.zeros(2, 2, D, dtype=dtype), torch.zeros(2).int()
    rows = torch.zeros(3, 2, 132, 2, D, dtype=dtype)
    ring_attention(q, k, k, rows, numbers, numbers, window=128, sinks=4, scale=0.1, soft_cap=soft_cap)


def norm(rows: tuple[int, ...], sets: int, rounds: bool) -> None:
    x = torch.zeros(rows, dtype=torch.bfloat16)
    rms_norm(x, torch.zeros(sets * rows[-1]), 1e-6, rounds, 0.0, torch.bfloat16)


def project(inputs: int, outputs: int, bias: bool) -> None:
    x, weight = torch.zeros(2, inputs, dtype=torch.bfloat16), torch.zeros(outputs, inputs, dtype=torch.bfloat16)
    precise_linear(x, weight, torch.zeros(outputs) if bias else None)


def step_of_row(hidden: int, heads: tuple[int, int, int], inner: int, dtype: torch.dtype) -> None:
    """All of a layer's step but its attention: of an SSE layer with a side path, and of a softmax layer with norms,
    rotation and a cache; `heads`: query heads, key heads and their size."""
    Hq, H, D = heads
    with torch.inference_mode():
        x, gain = torch.zeros(1, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
        weights = [torch.zeros(size, hidden, dtype=dtype) for size in (Hq * D, H * D, H * D, 64, 64, 16, 4)]
        biases = [*(weight[:, 0].contiguous() for weight in weights[:3]), *[None] * 4]
        row_products(x, gain, 1e-6, 0.0, weights[:3], [None] * 3)
        projected = row_products(x, gain, 1e-6, 0.0, weights, biases)
        key, value, side = Hq * D, (Hq + H) * D, (Hq + 2 * H) * D
        columns = {"q": 0, "k": key, "v": value, "side_q": side, "side_k": side + 64, "decay": side + 128}
        q, k, cached = (torch.zeros(1, *shape, D, dtype=dtype) for shape in ((Hq,), (H,), (H, 300)))
        up = torch.zeros(Hq * D, 64, dtype=dtype), torch.zeros(H * D, 64, dtype=dtype)
        decay = torch.zeros(H * D, 16, dtype=dtype), torch.zeros(H * D, dtype=dtype)
        out = Heads(q=q, k=k, v=k, shared=(q, k), decay=k.float())
        token_heads(projected, columns, HeadWeights(side=up, decay=decay), None, out)
        norms = HeadWeights(norms=(gain[:D], gain[:D]), eps=1e-6)
        placed = Heads(q=q, k=cached, v=cached, slot=torch.zeros((), dtype=torch.int64))
        token_heads(projected, columns, norms, (gain[None, :D], gain[None, :D]), placed)
        output, scale = torch.zeros(hidden, Hq * D, dtype=dtype), torch.zeros(Hq * D, dtype=dtype)
        added_product(q.flatten(1), output, None, x, scale, D, 1e-6)
        gate, down = torch.zeros(inner, hidden, dtype=dtype), torch.zeros(hidden, inner, dtype=dtype)
        added_product(gated_product(x, gain, 1e-6, 0.0, gate, gate), down, gain, x, None, 1, 0.0)


def losses(vocabulary: int, dtype: torch.dtype, cap: float | None) -> None:
    """Gradients take the place of logits."""
    x = torch.zeros(2, vocabulary, dtype=dtype)
    targets = torch.zeros(2, dtype=torch.int64)
    for answers in (None, targets):
        divergence_(x, x.clone(), (1.0, 0.5), (cap, None), answers, 0.5)
    cross_entropy_(x, targets, 1.0, cap)


BF16 = torch.bfloat16
IN_LAYERS: dict[str, Any] = {
    "gates": torch.float32,
    "decay_normalizer": 16.0,
    "k_scale": torch.ones(2, requires_grad=True),
}
"""what the operator is given by layers of two state heads in 16 bits"""
COMPILE_CASES = {
    "rows of states": CompileCase(partial(move_rows, BF16)),
    "decode in slots": CompileCase(
        partial(
            decode_in_slots, BF16, dims=(128, 128), dtype=BF16, heads=(2, 2), top_k=4, delta=True, k_map="l2",
            **IN_LAYERS,
        )
    ),
    "sum of slots": CompileCase(lambda: sum_slots(torch.zeros(5, 100, 8, 128, dtype=BF16))),
    "select": CompileCase(partial(route_tokens, 4, 1, BF16)),
    "select of 64": CompileCase(partial(route_tokens, 64, 2, torch.float32)),
    "select of 1": CompileCase(partial(route_tokens, 1, 1, torch.float32), slow=True),
    "select all of 128": CompileCase(partial(route_tokens, 128, 128, torch.float16), slow=True),
    "aligned": CompileCase(partial(lay_out, 4, 1, False, False, torch.int32)),
    "aligned with states": CompileCase(partial(lay_out, 64, 2, False, True, torch.int64)),
    "packed": CompileCase(partial(lay_out, 4, 1, True, False, torch.int64)),
    "packed, 64 partitions": CompileCase(partial(lay_out, 64, 3, True, False, torch.int32), slow=True),
    "aligned, all of 64": CompileCase(partial(lay_out, 64, 64, False, True, torch.int32), slow=True),
    "aligned, 300 partitions": CompileCase(partial(lay_out, 300, 1, False, True, torch.int32), slow=True),
    "train": CompileCase(partial(train, dims=(128, 128), dtype=BF16)),
    "train as the layer does": CompileCase(
        partial(train, dims=(128, 128), dtype=BF16, heads=(2, 2), states=True, k_map="softmax", **IN_LAYERS)
    ),
    "train by the delta rule": CompileCase(partial(train, dims=(128, 128), dtype=BF16, delta=True, k_map="l2")),
    "train by the delta rule with everything": CompileCase(
        partial(
            train, dims=(64, 128), dtype=BF16, heads=(2, 3), states=True, delta=True, top_k=2,
            decay_normalizer=16.0,
        ),
        slow=True,
    ),
    "delta rule, 80 channels in fp32": CompileCase(
        partial(train, dims=(80, 80), dtype=torch.float32, delta=True), slow=True
    ),
    "delta rule, 256 channels": CompileCase(
        partial(train, dims=(256, 256), dtype=BF16, delta=True, k_map="l2"), slow=True
    ),
    "train in float32": CompileCase(partial(train, dims=(64, 64), dtype=torch.float32), slow=True),
    "train with everything": CompileCase(
        partial(
            train, dims=(64, 128), dtype=BF16, heads=(2, 3), states=True, top_k=2,
            k_scale=torch.ones(2, requires_grad=True), k_map="silu",
        ),
        slow=True,
    ),
    "decode": CompileCase(partial(decode, dims=(128, 128), dtype=BF16)),
    "token attention": CompileCase(partial(attend, 128, BF16)),
    "ring attention": CompileCase(partial(attend_in_ring, 128, BF16, None)),
    "ring attention, 256 bounded channels": CompileCase(partial(attend_in_ring, 256, BF16, 30.0)),
    "ring attention in float32": CompileCase(partial(attend_in_ring, 128, torch.float32, None)),
    "norm": CompileCase(partial(norm, (1, 1024), 1, True)),
    "norm of heads": CompileCase(partial(norm, (1, 16, 128), 16, False)),
    "norms of a prefill": CompileCase(partial(norm, (8192, 128), 16, True)),
    "norm of 16384": CompileCase(partial(norm, (1, 16384), 1, False)),
    "step of 0.6b": CompileCase(partial(step_of_row, 1024, (16, 8, 128), 3072, BF16)),
    "step of 8b": CompileCase(partial(step_of_row, 4096, (32, 8, 128), 12288, BF16), slow=True),
    "step in fp32": CompileCase(partial(step_of_row, 960, (12, 4, 64), 2560, torch.float32), slow=True),
    "losses of 151,936 logits": CompileCase(partial(losses, 151936, BF16, None)),
    "losses of 50,257 bounded logits": CompileCase(partial(losses, 50257, torch.float32, 30.0)),
    "projection down": CompileCase(partial(project, 4096, 16, False)),
    "projection up": CompileCase(partial(project, 16, 4096, True)),
    "decode with everything": CompileCase(
        partial(decode, dims=(80, 96), dtype=BF16, heads=(2, 3), states=True, k_map="softmax", decay_normalizer=16.0,
                top_k=2),
        slow=True,
    ),
}  # fmt: skip
for name, dtype, dims in (
    ("bf16", BF16, (32, 64, 80, 256)), ("fp16", torch.float16, (80,)), ("fp32", torch.float32, (80, 256))
):  # fmt: skip
    for D in dims:  # float16 differs from bfloat16 in its loads and stores alone
        COMPILE_CASES |= {
            f"train, {D} channels in {name}": CompileCase(partial(train, dims=(D, D), dtype=dtype), slow=True),
            f"decode, {D} channels in {name}": CompileCase(partial(decode, dims=(D, D), dtype=dtype), slow=True),
            f"token attention, {D} channels in {name}": CompileCase(partial(attend, D, dtype), slow=True),
        }
