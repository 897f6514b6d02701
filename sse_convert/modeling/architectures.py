"""The supported model families, as data. Adding a family means adding an entry here.

Import-light on purpose: planning a conversion reads this without torch.
"""

import dataclasses as dc
import re
from typing import Any

from sse_convert.errors import CheckpointError
from sse_convert.modeling.arch_spec import SSE_PREFIX, ArchSpec, decoder_config

GUARD = "plain_class_guard"
"""field of a converted model's config.json that stops source classes"""


def _llama_like(model_type: str, stem: str, **fields: Any) -> ArchSpec:
    return ArchSpec(
        model_type=model_type,
        config_class=fields.pop("config_class", f"{stem}Config"),
        backbone_class=fields.pop("backbone_class", f"{stem}Model"),
        causal_lm_class=f"{stem}ForCausalLM",
        classifier_class=fields.pop("classifier_class", f"{stem}ForSequenceClassification"),
        **fields,
    )


def _latent(model_type: str, stem: str, **fields: Any) -> ArchSpec:
    """Multi-head latent attention, as in DeepSeek."""
    qkv = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    defaults = {"classifier_class": None, "qkv": qkv, "qkv_layout": "latent"}
    return _llama_like(model_type, stem, **{**defaults, **fields})


ARCHITECTURES: dict[str, ArchSpec] = {
    spec.model_type: spec
    for spec in (
        _llama_like("llama", "Llama"),
        _llama_like("mistral", "Mistral"),
        _llama_like("qwen2", "Qwen2"),
        _llama_like("qwen3", "Qwen3", qk_norm="head"),
        _llama_like("gemma2", "Gemma2"),
        _llama_like(
            "gemma3_text", "Gemma3", config_class="Gemma3TextConfig", backbone_class="Gemma3TextModel",
            classifier_class="Gemma3TextForSequenceClassification", qk_norm="head",
        ),
        _llama_like(
            "gemma4_text", "Gemma4", config_class="Gemma4TextConfig", backbone_class="Gemma4TextModel",
            classifier_class=None, qk_norm="head", value_norm="v_norm", keys_as_values="attention_k_eq_v",
            experts_per_token="top_k_experts", arguments=("shared_kv_states",),
            switches=("use_bidirectional_attention", "kv_sharing_modes"),
        ),
        _llama_like(
            "gemma4_unified_text", "Gemma4Unified", config_class="Gemma4UnifiedTextConfig",
            backbone_class="Gemma4UnifiedTextModel", classifier_class=None, qk_norm="head", value_norm="v_norm",
            keys_as_values="attention_k_eq_v", arguments=("shared_kv_states",),
            switches=("use_bidirectional_attention", "kv_sharing_modes"),
        ),
        _llama_like("phi3", "Phi3", qkv=("qkv_proj",), qkv_layout="blocks"),
        _llama_like("olmo2", "Olmo2", qk_norm="whole"),
        _llama_like("granite", "Granite", classifier_class=None, logits_over="logits_scaling"),
        _llama_like("smollm3", "SmolLM3"),
        _llama_like("starcoder2", "Starcoder2", output_dropout="residual_dropout"),
        _llama_like(
            "gpt_neox", "GPTNeoX", backbone="gpt_neox", attention="attention", embeddings="embed_in",
            qkv=("query_key_value",), qkv_layout="heads", output="dense",
        ),
        _llama_like("apertus", "Apertus", classifier_class=None, qk_norm="head"),
        _llama_like("apertus1p5_text", "Apertus1p5Text", classifier_class=None, qk_norm="head"),
        _llama_like("arcee", "Arcee"),
        _llama_like("cohere", "Cohere", classifier_class=None, logits_times="logit_scale"),
        _llama_like("cohere2", "Cohere2", classifier_class=None, rotated_layers="sliding", logits_times="logit_scale"),
        _llama_like(
            "cohere_compass_text", "CohereCompass", config_class="CohereCompassTextConfig",
            backbone_class="CohereCompassTextModel", classifier_class=None, logits_times="logit_scale",
        ),
        _llama_like("cwm", "Cwm", classifier_class=None),
        _llama_like("ernie4_5", "Ernie4_5", classifier_class=None),
        _llama_like("exaone4", "Exaone4", qk_norm="head", rotated_layers="sliding_if_any"),
        _llama_like("gemma", "Gemma"),
        _llama_like("glm", "Glm"),
        _llama_like("glm4", "Glm4"),
        _llama_like("helium", "Helium"),
        _llama_like(
            "hunyuan_v1_dense", "HunYuanDenseV1", qk_norm="head", qk_norms=("query_layernorm", "key_layernorm"),
        ),
        _llama_like("hyperclovax", "HyperCLOVAX", classifier_class=None, logits_times="logits_scaling"),
        _llama_like("jais2", "Jais2", classifier_class=None),
        _llama_like("ministral", "Ministral"),
        _llama_like("ministral3", "Ministral3"),
        _llama_like("nanochat", "NanoChat", classifier_class=None, qk_norm="head"),
        _llama_like("nemotron", "Nemotron", hands_on=False),
        _llama_like("olmo", "Olmo"),
        _llama_like("olmo3", "Olmo3", qk_norm="whole"),
        _llama_like("phi", "Phi", output="dense"),
        _llama_like("seed_oss", "SeedOss", output_dropout="residual_dropout"),
        _llama_like("stablelm", "StableLm", hands_on=False),
        _llama_like("vaultgemma", "VaultGemma", classifier_class=None),
        _llama_like("aria_text", "AriaText", classifier_class=None, experts_per_token="moe_topk"),
        _llama_like("dots1", "Dots1", classifier_class=None, qk_norm="head"),
        _llama_like("ernie4_5_moe", "Ernie4_5_Moe", classifier_class=None),
        _llama_like("exaone_moe", "ExaoneMoe", classifier_class=None, qk_norm="head", rotated_layers="sliding_if_any"),
        _llama_like("flex_olmo", "FlexOlmo", classifier_class=None, qk_norm="whole"),
        _llama_like("glm4_moe", "Glm4Moe", classifier_class=None, qk_norm="head", qk_norm_switch="use_qk_norm"),
        _llama_like(
            "flint", "Flint", classifier_class=None, qk_norm="head", rotated_layers="sliding",
            softmax_parameters=("sinks",),
        ),
        _llama_like(
            "granite_swa", "GraniteSWA", classifier_class=None, softmax_parameters=("sinks",),
            logits_over="logits_scaling",
        ),
        _llama_like(
            "granitemoe_swa", "GraniteMoeSWA", classifier_class=None, softmax_parameters=("sinks",),
            logits_over="logits_scaling",
        ),
        _llama_like("olmo_hybrid", "OlmoHybrid", classifier_class=None, qk_norm="whole", linear_layers=True),
        _llama_like("granitemoe", "GraniteMoe", classifier_class=None, logits_over="logits_scaling"),
        _llama_like("granitemoeshared", "GraniteMoeShared", classifier_class=None, logits_over="logits_scaling"),
        _llama_like("hunyuan_v1_moe", "HunYuanMoEV1", qk_norm="head", qk_norms=("query_layernorm", "key_layernorm")),
        _llama_like("hy_v3", "HYV3", classifier_class=None, qk_norm="head"),
        _llama_like("kolibri1", "Kolibri1", classifier_class=None, qk_norm="head", rotated_layers="sliding_if_any"),
        _llama_like(
            "llama4_text", "Llama4", config_class="Llama4TextConfig", backbone_class="Llama4TextModel",
            classifier_class=None, qk_norm="head", qk_norms=("qk_norm", "qk_norm"), qk_norm_switch="use_qk_norm",
            normed_layers="rotated",
            switches=("attn_temperature_tuning", "attn_scale", "floor_scale"),
        ),
        _llama_like("mellum", "Mellum", classifier_class=None, qk_norm="head"),
        _llama_like("minimax_m2", "MiniMaxM2", classifier_class=None, qk_norm="whole"),
        _llama_like("gpt_oss", "GptOss", softmax_parameters=("sinks",), separates_documents=False),
        _llama_like("mixtral", "Mixtral"),
        _llama_like("olmoe", "Olmoe", classifier_class=None, qk_norm="whole"),
        _llama_like("phimoe", "Phimoe", windows_in_masks=True),
        _llama_like("qwen2_moe", "Qwen2Moe", windows_in_masks=True),
        _llama_like("qwen3_moe", "Qwen3Moe", qk_norm="head"),
        _llama_like(
            "granitemoehybrid", "GraniteMoeHybrid", classifier_class=None, linear_layers=True,
            logits_over="logits_scaling",
        ),
        _llama_like("qwen3_next", "Qwen3Next", qk_norm="head", gated=True, linear_layers=True),
        _llama_like(
            "qwen3_5_text", "Qwen3_5", config_class="Qwen3_5TextConfig", backbone_class="Qwen3_5TextModel",
            classifier_class="Qwen3_5TextForSequenceClassification", qk_norm="head", gated=True, linear_layers=True,
        ),
        _llama_like(
            "qwen3_5_moe_text", "Qwen3_5Moe", config_class="Qwen3_5MoeTextConfig",
            backbone_class="Qwen3_5MoeTextModel", classifier_class=None, qk_norm="head", gated=True,
            linear_layers=True,
        ),
        _llama_like("solar_open", "SolarOpen", classifier_class=None),
        _latent("axk1", "AXK1", switches=("rope_interleave",)),
        _latent("deepseek_v2", "DeepseekV2", classifier_class="DeepseekV2ForSequenceClassification"),
        _latent(
            "deepseek_v3", "DeepseekV3", classifier_class="DeepseekV3ForSequenceClassification",
            switches=("rope_interleave",),
        ),
        _latent("glm4_moe_lite", "Glm4MoeLite", switches=("rope_interleave",)),
        _latent("kimi_linear", "KimiLinear", rotary=False, linear_layers=True),
        _latent(
            "minicpm3", "MiniCPM3", classifier_class="MiniCPM3ForSequenceClassification", logits_over="logits_scaling",
        ),
        _latent("youtu", "Youtu", switches=("rope_interleave",)),
        ArchSpec(
            model_type="gpt2", config_class="GPT2Config", backbone_class="GPT2Model",
            causal_lm_class="GPT2LMHeadModel", classifier_class="GPT2ForSequenceClassification",
            backbone="transformer", layers="h", attention="attn", embeddings="wte", qkv=("c_attn",),
            qkv_layout="blocks", output="c_proj", conv1d=True, rotary=False,
            output_dropout="resid_pdrop", inert=("attn_dropout", "resid_dropout"),
            arguments=("encoder_hidden_states", "encoder_attention_mask"),
            switches=(
                "attn_pdrop", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
            ),
        ),
    )
}  # fmt: skip


