"""The activation formulas against what autograd really keeps."""

import dataclasses as dc

import pytest
import torch

from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.mixers import SlidingMixer, mixer_from_dict
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for, source_class
from sse_convert.modeling.logits import FUSED_BYTES, KL_BYTES, SHARE, logits_at_once
from sse_convert.recipe.schema import Stage, Train
from sse_convert.surgery.budget import Geometry, added_parameters
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.memory import GIB, MOST_TOKENS, ONE, USABLE, Processes, StageMemory, most_rows
from sse_convert.surgery.stage_memory import (
    COMPILED_LAYER,
    COMPILED_SHARE,
    compiles_layers,
    stage_memory,
    still_the_teachers,
    trained_parameters,
)
from sse_convert.training.setup import prepare_parameters
from tests.modeling.tiny import spec_for, tiny_config, tiny_source

ESTIMATE = StageMemory(
    weights=GIB, head=1000, chunked_by=16, per_logit=16, vocabulary=1000, per_token=100_000, per_pair=4
)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
MIXERS = [
    None,
    {"kind": "sse"},
    {"kind": "sse", "top_k": 2, "state_heads": "query"},
    {"kind": "sse", "decay": "scalar", "shared_partition": False, "qk_rank": 0},
    {"kind": "gla"},
    {"kind": "gdn"},
    {"kind": "sse", "update": "delta", "k_feature_map": "l2"},
    {"kind": "sliding", "window": 64},
    {"kind": "sse+sliding", "window": 64},
]


def saved_bytes(config, length, bf16, train="all", weights=torch.float32, family="qwen3"):
    """Bytes of the distinct storages that a training forward of the backbone keeps for its backward pass."""
    model = model_class_for(source_class(spec_for(family)))(config).train().to(weights)
    prepare_parameters(model, stage(train=train), Train())
    held, sizes = [], {}

    def pack(tensor):
        """Keeps the memory, not the graph: a node that keeps its own output is never freed."""
        held.append(tensor.detach())
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(0))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model.get_decoder()(ids, use_cache=False)
    return sum(sizes.values())


def per_token_and_layer(mixer, bf16, train="all", weights=torch.float32):
    """The slope in length of the slope in layers: weights and what is there once cancel. A first layer is converted:
    below it nothing frozen keeps anything."""
    values = []
    for layers in (1, 2):
        source = tiny_config("qwen3", **SIZES, num_hidden_layers=1 + layers)
        mixers = {"first": {"kind": "gla"}} | ({} if mixer is None else {"m": mixer})
        names = ["first", *["full" if mixer is None else "m"] * layers]
        config = build_config(source, {"layers": names, "mixers": mixers})
        values.append([saved_bytes(config, length, bf16, train, weights) for length in (256, 512)])
    (a, b), (c, d) = values
    return ((d - c) - (b - a)) / 256


def geometry(layers=2, document_masks=False):
    config = tiny_config("qwen3", **SIZES)
    sizes = {"parameters": 2_000_000, "embedding_parameters": 20_000, "attention_parameters": 200_000}
    return Geometry(
        dims=attention_dims(config), windows=(None,) * layers, cache_element_bytes=2, tied=True, intermediate=704,
        vocabulary=97, qk_norm=True, document_masks=document_masks, **sizes,
    )  # fmt: skip


def stage(**changes):
    base = {"name": "s", "loss": "ce", "tokens": 1024, "seq_len": 128, "lr": 1e-3}
    return Stage(**{**base, **changes})


def memory(mixers, **changes):
    options = {"lora_rank": 16, "bf16": True, "checkpointing": False, "cuda_graphs": False}
    sizes = geometry(len(mixers), changes.pop("document_masks", False))
    stage_changes = {key: changes.pop(key) for key in ("loss", "train", "context_parallel") if key in changes}
    return stage_memory(sizes, mixers, stage(**stage_changes), **{**options, **changes})


@pytest.mark.parametrize(
    ("settings", "bf16"), [*((mixer, True) for mixer in MIXERS), *((mixer, False) for mixer in MIXERS[::3])], ids=str
)
def test_activations_per_token(settings, bf16):
    mixer = None if settings is None else mixer_from_dict(settings)
    one, two = memory([mixer], bf16=bf16), memory([mixer] * 2, bf16=bf16)
    assert two.per_token - one.per_token == pytest.approx(per_token_and_layer(settings, bf16), rel=0.15)


