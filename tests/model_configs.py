"""config.json of the models that recipes start from, which tests, tools, tables of pages and benchmarks read."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

CONFIGS = Path(__file__).parent / "fixtures" / "configs"


def config_path(name: str) -> Path:
    """The file of a model, by the name of its recipe."""
    return CONFIGS / f"{name}.json"


def model_config(name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """What the file holds.

    Args:
        name: of the model's recipe.
        changes: fields that it is to have instead; None removes one.
    """
    config = json.loads(config_path(name).read_text(encoding="utf-8")) | changes
    return {key: value for key, value in config.items() if value is not None or key not in changes}
