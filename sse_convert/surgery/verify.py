"""Prove that a converted checkpoint is what was written, complete and sound: files, names, weights, logits, teacher.

Weights are streamed, for the logits too: memory does not grow with the model.
"""

import dataclasses as dc
import functools
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from sse_convert.checkpoints.auxiliary_files import PATTERNS
from sse_convert.checkpoints.foreign import refusing
from sse_convert.checkpoints.identity import STAGE_FILE, read_sealed
from sse_convert.checkpoints.manifest import FILE as MANIFEST
from sse_convert.checkpoints.manifest import FileRecord, added_files, changed_files, read_manifest
from sse_convert.checkpoints.mapped_model import mapped_model
from sse_convert.checkpoints.meta_model import skeleton, stored_shapes
from sse_convert.checkpoints.open import CONFIG, CheckpointFiles, whole_checkpoint
from sse_convert.checkpoints.provenance import FILE as PROVENANCE
from sse_convert.checkpoints.provenance import read_provenance
from sse_convert.checkpoints.safetensors_io import FLOAT_DTYPES
from sse_convert.checkpoints.teacher import check_floats, check_shapes, config_object, is_new_tensor, source_view
from sse_convert.checkpoints.weights import Scan, check_weights, scan_weights
from sse_convert.console import progress
from sse_convert.errors import CheckpointError, SSEConvertError, VerificationError
from sse_convert.modeling.arch_spec import SSE_PREFIX, decoder_config
from sse_convert.modeling.auto import register
from sse_convert.modeling.remote_code import remote_code
from sse_convert.report import FieldsReport, counted
from sse_convert.surgery.originals import Originals
from sse_convert.surgery.verify_teacher import compare_with_teacher

PROBE_TOKENS = 32
Shapes = dict[str, tuple[int, ...]]
_TEACHER = "teacher"
_FROM_CONFIG = ("names and shapes", "dtypes", "logits", _TEACHER)
"""checks that build a model from config.json, and say nothing where it was changed"""
_BEFORE_LOGITS = ("names and shapes", "dtypes")
"""checks without which the model cannot be put together"""
_LOADED = ("*.safetensors", "*.py", "config.json", "*.index.json", "adapter_*")
"""what transformers may load beside a checkpoint's small files"""


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


def verify_beside(checkpoint: Path | str, originals: Originals) -> VerifyReport:
    """Verify a converted checkpoint folder. All checks run that can; a failure reports every one that did not pass.

    Args:
        checkpoint: the folder.
        originals: what it is compared with.

    Raises:
        VerificationError, CheckpointError: see `api.verify`.
    """
    try:
        files = whole_checkpoint(checkpoint)
        _require_converted(files)
    except CheckpointError as error:
        _require_as_recorded(Path(checkpoint), error)
        raise
    originals.named()  # a wrong name is no fault of the checkpoint
    register()
    scan = scan_weights(files)
    recorded = run_check("files", lambda: check_files(files.folder, scan.digests))
    expected = functools.cache(lambda: _expected(files))
    steps: dict[str, Callable[[], str]] = {
        "names and shapes": lambda: _check_names(files, expected()),
        "dtypes": lambda: _check_dtypes(files, expected()),
        "weights": lambda: _check_weights(files, scan),
        "code": lambda: _check_code(files),
        "logits": lambda: _check_logits(files),
        _TEACHER: lambda: _check_teacher(files, originals),
    }
    if not recorded.passed and f"{CONFIG} " in recorded.detail:
        steps = {name: step for name, step in steps.items() if name not in _FROM_CONFIG}
    checks = [recorded]
    for name, step in steps.items():
        if name != "logits" or all(check.passed for check in checks if check.name in _BEFORE_LOGITS):
            checks.append(run_check(name, step))
    if any(not check.passed for check in checks):
        raise failure(checks, _source(files))
    return VerifyReport(str(checkpoint), checks)


def _require_converted(files: CheckpointFiles) -> None:
    if not files.model_type.startswith(SSE_PREFIX):
        raise CheckpointError(
            f"{files.name} is a plain {files.model_type} checkpoint",
            expected="a converted checkpoint (model_type sse_*)",
            fix="verify the folder that `sse-convert convert` wrote",
        )


def _require_as_recorded(folder: Path, error: CheckpointError) -> None:
    """Say which files of a folder that cannot be opened are not what was written.

    Raises:
        VerificationError: there are some.
    """
    checks = [run_check("files", lambda: check_files(folder, {})), Check("opening", False, error.what)]
    if not checks[0].passed:
        raise failure(checks) from error


def failure(checks: list[Check], source: str = "") -> VerificationError:
    """The error that tells what did not pass. `source`: the model that was converted, where that is known."""
    failed = [check for check in checks if not check.passed]
    fix = "get the folder again, convert the model again, or go back to an earlier stage's folder"
    if all(_is_of_teacher(check) for check in failed):
        fix = f"give the model that it was converted from{source and f': {source}'}; if that is it, {fix}"
    return VerificationError(
        "\n".join(f"{check.name}: {check.detail}" for check in failed),
        expected="the files as they were written, finite weights and logits, and the teacher's tensors untouched",
        fix=fix,
    )


def _is_of_teacher(check: Check) -> bool:
    """Whether a check, or all that failed of a step's, compares with the teacher."""
    return check.name == _TEACHER or check.detail.startswith(f"{_TEACHER}: ")


