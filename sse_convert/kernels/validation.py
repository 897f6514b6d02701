"""Checks the arguments of `sse_attention` and brings them into one layout."""

from itertools import pairwise

import torch
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels.feature_maps import KeyFeatureMap, check_key_feature_map
from sse_convert.kernels.inputs import Inputs, SharedInputs

Shape = tuple[int, ...]
Tensors = dict[str, tuple[Tensor | None, Shape]]
"""name -> a tensor, and the shape it should have"""


def build_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    router_logits: Tensor,
    shared: tuple[Tensor, ...] | None = None,
    *,
    top_k: int,
    write_strength: Tensor | None = None,
    shared_write_strength: Tensor | None = None,
    write_gate: bool = True,
    read_gate: bool = True,
    scale: float | None = None,
    k_map: KeyFeatureMap = "identity",
    k_scale: Tensor | None = None,
    decay_normalizer: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    initial_state: Tensor | None = None,
    state_slots: Tensor | None = None,
) -> Inputs:
    """The inputs of `sse_attention`, whose docstring says what each argument is. Copies nothing.

    Raises:
        ShapeError: shapes, dtypes or devices disagree; lists every disagreement.
        UsageError: top_k, max_seqlen, k_map or decay_normalizer is out of range, or there is a
            shared_write_strength without write_strength or shared partition.
    """
    _check_ranks({"q": (q, (3, 4)), "k": (k, (3, 4)), "v": (v, (3, 4)), "router_logits": (router_logits, (2,))})
    T, N = router_logits.shape
    _check_settings(N, top_k, k_map, decay_normalizer)
    offsets = torch.arange(2, device=q.device) * T if cu_seqlens is None else cu_seqlens
    longest = T if cu_seqlens is None else _check_offsets(offsets, T)
    if max_seqlen is not None and longest is not None and max_seqlen < longest:
        raise UsageError(f"max_seqlen is {max_seqlen}", expected=f"at least the longest sequence ({longest})")
    tensors = _expected_shapes(q, k, v, log_decay, router_logits, shared)
    (H, D), V, M = k.shape[-2:], v.shape[-1], N + (shared is not None)
    rows = _state_rows(initial_state, state_slots, offsets.shape[0] - 1)
    tensors["initial_state"] = (initial_state, (rows, M, H, D, V))
    tensors["k_scale"] = (k_scale, (H,))
    tensors["write_strength"] = (write_strength, (T, H))
    tensors["shared_write_strength"] = (shared_write_strength, (T, H))
    if shared_write_strength is not None and (write_strength is None or shared is None):
        missing = "write_strength" if write_strength is None else "shared partition"
        raise UsageError(f"shared_write_strength is given without {missing}", expected=f"a {missing} beside it")
    _check_tensors(tensors, q.device)
    return Inputs(
        q=_per_partition(q),
        k=_per_partition(k),
        v=_per_partition(v),
        log_decay=log_decay,
        write_strength=write_strength,
        router_logits=router_logits,
        shared=None
        if shared is None
        else _shared_inputs(shared, v, write_strength if shared_write_strength is None else shared_write_strength),
        scale=D**-0.5 if scale is None else scale,
        cu_seqlens=offsets,
        max_seqlen=max_seqlen if longest is None else longest,
        initial_state=initial_state,
        state_slots=state_slots,
        top_k=top_k,
        write_gate=write_gate,
        read_gate=read_gate,
        k_map=k_map,
        k_scale=k_scale,
        decay_normalizer=decay_normalizer,
    )


def _state_rows(state: Tensor | None, slots: Tensor | None, sequences: int) -> int:
    """How many rows the initial state should have: any, where slots say which."""
    if slots is None:
        return sequences
    if slots.shape != (sequences,) or slots.is_floating_point():
        raise ShapeError(f"state_slots is {slots.dtype} {list(slots.shape)}", expected=f"integer [{sequences}]")
    if state is None or state.dtype == torch.float64:
        given = "None" if state is None else "float64"
        raise UsageError(f"state_slots with initial_state {given}", expected="an initial_state in float32 or bfloat16")
    return state.shape[0]


def _per_partition(x: Tensor) -> Tensor:
    return x[:, None] if x.dim() == 3 else x


