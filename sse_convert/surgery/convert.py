"""Make a hybrid checkpoint: the teacher's shards copied or linked, one shard of new tensors, a config, the code.

The teacher's weights are never loaded or rewritten; memory does not grow with the model.
"""

import contextlib
import dataclasses as dc
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files, without_code_keys
from sse_convert.checkpoints.hub import SHA256_DIGITS, cached_blob
from sse_convert.checkpoints.manifest import FileRecord, write_manifest
from sse_convert.checkpoints.meta_model import check_complete, predicts_further
from sse_convert.checkpoints.open import CONFIG, SINGLE, CheckpointFiles, download, open_checkpoint
from sse_convert.checkpoints.output_folder import (
    Link,
    Placed,
    can_clone,
    check_output,
    check_space,
    new_folder,
    place,
)
from sse_convert.checkpoints.provenance import Provenance, TeacherShard
from sse_convert.checkpoints.safetensors_io import ITEM_BYTES, Layout, write_shard
from sse_convert.checkpoints.teacher import SourceModel, Teacher
from sse_convert.checkpoints.tensor_data import TORCH_DTYPES, tensor_bytes
from sse_convert.checkpoints.weights import check_weights, write_index
from sse_convert.console import progress
from sse_convert.errors import CheckpointError, SSEConvertError
from sse_convert.mixers import FULL, Mixer, SSEMixer, mixer_to_dict
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.initialise import fresh_sse_tensors
from sse_convert.modeling.remote_code import write_remote_code
from sse_convert.modeling.tensors import new_tensors
from sse_convert.modeling.tried import warn_of_newer
from sse_convert.recipe import Recipe, recipe_hash, resolve
from sse_convert.report import FieldsReport, counted, format_number
from sse_convert.surgery.compatibility import check_fit
from sse_convert.surgery.guessing_teacher import warn_of_guessing
from sse_convert.surgery.job import Job

NEW_SHARD = "sse-00001-of-00001.safetensors"
ONLY_SHARD = "model-00001-of-00001.safetensors"
"""what a teacher's lone model.safetensors is called beside another shard: under its own name transformers would load it
alone and never look at the index"""
_SEED_STRIDE = 1_000_003


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport(FieldsReport):
    """The result of a conversion."""

    out: Path
    layers: list[str]
    """mixer name of each layer"""
    added_parameters: int
    added_tensors: int
    teacher_shards: dict[str, Placed]
    """file name -> whether it was linked, cloned or copied"""
    companions: list[str]
    """tokenizer, licence and other files that were copied"""
    unused_tensors: list[str]
    """tensors of the teacher's shards that its model does not use"""
    further_tensors: list[str]
    """of these, those of layers that predict further tokens"""
    checked: bool
    """whether all weights were streamed and found finite"""

    def lines(self) -> list[str]:
        """The result for a person."""
        how = {"hard": "linked", "clone": "copied", "copy": "copied"}
        ways = sorted({how[link] for link in self.teacher_shards.values()})
        converted = sum(name != FULL for name in self.layers)
        return [
            f"wrote {self.out}: {converted} of {len(self.layers)} layers converted",
            f"{counted(len(self.teacher_shards), 'teacher shard')} {' and '.join(ways)}, "
            f"{counted(self.added_tensors, 'new tensor')} with {format_number(self.added_parameters)} parameters",
            *self._unused(),
            f"next: sse-convert verify {shlex.quote(str(self.out))}",
        ]

    def _unused(self) -> list[str]:
        lines = []
        if self.further_tensors:
            lines.append(
                f"kept in the files, neither converted nor loaded: {counted(len(self.further_tensors), 'tensor')} "
                f"of layers that predict further tokens ({self.further_tensors[0]}, ...); training stages write none"
            )
        if rest := [name for name in self.unused_tensors if name not in set(self.further_tensors)]:
            lines.append(f"unused by the model: {', '.join(rest[:3])}")
        return lines