def _source(files: CheckpointFiles) -> str:
    try:
        provenance = read_provenance(files.folder)
    except CheckpointError:
        return ""
    return "" if provenance is None else provenance.teacher


def run_check(name: str, step: Callable[[], str]) -> Check:
    """Look at one thing; what goes wrong with it fails the check."""
    try:
        return Check(name, True, step())
    except SSEConvertError as error:
        return Check(name, False, error.what)


def check_files(folder: Path, digests: dict[str, str]) -> str:
    """Compare a folder with its manifest.

    Args:
        folder: a checkpoint, or any other folder that has a manifest.
        digests: SHA-256 of the files that were read already.

    Returns:
        What was compared, and what could not be.

    Raises:
        CheckpointError: names every file that is not as it was written.
    """
    records = read_manifest(folder)
    if records is None:
        if witness := _says_recorded(folder):
            raise CheckpointError(f"{MANIFEST} is missing, though {witness} says that it was written")
        return f"not recorded: there is no {MANIFEST}, so an edit of a file shows only where a check below sees it"
    changed = list(changed_files(folder, records, digests))
    added = added_files(folder, records)
    changed += [f"{name} is not in {MANIFEST}, and would be loaded" for name in added if _is_loaded(name)]
    if changed:
        raise CheckpointError("; ".join(changed))
    return "; ".join([f"{len(records)} are as {MANIFEST} records them", *_remarks(records, added)])


def _says_recorded(folder: Path) -> str | None:
    """The file beside a missing manifest that says there was one."""
    provenance = read_provenance(folder)
    if provenance is not None:
        return PROVENANCE if provenance.manifest else None
    return None if read_sealed(folder / STAGE_FILE) is None else STAGE_FILE


def _remarks(records: dict[str, FileRecord], added: list[str]) -> list[str]:
    deferred = [name for name, record in records.items() if record.sha256 is None]
    return [
        *([f"SHA-256 was deferred, so only their size is known: {', '.join(deferred)}"] if deferred else []),
        *([f"not recorded: {', '.join(added)}"] if added else []),
    ]


def _is_loaded(name: str) -> bool:
    """Whether transformers might load a file of this name with the model."""
    return any(fnmatch(name, pattern) for pattern in (*_LOADED, *PATTERNS)) and not fnmatch(name, "LICEN[CS]E*")


def _expected(files: CheckpointFiles) -> Shapes:
    """The tensors that the model needs, by stored name."""
    return stored_shapes(source_view(files), skeleton(_config(files)), files.tensors)


def _check_names(files: CheckpointFiles, expected: Shapes) -> str:
    check_shapes(files, expected)
    if stray := [name for name in files.tensors if is_new_tensor(name) and name not in expected]:
        raise CheckpointError(f"no layer has {counted(len(stray), 'new tensor')}: {', '.join(stray[:3])}")
    new = sum(map(is_new_tensor, files.tensors))
    return f"{counted(len(files.tensors), 'tensor')} in {counted(len(files.shard_bytes), 'shard')}, {new} of them new"


def _config(files: CheckpointFiles) -> Any:
    with refusing(
        f"config.json does not describe a {files.model_type} model",
        expected="what conversion wrote",
        fix="convert the model again",
    ):
        return config_object(files.config)


def _check_dtypes(files: CheckpointFiles, used: Shapes) -> str:
    check_floats(files, used.keys() & files.tensors.keys())
    found = sorted({info.dtype for name, info in files.tensors.items() if name in used})
    return ", ".join(FLOAT_DTYPES[dtype] for dtype in found)


def _check_weights(files: CheckpointFiles, scan: Scan) -> str:
    check_weights(files, scan)
    return "all finite"


def _check_code(files: CheckpointFiles) -> str:
    entries = files.config.get("auto_map") or {}
    if not isinstance(entries, dict):
        raise CheckpointError("auto_map of config.json is not a mapping")
    modules = {str(entry).partition(".")[0] for entry in entries.values()}
    if not modules:
        raise CheckpointError("config.json has no auto_map, so the model loads only where sse_convert is installed")
    if missing := sorted(module for module in modules if not (files.folder / f"{module}.py").is_file()):
        raise CheckpointError(f"{', '.join(f'{module}.py' for module in missing)} is missing")
    named = f"travels with the checkpoint ({', '.join(sorted(modules))})"
    return named if _is_todays(files.folder) else f"{named}; not that of this version: `sse-convert export` renews it"


def _is_todays(folder: Path) -> bool:
    written = {folder / name: text for name, text in remote_code().items()}
    return all(path.is_file() and path.read_text(encoding="utf-8") == text for path, text in written.items())


def _check_logits(files: CheckpointFiles) -> str:
    config = _config(files)
    text = decoder_config(config)
    length = min(PROBE_TOKENS, text.max_position_embeddings)
    ids = torch.arange(length)[None] % text.vocab_size
    with progress("trying the model", 1), mapped_model(files, config) as model:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    if bad := int(logits.numel() - logits.isfinite().sum()):
        raise CheckpointError(f"{bad} of {logits.numel()} logits of a {length}-token input are NaN or infinite")
    return f"finite on a {length}-token input"


def _check_teacher(files: CheckpointFiles, originals: Originals) -> str:
    provenance = read_provenance(files.folder)
    original = originals.of(provenance)
    if original is None:
        return "not compared: the teacher's folder is not at hand (give --teacher)"
    return compare_with_teacher(files, original, _config(files), provenance)
