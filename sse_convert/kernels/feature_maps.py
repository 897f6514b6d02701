"""phi, the feature map on keys: which rows of a state a token writes, and how strongly."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.errors import UsageError

KeyFeatureMap = Literal["softmax", "silu", "relu", "l2", "identity"]

_KNOWN = get_args(KeyFeatureMap)
NORM_EPS = 1e-6
"""added to the squared norm of a key under `l2`, whose norm so stays below 1 and has a gradient at 0"""


def check_key_feature_map(kind: str) -> None:
    """Refuse an unknown name.

    Raises:
        UsageError: `kind` is none of `KeyFeatureMap`.
    """
    if kind not in _KNOWN:
        raise UsageError(f"key feature map is {kind!r}", expected=f"one of {', '.join(_KNOWN)}")


def key_feature_map(k: Tensor, kind: KeyFeatureMap) -> Tensor:
    """phi(k) over the last dim, computed in float32 (float64 for float64) and returned in k's dtype.

    l2 is SiLU scaled to unit norm, as in Gated DeltaNet (arXiv:2412.06464).

    Args:
        k: [..., D] keys.
        kind: softmax | silu | relu | l2 | identity.

    Raises:
        UsageError: `kind` is not one of these.
    """
    check_key_feature_map(kind)
    x = k if k.dtype == torch.float64 else k.float()
    if kind == "softmax":
        return torch.softmax(x, dim=-1).to(k.dtype)
    if kind in ("silu", "l2"):
        phi = F.silu(x)
    elif kind == "relu":
        phi = F.relu(x)
    else:
        phi = x
    if kind == "l2":
        phi = phi * (phi.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    return phi.to(k.dtype)
