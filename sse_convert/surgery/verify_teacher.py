"""Whether a converted checkpoint has the weights of the model that it was converted from, as far as it can tell."""

import dataclasses as dc
from pathlib import Path
from typing import Any, Literal

from sse_convert.checkpoints.identity import STAGE_FILE, read_sealed
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.checkpoints.provenance import UNTRAINED, Provenance
from sse_convert.checkpoints.teacher import Teacher, source_view
from sse_convert.checkpoints.weights import same_tensors, some
from sse_convert.console import progress
from sse_convert.errors import CheckpointError
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.surgery.originals import Original, tensor_digest

Trained = Literal["nothing", "mixers", "more"] | None
"""nothing, converted layers alone, more than those, or not recorded"""


def compare_with_teacher(files: CheckpointFiles, original: Original, config: Any, provenance: Provenance | None) -> str:
    """Compare a converted checkpoint with a model.

    Args:
        files: the checkpoint.
        original: the model.
        config: the checkpoint's configuration object.
        provenance: the checkpoint's, if it has one.

    Returns:
        How much is the same.

    Raises:
        CheckpointError: the model is evidently another, or what was not trained differs from it.
    """
    view, other = source_view(files), source_view(original.files)
    size, before = view.text.vocab_size, other.text.vocab_size
    known = view if size <= before else _without_new_tokens(view, other)
    _refuse_unlike(known, other)
    found = _compare(known, original, config, _trained(files, provenance))
    return found if known is view else f"{found}; the vocabulary grew from {before} to {size}"


def _without_new_tokens(view: Teacher, other: Teacher) -> Teacher:
    """A checkpoint without the rows of tokens that its vocabulary has more than another model's.

    They are the last ones of tensors with a row for each token: the embedding, and a head of its own.
    """
    size, before, theirs = view.text.vocab_size, other.text.vocab_size, other.files.tensors
    tensors = dict(view.files.tensors)
    for name in tensors.keys() & theirs.keys():
        shape = theirs[name].shape
        if shape[:1] == (before,) and tensors[name].shape == (size, *shape[1:]):
            tensors[name] = dc.replace(tensors[name], shape=shape)
    return dc.replace(view, files=dc.replace(view.files, tensors=tensors))


def _refuse_unlike(view: Teacher, other: Teacher) -> None:
    """Refuse a model that has kept tensors in another shape, or lacks those of attention.

    Training may store others under newer names, such as those of experts.
    """
    attention = tuple(view.attention_tensor(layer, "") for layer in range(view.num_layers))
    lacked = attention if other.stored_prefix == view.stored_prefix else ()
    kept, theirs = view.files.tensors, other.files.tensors
    unlike = [
        name
        for name, info in kept.items()
        if (theirs[name].shape != info.shape if name in theirs else name.startswith(lacked))
    ]
    if unlike:
        which = f"{len(unlike)} of {len(kept)} tensors are missing or of another shape in {other.files.name}"
        tokens, before = view.text.vocab_size, other.text.vocab_size
        fewer = f"; it has {before} tokens, the checkpoint {tokens}" if tokens < before else ""
        raise CheckpointError(f"{which}: {some(unlike)}{fewer}")


def _compare(view: Teacher, original: Original, config: Any, trained: Trained) -> str:
    kept, theirs = list(view.files.tensors), original.files
    with progress("comparing with the teacher", len(kept)) as bar:
        different = same_tensors(view.files, theirs, kept, bar)
    if trained != "nothing":
        return _compare_trained(view, original, config, different, trained)
    _refuse(different, f"of {len(kept)} tensors", theirs)
    return f"{len(kept)} of {len(kept)} tensors identical to {theirs.name}"


def _compare_trained(view: Teacher, original: Original, config: Any, different: list[str], trained: Trained) -> str:
    """The same of a checkpoint of which a part was trained; values count there, and not the dtype."""
    kept, theirs = view.files.tensors, original.files
    cast = {name for name in different if name in theirs.tensors and _same_values(view.files, original, name)}
    different = [name for name in different if name not in cast]
    if trained == "mixers":
        converted = _converted(view, config)
        frozen = [name for name in different if name in theirs.tensors and not name.startswith(converted)]
        _refuse(frozen, "tensors outside converted attention layers, which alone were trained,", theirs)
    elif trained is None and len(different) == len(kept):
        _refuse(different, f"of {len(kept)} tensors", theirs)
    line = f"{len(kept) - len(different)} of {len(kept)} tensors identical to {theirs.name}"
    return f"{line}, {len(cast)} of them in another dtype" if cast else line


def _refuse(different: list[str], which: str, theirs: CheckpointFiles) -> None:
    if different:
        raise CheckpointError(f"{len(different)} {which} differ from {theirs.name}: {some(different)}")


def _converted(view: Teacher, config: Any) -> tuple[str, ...]:
    """What the names of tensors of converted attention layers begin with."""
    mixers = enumerate(layer_mixers(config))
    return tuple(view.attention_tensor(layer, "") for layer, mixer in mixers if mixer is not None)


def _same_values(files: CheckpointFiles, original: Original, name: str) -> bool:
    """Whether a tensor is another model's, stored in another dtype."""
    ours, other = files.tensors[name], original.files.tensors[name]
    if ours.dtype == other.dtype or ours.shape != other.shape:
        return False
    return tensor_digest(files, name, ours.dtype) == original.digest(name, ours.dtype)


def _trained(files: CheckpointFiles, provenance: Provenance | None) -> Trained:
    """What stages up to the checkpoint's trained, by the record beside it and the recipe in its config.json."""
    if provenance is None or provenance.stage in UNTRAINED:
        return "nothing"
    stage = provenance.stage
    recorded = _entries(files.config, "sse", "recipe", "stages")
    names = [entry.get("name") for entry in recorded]
    done = recorded[: names.index(stage) + 1] if stage in names else recorded
    own = _own_stage(files.folder)
    if any(not _trains_mixers(entry) for entry in [*done, *own]):
        return "more"
    return "mixers" if done and (stage in names or not own) else None


def _own_stage(folder: Path) -> list[dict[str, Any]]:
    """The settings of the stage that wrote a folder, if it was one."""
    found = (read_sealed(folder / STAGE_FILE) or {}).get("inputs")
    stage = found.get("stage") if isinstance(found, dict) else None
    return [stage] if isinstance(stage, dict) else []


def _trains_mixers(stage: dict[str, Any]) -> bool:
    return stage.get("loss") == "layer_mse" or stage.get("train") == "mixers"


def _entries(data: Any, *path: str) -> list[dict[str, Any]]:
    """The objects of a list somewhere in JSON data; none where it is not there."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
