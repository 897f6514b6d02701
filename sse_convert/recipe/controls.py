"""Control runs: what a hybrid must beat before its converted layers are given any credit.

Each control is the recipe itself with other layers, so that it sees the same text, the same stages and the same budget:

    teacher_tuned    the teacher, untouched, through the recipe's training (fine-tuning alone can buy loss)
    window           softmax attention over a window and sinks in the linear layers' places, untrained
    window_trained   the same, trained as the recipe says
    gla              plain gated linear attention in the SSE layers' places (the paper's GLA-H)
    pure_sse         SSE everywhere, no softmax layer left

KL to itself gives the teacher no gradient, so `teacher_tuned` runs the stages of loss ce alone, and those of loss kl
that have a teacher of their own, or planted rows that tell what the teacher does not know
(`data.needles.answers: row`); a recipe without any has it in
another run, with ce for kl (`--set stages.0.loss=ce`). A window is that of the layer it replaces if there is
one beside SSE, else that of the recipe's sliding layers, else 128 tokens and 4 sinks. Sliding layers of the recipe stay
as they are, save in `pure_sse`; a window beside SSE stays beside what replaces SSE.
"""

import dataclasses as dc
from pathlib import Path
from typing import get_args

from sse_convert.mixers import BUILT_IN, FULL, SSE_KINDS, Mixer, SlidingMixer, SSEMixer, SSESlidingMixer, WindowMixer
from sse_convert.recipe.pattern import UNTOUCHED, named_heads, resolve
from sse_convert.recipe.schema import Control, FullHeads, Layers, Recipe

CONTROLS = get_args(Control)[1:]
"""names, in the order of the tables"""
TO_BEAT = CONTROLS[1:]
"""controls that a good hybrid is ahead of; `teacher_tuned` is a second teacher"""
_OF_GLA = ("k_feature_map", "decay", "state_heads", "rope")
"""settings that gated linear attention shares with SSE"""
MEANING = {
    "teacher_tuned": "the teacher through the same training",
    "window": "window and sinks in the same layers, untrained",
    "window_trained": "window and sinks in the same layers, trained alike",
    "gla": "plain gated linear attention in the same layers",
    "pure_sse": "SSE in every layer",
}


def control_recipes(recipe: Recipe, num_layers: int, positions: int) -> dict[str, Recipe | str]:
    """The recipe of each control, or the reason why there is none.

    Args:
        recipe: the main run.
        num_layers: layers of its model.
        positions: what its model was trained for, which bounds what the untrained control is measured at.

    Raises:
        RecipeError: the recipe's layers do not fit the model.
    """
    named, found = resolve(recipe, num_layers)
    names, heads = [named_heads(name)[0] for name in named], [named_heads(name)[1] for name in named]
    mixers = {named_heads(name)[0]: without_heads(mixer) for name, mixer in found.items()}
    windows = [name for name, mixer in mixers.items() if isinstance(mixer, SlidingMixer)]
    linear = [name for name, mixer in mixers.items() if not isinstance(mixer, SlidingMixer)]
    sse = [name for name in linear if mixers[name].kind in SSE_KINDS]
    plain = windows[0] if windows else "sliding"
    window_mixers = {plain: mixers[plain] if windows else recipe.mixers.get("sliding", SlidingMixer())}
    window = dict.fromkeys(linear, plain)
    for name in linear:
        if isinstance(mixer := mixers[name], SSESlidingMixer):
            window[name] = f"{name}-window"
            window_mixers[window[name]] = SlidingMixer(window=mixer.window, sinks=mixer.sinks)
    gla = {name: f"{name}-gla" for name in sse}
    replaced: dict[str, tuple[dict[str, str], dict[str, Mixer]]] = {
        "window": (window, window_mixers),
        "gla": (gla, {gla[name]: as_gla(mixers[name]) for name in sse}),
        "pure_sse": (dict.fromkeys([FULL, *windows], sse[0]) if sse else {}, {}),
    }
    made: dict[str, Recipe | str] = {}
    for control in CONTROLS:
        if control == "teacher_tuned":
            made[control] = _tuned(recipe)
            continue
        other, settings = replaced[control.removesuffix("_trained")]
        layers = [other.get(name, name) for name in names]
        kept = heads if control != "pure_sse" else [[] for _ in heads]
        if layers == names and kept == heads:
            made[control] = "nothing to replace in the recipe's layers"
        elif control == "window_trained" and not recipe.stages:
            made[control] = "the recipe has no training stages"
        elif control == "window" and _longest_measured(recipe) > positions:
            made[control] = "untrained it has the teacher's positions, and eval asks for more, as a stage's rope gives"
        else:
            made[control] = _variant(recipe, control, layers, {**mixers, **settings}, kept)
    return made