@pytest.mark.parametrize("settings", [None, {"kind": "gla"}, {"kind": "sse"}, MIXERS[-1]], ids=str)
def test_activations_of_weights_in_the_compute_dtype(settings):
    """As FSDP has them."""
    mixer = None if settings is None else mixer_from_dict(settings)
    one, two = (memory([mixer] * layers) for layers in (1, 2))
    spared = two.narrower - one.narrower
    narrow = per_token_and_layer(settings, True, weights=torch.bfloat16)
    assert two.per_token - one.per_token - spared == pytest.approx(narrow, rel=0.15)
    assert spared == pytest.approx(per_token_and_layer(settings, True) - narrow, rel=0.35)
    assert memory([mixer], bf16=False).narrower == 0


def test_fsdp_spares_what_narrower_activations_do():
    estimate = dc.replace(ESTIMATE, narrower=30_000)
    assert estimate.total(128, 2, 80 * GIB) == ESTIMATE.total(128, 2, 80 * GIB)
    for processes in (Processes(2, sharded=True), Processes(2)):
        spared = ESTIMATE.total(128, 2, 80 * GIB, processes) - estimate.total(128, 2, 80 * GIB, processes)
        assert spared == 256 * 30_000 * processes.sharded


def test_activations_per_token_beside_lora():
    settings = {"kind": "sse+sliding", "window": 64}
    one, two = (memory([mixer_from_dict(settings)] * n, train="lora") for n in (1, 2))
    assert two.per_token - one.per_token == pytest.approx(per_token_and_layer(settings, True, "lora"), rel=0.15)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("settings", [None, {"kind": "gla"}, MIXERS[-1]], ids=str)
def test_frozen_matrices_need_no_input(settings, bf16):
    mixer = None if settings is None else mixer_from_dict(settings)
    every, frozen = (
        (memory([mixer] * 2, train=train, bf16=bf16).per_token - memory([mixer], train=train, bf16=bf16).per_token)
        for train in ("all", "mixers")
    )
    kept, less = (per_token_and_layer(settings, bf16, train) for train in ("all", "mixers"))
    assert every - frozen == pytest.approx(kept - less, rel=0.15)


@pytest.mark.parametrize("settings", [None, {"kind": "gla"}, MIXERS[-1]], ids=str)
def test_what_frozen_matrices_do_not_need_is_not_spared_again_by_weights_in_the_compute_dtype(settings):
    mixer = None if settings is None else mixer_from_dict(settings)
    one, two = (memory([mixer] * layers, train="mixers") for layers in (1, 2))
    wide, narrow = (
        per_token_and_layer(settings, True, "mixers", weights) for weights in (torch.float32, torch.bfloat16)
    )
    assert two.narrower - one.narrower == pytest.approx(wide - narrow, rel=0.35)


def test_where_peaks_show_nothing_less_for_frozen_matrices():
    mixers = [mixer_from_dict({"kind": "sse"}), None]
    every, frozen = (memory(mixers, train=train, loss="kl") for train in ("all", "mixers"))
    assert frozen.per_token < every.per_token
    for how in ({"compiled": True}, {"checkpointing": True}):
        every, frozen = (memory(mixers, train=train, loss="kl", **how) for train in ("all", "mixers"))
        assert (frozen.per_token, frozen.again, frozen.narrower) == (every.per_token, every.again, every.narrower)
    experts = dc.replace(geometry(), has_experts=True)
    options = {"lora_rank": 16, "bf16": True, "checkpointing": False, "cuda_graphs": False}
    every, frozen = (stage_memory(experts, mixers, stage(train=train), **options) for train in ("all", "mixers"))
    assert (frozen.per_token, frozen.narrower) == (every.per_token, every.narrower)


