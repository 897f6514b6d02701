import pytest
import torch

from sse_convert.errors import UsageError
from sse_convert.kernels.feature_maps import key_feature_map

KINDS = ("softmax", "silu", "relu", "l2", "identity")


def test_maps_are_what_their_names_say() -> None:
    k = torch.randn(3, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(key_feature_map(k, "softmax"), k.exp() / k.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(key_feature_map(k, "silu"), k / (1 + (-k).exp()))
    torch.testing.assert_close(key_feature_map(k, "relu"), k.clamp_min(0))
    silu = k / (1 + (-k).exp())
    torch.testing.assert_close(key_feature_map(k, "l2"), silu / (silu.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt())
    assert torch.equal(key_feature_map(k, "identity"), k)


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_keys_are_mapped_in_float32(kind: str) -> None:
    k = torch.randn(5, 16).bfloat16()
    assert torch.equal(key_feature_map(k, kind), key_feature_map(k.float(), kind).bfloat16())


def test_l2_is_never_longer_than_one_and_has_a_gradient_at_zero() -> None:
    k = torch.cat([torch.zeros(1, 8), 1e-4 * torch.randn(3, 8), 1e4 * torch.randn(3, 8)]).requires_grad_()
    phi = key_feature_map(k, "l2")
    assert bool((phi.norm(dim=-1) <= 1 + 1e-6).all())
    phi.sum().backward()
    assert k.grad is not None
    assert k.grad.isfinite().all()


def test_unknown_map_is_refused() -> None:
    with pytest.raises(UsageError, match="'elu'\nexpected: one of softmax, silu, relu, l2, identity"):
        key_feature_map(torch.zeros(2), "elu")  # type: ignore[arg-type]