def without_heads(mixer: Mixer) -> Mixer:
    """A mixer none of whose heads sees the whole row."""
    return dc.replace(mixer, full_heads=()) if isinstance(mixer, WindowMixer) else mixer


def _longest_measured(recipe: Recipe) -> int:
    """The longest row that eval names, 0 where it names none."""
    asked = [*recipe.eval.lengths, *recipe.eval.throughput]
    asked += recipe.eval.needle.lengths if recipe.eval.needle else []
    return max(asked, default=0)


def as_gla(mixer: Mixer) -> SSEMixer:
    """Gated linear attention with the settings it shares with another linear mixer; beside the same window if any."""
    gla = dc.replace(BUILT_IN["gla"], **{name: getattr(mixer, name) for name in _OF_GLA})
    assert isinstance(gla, SSEMixer)
    if not isinstance(mixer, SSESlidingMixer):
        return gla
    settings = {f.name: getattr(gla, f.name) for f in dc.fields(gla) if f.name != "kind"}
    return SSESlidingMixer(**settings, window=mixer.window, sinks=mixer.sinks)


def _tuned(recipe: Recipe) -> Recipe | str:
    """Layers in training groups are none, so stages for converted layers alone train the whole model."""
    needles = recipe.data.needles
    told = bool(needles.share) and needles.answers == "row"
    stages = [
        dc.replace(s, train="all" if s.train == "mixers" else s.train)
        for s in recipe.stages
        if s.loss == "ce" or (s.loss == "kl" and (told or s.teacher is not None))
    ]
    if not stages:
        why = "no stage of loss ce, and KL to itself gives the teacher no gradient: it stays the teacher"
        as_text = [f"--set stages.{i}.loss=ce" for i, stage in enumerate(recipe.stages) if stage.loss == "kl"]
        return f"{why}; a run with {' '.join(as_text)} and another export.dir has it" if as_text else why
    calibrate = dc.replace(recipe.calibrate, enabled=False)
    changed = dc.replace(recipe, layers=UNTOUCHED, mixers={}, stages=stages, calibrate=calibrate)
    return _in_own_folder(changed, "teacher_tuned")


def _variant(
    recipe: Recipe, control: str, layers: list[str], mixers: dict[str, Mixer], heads: list[list[int]]
) -> Recipe:
    used = {name: mixers[name] for name in dict.fromkeys(layers) if name != FULL}
    kept: dict[int | str, str | FullHeads] = {
        i: FullHeads(full_heads=own) for i, own in enumerate(heads) if own and layers[i] != FULL
    }
    learns = any(not isinstance(mixer, SlidingMixer) for mixer in used.values())
    changed = dc.replace(
        recipe,
        layers=Layers(pattern=layers, overrides=kept),
        mixers=used,
        stages=[] if control == "window" else recipe.stages,
        calibrate=recipe.calibrate if learns else dc.replace(recipe.calibrate, enabled=False),
    )
    return _in_own_folder(changed, control)


def _in_own_folder(recipe: Recipe, control: str) -> Recipe:
    export = dc.replace(recipe.export, dir=str(controls_folder(recipe) / control))
    return dc.replace(recipe, controls=[], export=export)


def controls_folder(recipe: Recipe) -> Path:
    """Where the controls of a recipe live; each has its steps in `<name>.stages`."""
    out = Path(recipe.export.dir)
    return out.with_name(f"{out.name}.controls")
