"""Two processes that each have half of the heads."""

from pathlib import Path

import pytest

from tests.serving.vllm.engine import checkpoint, engine, greedy, prompts, tokens


def test_two_devices_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    made, given = checkpoint(tmp_path, ["sse+sliding", "full", "gla+sliding"]), prompts(70, 9)
    with engine(tmp_path, tensor_parallel_size=2) as llm:
        assert tokens(greedy(llm, given)) == [made.follows(ids) for ids in given]
