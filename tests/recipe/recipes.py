"""A small valid recipe, and variations of it."""

import copy
from pathlib import Path
from typing import Any

import yaml

from sse_convert.mixers import recipe_entry

PAPER: dict[str, Any] = {
    "num_partitions": 4,
    "top_k": 1,
    "update": "gla",
    "k_feature_map": "softmax",
    "state_heads": "kv",
    "decay_params": "shared",
}
SMALL: dict[str, Any] = {
    "recipe_version": 1,
    "model": "some/model",
    "layers": {"pattern": ["sse", "full"]},
    "mixers": {"sse": {"num_partitions": 4, "top_k": 1}},
    "stages": [
        {"name": "align", "loss": "layer_mse", "tokens": 65536, "seq_len": 512, "lr": 0.001},
        {"name": "distill", "loss": "kl", "tokens": 131072, "seq_len": 512, "lr": {"mixers": 0.001, "rest": 0.0001}},
    ],
    "data": {"train": [{"path": "train.txt"}], "valid": [{"path": "valid.txt"}]},
    "export": {"dir": "out/x"},
}


def write(folder: Path, recipe: dict[str, Any] | str) -> Path:
    """Save a recipe (as data, or as text) and return its path."""
    path = folder / "recipe.yaml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe, sort_keys=False))
    return path


def small(**changes: Any) -> dict[str, Any]:
    """The small recipe with top-level keys replaced."""
    return {**copy.deepcopy(SMALL), **changes}


def sse(**settings: Any) -> dict[str, Any]:
    """A recipe's `sse` or `sse+sliding`: the paper's, small and cheap, but for these settings, `advanced` or not."""
    return recipe_entry({**PAPER, **settings})
