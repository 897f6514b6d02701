"""Where attention sits in each supported model family, as data. Adding a family means adding an entry here.

Import-light on purpose: planning a conversion reads this without torch.
"""

import dataclasses as dc
import re
from typing import Any, Literal

from sse_convert.errors import CheckpointError

SSE_PREFIX = "sse_"
"""prefix of a converted model's model_type, and of every new tensor"""
GUARD = "plain_class_guard"
"""field of a converted model's config.json that stops source classes"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ArchSpec:
    """One model family. Names are those of transformers classes, modules and config fields."""

    model_type: str
    """`model_type` in config.json"""
    config_class: str
    """configuration class in transformers"""
    backbone_class: str
    """model class without the language-model head; of a model of images and text, with what sees images"""
    causal_lm_class: str
    """model class with the head"""
    classifier_class: str | None = None
    """model class that labels whole sequences; None if the family has none"""
    backbone: str = "model"
    """path in the causal LM of the backbone, which holds the decoder layers"""
    layers: str = "layers"
    """attribute of the backbone that holds the decoder layers"""
    attention: str = "self_attn"
    """attribute of a decoder layer that holds its attention"""
    embeddings: str = "embed_tokens"
    """attribute of the backbone that holds the token embeddings"""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """projection modules of the attention: three, one fused, or those of `latent` in their order"""
    qkv_layout: Literal["separate", "blocks", "heads", "latent"] = "separate"
    """`blocks`: one module, all of q, then k, then v; `heads`: one module, q, k and v of each head in turn; `latent`: a
    projection, a norm and a projection for q, the same for k and v, whose first one also makes the last channels of all
    keys. q has one projection, `q_proj`, where the checkpoint says `q_lora_rank: null`"""
    output: str = "o_proj"
    """output projection module"""
    gated: bool = False
    """the query projection holds, head by head, a query and a gate, whose sigmoid multiplies the head's output"""
    linear_layers: bool = False
    """some layers have linear attention or a state space in place of softmax; conversion leaves them alone"""
    conv1d: bool = False
    """projections are transformers' Conv1D, weights stored [in, out]"""
    qk_norm: Literal["none", "head", "whole"] = "none"
    """norms of q and k, per head or over the whole projection"""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    """their modules"""
    qk_norm_switch: str | None = None
    """config field that says whether a checkpoint has these norms; None if all have"""
    norm_after_rotation: bool = False
    """q and k are rotated first and then normed"""
    normed_layers: Literal["all", "rotated"] = "all"
    """layers with norms of q and k: all, or those that rotate"""
    value_norm: str | None = None
    """module that norms each head's values; None if they are not normed"""
    keys_as_values: str | None = None
    """config field that says whether, in layers without a native window, keys before their norm serve as values"""
    rotary: Literal["full", "partial", "last", "none"] = "full"
    """rotary embedding over all, the first or the last dimensions of a head; none for learned absolute positions, or no
    positions at all"""
    rotary_pairs: Literal[
        "halves", "halves_once", "backwards", "neighbours", "neighbours_once", "neighbours_from_halves",
        "neighbours_to_halves",
    ] = "halves"  # fmt: skip
    """which dimensions turn together: one of each half (`backwards`: by the negative angle), or neighbours. The tables
    (cos, sin) hold each angle once in either half; for `neighbours` twice in turn; for `halves_once` and
    `neighbours_once` once in all, in the latter as complex numbers. `neighbours_to_halves` leaves pairs in halves"""
    pairs_switch: str | None = None
    """config field that says whether a checkpoint has these pairs; `halves` if not. None if all have"""
    rotated_layers: Literal["all", "sliding", "sliding_if_any"] = "all"
    """layers that rotate: all but those whose attention says `use_rope = False`; those with a native window; or these,
    but all in a model without windows"""
    output_dropout: str | None = None
    """config field with the dropout that the attention module applies to its output"""
    logits_times: str | None = None
    """config field that the logits are multiplied by"""
    logits_over: str | None = None
    """config field that the logits are divided by"""
    experts_per_token: str = "num_experts_per_tok"
    """config field with the number of routed experts that a token meets, in families that have experts"""
    cache_argument: str = "past_key_values"
    """name under which a decoder layer hands the cache to its attention"""
    separates_documents: bool = True
    """the backbone's masks keep packed documents apart where `position_ids` restart"""
    hands_on: bool = True
    """a decoder layer hands its other keyword arguments to its attention"""
    softmax_parameters: tuple[str, ...] = ()
    """parameters of the attention that its softmax uses, such as learned sinks: a window beside SSE has them too"""
    inert: tuple[str, ...] = ()
    """other children, parameters and buffers of the attention, of which a converted layer needs nothing"""
    arguments: tuple[str, ...] = ()
    """other arguments of the attention's forward, which only its softmax uses"""
    switches: tuple[str, ...] = ()
    """other config fields that the attention reads, which need nothing of a converted layer"""
    text_types: tuple[str, ...] = ()
    """`model_type` of the language model, one of these, inside a model of images and text; none for a language model"""
    masks_outside: bool = False
    """masks are made around the backbone, which is handed them in place of the padding"""

    def of(self, config: Any, *, rotated: bool = True, own_values: bool = True) -> "ArchSpec":
        """The entry as it is for one checkpoint, by its transformers configuration, in layers that rotate or do not,
        and that have values of their own or not."""
        config = decoder_config(config)
        changes: dict[str, Any] = {}
        switched_off = self.qk_norm_switch is not None and not getattr(config, self.qk_norm_switch)
        if switched_off or (self.normed_layers == "rotated" and not rotated):
            changes["qk_norm"] = "none"
        if self.pairs_switch is not None and not getattr(config, self.pairs_switch):
            changes["rotary_pairs"] = "halves"
        if self.qkv_layout == "latent" and config.q_lora_rank is None:
            changes["qkv"] = ("q_proj", *self.qkv[-3:])
        if not own_values:
            changes["qkv"] = self.qkv[:2]
        return dc.replace(self, **changes) if changes else self

    @property
    def children(self) -> tuple[str, ...]:
        """Modules of the attention that a converted layer uses."""
        norms = () if self.qk_norm == "none" else dict.fromkeys(self.qk_norms)
        return (*self.qkv, self.output, *norms, *(() if self.value_norm is None else (self.value_norm,)))

    @property
    def hybrid_config(self) -> str:
        """Name of the derived configuration class."""
        return f"SSE{self.config_class}"

    @property
    def hybrid_backbone(self) -> str:
        """Name of the derived backbone class."""
        return f"SSE{self.backbone_class}"

    @property
    def hybrid_causal_lm(self) -> str:
        """Name of the derived class with the head. By its ending transformers picks the loss: ForCausalLM,
        but in models of images and text."""
        if self.text_types:
            return f"SSE{self.causal_lm_class}"
        return f"SSE{self.causal_lm_class.removesuffix('LMHeadModel').removesuffix('ForCausalLM')}ForCausalLM"

    @property
    def hybrid_classifier(self) -> str | None:
        """Name of the derived sequence classification class; None if the family has none."""
        return self.classifier_class and f"SSE{self.classifier_class}"

    @property
    def auto_class(self) -> str:
        """Which of transformers' auto classes serves models with the head, plain and converted."""
        return "AutoModelForImageTextToText" if self.text_types else "AutoModelForCausalLM"

    @property
    def auto_classes(self) -> dict[str, str]:
        """Each of transformers' auto classes that serves converted models -> name of the derived class."""
        classes = {"AutoModel": self.hybrid_backbone, self.auto_class: self.hybrid_causal_lm}
        if self.hybrid_classifier:
            classes["AutoModelForSequenceClassification"] = self.hybrid_classifier
        return classes

    @property
    def hybrid_type(self) -> str:
        """`model_type` of a converted model."""
        return SSE_PREFIX + self.model_type

    @property
    def layers_path(self) -> str:
        """Path of the decoder layers in the causal LM's state dict."""
        return f"{self.backbone}.{self.layers}"

    def sees_images(self, parameter: str) -> bool:
        """Whether a parameter of the causal LM, by name, is of what sees images and hands it on, which text does not
        meet."""
        return bool(self.text_types) and not parameter.startswith(f"{self.backbone}.") and "lm_head" not in parameter

    def attention_path(self, layer: int) -> str:
        """Path of a layer's attention there."""
        return f"{self.layers_path}.{layer}.{self.attention}"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class LatentDims:
    """Sizes of low-rank projections of q, k and v."""

    query: int | None
    """rank of q's; None where q has one projection"""
    key_value: int
    """rank of that of k and v"""
    shared_key: int
    """last channels of a key, which all heads share"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionDims:
    """Sizes of one attention layer."""

    hidden: int
    """width of the residual stream"""
    query_heads: int
    """Hq"""
    kv_heads: int
    """heads of k and v"""
    head_dim: int
    """D, size of a query and a key"""
    value_dim: int
    """V, size of a value; the same as D but for latent attention"""
    latent: LatentDims | None = None
    """sizes of low-rank projections, None for whole ones"""
    own_values: bool = True
    """whether values have a projection of their own; else keys serve as values"""

    @property
    def cached(self) -> int:
        """Elements that a softmax layer's cache keeps of a token: keys and values, or what they are made of."""
        if self.latent is not None:
            return self.latent.key_value + self.latent.shared_key
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def projected(self) -> int:
        """Inputs and outputs of all projections, summed."""
        query, output = self.query_heads * self.head_dim, self.query_heads * self.value_dim
        if self.latent is None:
            inputs = (4 if self.own_values else 3) * self.hidden
            return inputs + query + self.kv_heads * (self.head_dim + self.own_values * self.value_dim) + output
        rank, shared = self.latent.key_value, self.latent.shared_key
        expanded = self.query_heads * (self.head_dim - shared + self.value_dim)
        return 3 * self.hidden + 2 * (self.latent.query or 0) + query + 2 * rank + shared + expanded + output


