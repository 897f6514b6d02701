"""The batch that layers get of vLLM's metadata, and where its tensors are when a step is replayed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sse_convert.serving.batch import Batch
from sse_convert.serving.vllm.metadata import StateMetadataBuilder

BLOCK = 16


@pytest.fixture(params=["none", "align"])
def builder(request: pytest.FixtureRequest) -> StateMetadataBuilder:
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=BLOCK, shapes=((256,),), dtypes=(torch.uint8,), mamba_type=MambaAttentionBackendEnum.LINEAR,
        mamba_cache_mode=request.param,
    )  # fmt: skip
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=None),
        cache_config=SimpleNamespace(mamba_cache_mode=request.param),
    )
    return StateMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def batch(builder: StateMetadataBuilder, seen: list[int], new: list[int], rows: list[list[int]]) -> Batch:
    """Of requests that have `seen` tokens with the new ones, and rows for each block of tokens."""
    offsets = torch.tensor([0, *new]).cumsum(0).int()
    common: Any = SimpleNamespace(
        query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=torch.tensor(seen, dtype=torch.int32),
        block_table_tensor=torch.tensor(rows, dtype=torch.int32), num_reqs=len(new), num_actual_tokens=sum(new),
        max_query_len=max(new), is_prefilling=torch.zeros(len(new), dtype=torch.bool),
    )  # fmt: skip
    made = builder.build(0, common).batch
    assert made is not None
    return made


def test_single_tokens_come_first(builder: StateMetadataBuilder) -> None:
    made = batch(builder, [9, 1, 12], [1, 1, 12], [[3], [5], [2]])
    assert (made.decodes, made.prefills, made.tokens) == (2, 1, 14)
    assert made.slots.tolist() == [3, 5, 2]
    assert made.past.tolist() == [8, 0, 0]


def test_a_recorded_step_finds_its_tensors_again(builder: StateMetadataBuilder) -> None:
    first = batch(builder, [9, 4, 0], [1, 1, 0], [[3], [5], [0]])
    assert (first.decodes, first.tokens) == (3, 3)
    assert first.slots.tolist() == [3, 5, -1]
    assert first.past.tolist()[:2] == [8, 3]
    second = batch(builder, [10, 5, 1], [1, 1, 1], [[3], [5], [7]])
    assert first.slots.data_ptr() == second.slots.data_ptr()
    assert first.past.data_ptr() == second.past.data_ptr()
    assert first.slots.tolist() == [3, 5, 7]


@pytest.mark.parametrize("builder", ["align"], indirect=True)
def test_the_row_is_that_of_the_last_block_of_tokens(builder: StateMetadataBuilder) -> None:
    """With prefix caching a request has a row for each block that is kept."""
    made = batch(builder, [BLOCK, BLOCK + 1], [1, 1], [[3, 4], [5, 6]])
    assert made.slots.tolist() == [3, 6]
