"""What is not built is refused by name, before an engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from sse_convert.errors import UsageError
from sse_convert.modeling.configuration import small_entry
from tests.serving.vllm.engine import checkpoint

NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
OPTIONS = {
    "speculative decoding": {"speculative_config": NGRAMS},
    "pipeline parallelism": {"pipeline_parallel_size": 2},
    "states in float16": {"mamba_ssm_cache_dtype": "float16"},
}


def configured(path: Path, **options: Any) -> Any:
    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, **options}
    return EngineArgs(model=str(path), **given).create_engine_config()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), ["sse", "full"]).path


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, model: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} with a converted model"):
        configured(model, **OPTIONS[name])


@pytest.mark.parametrize("theirs", [None, lambda self, request, num_new_tokens: num_new_tokens])
def test_prefix_caching_where_chunks_are_cut_otherwise(
    theirs: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.core.sched.scheduler.Scheduler._mamba_block_aligned_split", theirs)
    with pytest.raises(UsageError, match="prefix caching on a CPU with this vLLM with a converted model"):
        configured(model, enable_prefix_caching=True)


def test_adapters_that_requests_without_one_would_get(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.lora.ops.torch_ops.bgmv_expand", lambda inputs, weights, output, indices: output.fill_(1))
    with pytest.raises(UsageError, match=r"LoRA adapters on a CPU with vLLM 0\.32 with a converted model"):
        configured(model, enable_lora=True)


def test_families(tmp_path: Path) -> None:
    checkpoint(tmp_path, ["sse", "full"], "olmo2")
    with pytest.raises(UsageError, match="model_type is 'sse_olmo2': vLLM does not serve converted models"):
        configured(tmp_path)


def test_layers_some_of_whose_heads_see_the_whole_row(tmp_path: Path) -> None:
    checkpoint(tmp_path, ["sse", "heads"])
    with pytest.raises(UsageError, match="layers 1 keep full_heads, and vLLM has one kind of cache for a layer"):
        configured(tmp_path)


def test_what_vllm_is_told(model: Path) -> None:
    config = configured(model)
    assert config.model_config.is_hybrid
    assert config.model_config.hf_config.layer_types == ["linear_attention", "full_attention"]


def test_a_small_checkpoint_with_the_command_that_makes_it_whole(tmp_path: Path) -> None:
    checkpoint(tmp_path, ["sse", "full"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["sse"] = small_entry(config["sse"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="is a small checkpoint") as caught:
        configured(tmp_path)
    assert caught.value.fix == f"serve what this makes: sse-convert join {tmp_path} --out WHOLE"
