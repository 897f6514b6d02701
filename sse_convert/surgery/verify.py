"""Prove that a converted checkpoint is complete and sound: names, shapes, dtypes, weights, code, logits, teacher."""

import dataclasses as dc
from collections.abc import Callable
from pathlib import Path

import torch

from sse_convert.checkpoints.meta_model import skeleton, stored_shapes
from sse_convert.checkpoints.open import CheckpointFiles, open_checkpoint
from sse_convert.checkpoints.provenance import UNTRAINED, read_provenance
from sse_convert.checkpoints.safetensors_io import FLOAT_DTYPES
from sse_convert.checkpoints.teacher import check_shapes, config_object, is_new_tensor, source_view
from sse_convert.checkpoints.weights import check_weights, same_tensors
from sse_convert.console import progress
from sse_convert.errors import CheckpointError, SSEConvertError, VerificationError
from sse_convert.modeling.architectures import SSE_PREFIX
from sse_convert.modeling.auto import load_pretrained, register
from sse_convert.report import FieldsReport

PROBE_TOKENS = 32


@dc.dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    passed: bool
    detail: str


@dc.dataclass(frozen=True, slots=True)
class VerifyReport(FieldsReport):
    """The result of a verification that passed."""

    checkpoint: str
    checks: list[Check]

    def lines(self) -> list[str]:
        """The result for a person."""
        return [f"{self.checkpoint} is sound:", *(f"  {check.name}: {check.detail}" for check in self.checks)]


def verify_checkpoint(checkpoint: Path | str, *, teacher: Path | str | None = None) -> VerifyReport:
    """Verify a converted checkpoint folder. All checks run; a failure reports every one that did not pass.

    Arguments and errors as of `api.verify`.
    """
    files = open_checkpoint(checkpoint)
    if not files.model_type.startswith(SSE_PREFIX):
        raise CheckpointError(
            f"{checkpoint} is a plain {files.model_type} checkpoint",
            expected="a converted checkpoint (model_type sse_*)",
            fix="verify the folder that `sse-convert convert` wrote",
        )
    register()
    steps: dict[str, Callable[[], str]] = {
        "names and shapes": lambda: _check_names(files),
        "dtypes": lambda: _check_dtypes(files),
        "weights": lambda: _check_weights(files),
        "code": lambda: _check_code(files),
        "logits": lambda: _check_logits(files),
        "teacher": lambda: _check_teacher(files, teacher),
    }
    checks = [_run(name, step) for name, step in steps.items()]
    failed = [check for check in checks if not check.passed]
    if failed:
        raise VerificationError(
            "\n".join(f"{check.name}: {check.detail}" for check in failed),
            expected="a complete checkpoint with finite weights and logits, and the teacher's tensors untouched",
            fix="convert the model again, or go back to an earlier stage's folder",
        )
    return VerifyReport(str(checkpoint), checks)


def _run(name: str, step: Callable[[], str]) -> Check:
    try:
        return Check(name, True, step())
    except SSEConvertError as error:
        return Check(name, False, error.what)


def _check_names(files: CheckpointFiles) -> str:
    model = skeleton(config_object(files.config))
    expected = stored_shapes(source_view(files), model, files.tensors)
    check_shapes(files, expected)
    if stray := [name for name in files.tensors if is_new_tensor(name) and name not in expected]:
        raise CheckpointError(f"{len(stray)} new tensors belong to no layer: {', '.join(stray[:3])}")
    new = sum(map(is_new_tensor, files.tensors))
    return f"{len(files.tensors)} tensors in {len(files.shard_bytes)} shards, {new} of them new"


def _check_dtypes(files: CheckpointFiles) -> str:
    found = sorted({info.dtype for info in files.tensors.values()})
    if odd := [dtype for dtype in found if dtype not in FLOAT_DTYPES]:
        raise CheckpointError(f"tensors are stored as {', '.join(odd)}, expected {', '.join(FLOAT_DTYPES)}")
    return ", ".join(FLOAT_DTYPES[dtype] for dtype in found)


def _check_weights(files: CheckpointFiles) -> str:
    check_weights(files)
    return "all finite"


def _check_code(files: CheckpointFiles) -> str:
    entries = files.config.get("auto_map") or {}
    modules = {str(entry).partition(".")[0] for entry in entries.values()}
    if not modules:
        raise CheckpointError("config.json has no auto_map, so the model loads only where sse_convert is installed")
    if missing := sorted(module for module in modules if not (files.folder / f"{module}.py").is_file()):
        raise CheckpointError(f"{', '.join(f'{module}.py' for module in missing)} is missing")
    return f"travels with the checkpoint ({', '.join(sorted(modules))})"


def _check_logits(files: CheckpointFiles) -> str:
    model = load_pretrained(files.folder)
    length = min(PROBE_TOKENS, model.config.max_position_embeddings)
    ids = torch.arange(length)[None] % model.config.vocab_size
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    if bad := int(logits.numel() - logits.isfinite().sum()):
        raise CheckpointError(f"{bad} of {logits.numel()} logits of a {length}-token input are NaN or infinite")
    return f"finite on a {length}-token input"


def _check_teacher(files: CheckpointFiles, teacher: Path | str | None) -> str:
    provenance = read_provenance(files.folder)
    if teacher is None and provenance is not None and provenance.teacher_folder:
        teacher = provenance.teacher_folder if Path(provenance.teacher_folder).is_dir() else None
    if teacher is None:
        return "not compared: the teacher's folder is not at hand (give --teacher)"
    theirs = open_checkpoint(teacher)
    kept = [name for name in files.tensors if not is_new_tensor(name)]
    with progress("comparing with the teacher", len(kept)) as bar:
        different = same_tensors(files, theirs, kept, bar)
    if different and (provenance is None or provenance.stage in UNTRAINED):
        raise CheckpointError(
            f"{len(different)} of {len(kept)} tensors differ from {teacher}: {', '.join(different[:3])}"
        )
    return f"{len(kept) - len(different)} of {len(kept)} tensors identical to {teacher}"
