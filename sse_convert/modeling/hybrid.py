"""Converted models: mixins in front of a family's own classes, derived on demand (`SSEQwen3ForCausalLM`, ...).

The backbone's mixin swaps attention modules, makes masks and the sequence layout once per forward, and installs cache
layers; it sits on the backbone because trainers call that directly. The mixin of models with a head adds the balance
loss to the training loss; that of causal LMs prepares generation as well. In models of images and text another class is
between head and backbone, with a mixin that hands the backbone what it would not see.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModel, DynamicCache, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING

from sse_convert.errors import CheckpointError, UsageError
from sse_convert.kernels.gates import partition_gate
from sse_convert.mixers import SlidingMixer, SSESlidingMixer
from sse_convert.modeling.architectures import (
    ARCHITECTURES,
    IMAGE_TEXT,
    INSIDE,
    ArchSpec,
    backbone_of,
    decoder_config,
    further_tokens,
    source_spec,
    spec_for,
)
from sse_convert.modeling.cache import counting_layer, install
from sse_convert.modeling.compat import record_outputs, share_weight_names
from sse_convert.modeling.configuration import config_class_for, hand_down, layer_mixers
from sse_convert.modeling.context import Shard, check_part, current_shard
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION
from sse_convert.modeling.initialise import reset_sse_parameters
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layout import (
    document_starts,
    padding_mask,
    positions_from_offsets,
    sequence_layout,
    text_positions,
)
from sse_convert.modeling.parallel import refuse_parallel_load, refuse_sharded
from sse_convert.modeling.tracing import traced
from sse_convert.modeling.window.document_masks import document_masks
from sse_convert.modeling.window.sliding import MASKS, attention_mask_for, make_sliding, sliding_masks
from sse_convert.modeling.window.window_branch import attention_layer

_Source: Any = object
"""what the mixins are put in front of; to a type checker, a class with any attribute"""
LAYOUT = "sse_layout"
PADDING = "sse_padding"
"""keyword argument of a backbone that is handed masks: the padding mask [B, past + T] they were made of, or None"""
POSITIONS = "sse_positions"
"""keyword argument that carries the positions [1 or B, T] in the row, where partition gates read them"""
OFFSETS = "sse_offsets"
"""keyword argument of the model: int64 [S + 1], where documents begin in the flattened batch, as for `document_layout`;
beside `position_ids` that restart it saves looking at them, for which one would wait for the device"""


class HandOn:
    """Hands what converted layers need from a decoder layer to its attention, where the family's own code does not.

    An object whose methods are hooks, so that models can be pickled.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.words: dict[str, Any] = {}
        layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def reach(self, attention: nn.Module) -> None:
        """Give the arguments to this module; before its other hooks are registered."""
        attention.register_forward_pre_hook(self._give, with_kwargs=True)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.words = {name: kwargs[name] for name in (LAYOUT, MASKS, POSITIONS) if name in kwargs}

    def _give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        words, self.words = self.words, {}
        return args, {**kwargs, **words}


