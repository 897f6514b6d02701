"""Converted models: mixins in front of a family's own classes, derived on demand (`SSEQwen3ForCausalLM`, ...).

Of models with a head it adds the balance loss to the training loss; of causal LMs it prepares generation as well. In
models of images and text another class is between head and backbone, with a mixin that hands the backbone what it would
not see. The backbone's own mixin is in `backbone.py`.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModel, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.masking_utils import create_masks_for_generate
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING

from sse_convert.errors import CheckpointError, UsageError
from sse_convert.modeling.arch_spec import SSE_PREFIX, ArchSpec, decoder_config
from sse_convert.modeling.architectures import ARCHITECTURES, IMAGE_TEXT, INSIDE, backbone_of, source_spec, spec_for
from sse_convert.modeling.backbone import SSEBaseMixin, SSEMixin, leave_further_tokens
from sse_convert.modeling.cache import counting_layer, named_cache
from sse_convert.modeling.compat import CACHE, record_outputs, share_weight_names
from sse_convert.modeling.configuration import config_class_for, hand_down
from sse_convert.modeling.generation import stepping
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layer_arguments import PADDING


class SSEImageTextMixin(SSEMixin):
    """Goes in front of a model of images and text without a head: a backbone, and around it what sees images."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _make_known(config)
        super().__init__(config, *args, **kwargs)
        if not isinstance(self.language_model, SSEBaseMixin):
            _convert(self.language_model)
        self.post_init()

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """As the source's."""
        if source_spec(self.config.model_type).masks_outside:
            kwargs[PADDING] = attention_mask
        return super().forward(*args, attention_mask=attention_mask, **named_cache(kwargs))


class SSEHeadMixin(SSEMixin):
    """Goes in front of a family's class with a head on its backbone."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _make_known(config)
        super().__init__(config, *args, **kwargs)
        if not isinstance(backbone := self._sse_backbone(), SSEBaseMixin):
            _convert(backbone)
        if not isinstance(body := self.base_model, SSEMixin):
            _change_class(body)
        leave_further_tokens(self)
        self.post_init()

    def sse_layers(self) -> dict[int, SSEAttention]:
        """Index of each SSE layer -> its attention."""
        layers: dict[int, SSEAttention] = self._sse_backbone().sse_layers()
        return layers

    def sse_balance_loss(self) -> Tensor:
        """Balance loss of the last forward, 0-d, already weighted by its coefficient: the mean over the SSE layers that
        are balanced by a loss; 0 if none is.

        Raises:
            UsageError: the last forward ran under reentrant gradient checkpointing.
        """
        each = [layer.balance_loss() for layer in self.sse_layers().values()]
        losses = [loss for loss in each if loss is not None]
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()

    def sse_expert_loss(self, router_logits: tuple[Tensor, ...]) -> Tensor:
        """Load-balancing loss of the source's own routers, 0-d, weighted as the source does; 0 for families that have
        none.

        Args:
            router_logits: of each layer with experts, as the backbone returns them for `output_router_logits`.
        """
        family = sys.modules[source_class(source_spec(self.config.model_type)).__module__]
        balance = getattr(family, "load_balancing_loss_func", None)
        if balance is None:
            return torch.zeros((), device=self.device)
        holder: Any = self if hasattr(self, "num_experts") else decoder_config(self.config)  # where images are seen
        loss: Tensor = balance(router_logits, holder.num_experts, holder.num_experts_per_tok)
        weighted: Tensor = holder.router_aux_loss_coef * loss
        return weighted

    def sse_router_stats(self) -> dict[int, dict[str, Any]]:
        """Layer index -> load [N], entropy and mean gate of the last forward's routing (see `SSEAttention`)."""
        stats = {index: layer.router_stats() for index, layer in self.sse_layers().items()}
        return {index: value for index, value in stats.items() if value is not None}

    def _sse_backbone(self) -> Any:
        return backbone_of(self)


class SSECausalLMMixin(SSEHeadMixin):
    """Goes in front of a family's causal LM class."""

    sse_columns = 0
    """most columns of the cache that `generate` now fills; 0 if its steps do not follow each other, as with beams"""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own. Where the package is imported, steps on a GPU are replayed from a CUDA graph."""
        with stepping(self):
            return super().generate(*args, **named_cache(kwargs))

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> Any:  # fmt: skip
        one_by_one = generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        self.sse_columns = max_cache_length + 1 if one_by_one else 0
        if getattr(generation_config, "use_mtp", None):
            raise UsageError(
                "use_mtp: drafts by layers that predict further tokens",
                expected="such layers are not converted, and read the hidden states of the original model",
                fix="leave use_mtp unset, or give generate an assistant_model",
            )
        result = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get(CACHE)
        self._sse_backbone().sse_install(cache)
        if cache is not None and generation_config.is_assistant:  # recording began before our layers were in
            cache.activate_past_recording()
        return result

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered; every way to it (`generate_batch`, a paged cache) begins here.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "continuous batching of a model with converted layers",
            expected="generate: pages hold keys and values, not the states and windows of converted layers",
            fix="call generate with a padded batch, and leave cache_implementation unset",
        )

    def create_masks_for_generate(self, *args: Any, **kwargs: Any) -> Any:
        """What generation with a static cache hands to the forward: the padding mask, since the backbone makes all
        masks itself. For a one-token step it has a column for every slot, so that its shape stays."""
        layer, mask = counting_layer(kwargs[CACHE]), kwargs["attention_mask"]
        if layer is None:
            return getattr(super(), "create_masks_for_generate", create_masks_for_generate)(*args, **kwargs)
        if mask is None or kwargs["inputs_embeds"].shape[1] > 1:
            return mask
        return F.pad(mask, (0, layer.static_length - mask.shape[1]))


def _make_known(config: Any) -> None:
    """Let a family's own code find our class for its backbone, which most classifiers and models of images and text ask
    AutoModel for."""
    hand_down(config)  # again: on loading, `sse` may have been set since the configuration was made
    inside = decoder_config(config)
    if type(inside) not in MODEL_MAPPING:
        source = getattr(transformers, source_spec(inside.model_type).backbone_class)
        AutoModel.register(type(inside), base_class_for(source))


def _convert(backbone: Any) -> None:
    """Make a family's backbone one of ours."""
    _change_class(backbone)
    backbone._sse_surgery()
    backbone.post_init()


