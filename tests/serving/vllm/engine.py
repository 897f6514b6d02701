"""Tiny converted checkpoints, their greedy tokens by transformers, and an engine that is shut down."""

import contextlib
import dataclasses as dc
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory

from sse_convert.mixers import BUILT_IN, Mixer, SlidingMixer, SSEMixer, SSESlidingMixer, mixer_to_dict
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for, source_class

VOCAB = 199
NEW = 12
"""tokens that follow a prompt"""
SMALL: dict[str, Any] = {"num_partitions": 6, "top_k": 2, "qk_rank": 8}
DELTA: dict[str, Any] = {"update": "delta", "k_feature_map": "l2", "state_heads": "query", "decay_params": "separate"}
MIXERS: dict[str, Mixer] = {
    "sse": SSEMixer(**SMALL, **DELTA),
    "gla": SSEMixer(**SMALL),
    "sse+sliding": SSESlidingMixer(**SMALL, **DELTA, window=16, sinks=2),
    "gla+sliding": SSESlidingMixer(**SMALL, window=16, sinks=2),
    "gdn": BUILT_IN["gdn"],
    "sliding": SlidingMixer(window=16, sinks=2),
    "heads": SlidingMixer(window=16, sinks=2, full_heads=(1,)),
    "large": SSEMixer(**{**SMALL, "num_partitions": 18}, **DELTA),
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


@dc.dataclass(frozen=True)
class Checkpoint:
    """A converted model on disk and in memory."""

    path: Path
    model: Any

    def follows(self, prompt: list[int], new: int = NEW) -> list[int]:
        """The greedy tokens after a prompt, by transformers."""
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        found = self.model.generate(ids, max_new_tokens=new, do_sample=False, **options)
        return found[0, len(prompt) :].tolist()


def checkpoint(folder: Path, layers: list[str], family: str = "qwen3", **sizes: Any) -> Checkpoint:
    """A random converted model whose tokens depend on what its layers keep."""
    spec = spec_for(family)
    source: Any = getattr(transformers, spec.config_class)(**{**SIZES, "num_hidden_layers": len(layers), **sizes})
    kinds = {kind: mixer_to_dict(MIXERS[kind]) for kind in set(layers) - {"full"}}
    torch.manual_seed(0)
    config = build_config(source, {"layers": layers, "mixers": kinds})
    model: Any = model_class_for(source_class(spec))._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=(1.0 if "sse_router" in name else 0.5) * parameter.shape[-1] ** -0.5)
            elif name.endswith(("window_scale", "out_scale")):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


def prompts(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Random prompts, the first `shared` tokens of which are the same."""
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(2, VOCAB, (shared,), generator=generator).tolist()
    return [prefix + torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@contextlib.contextmanager
def engine(path: Path, **options: Any) -> Iterator[LLM]:
    """An engine of few requests and short chunks, shut down at the end."""
    given = {
        "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 256,
        "max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": False, **options,
    }  # fmt: skip
    llm = LLM(model=str(path), **given)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def greedy(llm: LLM, given: list[list[int]], new: int = NEW, lora_request: Any = None) -> list[Any]:
    """vLLM's answers to prompts that all wait from the beginning."""
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    waiting = [TokensPrompt(prompt_token_ids=ids) for ids in given]
    return llm.generate(waiting, sampling, lora_request=lora_request, use_tqdm=False)


def tokens(answers: list[Any]) -> list[list[int]]:
    """Of each answer."""
    return [list(answer.outputs[0].token_ids) for answer in answers]
