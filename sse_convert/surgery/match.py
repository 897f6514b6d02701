"""Whether a recipe describes the checkpoint it is used with: layer by layer and key by key, before anything is loaded.

What decides a layer's tensors or outputs must agree. What training alone reads may differ: a stage takes it from the
recipe.
"""

import dataclasses as dc
import json
from typing import Any

from sse_convert.errors import CheckpointError, RecipeError
from sse_convert.mixers import FULL, Mixer, mixer_to_dict
from sse_convert.modeling.architectures import SSE_PREFIX
from sse_convert.modeling.configuration import stored_mixers
from sse_convert.recipe import Recipe, resolve
from sse_convert.surgery.checkpoint import CheckpointFiles

TRAINING_ONLY = ("balance", "balance_coef", "branch_dropout")
"""mixer settings that only training reads; but `balance: bias` has a tensor of its own, which generation reads too"""


@dc.dataclass(frozen=True, slots=True)
class Match:
    """A recipe and a checkpoint that go together."""

    names: list[str]
    """the recipe's mixer name of each layer"""
    mixers: dict[str, Mixer]
    """the recipe's mixers in use, by name"""
    sse: dict[str, Any]
    """the field `sse` of the checkpoint's configuration, with the recipe's names and mixers"""
    training: dict[str, Any]
    """training settings in which the recipe differs from the checkpoint: key -> the recipe's value"""


@dc.dataclass(frozen=True, slots=True)
class _Difference:
    """One key of one recipe mixer, and what the checkpoint has in its place in some layers."""

    key: str
    """as in the recipe; empty where a layer is of another kind"""
    recipe: Any
    checkpoint: Any

    @property
    def trains(self) -> bool:
        """Whether nothing but training would notice."""
        name = self.key.rpartition(".")[2]
        return name in TRAINING_ONLY and not (name == "balance" and "bias" in (self.recipe, self.checkpoint))


def converted_field(files: CheckpointFiles) -> dict[str, Any]:
    """The field `sse` of a converted checkpoint's configuration.

    Raises:
        CheckpointError: the checkpoint is not converted.
    """
    sse = files.config.get("sse")
    if not files.model_type.startswith(SSE_PREFIX) or not isinstance(sse, dict):
        raise CheckpointError(
            f"{files.name} is a plain {files.model_type} checkpoint",
            expected="a converted checkpoint",
            fix="run `sse-convert convert` first and give its folder",
        )
    return sse


def match_recipe(recipe: Recipe, files: CheckpointFiles) -> Match:
    """Compare a recipe's layers with those of a converted checkpoint. Names of mixers may differ.

    Args:
        recipe: layers and mixers are read.
        files: the opened checkpoint.

    Raises:
        CheckpointError: the checkpoint is not converted, or its configuration is damaged.
        RecipeError: a layer is of another kind, or has another setting that its tensors or outputs depend on; all of
            them are named.
    """
    sse = converted_field(files)
    stored = stored_mixers(sse)
    names, mixers = resolve(recipe, len(stored))
    found: dict[_Difference, list[int]] = {}
    for layer, name in enumerate(names):
        for difference in _differences(name, mixers.get(name), stored[layer]):
            found.setdefault(difference, []).append(layer)
    if refused := {difference: layers for difference, layers in found.items() if not difference.trains}:
        raise _refusal(files, names, refused)
    return Match(
        names=names,
        mixers=mixers,
        sse={**sse, "layers": names, "mixers": {name: mixer_to_dict(mixer) for name, mixer in mixers.items()}},
        training={difference.key: difference.recipe for difference in found},
    )


def _differences(name: str, wanted: Mixer | None, stored: Mixer | None) -> list[_Difference]:
    if wanted is None or stored is None or wanted.kind != stored.kind:
        kinds = [FULL if mixer is None else mixer.kind for mixer in (wanted, stored)]
        return [] if kinds[0] == kinds[1] else [_Difference("", *kinds)]
    mine, theirs = _settings(wanted), _settings(stored)
    return [_Difference(f"mixers.{name}.{key}", mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]]


def _settings(mixer: Mixer) -> dict[str, Any]:
    """The settings under dotted keys, with what an unset one means."""
    settings: dict[str, Any] = {}
    for key, value in mixer_to_dict(mixer).items():
        settings |= {f"{key}.{part}": x for part, x in value.items()} if isinstance(value, dict) else {key: value}
    if settings.get("read_top_k") == settings.get("top_k"):
        settings["read_top_k"] = None
    return settings


def _refusal(files: CheckpointFiles, names: list[str], refused: dict[_Difference, list[int]]) -> RecipeError:
    lines, sets = [], []
    for difference, layers in refused.items():
        where = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
        values = f"{_spelled(difference.recipe)} in the recipe, {_spelled(difference.checkpoint)} in the checkpoint"
        lines.append(f"{difference.key}: {values} ({where})" if difference.key else f"{where}: {values}")
        if difference.key and len(layers) == names.count(names[layers[0]]):
            sets.append(f"--set {difference.key}={_spelled(difference.checkpoint)}")
    fix = "use the recipe that made the checkpoint (its config.json holds one, under sse.recipe)"
    if len(sets) == len(lines):
        fix = f"go on with the checkpoint's settings: {' '.join(sets)}"
    return RecipeError(
        "\n  ".join([f"{files.name} was converted with other layers or mixers than this recipe's:", *lines]),
        expected=f"a recipe that differs at most in what only training reads ({', '.join(TRAINING_ONLY)})",
        fix=f"{fix}; or convert the model anew with this recipe",
        problems=lines,
    )


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
