"""The door to the Triton kernels: whether they run here, whether they run these inputs, and running them.

Triton is imported inside functions only, so that everything else works without it.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.triton.config import MAX_DIM, Widths

GPU = "cuda"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def unavailable_reason(
    device: torch.device, delta: bool = False, widths: tuple[int, int, int] | None = None
) -> str | None:  # fmt: skip
    """Why the kernels (those of the delta rule, if `delta`) cannot run heads of such `Widths` on a device, or what no
    check runs, where these are None; None if they can. The first call on a GPU for some widths runs their self-check.
    A plain tuple, since torch.compile empties a named one on its way to functions whose result is constant."""
    from sse_convert.kernels.triton.availability import untrusted_reason

    return untrusted_reason(device, delta=delta, widths=None if widths is None else Widths(*widths))


def untrusted(x: Inputs) -> str | None:
    """`unavailable_reason` of some inputs that are supported. No check runs the kernel of decoding."""
    groups, dim, value_dim = x.q.shape[2] // x.k.shape[2], x.k.shape[-1], x.v.shape[-1]
    widths = None if _decodes(x) else (int(groups), int(dim), int(value_dim))
    reason: str | None = unavailable_reason(x.q.device, _corrects(x), widths)
    return reason


def unsupported_reason(x: Inputs) -> str | None:
    """Why the kernels cannot run these inputs, wherever they are; None if they can."""
    for name, tensor in x.tensors().items():
        if tensor.dtype == torch.float64:
            return f"{name} is float64"
    return too_wide(max(x.k.shape[-1], x.v.shape[-1]))


def _corrects(x: Inputs) -> bool:
    """Whether the kernels of the delta rule run, which decoding does without."""
    return x.write_strength is not None and not _decodes(x)


def _decodes(x: Inputs) -> bool:
    return x.one_token_each and not x.wants_grad()


def too_wide(dim: int) -> str | None:
    """Why the kernels cannot run heads of so many channels; None if they can."""
    return f"the head dim is {dim}, more than {MAX_DIM}" if dim > MAX_DIM else None


def has_kernels(x: Tensor) -> bool:
    """Whether kernels of our own can do what surrounds the operator: on a GPU, without gradients, not in float64."""
    wanted = x.device.type == GPU and not torch.is_grad_enabled() and x.dtype != torch.float64
    return wanted and unavailable_reason(x.device) is None


def fuses(x: Tensor) -> bool:
    """Whether they do; under torch.compile, its own kernels fuse with what comes before and after."""
    return not torch.compiler.is_compiling() and has_kernels(x)


def sse_attention_on_triton(
    x: Inputs, *, output_final_state: bool, inplace_state: bool
) -> tuple[Tensor, Tensor | None]:
    """o [T, Hq, V] in v's dtype and the final states [S, M, H, D, V] in float32, or None if nobody wants them.

    One token per sequence without gradients takes the decode kernel, which overwrites the state of the partitions used;
    everything else the chunked kernels, whose final state is copied into `initial_state` for `inplace_state`.
    """
    with nullcontext() if torch.compiler.is_compiling() else torch.cuda.device_of(x.q):  # type: ignore[no-untyped-call]
        return _run(x, output_final_state, inplace_state)


def _run(x: Inputs, output_final_state: bool, inplace_state: bool) -> tuple[Tensor, Tensor | None]:
    final: Tensor | None
    if _decodes(x):
        from sse_convert.kernels.triton.fused_recurrent import sse_attention_decode

        strided = x.state_slots is not None
        overwrites = inplace_state and x.initial_state is not None and (strided or x.initial_state.is_contiguous())
        o, final = sse_attention_decode(x, inplace_state=overwrites)
    else:
        from sse_convert.kernels.triton.autograd import sse_attention_triton

        overwrites = False
        o, final = sse_attention_triton(x, output_final_state=output_final_state or inplace_state)
    if inplace_state and not overwrites and x.initial_state is not None and final is not None:
        final = x.initial_state.copy_(final)
    return o, final
