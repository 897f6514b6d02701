"""Checks the arguments of `sse_attention` and brings them into the layout of the backends."""

import torch
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels.gates import PartitionGate
from sse_convert.kernels.operands import Operands, SharedOperands

Shape = tuple[int | str, ...]


def build_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    router_logits: Tensor,
    shared: tuple[Tensor, ...] | None,
    *,
    top_k: int,
    read_top_k: int | None,
    write_gate: bool,
    read_gate: bool,
    scale: float | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    router_bias: Tensor | None,
    partition_gate: PartitionGate | None,
    positions: Tensor | None,
) -> Operands:
    """The operands of `sse_attention`, whose docstring says what each argument is.

    Raises:
        ShapeError: shapes, dtypes or devices disagree; lists every disagreement.
        UsageError: top_k or read_top_k is out of range.
    """
    _check_ranks({"q": (q, (3, 4)), "k": (k, (3, 4)), "v": (v, (3, 4)), "router_logits": (router_logits, (2,))})
    (T, N), H, D, V = router_logits.shape, k.shape[-2], k.shape[-1], v.shape[-1]
    Hq = q.shape[-2]
    if H == 0 or Hq % H:
        raise ShapeError(f"q has {Hq} heads and k has {H}", expected="the heads of q a multiple of the heads of k")
    for name, value in (("top_k", top_k), ("read_top_k", top_k if read_top_k is None else read_top_k)):
        if not 1 <= value <= N:
            raise UsageError(f"{name} is {value}", expected=f"1 to the number of partitions ({N})")
    offsets = torch.tensor([0, T]) if cu_seqlens is None else cu_seqlens
    _check_offsets(offsets, T)
    S, M = len(offsets) - 1, N + (shared is not None)

    tensors: dict[str, tuple[Tensor | None, Shape]] = {
        "q": (q, (T, Hq, D) if q.dim() == 3 else (T, N, Hq, D)),
        "k": (k, (T, H, D) if k.dim() == 3 else (T, N, H, D)),
        "v": (v, (T, H, V) if v.dim() == 3 else (T, N, H, V)),
        "log_decay": (log_decay, (T, H, D)),
        "router_logits": (router_logits, (T, N)),
        "initial_state": (initial_state, (S, M, H, D, V)),
        "router_bias": (router_bias, (N,)),
    }
    if shared is not None:
        _check_shared(shared, v)
        for name, tensor, shape in zip(("q", "k", "log_decay", "v"), shared, ((T, Hq, D), *[(T, H, D)] * 2, (T, H, V)),
                                       strict=False):  # fmt: skip
            tensors[f"shared {name}"] = (tensor, shape)
    _check_tensors(tensors, q.device)
    if positions is not None and (positions.shape != (T,) or positions.is_floating_point()):
        raise ShapeError(f"positions is {positions.dtype} {list(positions.shape)}", expected=f"integer [{T}]")

    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    scale = D**-0.5 if scale is None else scale
    return Operands(
        q_TPHGD=torch.unflatten(_per_partition(q.to(dtype) * scale), 2, (H, Hq // H)),
        k_TPHD=_per_partition(k.to(dtype)),
        v_TPHV=_per_partition(v.to(dtype)),
        log_decay_THD=log_decay.to(dtype),
        router_logits_TN=router_logits,
        shared=None if shared is None else _shared_operands(shared, v, dtype, scale),
        state_SMHDV=q.new_zeros(S, M, H, D, V, dtype=dtype) if initial_state is None else initial_state.to(dtype),
        cu_seqlens=offsets.long(),
        positions_T=positions,
        top_k=top_k,
        read_top_k=top_k if read_top_k is None else read_top_k,
        write_gate=write_gate,
        read_gate=read_gate,
        router_bias_N=router_bias,
        partition_gate=partition_gate,
    )


def _per_partition(x: Tensor) -> Tensor:
    return x[:, None] if x.dim() == 3 else x


def _shared_operands(shared: tuple[Tensor, ...], v: Tensor, dtype: torch.dtype, scale: float) -> SharedOperands:
    q, k, log_decay = (x.to(dtype) for x in shared[:3])
    values = shared[3] if len(shared) == 4 else v
    H = k.shape[1]
    return SharedOperands(
        q_THGD=torch.unflatten(q * scale, 1, (H, q.shape[1] // H)),
        k_THD=k,
        v_THV=values.to(dtype),
        log_decay_THD=log_decay,
    )


def _check_ranks(tensors: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, (tensor, ranks) in tensors.items():
        if tensor.dim() not in ranks:
            raise ShapeError(
                f"{name} has shape {list(tensor.shape)}", expected=f"{' or '.join(map(str, ranks))} dimensions"
            )


def _check_offsets(offsets: Tensor, total: int) -> None:
    if offsets.dim() != 1 or len(offsets) < 1 or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise ShapeError(
            f"cu_seqlens is {offsets.dtype} {list(offsets.shape)}", expected="integer [S + 1], S the sequences"
        )
    if offsets.device.type != "cpu":
        return
    ends_right = int(offsets[0]) == 0 and int(offsets[-1]) == total
    if not ends_right or bool((offsets.diff() < 0).any()):
        raise ShapeError(
            f"cu_seqlens is {offsets.tolist()[:8]}{'...' if len(offsets) > 8 else ''}",
            expected=f"non-decreasing offsets from 0 to the number of tokens ({total})",
        )


def _check_shared(shared: tuple[Tensor, ...], v: Tensor) -> None:
    if len(shared) not in (3, 4):
        raise ShapeError(f"shared has {len(shared)} tensors", expected="(q, k, log_decay) or (q, k, log_decay, v)")
    if len(shared) == 3 and v.dim() == 4:
        raise ShapeError(
            f"v has shape {list(v.shape)}, one per partition, and shared has no v",
            expected="shared = (q, k, log_decay, v) when v is per partition",
        )


def _check_tensors(tensors: dict[str, tuple[Tensor | None, Shape]], device: torch.device) -> None:
    problems, expected = [], []
    for name, (tensor, shape) in tensors.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
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
