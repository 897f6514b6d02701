"""How a model family is described: where its attention sits, and what is peculiar about it."""

import dataclasses as dc
from typing import Any, Literal

SSE_PREFIX = "sse_"
"""prefix of a converted model's model_type, and of every new tensor"""
DELTA = "delta"
"""entry of the field `sse` of a small checkpoint, whose teacher holds the rest: the name of the file that says what"""
LENT_FILE = "sse_delta.json"
"""that file"""
TEACHER_VARIABLE = "SSE_TEACHER"
"""environment variable that names the teacher's folder, for small checkpoints that do not find it"""


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
    normed_layers: Literal["all", "rotated"] = "all"
    """layers with norms of q and k: all, or those that rotate"""
    value_norm: str | None = None
    """module that norms each head's values; None if they are not normed"""
    keys_as_values: str | None = None
    """config field that says whether, in layers without a native window, keys before their norm serve as values"""
    rotary: bool = True
    """positions are rotations of q and k; false for learned absolute ones, or none at all"""
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
    separates_documents: bool = True
    """the backbone's masks keep packed documents apart where `position_ids` restart"""
    windows_in_masks: bool = False
    """the attention does not tell its attention function of a window, which masks alone have"""
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


def decoder_config(config: Any) -> Any:
    """The configuration of a model's decoder: that of the language model inside a model of images and text.

    Args:
        config: a transformers configuration object.
    """
    return getattr(config, "text_config", config)
