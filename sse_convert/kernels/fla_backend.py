"""The door to fla-core's kernels for the gated delta rule with one decay per head, where a GPU and `fla` are there."""

import functools
import importlib
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.torch.operands import operands_of
from sse_convert.kernels.torch.varlen import sse_attention_varlen

MODULE = "fla.ops.gated_delta_rule"
MAX_DIM = 256
"""largest head dim of fla's kernels"""
HOPPER = 9
"""major compute capability"""
WRONG_ON_HOPPER = "3.4.0", "3.7.1"
"""from the first Triton to before the second, fla's gated backward is miscompiled there, and refused (its issue 640)"""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def fla_unavailable_reason(device: torch.device) -> str | None:
    """Why fla cannot run on a device; None if it can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "it needs a CUDA GPU"
    for module, package in (("fla", "fla-core"), ("triton", "triton")):
        if not importlib.util.find_spec(module):
            return f"{package} is not installed (pip install {package})"
    return _miscompiled(device)


def _miscompiled(device: torch.device) -> str | None:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return None
    first, fixed = WRONG_ON_HOPPER
    triton = TorchVersion(importlib.import_module("triton").__version__)
    if not first <= triton < fixed:
        return None
    return f"triton {triton} miscompiles fla's gated backward on Hopper GPUs (install triton {fixed} or newer)"


def fla_unsupported_reason(x: Inputs) -> str | None:
    """Why fla cannot run these inputs, wherever they are; None if it can.

    A decay is known to be one per head where it is an expanded view, as the layers make it.
    """
    decays = [x.log_decay] if x.shared is None else [x.log_decay, x.shared.log_decay]
    dim = max(x.k.shape[-1], x.v.shape[-1])
    reasons = {
        "it runs the gated delta rule only": x.write_strength is None,
        "the decay is one per key channel": any(decay.stride(-1) != 0 for decay in decays),
        f"v is {str(x.v.dtype).removeprefix('torch.')}, not float16 or bfloat16": x.v.dtype.itemsize != 2,
        f"the head dim is {dim}, more than {MAX_DIM}": dim > MAX_DIM,
        "the partition gate reads the state": x.partition_gate is not None and x.partition_gate.needs_state,
        "there are no tokens": x.num_tokens == 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sse_attention_on_fla(x: Inputs) -> tuple[Tensor, Tensor]:
    """SSE by reordered tokens (`varlen.py`), with fla's kernel on the segments.

    Returns:
        o [T, H, G, V] and the final states [S, M, H, D, V], in float32.
    """
    return sse_attention_varlen(operands_of(x), attend=functools.partial(_attend, dtype=x.v.dtype))


def _attend(
    q_THGD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    log_decay_THD: Tensor,
    cu_seqlens: Tensor,
    state_SHDV: Tensor,
    *,
    write_strength_TH: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """fla's kernel: one query head per state head, so those of a group get copies; no empty segments."""
    assert write_strength_TH is not None, "inputs without write strengths are refused"
    (_, H, G, _), lengths_S = q_THGD.shape, cu_seqlens.diff()
    kept = lengths_S.nonzero()[:, 0]
    k, v, decay, beta = (
        x.repeat_interleave(G, 1)[None] for x in (k_THD, v_THV, log_decay_THD[..., 0], write_strength_TH)
    )
    o, final = importlib.import_module(MODULE).chunk_gated_delta_rule(
        q_THGD.flatten(1, 2)[None].to(dtype), k.to(dtype), v.to(dtype), decay, beta,
        scale=1.0, initial_state=state_SHDV[kept].repeat_interleave(G, 1), output_final_state=True,
        cu_seqlens=F.pad(lengths_S[kept].cumsum(0), (1, 0)),
    )  # fmt: skip
    return o[0].unflatten(1, (H, G)).to(state_SHDV), state_SHDV.index_copy(0, kept, final[:, ::G].to(state_SHDV))
