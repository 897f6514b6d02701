"""vLLM's metadata of linear attention as the layers' `Batch`, made once a step and in place for CUDA graphs."""

import dataclasses as dc
from typing import Any

import torch
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)

from sse_convert.serving.batch import Batch


@dc.dataclass
class StateMetadata(LinearAttentionMetadata):
    """With the batch that layers take."""

    batch: Batch | None = None


class StateMetadataBuilder(LinearAttentionMetadataBuilder):
    """Keeps slots and pasts where they were when a decoding step was recorded; rows of padding get slot -1."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_seqs
        largest = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.slots, self.past = torch.zeros(2, max(most, largest), dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StateMetadata:
        """The metadata of a step."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        requests = made.num_decodes + made.num_prefills
        offsets, seen = made.query_start_loc[: requests + 1], made.seq_lens[:requests]
        slots = made.state_indices_tensor[:requests].masked_fill(seen == 0, -1)
        past = seen - offsets.diff()
        if not made.num_prefills and requests <= len(self.slots):
            slots = self.slots[:requests].copy_(slots)
            past = self.past[:requests].copy_(past)
        batch = Batch(
            decodes=made.num_decodes, prefills=made.num_prefills,
            tokens=made.num_decode_tokens + made.num_prefill_tokens, offsets=offsets, slots=slots, past=past,
        )  # fmt: skip
        fields = {field.name: getattr(made, field.name) for field in dc.fields(made)}
        return StateMetadata(**fields, batch=batch)


class StateBackend(LinearAttentionBackend):
    """vLLM's backend of linear attention with this builder."""

    @staticmethod
    def get_name() -> str:
        """In vLLM's messages."""
        return "SSE"

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """What makes metadata."""
        return StateMetadataBuilder