class SSEMixin(_Source):
    """What all classes of converted models have in common."""

    _supports_context_parallel = False
    _tp_plan = None

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the source's; refuses tensor, context and sequence parallelism."""
        refuse_parallel_load(kwargs)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the source: transformers looks for a decorator in the file that a class is from."""
        source: Any = next(base for base in cls.__mro__ if base is not cls and not issubclass(base, SSEMixin))
        found: bool = source._can_set_experts_implementation()
        return found


class SSEBaseMixin(SSEMixin):
    """Goes in front of a family's backbone class."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        _leave_further_tokens(self)
        self._sse_surgery()
        self.post_init()

    def _sse_surgery(self) -> None:
        """Swap the attention of converted layers. The weights of the new tensors are set by `post_init`."""
        config = self.config
        spec = source_spec(config.model_type)
        if getattr(config, "add_cross_attention", False):
            raise CheckpointError("config.json has add_cross_attention", expected="a decoder-only model")
        self._sse_indices: list[int] = []
        self._sse_windows: dict[int, tuple[int, int]] = {}
        self._sse_counts = False
        for index, mixer in enumerate(layer_mixers(config)):
            if mixer is None:
                continue
            layer = getattr(self, spec.layers)[index]
            attention = getattr(layer, spec.attention)
            handing = None if spec.hands_on else HandOn(layer)
            if handing is not None and isinstance(mixer, SlidingMixer):
                handing.reach(attention)
            if isinstance(mixer, SlidingMixer):
                make_sliding(attention, index, mixer.window, mixer.sinks)
                self._sse_windows[index] = mixer.window, mixer.sinks
            else:
                backend = config.sse.get("backend", "auto")
                new = attention_layer(attention, config, index, spec=spec, mixer=mixer, backend=backend)
                setattr(layer, spec.attention, new)
                if handing is not None:
                    handing.reach(new)
                self._sse_indices.append(index)
                self._sse_counts |= partition_gate(mixer.partition_gate) is not None
                if isinstance(mixer, SSESlidingMixer):
                    self._sse_windows[index] = mixer.window, mixer.sinks

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SSEAttention):
            reset_sse_parameters(module)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the source's, with packed documents by position_ids that restart (or cu_seq_lens_q) and no cache. Beside
        position_ids, `sse_offsets` says where they do (see `OFFSETS`), and is taken at its word.

        Raises:
            UsageError: packed documents with a cache or with padding, a mask that recurrent layers cannot follow, or
                offsets without positions.
            HardwareError: the model is spread over devices in a way that is not offered.
        Where rows are split over ranks (`context.sharded`), every argument is of this rank's tokens.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise UsageError("neither input_ids nor inputs_embeds", expected="one of the two")
        batch, length = tokens.shape[:2]
        made: Any = None
        if PADDING in kwargs:
            made, attention_mask = attention_mask, kwargs.pop(PADDING)
        offsets = kwargs.pop(OFFSETS, None)
        if offsets is not None and position_ids is None:
            raise UsageError(
                f"{OFFSETS} without position_ids",
                expected="both",
                fix="pass position_ids that restart with each document, or cu_seq_lens_q alone",
            )
        if position_ids is None and kwargs.get("cu_seq_lens_q") is not None:
            position_ids = positions_from_offsets(kwargs["cu_seq_lens_q"], length).expand(batch, -1)
        if (shard := current_shard()) is not None:
            check_part(shard, tokens, attention_mask, position_ids, past_key_values)
            return super().forward(
                input_ids=input_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                use_cache=False,
                **{**kwargs, **split_arguments(shard, self._sse_running_windows())},
            )
        mask = starts = None
        if self._sse_lays_out():
            self._refuse_sharded()
            self.sse_install(past_key_values)
            one_step = length == 1 and past_key_values is not None
            if not (one_step and traced()):  # who generates token by token pads none of them
                mask = padding_mask(self._sse_filled(attention_mask, length, past_key_values), length)
            if not one_step:
                positions = text_positions(position_ids)
                starts = self._documents(mask, positions, past_key_values, use_cache, batch, look=offsets is None)
        if starts is not None:
            made = made if attention_mask is None else None  # with a padding mask, transformers sees no documents
            attention_mask, use_cache = None, False
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        self.sse_install(past_key_values)
        shape = batch, length
        weights = kwargs.get("output_attentions", self.config.output_attentions)
        apart = source_spec(self.config.model_type).separates_documents
        if starts is not None and position_ids is not None and not apart:
            made = document_masks(self, position_ids)
        kwargs.update(
            self._sse_masks(shape, tokens.device, attention_mask, past_key_values, mask, starts, offsets, weights)
        )
        if self._sse_counts:
            kwargs[POSITIONS] = self._sse_positions(position_ids, attention_mask, past_key_values, tokens)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask if made is None else made,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def sse_layers(self) -> dict[int, SSEAttention]:
        """Index of each SSE layer -> its attention."""
        spec = source_spec(self.config.model_type)
        layers = getattr(self, spec.layers)
        return {index: getattr(layers[index], spec.attention) for index in self._sse_indices}

    def sse_install(self, cache: Any) -> None:
        """Put the cache layers that converted layers need into a cache (see `cache.install`)."""
        if self._sse_converted():
            running = self.config.num_hidden_layers
            states = [index for index in self._sse_indices if index < running]
            install(cache, self.config, states, self._sse_running_windows())

    def _sse_masks(
        self,
        shape: tuple[int, int],
        device: torch.device,
        attention_mask: Any,
        cache: Any,
        mask: Tensor | None,
        starts: Tensor | None,
        offsets: Tensor | None,
        weights: bool,
    ) -> dict[str, Any]:
        """The keyword arguments that converted layers and attention within documents need, made once for all layers.

        Args:
            shape: (B, T) of the new tokens.
            device: of the masks.
            attention_mask: [B, past + T] padding mask as given, or None.
            cache: the cache, with its layers installed, or None.
            mask: bool [B, T] part of it for the new tokens; None for no padding.
            starts: bool [B, T] first tokens of packed documents, or None.
            offsets: of those documents, if they are known.
            weights: whether attention weights are to be returned.
        """
        if not self._sse_lays_out():
            return {}
        layout = sequence_layout(shape, device, mask=mask, starts=starts, offsets=offsets)
        kind = self.config._attn_implementation
        sees = sliding_masks(self._sse_running_windows(), cache, attention_mask, mask, starts, shape, device, weights)
        return {
            LAYOUT: layout,
            MASKS: {
                key: None if value is None else attention_mask_for(kind, value, self.dtype)
                for key, value in sees.items()
            },
        }

    def _sse_positions(self, position_ids: Tensor | None, mask: Any, cache: Any, tokens: Tensor) -> Tensor:
        """Positions [1 or B, T] in the row. Arguments as of `forward`; `tokens` [B, T, ...] are the new ones."""
        length = tokens.shape[1]
        if (rows := text_positions(position_ids)) is not None:
            return rows
        if position_ids is not None and mask is not None:  # of images, beside padding: as `generate` counts
            counted: Tensor = self._sse_filled(mask, length, cache).long().cumsum(-1) - 1
            return counted.clamp(min=0)[:, -length:]
        past = 0 if cache is None else cache.get_seq_length()
        return (torch.arange(length, device=tokens.device) + past)[None]

    def _sse_filled(self, attention_mask: Any, length: int, cache: Any) -> Any:
        """The mask up to the new tokens, of one that has a column for every slot of a static cache."""
        layer = counting_layer(cache)
        if layer is None or attention_mask is None or attention_mask.shape[-1] != layer.static_length:
            return attention_mask
        return attention_mask[..., : int(layer.seen) + length]

    def _sse_running_windows(self) -> dict[int, tuple[int, int]]:
        """Windows of the layers that run: a draft by early exit lowers `num_hidden_layers` for a while."""
        running = self.config.num_hidden_layers
        return {index: window for index, window in self._sse_windows.items() if index < running}

    def _sse_converted(self) -> bool:
        return bool(self._sse_windows or self._sse_indices)

    def _sse_lays_out(self) -> bool:
        """Whether any layer, converted or not, needs to know where sequences are."""
        return self._sse_converted() or self.config._attn_implementation == DOCUMENT_ATTENTION

    def _refuse_sharded(self) -> None:
        if self._sse_indices:
            spec = source_spec(self.config.model_type)
            layer = getattr(self, spec.layers)[self._sse_indices[0]]
            refuse_sharded(getattr(layer, spec.attention), self.config._attn_implementation)

    def _documents(
        self,
        mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Any,
        use_cache: bool | None,
        batch: int,
        *,
        look: bool,
    ) -> Tensor | None:
        """Starts of packed documents, bool [B, T]; None if each row is one document."""
        if cache is not None and cache.get_seq_length() > 0:
            return None
        starts = document_starts(position_ids, batch, look=look)
        if starts is None:
            return None
        if mask is not None:
            jumps = starts[:, 1:] & mask[:, 1:] & mask[:, :-1]
            if not bool(jumps.any()):
                return None  # positions stand still in the padding
            raise UsageError(
                "position_ids restart inside a padded row",
                expected="packed documents without padding",
                fix="drop attention_mask and fill rows with documents, or pass one document per row",
            )
        if cache is not None or use_cache:
            raise UsageError(
                "position_ids restart (packed documents) and a cache is asked for",
                expected="use_cache=False",
                fix="pass use_cache=False, or one document per row",
            )
        return starts


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
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


