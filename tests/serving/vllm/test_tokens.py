"""vLLM's greedy tokens are transformers', for every layout, family and way in which tokens come."""

from pathlib import Path

import pytest

from tests.serving.vllm.engine import checkpoint, engine, greedy, prompts, tokens

LENGTHS = (100, 7, 45, 1, 150)
"""longer and shorter than a step of 64 tokens, which several share; five for four places"""
LAYOUTS = {
    "delta rule": ["sse", "full"],
    "gated": ["gla", "full"],
    "beside windows": ["sse+sliding", "full", "gla+sliding"],
    "the recipe's": ["sse+sliding", "sliding", "full"],
    "no softmax": ["sse+sliding", "sse"],
    "baselines": ["gdn", "full"],
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, tmp_path: Path) -> None:
    made, given = checkpoint(tmp_path, LAYOUTS[name]), prompts(*LENGTHS)
    with engine(tmp_path) as llm:
        assert tokens(greedy(llm, given)) == [made.follows(ids) for ids in given]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    made, given = checkpoint(tmp_path, ["sse+sliding", "full"], family, **FAMILIES[family]), prompts(70, 9)
    with engine(tmp_path) as llm:
        assert tokens(greedy(llm, given)) == [made.follows(ids) for ids in given]


def test_a_prefix_is_read_once(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, ["sse+sliding", "sliding", "full"])
    given = prompts(100, 7, 45, shared=300)
    with engine(tmp_path, max_model_len=512, enable_prefix_caching=True) as llm:
        greedy(llm, given[:1])
        answers = greedy(llm, given)
    assert all(answer.num_cached_tokens >= 256 for answer in answers)
    assert tokens(answers) == [made.follows(ids) for ids in given]


def test_a_long_prompt_is_the_same_again(tmp_path: Path) -> None:
    """Chunks of 2,048 tokens over blocks of 640, in a process of its own: a kept state is that of its prefix."""
    made, given = checkpoint(tmp_path, ["large", "full"], max_position_embeddings=4096), prompts(2500, 3000)
    options = {"max_model_len": 4096, "max_num_batched_tokens": 2048, "enable_prefix_caching": True}
    with engine(tmp_path, **options) as llm:
        first, second = (greedy(llm, given) for _ in range(2))
    assert [answer.num_cached_tokens for answer in second] == [1920, 2560]
    assert tokens(first) == tokens(second) == [made.follows(ids) for ids in given]


def test_a_request_that_loses_its_place_begins_anew(tmp_path: Path) -> None:
    """Memory for fewer tokens than the answers will have: somebody is preempted."""
    made, given, new = checkpoint(tmp_path, ["sse", "full"]), prompts(230, 225, 190), 80
    with engine(tmp_path, max_model_len=512, num_gpu_blocks_override=6, disable_log_stats=False) as llm:
        answers = greedy(llm, given, new)
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    assert sum(preempted) > 0
    assert tokens(answers) == [made.follows(ids, new) for ids in given]


def test_compiled(tmp_path: Path) -> None:
    """The model cut at its operator and compiled, as a server runs it."""
    made, given = checkpoint(tmp_path, ["sse+sliding", "full"]), prompts(70, 9)
    with engine(tmp_path, enforce_eager=False) as llm:
        assert tokens(greedy(llm, given)) == [made.follows(ids) for ids in given]
