"""The norm of the routers' gradients."""

import torch

from sse_convert.training.metrics import gradient_norm, router_parameters
from tests.modeling.tiny import SSE, tiny_model
from tests.surgery.models import tokens


def test_router_parameters_are_all_that_choose():
    model = tiny_model("qwen3", ("sse", "full", "sse", "full"), {"sse": SSE}).train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    wanted = {name: weight for name, weight in model.named_parameters() if name.endswith("sse_router.weight")}
    assert len(wanted) == 2
    found = router_parameters(model)
    assert {id(weight) for weight in found} == {id(weight) for weight in wanted.values()}
    assert all(weight.grad.abs().max() > 0 for weight in found)
    together = torch.cat([weight.grad.flatten() for weight in found]).norm()
    torch.testing.assert_close(gradient_norm(found), together)
