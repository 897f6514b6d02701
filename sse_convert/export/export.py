"""The finished model as a folder: safetensors shards, config, code, tokenizer, recipe, figures and a model card.

Weights are streamed in pieces, so a model of any size can be exported on any machine.
"""

import contextlib
import dataclasses as dc
import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files, has_chat_template
from sse_convert.checkpoints.foreign import parse_json
from sse_convert.checkpoints.manifest import write_manifest
from sse_convert.checkpoints.open import CONFIG, CheckpointFiles, download, whole_checkpoint
from sse_convert.checkpoints.output_folder import check_output, check_space, new_folder
from sse_convert.checkpoints.provenance import EXPORT, Provenance, read_provenance
from sse_convert.checkpoints.safetensors_io import FLOAT_DTYPES, ITEM_BYTES
from sse_convert.checkpoints.teacher import Teacher, refuse_quantised
from sse_convert.errors import CheckpointError, RecipeError
from sse_convert.evaluation.report import EVALUATION_FILE, EvalReport
from sse_convert.export.card import CARD, model_card
from sse_convert.export.lending import in_teachers_words, lend, without_lent
from sse_convert.export.published import paths_in, published
from sse_convert.export.shards import SHARD_BYTES, assigned, write_weights
from sse_convert.files import write_json
from sse_convert.modeling.arch_spec import LENT_FILE
from sse_convert.modeling.configuration import entry_points, small_entry
from sse_convert.modeling.remote_code import write_remote_code
from sse_convert.recipe import Recipe, recipe_hash
from sse_convert.report import FieldsReport, counted, format_bytes, format_number
from sse_convert.results.collect import RECIPE
from sse_convert.results.stored_evaluation import read_evaluation
from sse_convert.surgery.compatibility import match_recipe
from sse_convert.surgery.job import Job

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
    lent: int
    """tensors that are left to the teacher"""
    destroyed: bool
    """whether those figures say that the model is not fit to be published"""

    def lines(self) -> list[str]:
        """The result for a person."""
        size = format_bytes(sum(self.shards.values()))
        out = shlex.quote(str(self.out))
        asking = f"generate {out} 'Once upon a time'"
        push = "" if self.destroyed else f", or sse-convert push {out} USER/NAME"
        left = [
            f"left to the teacher: {counted(self.lent, 'tensor')}; `sse-convert join {out} --out WHOLE` takes them in"
        ]
        return [
            f"wrote {self.out}: {format_number(self.parameters)} parameters, {self.dtype}, {size} in "
            f"{counted(len(self.shards), 'shard')}",
            *(left if self.lent else []),
            "the model card has " + ("the figures of the evaluation" if self.evaluated else "no figures yet"),
            f"next: sse-convert {f'chat {out}' if self.chats else asking}{push}",
        ]


def export_checkpoint(
    job: Job,
    checkpoint: str | Path,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    evaluation: Path | None = None,
    delta: bool = False,
) -> ExportReport:
    """Write the final folder of a converted checkpoint. Other arguments and errors as of `api.export`.

    Args:
        job: recipe and model.
        dtype: keep (the teacher's, tensor by tensor), float32, bfloat16 or float16.
        shard_bytes: of the largest shard; a larger tensor gets a shard of its own.
    """
    recipe, out = job.recipe, Path(out)
    check_output(out)
    files = download(whole_checkpoint(checkpoint))
    _check(files, recipe)
    choice, delta = dtype or recipe.export.dtype, delta or recipe.export.delta
    teacher = job.teacher() if choice == "keep" or delta else None
    if small := delta and teacher:
        files = in_teachers_words(files, small)
    target, dtypes = _target_dtypes(files, teacher, choice)
    lent = lend(files, small, recipe.model, dtypes) if small else None
    own = files if lent is None else without_lent(files, lent)
    shards = assigned(own.tensors, dtypes, shard_bytes)
    places = {*paths_in(recipe.to_dict()), str(files.folder), str(out)}
    told = published(recipe.to_dict())
    report = _evaluation(files.folder, evaluation)
    with new_folder(out) as folder:
        check_space(out, sum(info.numel * ITEM_BYTES[dtypes[name]] for name, info in own.tensors.items()))
        records = write_weights(own, folder, shards, dtypes)
        config = published(_config(files, recipe, target), places)
        if lent is not None:
            config["sse"] = small_entry(config["sse"])
            write_json(folder / LENT_FILE, dc.asdict(lent))
        _write_json(folder / CONFIG, config)
        write_remote_code(folder)
        for name in copy_auxiliary_files(files.folder, folder):
            _publish_settings(folder / name, places)
        _write_provenance(files, folder, recipe, told["model"])
        (folder / RECIPE).write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")
        if report is not None:
            figures = published(report.to_dict(), places)
            (folder / EVALUATION_FILE).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        teacher_card = Path(recipe.model) / CARD
        origin = read_provenance(files.folder)
        trained = {**told, "stages": origin.took_place(told["stages"]) if origin else told["stages"]}
        chats = has_chat_template(folder)
        card = model_card(out.name, config, trained, report, files.parameters, teacher_card, chats=chats, lent=lent)
        (folder / CARD).write_text(card, encoding="utf-8")
        write_manifest(folder, records)
    return ExportReport(
        out=out,
        parameters=files.parameters,
        dtype=target,
        shards={name: (out / name).stat().st_size for name in shards},
        files=sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()),
        evaluated=report is not None,
        chats=chats,
        lent=len(files.tensors) - len(own.tensors),
        destroyed=report is not None and report.verdict().destroyed,
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


def _target_dtypes(files: CheckpointFiles, teacher: Teacher | None, choice: str) -> tuple[str, dict[str, str]]:
    """The torch name of the model's type, and the stored type of each tensor; integers stay what they are."""
    stored = {name: info.dtype for name, info in files.tensors.items()}
    floats = {name for name, kind in stored.items() if kind in FLOAT_DTYPES}
    if choice != "keep" or teacher is None:
        if choice not in _STORED:
            raise RecipeError(f"dtype is {choice!r}", expected=f"keep, {', '.join(sorted(_STORED))}")
        return choice, {**stored, **dict.fromkeys(floats, _STORED[choice])}
    theirs = {name: teacher.files.tensors[name].dtype for name in floats & teacher.files.tensors.keys()}
    return FLOAT_DTYPES[teacher.dtype], {**stored, **dict.fromkeys(floats, teacher.dtype), **theirs}


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


def _evaluation(folder: Path, given: Path | None) -> EvalReport | None:
    """The report that is given, or lies in the checkpoint's folder."""
    path = given or folder / EVALUATION_FILE
    return read_evaluation(path) if given is not None or path.is_file() else None