def convert_checkpoint(
    job: Job,
    out: Path,
    *,
    link: Link = "auto",
    check: bool = False,
    defer_digests: bool = False,
    try_teacher: bool = False,
) -> ConvertReport:
    """Convert the recipe's model into a new folder. Other arguments and errors as of `api.convert`.

    Args:
        job: recipe and model.
        try_teacher: warn of one that guesses, if it can be had with a tokenizer and local text.
    """
    out = Path(out)
    check_output(out)
    recipe, teacher = job.recipe, job.teacher()
    names, mixers = resolve(recipe, teacher.num_layers)
    check_fit(recipe, teacher, mixers)
    if try_teacher and all(source.path and Path(source.path).exists() for source in recipe.data.train):
        with contextlib.suppress(SSEConvertError):  # conversion needs neither tokenizer nor text; later steps say
            warn_of_guessing(recipe, teacher)
    return convert_layers(
        teacher, names, mixers, out, recipe=recipe, link=link, check=check, defer_digests=defer_digests
    )


def convert_layers(
    teacher: Teacher,
    names: list[str],
    mixers: dict[str, Mixer],
    out: Path,
    *,
    recipe: Recipe,
    link: Link = "auto",
    check: bool = False,
    defer_digests: bool = False,
) -> ConvertReport:
    """Convert given layers of an opened teacher; `names` may keep every layer, which gives the teacher's own logits.

    Args:
        teacher: the opened teacher.
        names: mixer name or `full` for each layer.
        mixers: settings of the named mixers.
        out: the folder to make.
        recipe: travels in the config; seed and backend are read.
        link: see `convert`.
        check: see `convert`.
        defer_digests: see `convert`.

    Raises:
        CheckpointError, OutputError, HubError: see `convert`.
    """
    warn_of_newer()
    unused = check_complete(teacher)
    teacher = dc.replace(teacher, files=download(teacher.files))
    files = teacher.files
    layout = new_layout(teacher, names, mixers)
    with new_folder(out) as folder:
        check_space(out, layout_bytes(layout) + _copied_bytes(files, folder, link))
        placed = _place_teacher(files, folder, link)
        if layout:
            dtype, fresh = TORCH_DTYPES[teacher.dtype], fresh_tensors(teacher, names, mixers, recipe.train.seed)
            data = ((teacher.attention_tensor(*place), tensor_bytes(tensor.to(dtype))) for place, tensor in fresh)
            with progress("writing new tensors", 1):
                write_shard(folder / NEW_SHARD, layout, data)
        write_index(folder, [*placed, *([NEW_SHARD] if layout else [])])
        _write_config(folder, teacher, names, mixers, recipe)
        write_remote_code(folder)
        companions = copy_auxiliary_files(files.folder, folder)
        digests = check_weights(open_checkpoint(folder)) if check else {}
        _provenance(folder, teacher, recipe, placed).write(folder)
        write_manifest(folder, _known_records(files, folder, placed, digests, defer=defer_digests))
    return ConvertReport(
        out=out,
        layers=names,
        added_parameters=sum(math.prod(shape) for _, shape in layout.values()),
        added_tensors=len(layout),
        teacher_shards={name: how for name, (_, how) in placed.items()},
        companions=companions,
        unused_tensors=unused,
        further_tensors=[name for name in unused if predicts_further(teacher, name)],
        checked=check,
    )


def new_layout(teacher: Teacher, names: list[str], mixers: dict[str, Mixer]) -> Layout:
    """Stored name -> (dtype, shape) of the new tensors, layer by layer, in the teacher's dtype."""
    return {
        teacher.attention_tensor(layer, spec.name): (teacher.dtype, spec.shape)
        for layer, mixer in _sse_layers(names, mixers)
        for spec in new_tensors(teacher.dims_of(layer), mixer)
    }


def layout_bytes(layout: Layout) -> int:
    """Bytes of data that a shard with this layout holds."""
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in layout.values())


def _sse_layers(names: list[str], mixers: dict[str, Mixer]) -> Iterator[tuple[int, SSEMixer]]:
    for layer, name in enumerate(names):
        if name != FULL and isinstance(mixer := mixers[name], SSEMixer):
            yield layer, mixer


