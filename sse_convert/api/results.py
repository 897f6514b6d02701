"""What becomes of a checkpoint: checked, looked into, compared, talked with and published."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sse_convert.api.recipes import RecipeLike, job_of
from sse_convert.doctor import DoctorReport, diagnose

if TYPE_CHECKING:
    from sse_convert.export.export import ExportReport
    from sse_convert.export.join import JoinReport
    from sse_convert.export.push import PushReport
    from sse_convert.inference.generate import ChatReport, GenerationReport
    from sse_convert.results.board import Board
    from sse_convert.surgery.inspect import InspectReport
    from sse_convert.surgery.verify import VerifyReport


def inspect(checkpoint: Path | str, *, revision: str | None = None) -> "InspectReport":
    """What a checkpoint is, converted or not: family, layers, new tensors, where it comes from.

    Args:
        checkpoint: local folder or hub id.
        revision: hub revision.

    Raises:
        CheckpointError: it cannot be opened, or its family is unknown.
        HubError: the hub refused or cannot be reached.
    """
    from sse_convert.surgery.inspect import inspect_checkpoint

    return inspect_checkpoint(checkpoint, revision)


def verify(checkpoint: Path | str, *, teacher: Path | str | None = None) -> "VerifyReport":
    """Prove that a converted checkpoint is what was written, complete and sound.

    SHA-256 of every file, names, shapes and dtypes of tensors, finite weights and logits, the teacher's tensors.

    Args:
        checkpoint: the folder, or the `.stages` folder of a run, whose steps are then verified one by one.
        teacher: the teacher's folder or hub id; unset looks where the checkpoint was made from. Shards that are the
            same file on disk are not read, others are compared bit by bit.

    Raises:
        VerificationError: something is wrong; the message lists what.
        CheckpointError: the folder cannot be opened, or is not a converted checkpoint.
    """
    from sse_convert.surgery.verify_run import verify_folder

    return verify_folder(checkpoint, teacher=teacher)


def compare(sources: Sequence[Path | str]) -> "Board":
    """Set runs, checkpoints or evaluations side by side; what is not comparable stands apart and says why.

    Args:
        sources: runs, checkpoints, or JSON files of `eval`; at least two.

    Raises:
        UsageError: fewer than two sources, one twice, one that is nothing of this, or no figure in common.
        CheckpointError: a file is damaged or of another version.
    """
    from sse_convert.results.compare import compare_runs

    return compare_runs(sources)


def generate(
    checkpoint: Path | str,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str | None = None,
) -> "GenerationReport":
    """Continue a text with a checkpoint (converted or not).

    Args:
        checkpoint: folder or hub id.
        prompt: text to continue.
        max_new_tokens: tokens to generate at most.
        temperature: 0 takes the likeliest token.
        top_p: sample from the likeliest tokens of this total probability.
        seed: of sampling.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.

    Raises:
        UsageError: a setting out of range, an empty prompt, or one that does not fit the context.
        CheckpointError, HubError, HardwareError: the checkpoint cannot be loaded.
    """
    from sse_convert.inference.generate import generate_text
    from sse_convert.inference.sampling import Sampling

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return generate_text(checkpoint, prompt, sampling=sampling, device=device)


def chat(
    checkpoint: Path | str,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = 0.9,
    seed: int = 0,
    system: str | None = None,
    device: str | None = None,
) -> "ChatReport":
    """Talk with a checkpoint on stdin and stdout until end of input (Ctrl-D).

    Args:
        checkpoint: folder or hub id.
        max_new_tokens: tokens to generate at most.
        temperature: 0 takes the likeliest token.
        top_p: sample from the likeliest tokens of this total probability.
        seed: of sampling.
        system: system message.
        device: such as cuda:1 or cpu; unset picks the accelerator, or the CPU.

    Raises:
        UsageError: a setting out of range, or a system message without a chat template.
        CheckpointError, HubError, HardwareError: the checkpoint cannot be loaded.
    """
    from sse_convert.inference.generate import chat_in_terminal
    from sse_convert.inference.sampling import Sampling

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    return chat_in_terminal(checkpoint, sampling=sampling, system=system, device=device)


def export(
    recipe: RecipeLike,
    checkpoint: Path | str,
    out: Path | str,
    *,
    overrides: Sequence[str] | None = None,
    evaluation: Path | None = None,
    delta: bool = False,
) -> "ExportReport":
    """Write the finished model: safetensors, model card, recipe.

    Args:
        recipe: a recipe, a recipe file, or the name of a packaged recipe.
        checkpoint: converted (and trained) model, folder or hub id.
        out: the folder to make.
        overrides: `a.b=c` assignments (for a file or a name).
        evaluation: report of `eval` for the model card; unset looks for `evaluation.json` in the checkpoint.
        delta: write only tensors that are new or changed against the teacher, which is fetched when the model is
            loaded; `join` makes it whole.

    Raises:
        RecipeError: the recipe is malformed or describes another conversion.
        CheckpointError, HubError: not a converted checkpoint, damaged, unmerged adapters, NaN, Inf or overflow in the
            weights, or it cannot be read.
        OutputError: `out` exists or cannot be written; nothing is left behind.
    """
    job = job_of(checkpoint, recipe, overrides)
    from sse_convert.export.export import export_checkpoint

    return export_checkpoint(job, checkpoint, Path(out), evaluation=evaluation, delta=delta)


def join(checkpoint: Path | str, out: Path | str, *, teacher: Path | None = None) -> "JoinReport":
    """Make a whole checkpoint of a small one, which `export` wrote with `delta`, and its teacher.

    Args:
        checkpoint: the small checkpoint, folder or hub id.
        out: the folder to make.
        teacher: folder of the teacher; unset takes it from the hub, or by its name beside the checkpoint.

    Raises:
        CheckpointError: the checkpoint is whole or damaged, or the teacher is not at hand, or another.
        HubError: the hub refused or cannot be reached.
        OutputError: `out` exists or cannot be written; nothing is left behind.
    """
    from sse_convert.export.join import join_checkpoint

    return join_checkpoint(checkpoint, Path(out), teacher)


def push(
    folder: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    anyway: bool = False,
) -> "PushReport":
    """Upload an exported checkpoint to the hub as one commit. Log in first with `hf auth login`.

    A repository that already has a model is left alone unless a revision or a pull request is asked for; weights and
    code of the older upload are then replaced as a whole.

    Args:
        folder: result of `export`.
        repo_id: `owner/name`, or `name` for the logged-in user.
        private: create the repository as private.
        dry_run: check the folder and list what would be sent, without asking the hub anything.
        revision: branch to commit to; made if it does not exist.
        create_pr: open a pull request instead of committing.
        anyway: push a model that its evaluation calls destroyed, whose weights are not finite, or whose files are not
            as they were exported.

    Raises:
        VerificationError: the evaluation says that the model is destroyed, its weights are not finite, or files are not
            as they were exported.
        CheckpointError: the folder is not an exported model, is damaged, or holds pickles.
        UsageError: the repository name is malformed, or `revision` and `create_pr` are both given.
        HubError: not logged in, no permission, the repository exists, or the hub cannot be reached.
    """
    from sse_convert.export.push import push_folder

    return push_folder(
        folder, repo_id, private=private, dry_run=dry_run, revision=revision, create_pr=create_pr, anyway=anyway
    )


def doctor() -> DoctorReport:
    """Versions, devices, backends and optional packages of this machine."""
    return diagnose()