def test_weights():
    mixer = mixer_from_dict({"kind": "sse"})
    added = added_parameters(geometry().dims, mixer)
    weights = 2_000_000 + added
    assert memory([mixer, None]).weights == weights * (4 + 2 + 12)
    assert memory([mixer, None], bf16=False).weights == weights * (4 + 12)
    assert memory([mixer, None]).head == 97 * 256 * 4
    assert memory([mixer, None], loss="kl").weights == weights * 18 + 2 * 2_000_000
    align = memory([mixer, None, mixer], loss="layer_mse", train="mixers")
    assert align.weights == 2 * (added + 200_000) * 18 + 2 * 2_000_000
    assert align.head == align.per_logit == 0
    assert align.per_token < memory([mixer]).per_token * 1.2


def test_copies_of_frozen_weights_exist_a_layer_at_a_time_where_activations_are_computed_twice():
    mixer = mixer_from_dict({"kind": "sse"})
    added = added_parameters(geometry().dims, mixer)
    layers = [mixer, *[None] * 7]
    kept, twice = (memory(layers, loss="kl", train="lora", checkpointing=again) for again in (False, True))
    trained = trained_parameters(geometry(8), layers, stage(train="lora"), 16)
    assert kept.copies == 2 * (2_000_000 + added)
    assert twice.copies == 2 * (trained + 97 * 256 + (2_000_000 - 20_000 + added) // 8)
    assert kept.weights - kept.copies == twice.weights - twice.copies
    every, again = (memory(layers, loss="kl", checkpointing=again) for again in (False, True))
    assert every.copies == again.copies == kept.copies


def test_weights_of_several_processes():
    """DDP adds 4 bytes a trained parameter; FSDP2 shares all but copies for autocast, and gathers some weights."""
    mixer = mixer_from_dict({"kind": "sse"})
    found = memory([mixer, None], loss="kl")
    weights = 2_000_000 + added_parameters(geometry().dims, mixer)
    assert found.fixed(Processes(2)) == found.fixed() + 4 * weights
    gathered = 20_000 * (2 + 2 + 4) + (weights - 20_000) // 2 * (4 + 6)
    shared = weights * 16 + 2 * 2_000_000
    assert found.fixed(Processes(8, sharded=True)) == shared / 8 + gathered + found.head
    align = memory([mixer, None], loss="layer_mse", train="mixers")
    assert align.gathered == 20_000 * 2 + (weights - 20_000) // 2 * 10
    assert memory([mixer, None], loss="ce", train="lora").gathered == gathered - 20_000 * (2 + 4)


def test_frozen_matrices_of_the_teacher_exist_once():
    layers = [mixer_from_dict({"kind": "sse"}), None]
    frozen = 2_000_000 - 20_000 - 200_000  # without the embedding and the converted layer's attention
    own, other = (memory(layers, loss="kl", train="mixers", shared=shared) for shared in (True, False))
    assert own.held_low - other.held_low == 2 * frozen
    assert own.fixed() == other.fixed() - 2 * frozen
    assert own.fixed(Processes(2, sharded=True)) == other.fixed(Processes(2, sharded=True))
    changes = {"loss": "ce", "train": "mixers"}
    assert memory(layers, **changes, shared=True) == memory(layers, **changes)


def test_what_is_frozen_is_the_teachers_until_more_is_trained():
    stages = [stage(name=name, train=train) for name, train in (("a", "mixers"), ("b", "lora"), ("c", "mixers"))]
    assert [still_the_teachers(stages, one) for one in stages] == [True, True, False]


def test_trained_parameters():
    mixer, sizes = mixer_from_dict({"kind": "sse"}), geometry()
    added = added_parameters(sizes.dims, mixer)
    assert trained_parameters(sizes, [mixer, None], stage(), 16) == 2_000_000 + added
    assert trained_parameters(sizes, [mixer, None], stage(train="mixers"), 16) == added + 200_000
    assert trained_parameters(sizes, [mixer, None], stage(train="lora"), 16) > added + 200_000


def test_checkpointing_keeps_less():
    plain, kept = memory([None] * 8), memory([None] * 8, checkpointing=True)
    assert kept.per_token < plain.per_token / 4


def test_a_layer_is_computed_again_when_no_logits_are_left():
    few, many = (dc.replace(ESTIMATE, again=again) for again in (1_000, 1_000_000))
    logits = logits_at_once(80 * GIB, 16) * 16
    tokens = 64 * 16384
    assert tokens * few.again < logits < tokens * many.again
    plain, first, second = (estimate.total(16384, 64, 80 * GIB) for estimate in (ESTIMATE, few, many))
    assert first == plain
    assert second - plain == tokens * many.again - logits


@pytest.mark.parametrize("bf16", [True, False])
def test_logits_of_a_chunk_are_in_the_compute_dtype(bf16):
    """The student's, and a teacher's (tests/training/test_losses.py counts them); chunks are cut as in float32."""
    element = 2 if bf16 else 4
    student, both = (
        stage_memory(
            geometry(), [None], stage(**changes), lora_rank=16, bf16=bf16, checkpointing=False, cuda_graphs=False
        )
        for changes in ({}, {"loss": "kl"})
    )
    assert (student.per_logit, both.per_logit) == (element, 2 * element)
    assert student.chunked_by == both.chunked_by == FUSED_BYTES


@pytest.mark.parametrize(("loss", "checkpointing", "sets"), [("kl", False, 2), ("kl", True, 1), ("ce", False, 1)])
def test_cuda_graphs_have_activations_of_their_own(loss, checkpointing, sets):
    mixer = mixer_from_dict({"kind": "sse"})
    plain, recorded = (
        memory([mixer], loss=loss, checkpointing=checkpointing, cuda_graphs=graphs) for graphs in (False, True)
    )
    assert recorded.per_token == sets * plain.per_token
    assert recorded.weights == plain.weights


def test_compiled_layers_keep_less():
    sse = mixer_from_dict({"kind": "sse"})
    plain, compiled = (memory([sse, None], loss="kl", compiled=compiled) for compiled in (False, True))
    assert compiled.per_token == pytest.approx(COMPILED_SHARE * plain.per_token)
    plain, compiled = (memory([sse, None], checkpointing=True, compiled=compiled) for compiled in (False, True))
    assert compiled.again == pytest.approx(COMPILED_LAYER * plain.again)
    assert dc.replace(compiled, again=plain.again) == plain


@pytest.mark.parametrize(
    ("asked", "changes", "compiled"),
    [
        ("auto", {}, True),
        ("auto", {"loss": "ce"}, True),
        ("auto", {"loss": "layer_mse"}, False),
        ("auto", {"tokens": 49 * 8192}, False),
        ("auto", {"context_parallel": 2}, False),
        (True, {"context_parallel": 2}, True),
        (False, {}, False),
    ],
)
def test_layers_are_compiled_where_it_pays_and_no_row_is_split(asked, changes, compiled):
    stage = dc.replace(
        Stage(name="s", loss="kl", tokens=50 * 8192, seq_len=4096, lr=1e-3, batch_tokens=8192), **changes
    )
    assert compiles_layers(stage, Train(compile=asked)) is compiled


def test_windows_keep_one_mask_for_all_layers():
    one, two = memory([SlidingMixer()]).per_token, memory([SlidingMixer()] * 2).per_token
    assert 2 * one - two == 2 * 128 + 4


def test_longest_row_is_the_last_that_fits():
    longest = ESTIMATE.longest(24)
    assert longest % 256 == 0
    assert ESTIMATE.total(longest, 1, 24 * GIB) <= 24 * GIB * USABLE < ESTIMATE.total(longest + 256, 1, 24 * GIB)
    assert dc.replace(ESTIMATE, weights=30 * GIB).longest(24) == 0


def test_a_chunk_of_logits_is_the_same_share_of_any_gpu():
    for gib in (24, 80, 141):
        share = gib * GIB / SHARE
        assert share / 2 < logits_at_once(gib * GIB) * KL_BYTES <= share
    few = ESTIMATE.total(1, 1, 80 * GIB)
    assert few == GIB + ESTIMATE.head + 16 * 1000 + 100_000 + 4


def test_pairs_of_tokens_count_where_softmax_masks_them():
    sse = mixer_from_dict({"kind": "sse"})
    masked = {"document_masks": True}
    assert memory([sse, sse], **masked).per_pair == memory([sse, None], loss="kl").per_pair == 0
    assert memory([sse, None], **masked).per_pair == memory([sse, sse], loss="kl", **masked).per_pair > 0


@pytest.mark.parametrize("traced", ["compiled", "cuda_graphs"])
def test_pairs_of_tokens_count_where_documents_have_no_kernel_and_cannot_be_traced(traced):
    sse = mixer_from_dict({"kind": "sse"})
    assert memory([sse, None], **{traced: True}).per_pair == 0
    assert memory([sse, None], bf16=False, **{traced: True}).per_pair > memory([sse, None], bf16=False).per_pair == 0


def test_bounded_scores_are_written_out_for_all_pairs(tmp_path):
    sizes = dc.replace(geometry(), scores_written=True)
    options = {"lora_rank": 16, "bf16": True, "cuda_graphs": False}

    def pairs(layers, own=sizes, again=False, **changes):
        return stage_memory(own, layers, stage(**changes), checkpointing=again, **options).per_pair

    sse = mixer_from_dict({"kind": "sse"})
    found = [pairs([None] * 2), pairs([None] * 2, again=True)]
    config = tiny_config("gemma2", num_hidden_layers=1)
    converted = build_config(config, {"layers": ["full"], "mixers": {}})
    low, middle, high = (saved_bytes(converted, length, True, family="gemma2") for length in (128, 256, 512))
    of_pairs = ((high - middle) / 256 - (middle - low) / 128) / (768 - 384) / config.num_attention_heads
    heads = sizes.dims.query_heads
    one = heads * of_pairs
    assert found == [3 * one, one]  # of two layers and of the one at work
    assert pairs([sse, sse]) == 0
    assert pairs([sse, None], loss="layer_mse") == one  # the teacher's
    assert pairs([sse, sse], loss="kl") == one
    for family, expected in (("gemma2", True), ("qwen3", False)):
        tiny_source(family).save_pretrained(tmp_path / family)
        assert geometry_of(open_teacher(tmp_path / family)).scores_written == expected


def test_processes_that_hold_a_row_together_keep_a_part_each():
    mixers = [mixer_from_dict({"kind": "sse"}), SlidingMixer(), None]
    one, four = (memory(mixers, loss="kl", context_parallel=n, document_masks=True) for n in (1, 4))
    alone, two = (memory([SlidingMixer()] * count).per_token for count in (1, 2))
    masks = 2 * alone - two
    assert four.per_token - masks == pytest.approx((one.per_token - masks) / 4)
    assert four.per_pair == 0 < one.per_pair
    few = dc.replace(ESTIMATE, per_token=0, per_pair=0, ranks=4)
    assert few.total(1024, 1, 80 * GIB) == GIB / 4 + ESTIMATE.head + 16 * 256 * 1000
    assert few.total(1024, 1, 80 * GIB, Processes(8, sharded=True)) == GIB / 8 + ESTIMATE.head + 16 * 256 * 1000


@pytest.mark.parametrize(("rows", "gib", "processes", "expected"), [
    (64, 24, 1, 32), (12, 24, 1, 12), (32, 6, 1, 4), (32, 6, 4, 8), (7, 6, 1, 7), (13, 6, 1, 1), (4, 1, 1, 0),
])  # fmt: skip
def test_the_most_rows_that_fit_go_evenly_into_a_step(rows, gib, processes, expected):
    room, launch = gib * GIB * USABLE, Processes(processes, sharded=True)
    estimate = dc.replace(ESTIMATE, per_token=600_000)
    found = most_rows(estimate, 1024, rows, gib * GIB, room, launch)
    assert found == expected
    if found:
        larger = [n for n in range(found + 1, rows + 1) if rows % n == 0]
        assert estimate.total(1024, found, gib * GIB, launch) <= room
        assert all(estimate.total(1024, n, gib * GIB, launch) > room for n in larger)


def test_a_pass_has_no_more_tokens_than_help():
    small = dc.replace(ESTIMATE, per_token=1, per_pair=0)
    assert most_rows(small, 1024, 1024, 80 * GIB, 80 * GIB, ONE) * 1024 == MOST_TOKENS
    assert most_rows(small, 2 * MOST_TOKENS, 8, 80 * GIB, 80 * GIB, ONE) == 1