INSIDE: dict[str, ArchSpec] = {
    spec.model_type: spec
    for spec in (
        _llama_like(
            "qwen2_5_vl_text", "Qwen2_5_VL", config_class="Qwen2_5_VLTextConfig",
            backbone_class="Qwen2_5_VLTextModel", classifier_class=None, separates_documents=False,
        ),
        _llama_like(
            "qwen3_vl_text", "Qwen3VL", config_class="Qwen3VLTextConfig", backbone_class="Qwen3VLTextModel",
            classifier_class=None, qk_norm="head",
        ),
        _llama_like(
            "qwen3_vl_moe_text", "Qwen3VLMoe", config_class="Qwen3VLMoeTextConfig",
            backbone_class="Qwen3VLMoeTextModel", classifier_class=None, qk_norm="head",
        ),
    )
}  # fmt: skip
"""language models that exist inside models of images and text alone, without a class of their own that has a head"""


def _around(model_type: str, stem: str, *text_types: str, **fields: Any) -> ArchSpec:
    """A model of images and text around a language model of one of these types, whose entries describe decoder layers
    alike."""
    own = {
        "config_class": f"{stem}Config",
        "backbone_class": f"{stem}Model",
        "causal_lm_class": f"{stem}ForConditionalGeneration",
        "backbone": "model.language_model",
        **fields,
    }
    inside = (ARCHITECTURES | INSIDE)[text_types[0]]
    return dc.replace(inside, model_type=model_type, classifier_class=None, text_types=text_types, **own)


