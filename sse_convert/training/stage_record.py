"""stage.json: what a folder was made from. Stages whose inputs changed are never mixed."""

from pathlib import Path
from typing import Any

from sse_convert import __version__
from sse_convert.checkpoints.identity import SEAL, STAGE_FILE, data_digest, read_stage_record
from sse_convert.errors import OutputError, TrainingError
from sse_convert.recipe.retired import DEFAULTS

HISTORY = "extended"
"""key of a stage's inputs, once made: its earlier budgets"""
FREE = {
    "stage": ("name", "micro_batch", "gradient_checkpointing", "context_parallel", "checkpoint_steps"),
    "train": ("compile", "cuda_graphs", "validate_every"),
}
"""settings of a recipe, by section, that decide nothing of what a stage computes but rounding: they may change before
its end, and after"""


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping from dotted keys to values."""
    if isinstance(data, dict):
        items = [(str(key), value) for key, value in data.items()]
    elif isinstance(data, list | tuple) and any(isinstance(item, dict | list | tuple) for item in data):
        items = [(str(i), value) for i, value in enumerate(data)]
    else:
        return {prefix: data}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two nested mappings of JSON data, one readable line per key. Digests that were never noted
    do not, nor do retired keys that nobody had set, nor `FREE` ones, of which earlier versions noted some."""
    old, new = flatten(before), flatten(now)
    return [
        f"{key} was {old.get(key, 'unset')!r}, is {new.get(key, 'unset')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not ((key.endswith(f".{SEAL}") and key not in old) or _retired(key, old, new) or _free(key))
    ]


def _retired(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a key is gone that nobody had set."""
    name = key.rpartition(".")[2]
    return key not in new and name in DEFAULTS and old[key] == DEFAULTS[name]


def _free(key: str) -> bool:
    """Whether a dotted key decides nothing."""
    section, _, name = key.partition(".")
    return name in FREE.get(section, ())


def finished(out: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The report of the finished stage in `out`, or None if there is nothing.

    Raises:
        TrainingError: it was made from other inputs; earlier budgets (`HISTORY`) are none.
        OutputError: the folder is something else.
        CheckpointError: stage.json is damaged.
    """
    if not out.exists():
        return None
    if not (out / STAGE_FILE).is_file():
        raise OutputError(f"{out} exists", expected="a new folder, or a finished stage", fix="choose another folder")
    record = read_stage_record(out)
    refuse_changes(out, {key: value for key, value in record["inputs"].items() if key != HISTORY}, inputs)
    report: dict[str, Any] = record["report"]
    return report


def refuse_changes(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Make sure that a stage's inputs are what they were.

    Raises:
        TrainingError: names every key that changed.
    """
    if changed := changes(before, now):
        raise TrainingError(
            "\n  ".join([f"{folder} was made from other inputs:", *changed]),
            expected="the same inputs, to continue or to reuse it",
            fix=f"undo the change, or delete {folder} and what was made from it, or choose another output folder",
        )


def record_of(inputs: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """What `write_sealed` puts into stage.json: what a folder was made from, and what came of it."""
    return {"inputs": inputs, "hash": data_digest(inputs), "report": report, "tool_version": __version__}
