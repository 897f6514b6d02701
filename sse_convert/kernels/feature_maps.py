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


def selected_rows(k: Tensor, row_top_k: int) -> Tensor:
    """Mask of the `row_top_k` largest entries along the last dim; ties go to the lowest index.

    Args:
        k: [..., D] keys before the feature map.
        row_top_k: entries kept per key; D or more keeps all.

    Returns:
        bool [..., D].
    """
    order = torch.sort(k, dim=-1, descending=True, stable=True).indices[..., :row_top_k]
    return torch.zeros_like(k, dtype=torch.bool).scatter_(-1, order, True)


def key_feature_map(k: Tensor, kind: KeyFeatureMap, row_top_k: int | None = None) -> Tensor:
    """phi(k) over the last dim, computed in float32 (float64 for float64) and returned in k's dtype.

    With `row_top_k`, the entries that are not selected are zero in phi(k): softmax runs over the selected entries alone
    (paper, equation of the row-sparse update), the elementwise maps zero the rest, and l2 before it takes the norm.

    l2 is SiLU scaled to unit norm, as in Gated DeltaNet (arXiv:2412.06464).

    Args:
        k: [..., D] keys.
        kind: softmax | silu | relu | l2 | identity.
        row_top_k: entries kept per key, or None for all.

    Raises:
        UsageError: `kind` is not one of these.
    """
    check_key_feature_map(kind)
    x = k if k.dtype == torch.float64 else k.float()
    keep = None if row_top_k is None or row_top_k >= k.shape[-1] else selected_rows(x.detach(), row_top_k)
    if kind == "softmax":
        phi = torch.softmax(x if keep is None else x.masked_fill(~keep, float("-inf")), dim=-1)
        return phi.to(k.dtype)
    if kind in ("silu", "l2"):
        phi = F.silu(x)
    elif kind == "relu":
        phi = F.relu(x)
    else:
        phi = x
    phi = phi if keep is None else phi.masked_fill(~keep, 0)
    if kind == "l2":
        phi = phi * (phi.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    return phi.to(k.dtype)
