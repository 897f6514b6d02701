"""Saved tiny checkpoints of real transformers classes, and recipes for them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from sse_convert.recipe import Recipe, recipe_from_dict
from tests.modeling.tiny import VOCAB, tiny_source
from tests.recipe.recipes import entries

MIXERS = {
    "sse": {"qk_rank": 4},
    "sliding": {"window": 4, "sinks": 2},
    "gla": {},
}
PATTERN = ["sse", "sliding", "gla", "full"]


def save_source(folder: Path, model_type: str = "qwen3", *, shard_size: str = "20KB", **options: Any) -> Path:
    """A tiny random model with tokenizer, chat template, generation config and licence; the folder."""
    return save_teacher(tiny_source(model_type, **options), folder, shard_size=shard_size)


def save_teacher(model: PreTrainedModel, folder: Path, *, shard_size: str = "20KB") -> Path:
    """Any model with these files; the folder."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    tokenizer |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "bos_token_id": 1}))
    (folder / "LICENSE").write_text("to be kept")
    return folder


def recipe(model: Path | str, **changes: Any) -> Recipe:
    """A recipe that gives a 4-layer model one layer of each kind."""
    return recipe_from_dict(recipe_data(model, **changes))


def recipe_data(model: Path | str, **changes: Any) -> dict[str, Any]:
    """The same as plain data."""
    base = {
        "recipe_version": 1,
        "model": str(model),
        "layers": {"pattern": PATTERN},
        "mixers": {name: {"kind": name, **values} for name, values in MIXERS.items()},
        "calibrate": {"rows": 2, "seq_len": 32},
        "export": {"dir": "out/x"},
    }
    found = {**base, **changes}
    return {**found, "mixers": entries(found["mixers"])}


def recipe_file(path: Path, model: Path | str, **changes: Any) -> Path:
    """The same as a file."""
    path.write_text(yaml.safe_dump(recipe_data(model, **changes)))
    return path


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each safetensors file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def tokens(rows: int = 2, length: int = 24, seed: int = 3) -> torch.Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
