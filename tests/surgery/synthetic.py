"""Checkpoints made for one test: valid headers, chosen shapes, sparse or given data. No model is built."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from sse_convert.checkpoints.config_only import with_shapes
from sse_convert.checkpoints.meta_model import model_shapes, skeleton
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.checkpoints.safetensors_io import ITEM_BYTES, header_bytes
from sse_convert.checkpoints.teacher import Teacher, as_teacher, build_source_config
from sse_convert.checkpoints.tensor_data import DTYPE_NAMES

Layout = dict[str, tuple[str, tuple[int, ...]]]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def llama_layout(config: dict, dtype: str = "BF16") -> Layout:
    """Every tensor of a Llama or Qwen3 checkpoint by the names and shapes the family uses."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: (dtype, shape) for name, shape in shapes.items()}


def saved_layout(raw: dict[str, Any]) -> Layout:
    """Every tensor of the model that a config.json describes, as transformers saves it."""
    config = build_source_config(raw, "m")
    model = skeleton(config)
    tensors = {name: torch.empty(shape, device="meta") for name, shape in model_shapes(model).items()}
    saved = revert_weight_conversion(model, tensors)
    return {name: (DTYPE_NAMES[config.dtype or torch.float32], tuple(x.shape)) for name, x in saved.items()}


def write_zeros(path: Path, layout: Layout) -> int:
    """A shard of zeros that takes no disk space; its size in bytes."""
    size = sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in layout.values())
    with path.open("wb") as file:
        file.write(header_bytes(layout))
        file.truncate(file.tell() + size)
    return size


def checkpoint(folder: Path, config: dict | None = None, shards: int = 1, layout: Layout | None = None) -> Path:
    """A Llama-shaped checkpoint of zeros in `shards` files; the folder."""
    config = LLAMA if config is None else config
    layout = llama_layout(config) if layout is None else layout
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_zeros(folder / "model.safetensors", layout)
        return folder
    names, weight_map = list(layout), {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: layout[name] for name in names[i::shards]}
        write_zeros(folder / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Change fields of a checkpoint's config.json; None removes a field."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def teacher_from_config(raw: dict[str, Any], name: str) -> Teacher:
    """A teacher that exists as a config.json alone, with the tensors its model would have: enough to plan.

    Args:
        raw: config.json.
        name: what to call it.

    Raises:
        CheckpointError: the family is unknown, or the values do not make a model.
    """
    files = CheckpointFiles(name=name, folder=Path(name), config=raw, tensors={}, shard_bytes={"somewhere": 0})
    return as_teacher(with_shapes(files))
