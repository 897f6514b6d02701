"""Models of the end-to-end benchmark: a softmax teacher and its hybrids, in true shapes, with random weights."""

import copy
import dataclasses as dc
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from sse_convert.mixers import FULL, SSEMixer, mixer_to_dict
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import model_class_for, source_class

SOFTMAX_EVERY = 5
"""layers 4, 9, 14, ... keep softmax attention"""
TEACHER = "teacher"
HYBRIDS = {"hybrid-kv": SSEMixer(state_heads="kv"), "hybrid-query": SSEMixer(state_heads="query")}
"""recipe defaults; one state per key-value head, and one per query head"""
MODELS = (TEACHER, *HYBRIDS)
NOISE = 0.02


@dc.dataclass(frozen=True, kw_only=True)
class Subject:
    """A teacher's shape, and the contexts it is measured at."""

    name: str
    config: PreTrainedConfig
    training: tuple[int, ...]
    """tokens of context of a training step"""
    decoding: tuple[int, ...]
    """tokens of context at which decoding is timed"""
    full: bool = True
    """measure every hybrid, compiled layers and a larger batch too, not only the teacher and the first hybrid"""
    weights: Path | None = None
    """folder of safetensors; without it weights are random"""

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models to measure."""
        return MODELS if self.full else MODELS[:2]

    def short(self) -> "Subject":
        """The same widths in as many layers as the softmax pattern takes, for comparisons."""
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = SOFTMAX_EVERY
        config.layer_types = config.layer_types[:SOFTMAX_EVERY]
        return dc.replace(self, config=config, weights=None)


def _qwen3(layers: int, hidden: int, heads: int, mlp: int, *, tied: bool, kv_heads: int = 8, head_dim: int = 128,
           vocabulary: int = 151936) -> Qwen3Config:  # fmt: skip
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        max_position_embeddings=2**17,  # published: 40960; it sizes nothing
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
    )


CONTEXTS = (2**11, 2**13, 2**15, 2**17)


def subject(name: str) -> Subject:
    """A shape by name: 0.6b and 8b are Qwen3's published sizes, tiny is for dry runs."""
    if name == "0.6b":
        config = _qwen3(28, 1024, 16, 3072, tied=True)
        return Subject(name=name, config=config, training=CONTEXTS, decoding=CONTEXTS)
    if name == "8b":
        config = _qwen3(36, 4096, 32, 12288, tied=False)
        return Subject(name=name, config=config, training=(2**15,), decoding=(2**15, 2**17), full=False)
    assert name == "tiny"
    config = _qwen3(5, 32, 4, 48, tied=True, kv_heads=2, head_dim=8, vocabulary=97)
    return Subject(name=name, config=config, training=(48,), decoding=(48,))


def subject_of_folder(folder: Path) -> Subject:
    """The shape of a checkpoint's config.json, with its weights if they are there too."""
    config = AutoConfig.from_pretrained(folder)
    fits = tuple(context for context in CONTEXTS if context <= config.max_position_embeddings)
    weights = folder if list(folder.glob("*.safetensors")) else None
    return Subject(name=folder.name, config=config, training=fits, decoding=fits, weights=weights)


def build(
    subject: Subject, model: str, *, device: torch.device, dtype: torch.dtype, backend: str = "auto"
) -> PreTrainedModel:
    """The teacher or one of its hybrids, made on the device; the same seed gives both the same first weights.

    Args:
        subject: the shape.
        model: one of MODELS.
        device: where to.
        dtype: of all weights.
        backend: of the SSE operator.
    """
    config: Any = copy.deepcopy(subject.config)
    cls: Any = source_class(spec_for(config.model_type))
    if model != TEACHER:
        config = build_config(config, _conversion(HYBRIDS[model], config.num_hidden_layers, backend))
        cls = model_class_for(cls)
    torch.manual_seed(0)
    with torch.device(device):
        made: PreTrainedModel = cls._from_config(config, dtype=dtype, attn_implementation="sdpa")
    if subject.weights is not None:
        for shard in sorted(subject.weights.glob("*.safetensors")):
            made.load_state_dict(load_file(shard, device=str(device)), strict=False)
    _fill_zero_factors(made)
    return made.eval()


def _conversion(mixer: SSEMixer, layers: int, backend: str) -> dict[str, Any]:
    names = [FULL if i % SOFTMAX_EVERY == SOFTMAX_EVERY - 1 else "sse" for i in range(layers)]
    return {"layers": names, "mixers": {"sse": mixer_to_dict(mixer)}, "base_model": "random", "backend": backend}


@torch.no_grad()
def _fill_zero_factors(model: PreTrainedModel) -> None:
    """Random values in the new tensors that start at zero, so that nothing is multiplied by zeros."""
    for name, parameter in model.named_parameters():
        if "sse_" in name and name.endswith("_up.weight"):
            parameter.normal_(std=NOISE)


def set_backend(model: PreTrainedModel, backend: str) -> None:
    """Let the SSE layers of a hybrid use another backend."""
    for layer in model.sse_layers().values():
        layer.backend = backend
