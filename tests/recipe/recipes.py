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
    "qk_rank": 64,
    "state_heads": "kv",
    "shared_partition": True,
    "balance": "aux_loss",
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


def entries(mixers: dict[str, Any]) -> dict[str, Any]:
    """Mixers as a recipe has them, from settings by name: SSE is the paper's, small and cheap, but for those given."""
    return {name: _entry(name, settings or {}) for name, settings in mixers.items()}


def _entry(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    base = PAPER if settings.get("kind", name) in ("sse", "sse+sliding") else {}
    given = {**base, **settings, **settings.get("advanced", {})}
    return recipe_entry({key: value for key, value in given.items() if key != "advanced"})