def fresh_tensors(
    source: SourceModel, names: list[str], mixers: dict[str, Mixer], seed: int
) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """The initial new tensors in the order of `new_layout`, float32, each after its layer and its name below the
    attention. A layer's depend on the seed and its index alone."""
    for layer, mixer in _sse_layers(names, mixers):
        generator = torch.Generator().manual_seed(seed * _SEED_STRIDE + layer)
        for name, tensor in fresh_sse_tensors(source.dims_of(layer), mixer, generator).items():
            yield (layer, name), tensor


def _copied_bytes(files: CheckpointFiles, folder: Path, link: Link) -> int:
    """Bytes of the teacher's shards that will take room of their own in `folder`."""
    if link == "hard" or can_clone(files.folder / CONFIG, folder):
        return 0
    linked = [shard for shard in files.shard_bytes if link == "auto" and cached_blob(files.folder / shard)]
    return sum(size for shard, size in files.shard_bytes.items() if shard not in linked)


def _known_records(
    files: CheckpointFiles, folder: Path, placed: dict[str, tuple[str, Placed]], digests: dict[str, str], *, defer: bool
) -> dict[str, FileRecord]:
    """What is known of shards without reading them again; teacher shards beyond that are deferred if that is asked for.

    Args:
        files: the teacher.
        folder: the new folder.
        placed: see `_place_teacher`.
        digests: of the shards that were streamed.
        defer: compute no more digests.

    Raises:
        CheckpointError: a shard of the hub's cache is not what the hub has.
    """
    records = {name: FileRecord((folder / name).stat().st_size, digest) for name, digest in digests.items()}
    for name, (source, _) in placed.items():
        size, blob = (folder / name).stat().st_size, cached_blob(files.folder / source)
        if blob is not None and len(blob.name) == SHA256_DIGITS:
            if digests.get(name, blob.name) != blob.name:
                raise CheckpointError(
                    f"shard {source} of {files.name} in the hub's cache has SHA-256 {digests[name]}",
                    expected=blob.name,
                    fix="delete it from the cache and download it again",
                )
            records[name] = FileRecord(size, blob.name, "hub cache")
        elif defer and name not in records:
            records[name] = FileRecord(size, None, "deferred")
    return records


def _place_teacher(files: CheckpointFiles, folder: Path, link: Link) -> dict[str, tuple[str, Placed]]:
    """Bring the teacher's shards in; name in `folder` -> (name in the teacher's folder, what was done)."""
    placed: dict[str, tuple[str, Placed]] = {}
    with progress("teacher shards", len(files.shard_bytes)) as bar:
        for shard in files.shard_bytes:
            name = ONLY_SHARD if shard == SINGLE else shard
            placed[name] = shard, place(files.folder / shard, folder / name, link)
            bar.update()
    return placed


def _write_config(folder: Path, teacher: Teacher, names: list[str], mixers: dict[str, Mixer], recipe: Recipe) -> None:
    """config.json: the teacher's own, with what conversion changes and nothing else."""
    sse = {
        "layers": names,
        "mixers": {name: mixer_to_dict(mixer) for name, mixer in mixers.items()},
        "base_model": recipe.model,
        "base_revision": teacher.files.revision,
        "recipe": recipe.to_dict(),
        "recipe_hash": recipe_hash(recipe),
    }
    after = build_config(teacher.config, sse).to_dict()
    config = _changed(without_code_keys(teacher.files.config), teacher.config.to_dict(), after)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _changed(own: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Fields with what differs between two other sets of them; within nested fields too.

    Args:
        own: the fields.
        before: the same with all defaults.
        after: these, changed.
    """
    found = dict(own)
    for key, value in after.items():
        nested = all(isinstance(fields.get(key), dict) for fields in (own, before, after))
        if nested:
            found[key] = _changed(own[key], before[key], value)
        elif key != "transformers_version" and (key not in before or before[key] != value):
            found[key] = value
    return found


def _provenance(folder: Path, teacher: Teacher, recipe: Recipe, placed: dict[str, tuple[str, Placed]]) -> Provenance:
    return Provenance(
        stage="convert",
        recipe_hash=recipe_hash(recipe),
        teacher=recipe.model,
        teacher_folder=str(teacher.files.folder.resolve()),
        teacher_revision=teacher.files.revision,
        shards={
            name: TeacherShard(source=source, bytes=(folder / name).stat().st_size)
            for name, (source, _) in placed.items()
        },
    )
