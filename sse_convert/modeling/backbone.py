"""The backbone of converted models: a mixin in front of a family's own class.

It swaps attention modules, makes masks and the sequence layout once per forward, and installs cache layers: here and
not in the model with a head, because trainers call the backbone directly.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sse_convert.errors import CheckpointError, UsageError
from sse_convert.kernels.torch_modes import traced
from sse_convert.mixers import SlidingMixer, WindowMixer
from sse_convert.modeling.arch_spec import DELTA
from sse_convert.modeling.architectures import further_tokens, source_spec
from sse_convert.modeling.attention_dims import attention_dims, heads_problem
from sse_convert.modeling.cache import check_pasts, counting_layer, install, one_cache
from sse_convert.modeling.compat import CACHE, CACHE_NAMES
from sse_convert.modeling.configuration import hand_down, layer_mixers, whole_entry
from sse_convert.modeling.context import check_part, current_shard
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION
from sse_convert.modeling.initialise import reset_sse_parameters
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.layer_arguments import OFFSETS, PADDING, HandOn, split_arguments
from sse_convert.modeling.layout import (
    LAYOUT,
    document_starts,
    padding_mask,
    positions_from_offsets,
    sequence_layout,
    text_positions,
)
from sse_convert.modeling.loading import refuse_parallel_load, refuse_sharded, with_teacher
from sse_convert.modeling.sink_attention import use_kernels
from sse_convert.modeling.tried import warn_of_newer
from sse_convert.modeling.window.masks import document_masks
from sse_convert.modeling.window.sliding import MASKS, attention_mask_for, make_sliding, sliding_masks
from sse_convert.modeling.window.window_attention import HeadOrder, head_order
from sse_convert.modeling.window.window_branch import attention_layer

_Source: Any = object
"""what the mixins are put in front of; to a type checker, a class with any attribute"""


class SSEMixin(_Source):
    """What all classes of converted models have in common."""

    _supports_context_parallel = False
    _tp_plan = None

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the source's; joins a small checkpoint with its teacher, refuses tensor, context and sequence parallelism,
        picks kernels for learned sinks, and warns of libraries that are newer than the tried ones."""
        warn_of_newer()
        refuse_parallel_load(kwargs)
        given = kwargs.get("config")
        asked = kwargs.get("attn_implementation") or getattr(given, "_attn_implementation", None)
        made = super().from_pretrained(*args, **kwargs)
        model = made[0] if isinstance(made, tuple) else made
        if DELTA in model.config.sse:
            raise CheckpointError(
                "this way of loading leaves a small checkpoint without its teacher",
                expected="from_pretrained of a tried version of transformers",
                fix="make a whole checkpoint of it: `sse-convert join`",
            )
        if asked is None:
            use_kernels(model)
        return made

    @classmethod
    def _load_pretrained_model(cls, model: Any, state_dict: Any, files: Any, load: Any, *more: Any) -> Any:
        """As transformers'. Of a small checkpoint it found the new tensors; the teacher's come beside them."""
        if DELTA in model.config.sse:
            if state_dict is None:
                state_dict, load = with_teacher(files, load)
            model.config.sse = whole_entry(model.config.sse)
            hand_down(model.config)
        return super()._load_pretrained_model(model, state_dict, files, load, *more)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: saving the configuration writes the code."""

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
        leave_further_tokens(self)
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
        self._sse_orders: dict[int, HeadOrder] = {}
        self._sse_layer_kinds: list[str] = []
        for index, mixer in enumerate(layer_mixers(config)):
            self._sse_layer_kinds.append(
                config.model_type if mixer is None else f"{mixer} {attention_dims(config, index)}"
            )
            if mixer is None:
                continue
            layer = getattr(self, spec.layers)[index]
            attention = getattr(layer, spec.attention)
            handing = None if spec.hands_on else HandOn(layer)
            if isinstance(mixer, WindowMixer):
                self._sse_windows[index] = mixer.window, mixer.sinks
                self._sse_check_heads(index, mixer.full_heads)
            if handing is not None and isinstance(mixer, SlidingMixer):
                handing.reach(attention)
            if isinstance(mixer, SlidingMixer):
                order = head_order(mixer.full_heads, attention_dims(config, index).kv_heads)
                make_sliding(attention, index, mixer, order)
            else:
                backend = config.sse.get("backend", "auto")
                new = attention_layer(attention, config, index, spec=spec, mixer=mixer, backend=backend)
                order = new.order
                setattr(layer, spec.attention, new)
                if handing is not None:
                    handing.reach(new)
                self._sse_indices.append(index)
            if order is not None:
                self._sse_orders[index] = order

    def _sse_check_heads(self, index: int, heads: tuple[int, ...]) -> None:
        """Refuse heads that see the whole row where a layer cannot have them, by a CheckpointError."""
        if heads and (problem := heads_problem(self.config, index, heads)):
            raise CheckpointError(
                f"layer {index} has full_heads {list(heads)}, and {problem}",
                expected="heads that can be told apart by key-value head, and one of them at least with a mixer",
                fix="convert the model again, with other layers.overrides",
            )

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
        position_ids, `sse_offsets` says where they do (see `OFFSETS`), and is taken at its word. The cache is called
        `cache` or `past_key_values`, in every version of transformers.

        Raises:
            UsageError: packed documents with a cache or with padding, a mask that recurrent layers cannot follow,
                offsets without positions, or a cache that is not this model's (see `one_cache` and `install`).
            HardwareError: the model is spread over devices in a way that is not offered.
        Where rows are split over ranks (`context.sharded`), every argument is of this rank's tokens.
        """
        tokens = _tokens_of(input_ids, inputs_embeds)
        named = {"past_key_values": past_key_values, "attention_mask": attention_mask, "position_ids": position_ids}
        cache = one_cache({**named, **kwargs})
        for name in CACHE_NAMES:
            kwargs.pop(name, None)
        self.sse_install(cache)
        made: Any = None
        if PADDING in kwargs:
            made, attention_mask = attention_mask, kwargs.pop(PADDING)
        offsets = kwargs.pop(OFFSETS, None)
        if position_ids is None:
            position_ids = _positions_of(tokens, offsets, kwargs.get("cu_seq_lens_q"))
        given = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        if (shard := current_shard()) is not None:
            check_part(shard, tokens, attention_mask, position_ids, cache)
            kwargs.update(split_arguments(shard, self._sse_running_windows()))
            return super().forward(**given, use_cache=False, **kwargs)
        shape, look = (tokens.shape[0], tokens.shape[1]), offsets is None
        mask, starts = self._sse_layout(attention_mask, position_ids, cache, use_cache, shape, look=look)
        if starts is not None:
            assert position_ids is not None, "documents start where positions do"
            made = self._sse_masks_of_documents(made, attention_mask, position_ids)
            attention_mask, use_cache = None, False
        cache, use_cache = self._sse_cache(cache, use_cache)
        weights = kwargs.get("output_attentions", self.config.output_attentions)
        kwargs.update(self._sse_masks(shape, tokens.device, attention_mask, cache, mask, starts, offsets, weights))
        attention_mask = attention_mask if made is None else made
        past = None if cache is None or traced() else cache.get_seq_length()
        if isinstance(past, int):
            check_pasts(cache, self.config.num_hidden_layers, past)
        made = super().forward(**given, attention_mask=attention_mask, use_cache=use_cache, **{CACHE: cache}, **kwargs)
        if isinstance(past, int):
            check_pasts(cache, self.config.num_hidden_layers, past + tokens.shape[1])
        return made

    def _sse_cache(self, cache: Any, use_cache: bool | None) -> tuple[Any, bool]:
        """The cache with the layers that converted ones need, made if there is to be one; and whether there is."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.training and torch.is_grad_enabled() and getattr(self, "gradient_checkpointing", False):
            use_cache = False  # layers that are repeated receive none
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
            self.sse_install(cache)
        return cache, use_cache

    def _sse_masks_of_documents(self, made: Any, attention_mask: Any, position_ids: Tensor) -> Any:
        """The masks of packed documents that the source is handed; None where it makes them.

        Args:
            made: masks that were made outside.
            attention_mask: of padding, with which transformers sees no documents.
            position_ids: which restart with each document.
        """
        if not source_spec(self.config.model_type).separates_documents:
            return document_masks(self, position_ids)
        return made if attention_mask is None else None

    def _sse_layout(
        self,
        attention_mask: Any,
        position_ids: Tensor | None,
        cache: Any,
        use_cache: bool | None,
        shape: tuple[int, int],
        *,
        look: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mask of padding and the starts of documents, as far as there are any and converted layers ask."""
        if not self._sse_lays_out():
            return None, None
        batch, length = shape
        self._refuse_sharded()
        one_step, mask = length == 1 and cache is not None, None
        if not (one_step and traced()):  # who generates token by token pads none of them
            mask = padding_mask(self._sse_filled(attention_mask, length, cache), length)
        if one_step:
            return mask, None
        return mask, self._documents(mask, text_positions(position_ids), cache, use_cache, batch, look=look)

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
            owner = "; ".join(self._sse_layer_kinds[:running])
            install(cache, self.config, states, self._sse_running_windows(), self._sse_orders, owner)

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
        for order in self._sse_orders.values():
            order.place(device)
        layout = sequence_layout(shape, device, mask=mask, starts=starts, offsets=offsets, cache=cache)
        kind = self.config._attn_implementation
        sees = sliding_masks(self._sse_running_windows(), cache, attention_mask, mask, starts, shape, device, weights)
        return {
            LAYOUT: layout,
            MASKS: {
                key: None if value is None else attention_mask_for(kind, value, self.dtype)
                for key, value in sees.items()
            },
        }

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
            refuse_sharded(getattr(layer, spec.attention).sse_out_scale, self.config._attn_implementation)

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


def _tokens_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """What has a row for each sequence and a column for each token."""
    tokens = input_ids if input_ids is not None else inputs_embeds
    if tokens is None:
        raise UsageError("neither input_ids nor inputs_embeds", expected="one of the two")
    return tokens


def _positions_of(tokens: Tensor, offsets: Tensor | None, cu_seq_lens: Tensor | None) -> Tensor | None:
    """Positions [B, T] of packed documents that offsets alone describe; None without any."""
    if offsets is not None:
        raise UsageError(
            f"{OFFSETS} without position_ids",
            expected="both",
            fix="pass position_ids that restart with each document, or cu_seq_lens_q alone",
        )
    batch, length = tokens.shape[:2]
    return None if cu_seq_lens is None else positions_from_offsets(cu_seq_lens, length).expand(batch, -1)


def leave_further_tokens(model: Any) -> None:
    """Let a model leave layers that predict further tokens in their files; families name theirs in part."""
    named = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = [*named, further_tokens(model.config)]