LINEAR = "linear_attention"
"""what `layer_types` of a configuration says of a layer without softmax attention"""


def decoder_config(config: Any) -> Any:
    """The configuration of a model's decoder: that of the language model inside a model of images and text.

    Args:
        config: a transformers configuration object.
    """
    return getattr(config, "text_config", config)


def softmax_layers(config: Any) -> list[int]:
    """Indices of the layers with softmax attention, which can be converted.

    Args:
        config: a transformers configuration object.
    """
    config = decoder_config(config)
    kinds = getattr(config, "layer_types", None) or []
    return [i for i in range(config.num_hidden_layers) if i >= len(kinds) or kinds[i] != LINEAR]


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
    defaults = {"classifier_class": None, "rotary": "last", "qkv": qkv, "qkv_layout": "latent"}
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
        _llama_like("phi3", "Phi3", qkv=("qkv_proj",), qkv_layout="blocks", rotary="partial"),
        _llama_like("olmo2", "Olmo2", qk_norm="whole"),
        _llama_like("granite", "Granite", classifier_class=None, logits_over="logits_scaling"),
        _llama_like("smollm3", "SmolLM3"),
        _llama_like("starcoder2", "Starcoder2", output_dropout="residual_dropout"),
        _llama_like(
            "gpt_neox", "GPTNeoX", backbone="gpt_neox", attention="attention", embeddings="embed_in",
            qkv=("query_key_value",), qkv_layout="heads", output="dense", rotary="partial",
            cache_argument="layer_past",
        ),
        _llama_like("apertus", "Apertus", classifier_class=None, qk_norm="head"),
        _llama_like("arcee", "Arcee"),
        _llama_like(
            "cohere", "Cohere", classifier_class=None, rotary_pairs="neighbours", logits_times="logit_scale",
        ),
        _llama_like(
            "cohere2", "Cohere2", classifier_class=None, rotary_pairs="neighbours", rotated_layers="sliding",
            logits_times="logit_scale",
        ),
        _llama_like(
            "cohere_compass_text", "CohereCompass", config_class="CohereCompassTextConfig",
            backbone_class="CohereCompassTextModel", classifier_class=None, logits_times="logit_scale",
        ),
        _llama_like("cwm", "Cwm", classifier_class=None),
        _llama_like("ernie4_5", "Ernie4_5", classifier_class=None, rotary_pairs="neighbours_from_halves"),
        _llama_like("exaone4", "Exaone4", qk_norm="head", rotated_layers="sliding_if_any"),
        _llama_like("gemma", "Gemma"),
        _llama_like("glm", "Glm", rotary="partial", rotary_pairs="neighbours_from_halves"),
        _llama_like("glm4", "Glm4", rotary="partial", rotary_pairs="neighbours_from_halves"),
        _llama_like("helium", "Helium", rotary_pairs="neighbours_from_halves"),
        _llama_like(
            "hunyuan_v1_dense", "HunYuanDenseV1", qk_norm="head", qk_norms=("query_layernorm", "key_layernorm"),
            norm_after_rotation=True,
        ),
        _llama_like("hyperclovax", "HyperCLOVAX", classifier_class=None, logits_times="logits_scaling"),
        _llama_like("jais2", "Jais2", classifier_class=None),
        _llama_like("ministral", "Ministral"),
        _llama_like("ministral3", "Ministral3"),
        _llama_like(
            "nanochat", "NanoChat", classifier_class=None, qk_norm="head", norm_after_rotation=True,
            rotary_pairs="backwards",
        ),
        _llama_like("nemotron", "Nemotron", rotary="partial", hands_on=False),
        _llama_like("olmo", "Olmo"),
        _llama_like("olmo3", "Olmo3", qk_norm="whole"),
        _llama_like("phi", "Phi", output="dense", rotary="partial"),
        _llama_like("seed_oss", "SeedOss", output_dropout="residual_dropout"),
        _llama_like("stablelm", "StableLm", rotary="partial", hands_on=False),
        _llama_like("vaultgemma", "VaultGemma", classifier_class=None),
        _llama_like(
            "aria_text", "AriaText", classifier_class=None, experts_per_token="moe_topk",
        ),
        _llama_like("dots1", "Dots1", classifier_class=None, qk_norm="head"),
        _llama_like(
            "ernie4_5_moe", "Ernie4_5_Moe", classifier_class=None, rotary_pairs="neighbours_from_halves",
        ),
        _llama_like(
            "exaone_moe", "ExaoneMoe", classifier_class=None, qk_norm="head", rotated_layers="sliding_if_any",
        ),
        _llama_like("flex_olmo", "FlexOlmo", classifier_class=None, qk_norm="whole"),
        _llama_like(
            "glm4_moe", "Glm4Moe", classifier_class=None, qk_norm="head", qk_norm_switch="use_qk_norm",
            rotary="partial",
        ),
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
        _llama_like(
            "hunyuan_v1_moe", "HunYuanMoEV1", qk_norm="head", qk_norms=("query_layernorm", "key_layernorm"),
            norm_after_rotation=True,
        ),
        _llama_like("hy_v3", "HYV3", classifier_class=None, qk_norm="head"),
        _llama_like(
            "kolibri1", "Kolibri1", classifier_class=None, qk_norm="head", rotated_layers="sliding_if_any",
        ),
        _llama_like(
            "llama4_text", "Llama4", config_class="Llama4TextConfig", backbone_class="Llama4TextModel",
            classifier_class=None, qk_norm="head", qk_norms=("qk_norm", "qk_norm"), qk_norm_switch="use_qk_norm",
            norm_after_rotation=True, normed_layers="rotated", rotary_pairs="neighbours_once",
            switches=("attn_temperature_tuning", "attn_scale", "floor_scale"),
        ),
        _llama_like("mellum", "Mellum", classifier_class=None, qk_norm="head"),
        _llama_like("minimax_m2", "MiniMaxM2", classifier_class=None, qk_norm="whole", rotary="partial"),
        _llama_like(
            "gpt_oss", "GptOss", rotary_pairs="halves_once", softmax_parameters=("sinks",), separates_documents=False,
        ),
        _llama_like("mixtral", "Mixtral"),
        _llama_like("olmoe", "Olmoe", classifier_class=None, qk_norm="whole"),
        _llama_like("phimoe", "Phimoe"),
        _llama_like("qwen2_moe", "Qwen2Moe"),
        _llama_like("qwen3_moe", "Qwen3Moe", qk_norm="head"),
        _llama_like(
            "granitemoehybrid", "GraniteMoeHybrid", classifier_class=None, linear_layers=True,
            logits_over="logits_scaling",
        ),
        _llama_like(
            "qwen3_next", "Qwen3Next", qk_norm="head", gated=True, linear_layers=True, rotary="partial",
        ),
        _llama_like(
            "qwen3_5_text", "Qwen3_5", config_class="Qwen3_5TextConfig", backbone_class="Qwen3_5TextModel",
            classifier_class="Qwen3_5TextForSequenceClassification", qk_norm="head", gated=True, linear_layers=True,
            rotary="partial",
        ),
        _llama_like(
            "qwen3_5_moe_text", "Qwen3_5Moe", config_class="Qwen3_5MoeTextConfig",
            backbone_class="Qwen3_5MoeTextModel", classifier_class=None, qk_norm="head", gated=True,
            linear_layers=True, rotary="partial",
        ),
        _llama_like("solar_open", "SolarOpen", classifier_class=None, rotary="partial"),
        _latent("axk1", "AXK1", rotary_pairs="neighbours_to_halves", pairs_switch="rope_interleave"),
        _latent(
            "deepseek_v2", "DeepseekV2", classifier_class="DeepseekV2ForSequenceClassification",
            rotary_pairs="neighbours_once",
        ),
        _latent(
            "deepseek_v3", "DeepseekV3", classifier_class="DeepseekV3ForSequenceClassification",
            rotary_pairs="neighbours_to_halves", pairs_switch="rope_interleave",
        ),
        _latent("glm4_moe_lite", "Glm4MoeLite", rotary_pairs="neighbours_to_halves", pairs_switch="rope_interleave"),
        _latent("kimi_linear", "KimiLinear", rotary="none", linear_layers=True),
        _latent(
            "minicpm3", "MiniCPM3", classifier_class="MiniCPM3ForSequenceClassification", logits_over="logits_scaling",
        ),
        _latent("youtu", "Youtu", rotary_pairs="neighbours_to_halves", pairs_switch="rope_interleave"),
        ArchSpec(
            model_type="gpt2", config_class="GPT2Config", backbone_class="GPT2Model",
            causal_lm_class="GPT2LMHeadModel", classifier_class="GPT2ForSequenceClassification",
            backbone="transformer", layers="h", attention="attn", embeddings="wte", qkv=("c_attn",),
            qkv_layout="blocks", output="c_proj", conv1d=True, rotary="none",
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


def attention_dims(config: Any, layer: int = 0) -> AttentionDims:
    """Sizes of an attention layer of a model. In most families all layers are alike.

    Args:
        config: a transformers configuration object.
        layer: its index.
    """
    config = decoder_config(config)
    spec, heads = source_spec(config.model_type), config.num_attention_heads
    if spec.qkv_layout == "latent":
        return AttentionDims(
            hidden=config.hidden_size,
            query_heads=heads,
            kv_heads=heads,
            head_dim=config.qk_nope_head_dim + config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            latent=LatentDims(
                query=config.q_lora_rank, key_value=config.kv_lora_rank, shared_key=config.qk_rope_head_dim
            ),
        )
    own = config.per_layer_config[layer] if differs_by_layer(config) else config
    head_dim = getattr(own, "head_dim", None) or config.hidden_size // heads
    reuses_keys = spec.keys_as_values is not None and getattr(config, spec.keys_as_values)
    return AttentionDims(
        hidden=config.hidden_size,
        query_heads=heads,
        kv_heads=getattr(own, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        value_dim=head_dim,
        own_values=not (reuses_keys and config.layer_types[layer] == "full_attention"),
    )


def differs_by_layer(config: Any) -> bool:
    """Whether transformers describes the layers of a model one by one, as their sizes may differ.

    Args:
        config: a transformers configuration object.
    """
    return bool(getattr(decoder_config(config), "is_heterogeneous", False))


def dims_by_layer(config: Any) -> tuple[AttentionDims, ...]:
    """Sizes of the attention of each layer of a model.

    Args:
        config: a transformers configuration object.
    """
    config = decoder_config(config)
    return tuple(attention_dims(config, layer) for layer in range(config.num_hidden_layers))


WIDEST_HEAD = 256
"""of torch's flash attention"""
_MASKED_KINDS = {"full_attention", "sliding_attention"}
"""layer types whose masks follow from documents and a window"""


def document_attention_problem(config: Any) -> str | None:
    """Why a model needs masks for its packed rows; None if `document_attention.document_attention` does what they say.

    Args:
        config: of a model of a known family, plain or converted.
    """
    spec, config = source_spec(config.model_type), decoder_config(config)
    widest = max(max(dims.head_dim, dims.value_dim) for dims in dims_by_layer(config))
    found = {
        "decoder layers keep their arguments to themselves": not spec.hands_on,
        "layers have linear attention of their own": spec.linear_layers,
        "attention has learned sinks": bool(spec.softmax_parameters),
        "attention scores are bounded": getattr(config, "attn_logit_softcapping", None) is not None,
        "attention has dropout": bool(getattr(config, "attention_dropout", 0.0)),
        f"heads are {widest} wide": widest > WIDEST_HEAD,
        "some layers have masks of another kind": not set(getattr(config, "layer_types", None) or []) <= _MASKED_KINDS,
    }
    return next((problem for problem, holds in found.items() if holds), None)
