"""The finished model as a folder: safetensors shards, config, code, tokenizer, recipe, figures and a model card.

Weights are streamed in pieces, so a model of any size can be exported on any machine.
"""

import contextlib
import dataclasses as dc
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files, has_chat_template
from sse_convert.checkpoints.foreign import parse_json
from sse_convert.checkpoints.manifest import FileRecord, write_manifest
from sse_convert.checkpoints.open import CONFIG, SINGLE, CheckpointFiles, download, open_checkpoint
from sse_convert.checkpoints.output_folder import check_output, check_space, new_folder
from sse_convert.checkpoints.provenance import EXPORT, Provenance, read_provenance
from sse_convert.checkpoints.safetensors_io import FLOAT_DTYPES, ITEM_BYTES, TensorInfo, write_shard
from sse_convert.checkpoints.teacher import open_teacher, refuse_quantised
from sse_convert.checkpoints.tensor_data import named_chunks, nonfinite
from sse_convert.console import progress
from sse_convert.errors import CheckpointError, RecipeError
from sse_convert.evaluation.verdict import model_verdict
from sse_convert.export.card import CARD, EVALUATION, model_card
from sse_convert.export.card_figures import write_pictures
from sse_convert.export.published import paths_in, published
from sse_convert.modeling.configuration import entry_points
from sse_convert.modeling.remote_code import write_remote_code
from sse_convert.pages.collect import RECIPE, read_evaluation
from sse_convert.recipe import Recipe, recipe_hash
from sse_convert.report import FieldsReport, format_bytes, format_number
from sse_convert.surgery.compatibility import match_recipe
from sse_convert.surgery.convert import write_index

SHARD_BYTES = 5 * 10**9
"""of the largest shard"""
_STORED = {name: stored for stored, name in FLOAT_DTYPES.items()}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport(FieldsReport):
    """The result of an export."""

    out: Path
    """the folder"""
    parameters: int
    """elements of all stored tensors"""
    dtype: str
    """type of the weights"""
    shards: dict[str, int]
    """shard to bytes"""
    files: list[str]
    """all files"""
    evaluated: bool
    """whether the card has figures"""
    chats: bool
    """whether the tokenizer has a chat template"""
    destroyed: bool
    """whether those figures say that the model is not fit to be published"""

    def lines(self) -> list[str]:
        """The result for a person."""
        size = format_bytes(sum(self.shards.values()))
        out = shlex.quote(str(self.out))
        asking = f"generate {out} 'Once upon a time'"
        push = "" if self.destroyed else f", or sse-convert push {out} USER/NAME"
        return [
            f"wrote {self.out}: {format_number(self.parameters)} parameters, {self.dtype}, {size} in "
            f"{len(self.shards)} shard{'s' if len(self.shards) > 1 else ''}",
            "the model card has " + ("the figures of the evaluation" if self.evaluated else "no figures yet"),
            f"next: sse-convert {f'chat {out}' if self.chats else asking}{push}",
        ]


def export_checkpoint(
    recipe: Recipe,
    checkpoint: str | Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    evaluation: dict[str, Any] | Path | None = None,
) -> ExportReport:
    """Write the final folder of a converted checkpoint. Other arguments and errors as of `api.export`.

    Args:
        dtype: keep (the teacher's, tensor by tensor), float32, bfloat16 or float16.
        shard_bytes: of the largest shard; a larger tensor gets a shard of its own.
    """
    out = Path(out)
    check_output(out)
    files = download(open_checkpoint(checkpoint))
    _check(files, recipe)
    target, dtypes = _target_dtypes(files, recipe, dtype or recipe.export.dtype)
    shards = _assign(files.tensors, dtypes, shard_bytes)
    places = {*paths_in(recipe.to_dict()), str(files.folder), str(out)}
    told = published(recipe.to_dict())
    figures = published(_figures(files.folder, evaluation), places)
    with new_folder(out) as folder:
        check_space(out, sum(info.numel * ITEM_BYTES[dtypes[name]] for name, info in files.tensors.items()))
        records = _write_weights(files, folder, shards, dtypes)
        config = published(_config(files, recipe, target), places)
        _write_json(folder / CONFIG, config)
        write_remote_code(folder)
        for name in copy_auxiliary_files(files.folder, folder):
            _publish_settings(folder / name, places)
        _write_provenance(files, folder, recipe, told["model"])
        (folder / RECIPE).write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")
        if figures is not None:
            (folder / EVALUATION).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        pictures = write_pictures(figures, files.folder, folder)
        teacher_card = Path(recipe.model) / CARD
        origin = read_provenance(files.folder)
        trained = {**told, "stages": origin.took_place(told["stages"]) if origin else told["stages"]}
        chats = has_chat_template(folder)
        card = model_card(out.name, config, trained, figures, files.parameters, pictures, teacher_card, chats=chats)
        (folder / CARD).write_text(card, encoding="utf-8")
        write_manifest(folder, records)
    return ExportReport(
        out=out,
        parameters=files.parameters,
        dtype=target,
        shards={name: (out / name).stat().st_size for name in shards},
        files=sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()),
        evaluated=figures is not None,
        chats=chats,
        destroyed=figures is not None and model_verdict(figures).destroyed,
    )