def _change_class(model: Any) -> None:
    model.__class__ = base_class_for(type(model))
    record_outputs(model)


def _with_balance_loss(source_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The source's forward; in training, with labels, its loss includes the balance loss, which counts as much of a
    step as the source's own loss does (see `_share_of_step`)."""
    place = list(inspect.signature(source_forward).parameters).index("labels") - 1

    @functools.wraps(source_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = source_forward(self, *args, **named_cache(kwargs))
        labels = args[place] if len(args) > place else kwargs.get("labels")
        if not self.training or labels is None:
            return outputs
        balance = self.sse_balance_loss()
        if isinstance(self, SSECausalLMMixin) and (items := kwargs.get("num_items_in_batch")) is not None:
            balance = balance * _share_of_step(labels, kwargs.get("shift_labels"), items).to(balance.device)
        if isinstance(outputs, tuple):
            return (outputs[0] + balance.to(outputs[0].device), *outputs[1:])
        outputs.loss = outputs.loss + balance.to(outputs.loss.device)
        return outputs

    return forward


def _share_of_step(labels: Tensor, shifted: Tensor | None, items: Tensor | int) -> Tensor:
    """Which share of an optimizer step this forward's loss is, 0-d: trainers that accumulate gradients tell causal LMs
    how many tokens the step predicts, and the loss is a sum over this forward's tokens, divided by that number.

    Args:
        labels: [B, T], -100 where nothing is predicted.
        shifted: [B, T], labels of the next tokens, where the trainer has shifted them.
        items: predicted tokens of the step.
    """
    predicted = (labels[..., 1:] if shifted is None else shifted).ne(-100).sum()
    total = torch.as_tensor(items, device=predicted.device)
    return predicted / total.clamp(min=1)


_CLASSES: dict[type, type] = {}


def base_class_for(source: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of converted models of a source family without a head; the same class each time."""
    if source not in _CLASSES:
        spec = source_spec(source.config_class.model_type)
        mixin = SSEImageTextMixin if spec.text_types else SSEBaseMixin
        _CLASSES[source] = _derive(spec.hybrid_backbone, mixin, source)
    return _CLASSES[source]


def model_class_for(source: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The causal LM class of converted models of a source family; the same class each time.

    Args:
        source: the family's causal LM class, e.g. transformers.Qwen3ForCausalLM.

    Raises:
        CheckpointError: the family is unknown, or this is not its causal LM class.
    """
    if source not in _CLASSES:
        spec = spec_for(source.config_class.model_type)
        if source.__name__ != spec.causal_lm_class:
            raise CheckpointError(
                f"model class {source.__name__}",
                expected=f"{spec.causal_lm_class} for {spec.model_type}",
                fix="convert the checkpoint with the language-model head",
            )
        _CLASSES[source] = _derive(spec.hybrid_causal_lm, SSECausalLMMixin, source)
        # By these names the Trainer knows whose labels it must shift when it computes the loss itself. It does not read
        # the keys: this one is no model_type, for which who lists the table would look in transformers.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SSE_PREFIX + spec.hybrid_causal_lm] = spec.hybrid_causal_lm
    return _CLASSES[source]


def classifier_class_for(source: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The sequence classification class of converted models of a source family; the same class each time."""
    if source not in _CLASSES:
        _CLASSES[source] = _derive(f"SSE{source.__name__}", SSEHeadMixin, source)
    return _CLASSES[source]


def source_class(spec: ArchSpec) -> type[PreTrainedModel]:
    """The family's own causal LM class."""
    cls: type[PreTrainedModel] = getattr(transformers, spec.causal_lm_class)
    return cls


def _derive(name: str, mixin: type, source: type[PreTrainedModel]) -> type[PreTrainedModel]:
    namespace = {
        "config_class": config_class_for(source.config_class),
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{source.__name__} with converted layers.",
    }
    if issubclass(mixin, SSEHeadMixin):
        namespace["forward"] = _with_balance_loss(source.forward)
    share_weight_names(source, name, config_class_for(source.config_class).model_type)
    # By name among the bases: else transformers copies a remote class that generates, and no copy can be pickled.
    generates = (GenerationMixin,) if issubclass(mixin, SSECausalLMMixin) else ()
    return type(name, (mixin, source, *generates), namespace)


def __getattr__(name: str) -> type[PreTrainedModel]:
    for spec in (ARCHITECTURES | IMAGE_TEXT | INSIDE).values():
        if name == spec.hybrid_causal_lm:
            return model_class_for(source_class(spec))
        if name == spec.hybrid_backbone:
            return base_class_for(getattr(transformers, spec.backbone_class))
        if name == spec.hybrid_classifier:
            return classifier_class_for(getattr(transformers, str(spec.classifier_class)))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