class SSEHeadMixin(SSEMixin):
    """Goes in front of a family's class with a head on its backbone."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        _make_known(config)
        super().__init__(config, *args, **kwargs)
        if not isinstance(backbone := self._sse_backbone(), SSEBaseMixin):
            _convert(backbone)
        if not isinstance(body := self.base_model, SSEMixin):
            _change_class(body)
        _leave_further_tokens(self)
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

    def sse_update_router_bias(self) -> None:
        """After an optimizer step: move the selection biases of layers with `balance: bias` by one sign step."""
        for layer in self.sse_layers().values():
            layer.update_router_bias()

    def _sse_backbone(self) -> Any:
        return backbone_of(self)


class SSECausalLMMixin(SSEHeadMixin):
    """Goes in front of a family's causal LM class."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(generation_config, "use_mtp", None):
            raise UsageError(
                "use_mtp: drafts by layers that predict further tokens",
                expected="such layers are not converted, and read the hidden states of the original model",
                fix="leave use_mtp unset, or give generate an assistant_model",
            )
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
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
        layer, mask = counting_layer(kwargs["past_key_values"]), kwargs["attention_mask"]
        if layer is None:
            return getattr(super(), "create_masks_for_generate", create_masks_for_generate)(*args, **kwargs)
        if mask is None or kwargs["inputs_embeds"].shape[1] > 1:
            return mask
        return F.pad(mask, (0, layer.static_length - mask.shape[1]))


