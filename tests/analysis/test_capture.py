import pytest
import torch

from sse_convert.analysis.capture import see, watching
from sse_convert.kernels.dispatch import sse_attention
from tests.analysis.cases import by_head, inputs, seen, sizes, text
from tests.modeling.tiny import MIXERS, SSE, prompts, tiny_model

SETTINGS = [
    {},
    {"top_k": 2},
    {"top_k": 1, "read_top_k": 3},
    {"write_gate": False},
    {"read_gate": False},
    {"router_bias": torch.tensor([0.0, 1.0, -1.0]).double()},
    {"k_scale": torch.tensor([0.5, 3.0]).double()},
    {"decay_normalizer": 16.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "_".join(s) or "default")
@pytest.mark.parametrize("own", [False, True])
def test_branches_are_those_of_the_layer(settings, own):
    s = sizes(partitions=3, query_heads=4)
    arguments = inputs(s, 40, **settings)
    if own:
        generator = torch.Generator().manual_seed(5)
        k, v = (torch.randn(40, 3, 2, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        arguments |= {"k": k, "v": v, "shared": (*arguments["shared"], v[:, 0])}
    offsets = torch.tensor([0, 15, 40])
    o, _ = sse_attention(**arguments, cu_seqlens=offsets)
    found = see(arguments, offsets, torch.zeros(40, dtype=torch.long))
    torch.testing.assert_close(found.sparse_TQV + found.shared_TQV, o, rtol=1e-10, atol=1e-12)
    assert found.sparse_TQV.abs().max() > 0.01


@pytest.mark.parametrize("settings", [{}, {"top_k": 2, "read_top_k": 1}, {"decay_normalizer": 16.0}])
def test_branches_where_every_head_chooses(settings):
    s = sizes(partitions=3, query_heads=4)
    arguments = inputs(s, 40, **by_head(s, 40), **settings)
    offsets = torch.tensor([0, 15, 40])
    o, _ = sse_attention(**arguments, cu_seqlens=offsets)
    found = see(arguments, offsets, torch.zeros(40, dtype=torch.long))
    torch.testing.assert_close(found.sparse_TQV + found.shared_TQV, o, rtol=1e-10, atol=1e-12)
    assert found.sparse_TQV.abs().max() > 0.01
    assert found.routing is None


def test_without_shared_partition():
    s = sizes(shared=False)
    found = seen(s)
    assert found.shared_TQV is None


def test_what_is_written():
    route = torch.tensor([2, 0, 1])
    arguments = inputs(sizes(partitions=3), 3, router_logits=torch.eye(3).double()[route], top_k=1, read_top_k=2)
    found = see(arguments, torch.tensor([0, 3]), torch.arange(3))
    assert found.written().long().argmax(1).tolist() == [2, 0, 1]
    assert found.written().sum(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("rope", ["none", "keep", "delta rule"])
def test_watching_a_model_sees_what_its_layers_do(family, rope):
    if family == "gpt2" and rope == "keep":
        pytest.skip("gpt2 has no rotary embedding")
    if rope == "delta rule":
        separate = {**MIXERS["delta"], "decay_params": "separate"}
        model = tiny_model(family, ("gdn", "full", "mom", "delta"), {"delta": separate})
    else:
        mixers = {"sse": {**SSE, "rope": rope}, "gla": {"kind": "gla"}}
        model = tiny_model(family, ("sse", "full", "gla", "sse+sliding"), mixers)
    ids, _ = prompts((9, 9))
    layers, found, outputs = model.sse_layers(), {}, {}
    for i, layer in layers.items():
        layer.scaled = lambda o, *args, i=i, scaled=layer.scaled: (outputs.update({i: o}), scaled(o, *args))[1]
    with torch.no_grad(), watching(layers, ids, found.__setitem__):
        model(ids, use_cache=False)
    assert list(found) == [0, 2, 3]
    for i, one in found.items():
        whole = one.sparse_TQV if one.shared_TQV is None else one.sparse_TQV + one.shared_TQV
        torch.testing.assert_close(whole, outputs[i], rtol=1e-5, atol=1e-6)
        assert one.tokens_T.tolist() == ids.flatten().tolist()
    found.clear()
    with torch.no_grad():
        model(ids, use_cache=False)
    assert not found, "the hooks are gone"


def test_text_knows_its_vocabulary():
    t = text(torch.tensor([[7, 3, 7], [3, 3, 9]]))
    assert t.vocabulary.tolist() == [3, 7, 9]
    assert t.names == ("<3>", "<7>", "<9>")
    assert t.vocabulary[t.index].tolist() == t.ids.tolist()
    assert [ids.tolist() for ids, _ in t.batches(1)] == [[[7, 3, 7]], [[3, 3, 9]]]
