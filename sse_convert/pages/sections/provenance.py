"""Where everything comes from: versions, hashes, commands."""

import hashlib

from sse_convert.pages.blocks import Block, Code, Section, Table
from sse_convert.pages.collect import Run, RunStep
from sse_convert.pages.commands import report_command, run_command


def provenance(run: Run) -> Section:
    """Checkpoint, steps, files that this page was made from, and commands."""
    blocks: list[Block] = [_model(run)]
    if run.steps:
        rows = tuple(_step(step) for step in run.steps)
        header = ("step", "folder", "hash of its inputs", "sse-convert")
        blocks.append(Table(caption="Steps", header=header, rows=rows, words=True))
    if files := [evaluation.path for evaluation in run.evaluations]:
        rows = tuple((str(path), hashlib.sha256(path.read_bytes()).hexdigest()[:16]) for path in files)
        blocks.append(
            Table(caption="Files behind this page", header=("file", "SHA-256, first 16 digits"), rows=rows, words=True)
        )
    blocks.append(Code(f"{run_command(run)}\n{report_command(run)}"))
    return Section(anchor="provenance", title="Provenance", blocks=tuple(blocks))


def _model(run: Run) -> Table:
    rows: list[tuple[str, str]] = []
    if (model := run.model) is not None:
        before = model.provenance
        rows += [
            ("checkpoint", model.name),
            ("teacher", str(model.base_model)),
            (
                "revision of the teacher",
                str(model.base_revision or (before and before.teacher_revision) or "local folder"),
            ),
            ("hash of the recipe", str(model.recipe_hash)),
            ("written by", f"stage {before.stage}, sse-convert {before.tool_version}" if before else "unknown"),
        ]
    if run.student is not None:
        conditions = run.student.data["conditions"].items()
        rows += [(f"evaluation: {key}", str(value)) for key, value in conditions if value is not None]
    return Table(caption="Checkpoint and conditions", header=("", ""), rows=tuple(rows), words=True)


def _step(step: RunStep) -> tuple[str, ...]:
    if step.record is None:
        return (step.name, step.folder.name, "not finished", "")
    return (step.name, step.folder.name, step.record["hash"][:16], str(step.record.get("tool_version", "")))