def _check(files: CheckpointFiles, recipe: Recipe) -> None:
    refuse_quantised(files)
    match_recipe(recipe, files)
    if (files.folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{files.name} holds PEFT adapters beside its weights",
            expected="merged weights (stages with train: lora end with them)",
            fix="load it with PEFT, call merge_and_unload() and save_pretrained()",
        )


def _target_dtypes(files: CheckpointFiles, recipe: Recipe, choice: str) -> tuple[str, dict[str, str]]:
    """The torch name of the model's type, and the stored type of each tensor; integers stay what they are."""
    stored = {name: info.dtype for name, info in files.tensors.items()}
    floats = {name for name, kind in stored.items() if kind in FLOAT_DTYPES}
    if choice != "keep":
        if choice not in _STORED:
            raise RecipeError(f"dtype is {choice!r}", expected=f"keep, {', '.join(sorted(_STORED))}")
        return choice, {**stored, **dict.fromkeys(floats, _STORED[choice])}
    teacher = open_teacher(recipe.model, recipe.revision)
    theirs = {name: teacher.files.tensors[name].dtype for name in floats & teacher.files.tensors.keys()}
    return FLOAT_DTYPES[teacher.dtype], {**stored, **dict.fromkeys(floats, teacher.dtype), **theirs}


def _assign(tensors: dict[str, TensorInfo], dtypes: dict[str, str], limit: int) -> dict[str, list[str]]:
    """Shard to tensor names, in the checkpoint's order, none larger than `limit` bytes unless it is a single tensor."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        nbytes = info.numel * ITEM_BYTES[dtypes[name]]
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _write_weights(
    files: CheckpointFiles, folder: Path, shards: dict[str, list[str]], dtypes: dict[str, str]
) -> dict[str, FileRecord]:
    """Write the shards and their index, in pieces; the shards' records."""

    def converted(names: list[str]) -> Iterator[tuple[str, bytes | memoryview]]:
        for name in names:
            for piece in named_chunks(files.folder, name, files.tensors[name], dtypes[name]):
                _require_finite(piece[1], name, dtypes[name], files.name)
                yield piece
            bar.update()

    records = {}
    with progress("writing weights", len(files.tensors)) as bar:
        for shard, names in shards.items():
            layout = {name: (dtypes[name], files.tensors[name].shape) for name in names}
            sha256 = write_shard(folder / shard, layout, converted(names))
            records[shard] = FileRecord((folder / shard).stat().st_size, sha256)
    if len(shards) > 1:
        write_index(folder, list(shards))
    return records


def _require_finite(data: bytes | memoryview, name: str, dtype: str, checkpoint: str) -> None:
    if data and nonfinite(memoryview(data), dtype):
        raise CheckpointError(
            f"tensor {name} of {checkpoint} is NaN or infinite as {dtype}",
            expected="finite weights",
            fix="export with dtype bfloat16 or float32, or use an earlier checkpoint",
        )


def _config(files: CheckpointFiles, recipe: Recipe, dtype: str) -> dict[str, Any]:
    config = {key: value for key, value in files.config.items() if key != "torch_dtype"}
    config |= {"dtype": dtype, **entry_points(files.model_type)}
    config["sse"] = {**config["sse"], "recipe": recipe.to_dict(), "recipe_hash": recipe_hash(recipe)}
    return config


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _publish_settings(path: Path, places: set[str]) -> None:
    """Take paths of this machine out of a tokenizer's or processor's settings, which transformers keeps there."""
    if not path.name.endswith("_config.json"):
        return
    with contextlib.suppress(ValueError):  # what cannot be read is no JSON
        data = parse_json(path.read_text(encoding="utf-8"))
        if (told := published(data, places)) != data:
            _write_json(path, told)


def _write_provenance(files: CheckpointFiles, folder: Path, recipe: Recipe, teacher: str) -> None:
    before = read_provenance(files.folder)
    Provenance(
        stage=EXPORT,
        exported=(before.exported or before.stage) if before else "",
        recipe_hash=recipe_hash(recipe),
        teacher=teacher,
        teacher_folder="",
        teacher_revision=before.teacher_revision if before else recipe.revision,
        shards={},
    ).write(folder)


def _figures(folder: Path, evaluation: dict[str, Any] | Path | None) -> dict[str, Any] | None:
    if isinstance(evaluation, dict):
        return evaluation
    path = evaluation or folder / EVALUATION
    if evaluation is None and not path.is_file():
        return None
    return read_evaluation(path).data