def split_arguments(shard: Shard, windows: dict[int, tuple[int, int]]) -> dict[str, Any]:
    """The keyword arguments that converted layers need where rows are split: of whole rows.

    Args:
        shard: how they are split.
        windows: index of each layer with a window -> (window, sinks).
    """
    shape, starts, device = shard.shape, shard.starts, shard.positions.device
    layout = sequence_layout(shape, device, starts=starts, offsets=shard.offsets)
    return {LAYOUT: layout, MASKS: sliding_masks(windows, None, None, None, starts, shape, device)}


def _make_known(config: Any) -> None:
    """Let a family's own code find our class for its backbone, which most classifiers and models of images and text ask
    AutoModel for."""
    hand_down(config)  # again: on loading, `sse` may have been set since the configuration was made
    inside = decoder_config(config)
    if type(inside) not in MODEL_MAPPING:
        source = getattr(transformers, source_spec(inside.model_type).backbone_class)
        AutoModel.register(type(inside), base_class_for(source))


def _leave_further_tokens(model: Any) -> None:
    """Let a model leave layers that predict further tokens in their files; families name theirs in part."""
    named = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = [*named, further_tokens(model.config)]


def _convert(backbone: Any) -> None:
    """Make a family's backbone one of ours."""
    _change_class(backbone)
    backbone._sse_surgery()
    backbone.post_init()


def _change_class(model: Any) -> None:
    model.__class__ = base_class_for(type(model))
    record_outputs(model)


def _with_balance_loss(source_forward: Callable[..., Any]) -> Callable[..., Any]:
    """The source's forward; in training, with labels, its loss includes the balance loss."""

    @functools.wraps(source_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = source_forward(self, *args, **kwargs)
        if not self.training or kwargs.get("labels") is None:
            return outputs
        balance = self.sse_balance_loss()
        if isinstance(outputs, tuple):
            return (outputs[0] + balance.to(outputs[0].device), *outputs[1:])
        outputs.loss = outputs.loss + balance.to(outputs.loss.device)
        return outputs

    return forward


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
        # by these names the Trainer knows whose labels it must shift when it computes the loss itself
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(spec.hybrid_type, spec.hybrid_causal_lm)
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
    return type(name, (mixin, source), namespace)


def __getattr__(name: str) -> type[PreTrainedModel]:
    for spec in (ARCHITECTURES | IMAGE_TEXT | INSIDE).values():
        if name == spec.hybrid_causal_lm:
            return model_class_for(source_class(spec))
        if name == spec.hybrid_backbone:
            return base_class_for(getattr(transformers, spec.backbone_class))
        if name == spec.hybrid_classifier:
            return classifier_class_for(getattr(transformers, str(spec.classifier_class)))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
