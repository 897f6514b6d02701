"""The norm of the routers' gradients, whatever chooses partitions."""

import pytest
import torch

from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.training.metrics import gradient_norm, router_parameters
from tests.modeling.tiny import SSE, tiny_model
from tests.surgery.models import tokens
from tests.training.conftest import losses

KEYS = {"router": "keys", "balance": "none"}


@pytest.mark.parametrize(
    ("mixer", "ends"),
    [({}, ("sse_router.weight",)), (KEYS, ("sse_centroids", "sse_route_scale"))],
    ids=["hidden", "keys"],
)
def test_router_parameters_are_all_that_choose(mixer, ends):
    model = tiny_model("qwen3", ("sse", "full", "sse", "full"), {"sse": {**SSE, **mixer}}).train()
    model(tokens(), labels=tokens(), use_cache=False).loss.backward()
    wanted = {name: weight for name, weight in model.named_parameters() if name.endswith(ends)}
    assert len(wanted) == 2 * len(ends)
    found = router_parameters(model)
    assert {id(weight) for weight in found} == {id(weight) for weight in wanted.values()}
    assert all(weight.grad.abs().max() > 0 for weight in found)
    together = torch.cat([weight.grad.flatten() for weight in found]).norm()
    torch.testing.assert_close(gradient_norm(found), together)


def test_training_logs_the_norm_where_keys_choose(make, train, tmp_path):
    recipe = make(("distill", {"tokens": 128}), mixers={"sse": {"qk_rank": 4, **KEYS}, "sliding": {"window": 8}})
    convert_checkpoint(recipe, tmp_path / "keys")
    folder, _ = train("distill", recipe=recipe, checkpoint=tmp_path / "keys")
    (norm,) = losses(folder, "gate_grad_norm")
    assert norm > 0
