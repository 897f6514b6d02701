"""A model that is not what its family's entry says is refused, with the name of what conversion would lose."""

import dataclasses as dc
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma4TextConfig

from sse_convert.checkpoints.config_only import open_for_planning
from sse_convert.checkpoints.meta_model import skeleton
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import CheckpointError
from sse_convert.modeling.arch_spec import ArchSpec
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.attention_dims import dims_by_layer, document_attention_problem
from sse_convert.surgery.family_guard import check_family, model_problems
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from tests.modeling.tiny import ENTRIES, tiny_config
from tests.surgery.models import recipe, save_source
from tests.surgery.synthetic import edit_config


def plain(model_type: str, **fields: Any) -> ArchSpec:
    """A family as the entry of Llama would describe it."""
    names = ("model_type", "config_class", "backbone_class", "causal_lm_class", "classifier_class")
    return ArchSpec(**{name: getattr(spec_for(model_type), name) for name in names}, **fields)


def problems(model_type: str, spec: ArchSpec | None = None, **overrides: Any) -> str:
    return "; ".join(model_problems(skeleton(tiny_config(model_type, **overrides)), spec or spec_for(model_type)))


def with_argument(kind: type[nn.Module]) -> type[nn.Module]:
    class Changed(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, surprise: Any = None, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs)

    return Changed


def with_switch(kind: type[nn.Module]) -> type[nn.Module]:
    class Changed(kind):  # type: ignore[misc, valid-type]
        @property
        def scale(self) -> Any:
            return 2 if self.config.surprise else 1

    return Changed


@pytest.mark.parametrize("model_type", ENTRIES)
def test_each_family_passes_as_it_is_and_is_refused_with_anything_more(model_type: str) -> None:
    """A child, a parameter, a buffer, an argument and a config switch, each in the family's real attention module."""
    spec, model = spec_for(model_type), skeleton(tiny_config(model_type))
    assert model_problems(model, spec) == []
    attention = model.get_submodule(spec.attention_path(2))
    kind = type(attention)
    attention.add_module("surprise", nn.Identity())
    assert model_problems(model, spec) == ["module surprise (layer 2)"]
    del attention.surprise
    attention.register_parameter("surprise", nn.Parameter(torch.zeros(1)))
    assert model_problems(model, spec) == ["parameter surprise (layer 2)"]
    del attention.surprise
    attention.register_buffer("surprise", torch.zeros(1))
    assert model_problems(model, spec) == ["buffer surprise (layer 2)"]
    del attention.surprise
    attention.__class__ = with_argument(kind)
    assert "argument surprise of its forward (layer 2)" in model_problems(model, spec)
    attention.__class__ = with_switch(kind)
    model.config.surprise = True
    assert "config field surprise = True (layer 2)" in model_problems(model, spec)
    model.config.surprise = False
    assert not any("config field" in problem for problem in model_problems(model, spec))


def test_what_a_plain_entry_would_have_lost() -> None:
    assert "module query_layernorm (layer 0)" in problems("hunyuan_v1_dense", plain("hunyuan_v1_dense"))
    assert "module q_norm (layer 0)" in problems("exaone4", plain("exaone4"))


def test_switches_that_a_checkpoint_may_set() -> None:
    assert problems("olmo", clip_qkv=8.0) == "config field clip_qkv = 8.0 (layer 0)"
    assert "module q_norm (layer 0)" in problems("cohere", use_qk_norm=True)
    assert "module q_layernorm (layer 0)" in problems("phi", qk_layernorm=True)
    assert "config field use_bidirectional_attention = True" in problems("gemma", use_bidirectional_attention=True)


def test_attention_to_later_tokens_is_refused() -> None:
    later = problems("gemma4_text", use_bidirectional_attention="all")
    assert later == "attention to later tokens (is_causal is False)"
    assert problems("gemma4_text", use_bidirectional_attention="vision") == ""  # of images, which it does not see


def test_gemma_4_of_its_default_sizes() -> None:
    config = Gemma4TextConfig()
    assert model_problems(skeleton(config), spec_for("gemma4_text")) == []
    assert {dims.head_dim for dims in dims_by_layer(config)} == {256, 512}
    assert document_attention_problem(config) == "heads are 512 wide"


def test_layers_that_share_keys_and_values_are_refused(tmp_path: Any) -> None:
    source = save_source(tmp_path / "teacher", "gemma4_text")
    edit_config(source, num_kv_shared_layers=1)
    with pytest.raises(CheckpointError, match="num_kv_shared_layers is 1") as caught:
        open_teacher(source)
    assert caught.value.expected == "num_kv_shared_layers: 0"


@pytest.mark.parametrize(
    ("model_type", "switches"),
    [
        ("llama", {"attention_bias": True}),
        ("gemma2", {"attn_logit_softcapping": 50.0}),
        ("mistral", {"sliding_window": 6}),
        ("seed_oss", {"attention_out_bias": True, "residual_dropout": 0.1}),
    ],
)
def test_switches_that_need_nothing_of_a_converted_layer(model_type: str, switches: dict[str, Any]) -> None:
    assert problems(model_type, **switches) == ""


def test_a_layer_that_hands_nothing_on_is_named() -> None:
    silent = dc.replace(spec_for("stablelm"), hands_on=True)
    assert "StableLmDecoderLayer.forward, which hands no keyword arguments" in problems("stablelm", silent)


def test_plan_refuses_before_any_weight_is_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_source(tmp_path / "teacher", "olmo", clip_qkv=8.0)
    with pytest.raises(CheckpointError, match=r"would lose: config field clip_qkv = 8\.0") as caught:
        make_plan(Job.of(recipe(source), open_for_planning))
    assert "'olmo'" in caught.value.expected
    check_family(tiny_config("olmo"), spec_for("olmo"))
