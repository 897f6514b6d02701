"""A recipe's layers and training in words that need no knowledge of its keys."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

RULES = {"gla": "gated linear attention", "delta": "delta rule"}
"""how a state is written, by `update`"""
ALONE = {"gla": "gated linear attention", "gdn": "gated delta rule", "mom": "mixture of memories"}
"""layers that need no more words, by kind"""
LONG = 8192
"""context of the teacher that most runs have; stages of longer rows are named"""


def softmax_layers(layers: Sequence[str]) -> str:
    """Indices of the layers that stay softmax attention.

    Args:
        layers: mixer of each layer.
    """
    kept = [str(i) for i, mixer in enumerate(layers) if mixer == "full"]
    return "all" if len(kept) == len(layers) else " ".join(kept) or "none"


def other_layers(layers: Sequence[str], mixers: Mapping[str, Mapping[str, Any]]) -> str:
    """What stands in the other layers.

    Args:
        layers: mixer of each layer.
        mixers: a recipe's settings of mixers.
    """
    names = dict.fromkeys(name for name in layers if name != "full")
    return "; ".join(mixer(mixers[name]) for name in names)


def mixer(settings: Mapping[str, Any]) -> str:
    """One layer kind with the settings that tell runs apart."""
    kind = settings["kind"]
    if kind in ALONE:
        return ALONE[kind]
    window = f"window of {settings.get('window')} tokens"
    if kind == "sliding":
        return window
    place = f"SSE beside a {window}" if kind == "sse+sliding" else "SSE"
    chosen = " chosen by keys" if settings.get("advanced", {}).get("router") == "keys" else ""
    states = f"{settings['num_partitions']} partitions{chosen}, {settings['top_k']} per token"
    return f"{place}: {states}, {RULES[settings.get('update', 'gla')]}"


def training(recipe: Mapping[str, Any], layers: Sequence[str], *, books: str | None = None) -> str:
    """Optimizer, size of steps and what else tells runs apart.

    Args:
        recipe: resolved, as reports hold it.
        layers: mixer of each layer.
        books: which part of the text was used, where it was not all.
    """
    stages = recipe["stages"]
    if not stages:
        return "untrained"
    optimizer = "Muon" if any(stage.get("optimizer") == "muon" for stage in stages) else "AdamW"
    parts = [f"{optimizer}, steps of {_size(stages[0]['batch_tokens'])} tokens", _rates(stages[0]["lr"])]
    if stages[-1]["seq_len"] > LONG:
        parts.append(f"then rows of {_size(stages[-1]['seq_len'])} at {_rates(stages[-1]['lr'])}")
    parts += [f"from the predictions of {PurePath(name).name}" for name in _of(stages, "teacher")]
    if "assistant" in _of(stages, "loss_mask"):
        parts.append("on assistant turns")
    if set(layers) - {"full", "sliding"}:
        parts.append(f"calibrated on rows of {recipe['calibrate']['seq_len']:,}")
    if recipe["train"].get("cuda_graphs"):
        parts.append("CUDA graphs")
    if set(_of(stages, "train")) == {"mixers"}:
        parts.append("converted layers alone")
    if not recipe["data"]["needles"]["share"]:
        parts.append("no needles in training rows")
    elif recipe["data"]["needles"].get("answers") == "teacher":
        parts.append("planted answers of the teacher")
    return ", ".join([*parts, *([books.partition(" and ")[0]] if books else [])])


def _of(stages: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """What stages say of a key, each once; reports of earlier versions do not have every key."""
    return list(dict.fromkeys(str(stage[key]) for stage in stages if stage.get(key)))


def _rates(rates: float | Mapping[str, float | None]) -> str:
    if not isinstance(rates, Mapping):
        return f"rate {rates:g}"
    return "rates " + "/".join(f"{rate:g}" for rate in rates.values() if rate is not None)


def _size(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"