def _shared_inputs(shared: tuple[Tensor, ...], v: Tensor, write_strength: Tensor | None) -> SharedInputs:
    (q, k, log_decay), own_values = shared[:3], len(shared) == 4
    v = shared[3] if own_values else v
    return SharedInputs(q=q, k=k, v=v, log_decay=log_decay, write_strength=write_strength, own_values=own_values)


def _expected_shapes(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, router_logits: Tensor, shared: tuple[Tensor, ...] | None
) -> Tensors:
    """Every tensor of tokens by name, with the shape it should have."""
    (T, N), Hq, (H, D), V = router_logits.shape, q.shape[-2], k.shape[-2:], v.shape[-1]
    if H == 0 or Hq % H:
        raise ShapeError(f"q has {Hq} heads and k has {H}", expected="the heads of q a multiple of the heads of k")
    tensors: Tensors = {
        "q": (q, (T, Hq, D) if q.dim() == 3 else (T, N, Hq, D)),
        "k": (k, (T, H, D) if k.dim() == 3 else (T, N, H, D)),
        "v": (v, (T, H, V) if v.dim() == 3 else (T, N, H, V)),
        "log_decay": (log_decay, (T, H, D)),
        "router_logits": (router_logits, (T, N)),
    }
    if shared is not None:
        _check_shared(shared, v)
        shapes = ((T, Hq, D), (T, H, D), (T, H, D), (T, H, V))
        for name, tensor, shape in zip(("q", "k", "log_decay", "v"), shared, shapes, strict=False):
            tensors[f"shared {name}"] = (tensor, shape)
    return tensors


def _check_settings(num_partitions: int, top_k: int, k_map: KeyFeatureMap, decay_normalizer: float | None) -> None:
    if not 1 <= top_k <= num_partitions:
        raise UsageError(f"top_k is {top_k}", expected=f"1 to the number of partitions ({num_partitions})")
    check_key_feature_map(k_map)
    if decay_normalizer is not None and not decay_normalizer > 0:
        raise UsageError(f"decay_normalizer is {decay_normalizer}", expected="more than 0, or None for log decays")


def _check_ranks(tensors: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, (tensor, ranks) in tensors.items():
        if tensor.dim() not in ranks:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}", expected=f"{' or '.join(map(str, ranks))} dimensions"
            )


def _check_offsets(offsets: Tensor, total: int) -> int | None:
    """The length of the longest sequence; None where it is not read: from a device, or when `torch.compile` traces."""
    if offsets.dim() != 1 or offsets.shape[0] < 1 or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ShapeError(
            f"cu_seqlens is {offsets.dtype} {list(offsets.shape)}", expected="integer [S + 1], S the sequences"
        )
    if offsets.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    ends = offsets.tolist()
    lengths = [b - a for a, b in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != total or min(lengths, default=0) < 0:
        raise ShapeError(
            f"cu_seqlens is {ends[:8]}{'...' if len(ends) > 8 else ''}",
            expected=f"non-decreasing offsets from 0 to the number of tokens ({total})",
        )
    return max(lengths, default=0)


def _check_shared(shared: tuple[Tensor, ...], v: Tensor) -> None:
    if len(shared) not in (3, 4):
        raise ShapeError(f"shared has {len(shared)} tensors", expected="(q, k, log_decay) or (q, k, log_decay, v)")
    if len(shared) == 3 and v.dim() == 4:
        raise ShapeError(
            f"v has shape {list(v.shape)}, one per partition, and shared has no v",
            expected="shared = (q, k, log_decay, v) when v is per partition",
        )


def _check_tensors(tensors: Tensors, device: torch.device) -> None:
    problems, expected = [], []
    for name, (tensor, shape) in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            problems.append(f"{name} has shape {list(tensor.shape)}")
            expected.append(f"{name} {list(shape)}")
        if not tensor.is_floating_point():
            problems.append(f"{name} has dtype {tensor.dtype}")
            expected.append(f"{name} of a float dtype")
        if tensor.device != device:
            problems.append(f"{name} is on {tensor.device}")
            expected.append(f"{name} on {device} like q")
    if problems:
        raise ShapeError("; ".join(problems), expected="; ".join(expected))