IMAGE_TEXT: dict[str, ArchSpec] = {
    spec.model_type: spec
    for spec in (
        _around("gemma3", "Gemma3", "gemma3_text", masks_outside=True),
        _around(
            "llama4", "Llama4", "llama4_text", backbone_class="Llama4ForConditionalGeneration",
            backbone="language_model.model",
        ),
        _around("mistral3", "Mistral3", "mistral", "ministral3"),
        _around("qwen2_5_vl", "Qwen2_5_VL", "qwen2_5_vl_text"),
        _around("qwen3_5", "Qwen3_5", "qwen3_5_text"),
        _around("qwen3_5_moe", "Qwen3_5Moe", "qwen3_5_moe_text"),
        _around("qwen3_vl", "Qwen3VL", "qwen3_vl_text"),
        _around("qwen3_vl_moe", "Qwen3VLMoe", "qwen3_vl_moe_text"),
    )
}  # fmt: skip
"""models of images and text"""


def spec_for(model_type: str) -> ArchSpec:
    """The family with this `model_type`.

    Raises:
        CheckpointError: the family is unknown, or the checkpoint is already converted.
    """
    if (spec := ARCHITECTURES.get(model_type) or IMAGE_TEXT.get(model_type)) is not None:
        return spec
    if model_type.startswith(SSE_PREFIX):
        raise CheckpointError(
            f"model_type is {model_type!r}: this checkpoint is already converted",
            expected="a checkpoint with softmax attention in every layer",
            fix="convert the original model, or train and evaluate this one as it is",
        )
    raise CheckpointError(
        f"model_type is {model_type!r}, a family sse-convert does not know",
        expected=f"one of {', '.join(sorted(ARCHITECTURES | IMAGE_TEXT))}",
        fix="add an ArchSpec to sse_convert/modeling/architectures.py: where layers, attention and q, k, v are found",
    )


