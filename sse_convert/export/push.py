"""Upload an exported folder to a hub. The token stays with the hub library: never printed, never stored here."""

import dataclasses as dc
import fnmatch
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.checkpoints import manifest, provenance
from sse_convert.checkpoints.auxiliary_files import auxiliary_files, stays_inside
from sse_convert.checkpoints.foreign import read_object
from sse_convert.checkpoints.hub import LOG_IN, MOST_OF_AN_ID, hub_errors
from sse_convert.checkpoints.open import CONFIG, INDEX, open_checkpoint
from sse_convert.checkpoints.weights import scan_weights
from sse_convert.errors import CheckpointError, HubError, UsageError, VerificationError
from sse_convert.evaluation.report import EVALUATION_FILE
from sse_convert.export.card import CARD
from sse_convert.export.published import is_absolute, paths_in
from sse_convert.modeling.arch_spec import LENT_FILE
from sse_convert.modeling.remote_code import remote_code
from sse_convert.recipe.source import parse
from sse_convert.report import counted, format_bytes, table
from sse_convert.results.collect import RECIPE
from sse_convert.results.stored_evaluation import read_evaluation

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
STALE = ["*.safetensors", "*.safetensors.index.json", "*.py", *PICKLES]
"""files of an older upload that this one replaces as a whole"""
OWN_FILES = (CARD, CONFIG, INDEX, LENT_FILE, EVALUATION_FILE, RECIPE, provenance.FILE, manifest.FILE)
"""what `export` writes beside weights, code and the teacher's small files"""
EMPTY_REPOSITORY = {".gitattributes", "README.md"}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """What was uploaded, or would be."""

    repo_id: str
    """repository"""
    private: bool
    """whether it was asked to be private"""
    dry_run: bool
    """nothing was sent"""
    files: dict[str, int]
    """file name to bytes"""
    remarks: tuple[str, ...] = ()
    """what its evaluation says of the model, or that there is none"""
    commit: str | None = None
    """commit made by the upload"""
    url: str | None = None
    """where to look at it: the commit, or the pull request"""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the total size."""
        return {**dc.asdict(self), "total_bytes": sum(self.files.values())}

    def lines(self) -> list[str]:
        """The files and what became of them."""
        total = format_bytes(sum(self.files.values()))
        done = f"would upload {total} to {self.repo_id}" if self.dry_run else f"uploaded {total} to {self.url}"
        return [*table(("file", "size"), self._rows()), *self.remarks, done]

    def _rows(self) -> list[tuple[str, str]]:
        """Files by name, those of a folder as one."""
        names: dict[str, list[str]] = {}
        for name in self.files:
            folder, inside, _ = name.partition("/")
            names.setdefault(f"{folder}/" if inside else name, []).append(name)
        return [
            (
                f"{shown} ({len(held)} files)" if len(held) > 1 else held[0],
                format_bytes(sum(self.files[name] for name in held)),
            )
            for shown, held in names.items()
        ]


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = "Upload model converted by sse-convert",
    anyway: bool = False,
) -> PushReport:
    """Upload an exported folder as one commit.

    A repository that already has a model is left alone unless a revision or a pull request is asked for; weights and
    code of the older upload are then replaced as a whole. Other arguments and errors as of `api.push`.

    Args:
        message: commit message.
    """
    files = check_folder(Path(folder))
    remarks = check_quality(Path(folder), anyway=anyway)
    if revision is not None and create_pr:
        raise UsageError("revision and create_pr are both given", expected="one of them", fix="drop one")
    _check_name(repo_id)
    if dry_run:
        return PushReport(repo_id=repo_id, private=private, dry_run=True, files=files, remarks=remarks)
    with hub_errors(repo_id, "write to"):
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        if get_token() is None:
            raise HubError("not logged in to the hub", expected="a token with write access", fix=LOG_IN)
        if not sys.stderr.isatty():
            disable_progress_bars()
        api = HfApi()
        repo_id = _prepare(api, repo_id, private=private, revision=revision, create_pr=create_pr)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
            allow_patterns=list(files),
            delete_patterns=STALE,
        )
    url = commit.pr_url or commit.commit_url
    return PushReport(
        repo_id=repo_id,
        private=private,
        dry_run=False,
        files=files,
        remarks=remarks,
        commit=commit.oid,
        url=url,
    )


def check_folder(folder: Path) -> dict[str, int]:
    """The files of an exported model that belong on a hub, and their sizes.

    Raises:
        CheckpointError: it is not an exported model, is damaged, holds pickles, or tells paths of a machine.
    """
    checkpoint = open_checkpoint(folder)
    if not str(checkpoint.model_type).startswith("sse_"):
        raise CheckpointError(
            f"{folder} holds a {checkpoint.model_type} model",
            expected="a model converted and exported by sse-convert",
            fix="push the result of `sse-convert export`",
        )
    if not (folder / "README.md").is_file() or not (folder / "README.md").read_text(encoding="utf-8").startswith("---"):
        raise CheckpointError(
            f"{folder} has no model card", expected="README.md", fix="make it with `sse-convert export`"
        )
    _check_places(folder)
    if checkpoint.small:
        _check_lender(folder)
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if pickles := [name for name in found if any(fnmatch.fnmatch(name, pattern) for pattern in PICKLES)]:
        raise CheckpointError(
            f"{folder} holds pickles: {', '.join(pickles[:3])}", expected="safetensors only", fix="remove them"
        )
    weights = [name for name in found if name.endswith(".safetensors")]
    if stray := sorted(set(weights) - set(checkpoint.shard_bytes)):
        raise CheckpointError(
            f"{folder} holds safetensors files that its index does not name: {', '.join(stray[:3])}",
            expected="the shards of one model",
            fix="remove them",
        )
    allowed = {*OWN_FILES, *weights, *auxiliary_files(folder), *_own_code(folder, found)}
    return {name: path.stat().st_size for name, path in found.items() if _is_sent(name, path, folder, allowed)}


def _check_lender(folder: Path) -> None:
    """Refuse a small checkpoint whose teacher nobody could fetch."""
    from sse_convert.modeling.loading import read_lent

    if (lent := read_lent(folder / LENT_FILE)).revision is None:
        raise CheckpointError(
            f"{folder} is small, and its teacher {lent.teacher} is a folder of this machine",
            expected="a teacher on the hub, which whoever loads the model can fetch",
            fix=f"make it whole, and push that: sse-convert join {shlex.quote(str(folder))} --out WHOLE",
        )


def _check_places(folder: Path) -> None:
    """Refuse files that tell where a machine keeps its own, as earlier exports did."""
    for name in (CONFIG, LENT_FILE, provenance.FILE, EVALUATION_FILE, RECIPE):
        if not (folder / name).is_file():
            continue
        if name == RECIPE:
            data = parse((folder / name).read_text(encoding="utf-8", errors="replace"), str(folder / name))[0]
        else:
            data = read_object(folder / name)
        if there := sorted(filter(is_absolute, paths_in(data))):
            raise CheckpointError(
                f"{folder / name} tells where a machine keeps its files: {there[0]}",
                expected="names without folders, as `export` writes them",
                fix="export the model again with this version, and push that",
            )


def check_quality(folder: Path, *, anyway: bool) -> tuple[str, ...]:
    """What is to be said of an exported model's quality, and of files that were changed since.

    Args:
        folder: the model.
        anyway: say what is wrong instead of failing.

    Raises:
        VerificationError: its weights are not finite, files are not as they were exported, or its evaluation says that
            it is destroyed.
        CheckpointError: its evaluation or its manifest cannot be read.
    """
    fix = "train it again with lower rates, or push it with --anyway"
    checkpoint = open_checkpoint(folder)
    scan = scan_weights(checkpoint)
    broken = list(scan.nonfinite)
    if broken and not anyway:
        raise VerificationError(f"{broken[0]} of {folder} is NaN or infinite", expected="finite weights", fix=fix)
    remarks = [f"NaN or Inf in {counted(len(broken), 'tensor')}"] if broken else []
    remarks += _changed(folder, scan.digests, anyway=anyway)
    if not (folder / EVALUATION_FILE).is_file():
        return (*remarks, f"nothing was measured: {folder} has no {EVALUATION_FILE}")
    verdict = read_evaluation(folder / EVALUATION_FILE).verdict()
    if not anyway:
        verdict.require_sound(fix)
    return (*remarks, verdict.line())


def _changed(folder: Path, digests: Mapping[str, str], *, anyway: bool) -> list[str]:
    """What is to be said of files that are not as the manifest records them. People may edit the card.

    Raises:
        VerificationError: there are others, and it is not to be pushed anyway.
    """
    records = manifest.read_manifest(folder) or {}
    card = {name: record for name, record in records.items() if name in manifest.EDITABLE}
    others = {name: record for name, record in records.items() if name not in card}
    changed = list(manifest.changed_files(folder, others, digests))
    if changed and not anyway:
        raise VerificationError(
            f"{len(changed)} files of {folder} are not as they were exported: {'; '.join(changed)}",
            expected=f"what {manifest.FILE} records; {CARD} alone may be edited",
            fix="export the model again and push that, or push it as it is with --anyway",
        )
    return [*changed, *manifest.changed_files(folder, card, digests)]


def _is_sent(name: str, path: Path, folder: Path, allowed: set[str]) -> bool:
    return name in allowed and stays_inside(path, folder)


def _own_code(folder: Path, found: Mapping[str, Path]) -> list[str]:
    """The code, with its README, that sse-convert wrote into the folder.

    Raises:
        CheckpointError: one of them is not as it was written, or there are others.
    """
    code = remote_code()
    names = [name for name in found if name.endswith(".py") or name in code]
    texts = {name: found[name].read_text(encoding="utf-8", errors="replace") for name in names}
    if strange := [name for name, text in texts.items() if text != code.get(name)]:
        raise CheckpointError(
            f"{folder} holds code that this version of sse-convert did not write: {', '.join(strange[:3])}",
            expected="the code that `export` writes, unchanged",
            fix="export the model again with this version, and push that",
        )
    return names


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UsageError(
            f"{repo_id!r} is not a repository name",
            expected=f"owner/name: letters, digits and single - _ . in between, at most {MOST_OF_AN_ID} characters",
            fix="give your name on the hub and a name for the model, such as YOU/NAME",
        ) from error


def _prepare(api: "HfApi", repo_id: str, *, private: bool, revision: str | None, create_pr: bool) -> str:
    """Create the repository and branch where they are missing; the full repository name."""
    from huggingface_hub.errors import RepositoryNotFoundError

    if "/" not in repo_id:
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError as error:
        if create_pr:
            raise HubError(
                f"{repo_id} does not exist",
                expected="a repository to open a pull request on",
                fix="push without it first",
            ) from error
        api.create_repo(repo_id, private=private)
    else:
        names = {sibling.rfilename for sibling in info.siblings or []}
        if names - EMPTY_REPOSITORY and revision is None and not create_pr:
            raise HubError(
                f"{repo_id} exists and holds {counted(len(names), 'file')}",
                expected="a new or empty repository",
                fix="choose another name, or say revision main to replace its model with a new commit",
            )
        if private and not info.private:
            raise HubError(
                f"{repo_id} exists and is public",
                expected="a private repository",
                fix="make it private on the hub first",
            )
    if revision not in (None, "main"):
        api.create_branch(repo_id, branch=str(revision), exist_ok=True)
    return repo_id
