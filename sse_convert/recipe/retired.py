"""Keys that recipes had, and what to do in their place. The one list of them, with what becomes of a stored recipe."""

import dataclasses as dc
from typing import Any

from sse_convert.mixers import BASIC, SSEMixer, mixer_from_dict, mixer_to_dict, recipe_entry
from sse_convert.recipe.problems import Path

RETIRED = {
    "mixers.*.qk_rank_on": "was retired, the side path serves the shared partition; remove it",
    "mixers.*.decay_rank": "was retired, the rank is 16; remove it",
    "mixers.*.decay_normalizer": "was retired, it is 16; remove it",
    "mixers.*.output_norm": "was retired, heads are always normed; remove it",
    "mixers.*.row_decay": "was retired, every row of a state decays; remove it",
    "mixers.*.branch_dropout": "was retired, the window branch is always there; remove it",
    "calibrate.router": "was retired, router rows start small and random; remove it",
    "calibrate.key_scale": "was retired, the temperature of keys is learned from 1; remove it",
    "calibrate.decay": "was retired, calibration always sets decays; remove it, or use calibrate.enabled: false",
    "stages.*.hidden_loss": "was retired; remove it",
    "stages.*.layers_at_once": "was retired; remove it, and lower micro_batch where memory is short",
    "stages.*.skip_below": "was retired; remove it, every layer trains for the whole budget",
    "stages.*.stop": "was retired, every layer trains for the whole budget; remove it, and lower tokens instead",
    "stages.*.stop{}": "was retired, every layer trains for the whole budget; remove it",
    "stages.*.offline": "was retired, the teacher predicts beside the student; remove it",
    "stages.*.offline{}": "was retired, the teacher predicts beside the student; remove it, and shard both by FSDP2",
    "stages.*.rope.attention_factor": "was retired, it follows from factor; remove it",
    "stages.*.rope.beta_fast": "was retired, it is 32; remove it",
    "stages.*.rope.beta_slow": "was retired, it is 1; remove it",
    "stages.*.rope.truncate": "was retired, it is true; remove it",
    "stages.*.rope.low_freq_factor": "was retired with rope_type llama3; use yarn, or rope_theta alone",
    "stages.*.rope.high_freq_factor": "was retired with rope_type llama3; use yarn, or rope_theta alone",
    "train.spikes": "was retired, steps that are not finite are left out; remove it, and lower clip where a loss jumps",
    "train.spikes{}": "was retired, steps that are not finite are left out; remove it",
    "train.collapse": "was retired, a collapsed router is always named; remove it",
    "train.collapse{}": "was retired, a collapsed router is always named; remove it",
}
"""old key -> what to do; `*` is any name or index, `{}` a mapping where there is none any more"""
MOVED = tuple(field.name for field in dc.fields(SSEMixer) if field.name not in BASIC)
"""keys of a mixer that stand under its `advanced` now"""
_RECOMMENDED_SINCE = 2
"""format of a checkpoint's field `sse` from which on a recipe's mixers start from `BUILT_IN`"""


def instead(path: Path, value: Any) -> str | None:
    """What to do about a key that recipes had; None for any other.

    Args:
        path: of the key.
        value: what the recipe gives it.
    """
    if len(path) == 3 and path[0] == "mixers" and path[2] in MOVED:
        return f"is now mixers.{path[1]}.advanced.{path[2]}"
    mapping = "{}" if isinstance(value, dict) else ""
    if path[:1] == ("mixers",) and path[2:3] == ("advanced",):
        path = (*path[:2], *path[3:])
    wild = ("*" if i == 1 and path[0] in ("mixers", "stages") else str(part) for i, part in enumerate(path))
    return RETIRED.get(".".join(wild) + mapping)


def stored_recipe(sse: dict[str, Any]) -> dict[str, Any]:
    """The recipe in a checkpoint's field `sse` as one of today, with the mixers that it meant when it was written.

    Retired keys of training and calibration are left out: they tell what was done, and say nothing of the model.

    Raises:
        ValueError: a mixer has a setting that layers no longer offer.
    """
    recipe: dict[str, Any] = _without_retired(sse["recipe"], ())
    if sse["format"] >= _RECOMMENDED_SINCE:
        return recipe
    stored = {**{kind: {"kind": kind} for kind in ("sse", "sse+sliding", "gla")}, **sse["recipe"]["mixers"]}
    meant = {name: recipe_entry(mixer_to_dict(mixer_from_dict(data))) for name, data in stored.items()}
    return {**recipe, "mixers": meant}


def _without_retired(value: Any, path: Path) -> Any:
    if isinstance(value, list):
        return [_without_retired(item, (*path, i)) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if instead((*path, key), item) is None}
    return {key: _without_retired(item, (*path, key)) for key, item in kept.items()}