def source_spec(model_type: str) -> ArchSpec:
    """The family of a source or of a converted model: `qwen3` and `sse_qwen3` give the same entry. Knows the parts of
    models of images and text too.

    Raises:
        CheckpointError: the family is unknown.
    """
    name = model_type.removeprefix(SSE_PREFIX)
    return INSIDE.get(name) or spec_for(name)


def check_text_type(spec: ArchSpec, model_type: str) -> None:
    """Make sure that a language model inside a model of images and text is one that the entry names.

    Raises:
        CheckpointError: it is another.
    """
    if model_type not in spec.text_types:
        raise CheckpointError(
            f"the language model inside this {spec.model_type} model is a {model_type}",
            expected=" or ".join(spec.text_types),
            fix="convert another checkpoint",
        )


def source_fields(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json, or what is nested in one, of a converted model as of its source."""
    fields = {key: value for key, value in config.items() if key not in ("sse", "auto_map", GUARD, "architectures")}
    if isinstance(name := fields.get("model_type"), str):
        fields["model_type"] = name.removeprefix(SSE_PREFIX)
    if isinstance(inside := fields.get("text_config"), dict):
        fields["text_config"] = source_fields(inside)
    return fields


def further_tokens(config: Any) -> str:
    """Pattern of the stored names of layers that predict further tokens, which no model loads: of a part called `mtp`,
    or beyond the model's own layers (DeepSeek, GLM).

    Args:
        config: a transformers configuration object of a known family, converted or not.
    """
    spec = source_spec(config.model_type)
    own = "|".join(map(str, range(decoder_config(config).num_hidden_layers)))
    layers = rf"({re.escape(spec.backbone)}\.)?{re.escape(spec.layers)}"
    return rf"(^|\.)mtp(_layers)?\.|^{layers}\.(?!({own})\.)\d+\."


def backbone_of(model: Any) -> Any:
    """The backbone of a causal language model of a known family, converted or not. transformers' `base_model` is
    that in most families, and the whole model in some."""
    return model.get_submodule(source_spec(model.config.model_type).backbone)


def has_experts(config: Any) -> bool:
    """Whether a model of a known family, converted or not, sends tokens to experts.

    Args:
        config: a transformers configuration object.
    """
    return getattr(decoder_config(config), source_spec(config.model_type).experts_per_token, None) is not None
