"""Verify every step of a run: the checkpoints as such, and that no file of the others changed."""

from pathlib import Path

from sse_convert.checkpoints.identity import STAGE_FILE
from sse_convert.checkpoints.manifest import FILE as MANIFEST
from sse_convert.checkpoints.open import CONFIG, INDEX, SINGLE
from sse_convert.errors import CheckpointError, VerificationError
from sse_convert.modeling.remote_code import CODE_FOLDER, MODELING_FILE
from sse_convert.surgery.originals import Originals
from sse_convert.surgery.verify import Check, VerifyReport, check_files, failure, run_check, verify_beside


def verify_folder(folder: Path | str, *, teacher: Path | str | None = None) -> VerifyReport:
    """Verify a checkpoint, or all steps of a run. Arguments and errors as of `api.verify`."""
    root, originals = Path(folder), Originals(teacher)
    steps = [] if _is_checkpoint(root) else _steps(root)
    if not steps:
        return verify_beside(folder, originals)
    originals.named()  # a wrong name is no fault of any step
    checks = [check for step in steps for check in _checked(step, root, originals)]
    if any(not check.passed for check in checks):
        raise failure(checks)
    return VerifyReport(str(folder), checks)


def _is_checkpoint(folder: Path) -> bool:
    """Whether this is, or was before it was damaged, a checkpoint."""
    return any((folder / name).is_file() for name in (CONFIG, INDEX, SINGLE, f"{CODE_FOLDER}/{MODELING_FILE}.py"))


def _steps(root: Path) -> list[Path]:
    """Folders of finished steps: the folder itself, or those below the folder of a run."""
    found = {path.parent for name in (STAGE_FILE, MANIFEST) for path in root.rglob(name)}
    return [root] if root in found else sorted(found)


def _checked(step: Path, root: Path, originals: Originals) -> list[Check]:
    """The checks of one step, their names beginning with the step's."""
    if _is_checkpoint(step):
        try:
            checks = verify_beside(step, originals).checks
        except (VerificationError, CheckpointError) as error:
            checks = [Check("checkpoint", False, error.what)]
    else:
        checks = [run_check("files", lambda: check_files(step, {}))]
    name = root.name if step == root else step.relative_to(root).as_posix()
    return [Check(f"{name}: {check.name}", check.passed, check.detail) for check in checks]
