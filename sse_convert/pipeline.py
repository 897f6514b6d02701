"""A whole recipe: choose layers if it says so, convert, calibrate, every training stage, eval, export.

Finished steps are skipped.

Each step has a folder `<export.dir>.stages/NN-name` with a stage.json that holds all inputs of the step and the hash of
the step before it. A step whose inputs changed is refused, with the keys that changed; the export, from which nothing
is made, is made anew. Where a recipe has gained or lost a step, what earlier runs made from there on is set aside.

A recipe's way from the command line to the training loop, each the caller of the next:

    cli.app                      reads the arguments of `sse-convert run`
    api.run                      reads and checks the recipe
    pipeline.run_recipe          makes the job, which opens the teacher, checks everything, runs the steps
    training.stage.run_stage     settles one stage, finds what is finished
    training.attempt.Attempt     loads the models, restores, trains
    training.loop.train          steps: forward and backward, optimizer, log, checkpoint
"""

import contextlib
import dataclasses as dc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator

from sse_convert.calibration.calibrate import calibrate_checkpoint
from sse_convert.checkpoints.identity import STAGE_FILE, checkpoint_identity, read_stage_record, write_sealed
from sse_convert.checkpoints.manifest import EDITABLE, add_to_manifest, changed_files, read_manifest
from sse_convert.checkpoints.manifest import FILE as MANIFEST
from sse_convert.checkpoints.open import open_checkpoint, stages_folder
from sse_convert.checkpoints.output_folder import check_output, move_folder, set_aside
from sse_convert.checkpoints.provenance import FILE as PROVENANCE
from sse_convert.checkpoints.provenance import read_provenance
from sse_convert.checkpoints.run_lock import run_lock
from sse_convert.console import say
from sse_convert.data.overlap import overlap
from sse_convert.data.rows import check_sources, text_digests
from sse_convert.errors import CheckpointError, OutputError
from sse_convert.evaluation.evaluate import Evaluator, measures
from sse_convert.evaluation.long_rows import splits_rows
from sse_convert.evaluation.report import EVALUATION_FILE
from sse_convert.evaluation.tasks import check_texts
from sse_convert.evaluation.verdict import ModelVerdict
from sse_convert.export.export import export_checkpoint
from sse_convert.files import is_leftover, write_json, write_text
from sse_convert.recipe.choosing import chosen_recipe, draft_recipe, open_choice
from sse_convert.recipe.schema import Recipe
from sse_convert.report import Report, format_bytes, found_before, json_ready
from sse_convert.results.collect import RECIPE
from sse_convert.results.stored_evaluation import read_evaluation
from sse_convert.selection.automatic import choice_inputs, choose_layers
from sse_convert.selection.team import Team
from sse_convert.surgery.compatibility import match_recipe
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.guessing_teacher import guessing_teacher
from sse_convert.surgery.job import Job
from sse_convert.surgery.plan import make_plan
from sse_convert.training.compiling import kept_code
from sse_convert.training.schedule import Schedule
from sse_convert.training.setup import make_accelerator
from sse_convert.training.stage import run_stage
from sse_convert.training.stage_record import changes, finished, record_of, refuse_changes

_MADE = ".made"
"""folder in that of the export step, where the result is until the step is recorded"""
_UNFINISHED = f".{STAGE_FILE}"
_LEFT_BY_STEPS = {STAGE_FILE, _UNFINISHED, MANIFEST, EVALUATION_FILE, "evaluation.png", _MADE}
"""what steps leave, or left once, that make no checkpoint; a checkpoint's provenance says whose it is"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A finished pipeline."""

    out: str
    """folder of the finished model"""
    steps: tuple[dict[str, Any], ...]
    """name, folder, report and `already_done` of each step, in order"""
    verdict: ModelVerdict | None = None
    """what the figures come to, None where nothing is measured"""
    warnings: tuple[str, ...] = ()
    """what looked wrong before the first step"""
    work_bytes: int = 0
    """of the training checkpoints that stages have left, in folders `*.work` beside them"""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        verdict = {} if self.verdict is None else {"verdict": dc.asdict(self.verdict)}
        plain = {"out": self.out, "steps": list(self.steps), "warnings": list(self.warnings)}
        return {**plain, "work_bytes": self.work_bytes, **verdict}

    def lines(self) -> list[str]:
        """The result for a person, who has seen what each step came to."""
        warnings = [f"warning: {warning}" for warning in self.warnings]
        verdict = [] if self.verdict is None else [self.verdict.line()]
        broken = self.verdict is not None and self.verdict.destroyed
        left = (
            f"{stages_folder(Path(self.out))}/*.work hold {format_bytes(self.work_bytes)} of training checkpoints: "
            "only more tokens for a stage need them, so they may be deleted"
        )
        return [
            *warnings,
            *verdict,
            *([left] if self.work_bytes else []),
            f"{'destroyed' if broken else 'finished'} model: {self.out}",
        ]


def run_recipe(recipe: Recipe, *, resume: bool = True) -> RunReport:
    """Execute a recipe. Under `accelerate launch` all processes choose layers and train; the rest is the main one's.

    Args:
        recipe: what to do.
        resume: continue an earlier run; false refuses to find one.

    Raises:
        SSEConvertError: any step's; TrainingError if a finished step had other inputs, OutputError if the result's
            folder exists, VerificationError if the exported model is destroyed (what came of the steps is printed
            first).
    """
    job = Job.of(recipe)
    steps = _Steps(Path(recipe.export.dir), make_accelerator(recipe.train))
    warnings = _check(job, steps, resume)
    with _opened(steps):
        job = dc.replace(job, recipe=_chosen(job, steps))
        folder = _initial(job, steps)
        for stage in recipe.stages:
            target = steps.announce(stage.name)
            report = run_stage(job, stage, folder, target, steps.accelerator, later=steps.later())
            steps.add(stage.name, target, report.to_dict(), report.lines(), already_done=report.already_done)
            folder = target
        figures = _measure(job, folder, steps)
        _export(job, folder, figures, steps)
    verdict = None if figures is None else read_evaluation(figures).verdict()
    left = sum(path.stat().st_size for path in steps.root.glob("*.work/**/*") if path.is_file())
    done = tuple(steps.done)
    result = RunReport(out=str(steps.out), steps=done, verdict=verdict, warnings=tuple(warnings), work_bytes=left)
    _require_sound(result, steps)
    return result


def _require_sound(result: RunReport, steps: "_Steps") -> None:
    """Fail for a destroyed model, after saying what came of the steps."""
    if result.verdict is not None and result.verdict.destroyed:
        if steps.accelerator.is_main_process:
            for line in result.lines():
                say(line)
        result.verdict.require_sound(f"lower the stages' lr or lengthen their warmup; the model is in {result.out}")


def _check(job: Job, steps: "_Steps", resume: bool) -> list[str]:
    """What can be found wrong before the first step: the recipe, the text, the processes, the folders.

    Returns:
        What looks wrong and does not stop the run.
    """
    teacher, out, root, accelerator = job.teacher(), steps.out, steps.root, steps.accelerator
    recipe = draft_recipe(job.recipe, teacher.num_layers, teacher.separable_heads)
    if not resume and root.exists():
        raise OutputError(
            f"{root} holds an earlier run", expected="no earlier run", fix="delete it, or run with --resume"
        )
    if out.exists() and _exported(root) is None:
        raise OutputError(
            f"{out} exists", expected="a folder that does not exist yet", fix="change export.dir, or remove the folder"
        )
    for stage in recipe.stages:
        Schedule.of(stage).check_processes(accelerator.num_processes // stage.context_parallel)
    plan = make_plan(job)
    check_sources([*recipe.data.train, *recipe.data.valid])
    check_texts(job)
    warnings = [*plan.warnings, *overlap(recipe.data.train, recipe.data.valid)]
    if accelerator.is_main_process:
        if not any(root.glob(f"*/{STAGE_FILE}")):
            warnings += guessing_teacher(recipe, teacher)
        for warning in warnings:
            say(f"warning: {warning}")
    accelerator.wait_for_everyone()
    return warnings


def _exported(root: Path) -> Path | None:
    """The folder of an export step that was finished, None without one."""
    return next((path.parent for path in sorted(root.glob(f"*-export/{STAGE_FILE}"))), None)


@contextlib.contextmanager
def _opened(steps: "_Steps") -> Iterator[None]:
    """Keep other runs out of the folder of the steps."""
    with contextlib.ExitStack() as held:
        if steps.accelerator.is_main_process:
            if not steps.root.exists():
                check_output(steps.root)
            steps.root.mkdir(exist_ok=True)
            held.enter_context(run_lock(steps.root))
            exported = _exported(steps.root)
            if exported is not None and not steps.out.exists() and not (exported / _MADE / steps.out.name).exists():
                _remove_step(exported)  # the result was deleted: make it again
        steps.accelerator.wait_for_everyone()
        held.enter_context(kept_code(steps.root, tidy=steps.accelerator.is_main_process))
        yield


def _remove_step(folder: Path) -> None:
    """Remove what a step left in its folder.

    Raises:
        OutputError: something else lies there.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {""}
    names = {name for name in names if not is_leftover(name)}
    if PROVENANCE not in names and not names <= _LEFT_BY_STEPS:
        others = ", ".join(sorted(names - _LEFT_BY_STEPS)[:3])
        raise OutputError(
            f"{folder} is no folder of a run: {others or 'it'} was not made by one",
            expected="nothing there, or what a run left",
            fix="move it away, or change export.dir",
        )
    shutil.rmtree(folder)


def _chosen(job: Job, steps: "_Steps") -> Recipe:
    """The recipe with the layers chosen that `layers.select` leaves open, or that an earlier run chose as it says.

    Raises:
        TrainingError: an earlier run chose other layers.
    """
    recipe, teacher = job.recipe, job.teacher()
    asked = _as_asked(recipe, steps)
    if (choice := open_choice(asked, teacher.num_layers, teacher.separable_heads)) is None:
        return recipe
    open_job, team = dc.replace(job, recipe=asked), Team.of(steps.accelerator)
    folder = steps.alone(
        "select", choice_inputs(open_job), lambda at: choose_layers(open_job, at, team), helped=True, resumes=True
    )
    found = chosen_recipe(asked, read_stage_record(folder)["report"]["choices"][0]["kept"], choice)
    if asked is not recipe:
        refuse_changes(folder, dc.asdict(found.layers), dc.asdict(recipe.layers))
    return found


def _as_asked(recipe: Recipe, steps: "_Steps") -> Recipe:
    """The recipe without its choice where an earlier run made one: `recipe.yaml` beside the steps names the layers."""
    select = recipe.layers.select
    if select is None or select.chosen is None or not (steps.folder("select") / STAGE_FILE).is_file():
        return recipe
    select = dc.replace(select, chosen=None)
    return dc.replace(recipe, layers=dc.replace(recipe.layers, select=select))


def _initial(job: Job, steps: "_Steps") -> Path:
    """Convert and calibrate; the folder that training starts from."""
    converted = steps.alone("convert", _convert_inputs(job, steps), lambda at: convert_checkpoint(job, at))
    match_recipe(job.recipe, open_checkpoint(converted))
    if not job.recipe.calibrate.enabled:
        return converted
    inputs = _calibrate_inputs(job.recipe, converted)
    return steps.alone("calibrate", inputs, lambda at: calibrate_checkpoint(job, converted, at))


def _measure(job: Job, folder: Path, steps: "_Steps") -> Path | None:
    """The eval step; the file of its report, or None where nothing is asked for."""
    if not measures(job.recipe):
        return None

    def write(at: Path) -> Report:
        """Figures in a folder that does not count as finished; by the main process, if others help."""
        report = Evaluator(job).report(open_checkpoint(folder))
        if steps.accelerator.is_main_process:
            with found_before(report):
                write_json(at / EVALUATION_FILE, report.to_dict())
        return report

    helped = splits_rows(job.recipe)
    measured = steps.alone("eval", _eval_inputs(job, folder), write, helped=helped, result=EVALUATION_FILE)
    return measured / EVALUATION_FILE


def _export(job: Job, checkpoint: Path, figures: Path | None, steps: "_Steps") -> None:
    """The export step: the result is made and recorded in the step's own folder, then moved to `export.dir`.

    So a result without its record, which a later start would have to refuse, never lies there. The recipe stays beside
    the steps as it was, with the paths that the result does not tell.
    """

    def write(folder: Path) -> Report:
        report = export_checkpoint(job, checkpoint, folder / _MADE / steps.out.name, evaluation=figures)
        return dc.replace(report, out=steps.out)

    inputs = {"checkpoint": checkpoint_identity(checkpoint), "export": dc.asdict(job.recipe.export)}
    if figures is not None:
        inputs["eval"] = checkpoint_identity(figures.parent)
    steps.outdate("export", inputs)
    made = steps.alone("export", inputs, write) / _MADE
    if steps.done[-1]["already_done"] and steps.out.exists():  # every process, so that none waits for one that failed
        _require_whole(steps.out)
    if steps.accelerator.is_main_process:
        write_text(steps.root / RECIPE, yaml.safe_dump(job.recipe.to_dict(), sort_keys=False))
    if steps.accelerator.is_main_process and made.exists():
        if (made / steps.out.name).exists():
            move_folder(made / steps.out.name, steps.out)
        shutil.rmtree(made)
    steps.accelerator.wait_for_everyone()


def _require_whole(out: Path) -> None:
    """Make sure that a model of an earlier run is as it was written.

    Raises:
        CheckpointError: a file is missing or has changed.
    """
    if (wrong := next(_damage(out), None)) is not None:
        raise CheckpointError(
            f"{out} is not the model that an earlier run finished: {wrong}",
            expected="every file as it was written",
            fix=f"delete {out}, and run again: the finished steps are kept, and the model is exported anew",
        )


def _damage(out: Path) -> Iterator[str]:
    """What is wrong with a finished model, one line each."""
    try:
        records, provenance = read_manifest(out), read_provenance(out)
    except CheckpointError as error:
        yield error.what
        return
    if records is not None:
        yield from changed_files(out, records, {})
    elif provenance is None or provenance.manifest:
        yield f"{MANIFEST} is missing"
    yield from (f"{name} is missing" for name in EDITABLE if not (out / name).is_file())


class _Steps:
    """Runs the steps of one result in order; says and keeps what each came to."""

    def __init__(self, out: Path, accelerator: Accelerator) -> None:
        self.out, self.root, self.accelerator = out, stages_folder(out), accelerator
        self.done: list[dict[str, Any]] = []

    def folder(self, name: str) -> Path:
        """That of the next step."""
        return self.root / f"{len(self.done):02d}-{name}"

    def announce(self, name: str) -> Path:
        """Folder of the next step; says its name unless it is finished. What an earlier run made there by another step,
        and from there on, is set aside."""
        folder = self.folder(name)
        if self.accelerator.is_main_process:
            own = folder.name, f"{folder.name}.work"
            others = [path for path in sorted(self.root.glob(f"{len(self.done):02d}-*")) if path.name not in own]
            if others:
                place = set_aside(others[0], [*others[1:], *self.later()])
                say(f"{others[0].name} is {name} now: what was made before is now in {place}")
            if not (folder / STAGE_FILE).is_file():
                say(f"== {name} -> {folder}")
        return folder

    def later(self) -> list[Path]:
        """What earlier runs made after the step that is next, in order: steps, finished or not, and the result."""
        steps = [path for path in sorted(self.root.glob("[0-9][0-9]-*")) if int(path.name[:2]) > len(self.done)]
        return [*steps, *([self.out] if self.out.exists() else [])]

    def outdate(self, name: str, inputs: dict[str, Any]) -> None:
        """Set the next step aside with what was made from it, where it is finished and its inputs have changed: it is
        made anew, since nothing is trained from it."""
        folder = self.folder(name)
        if self.accelerator.is_main_process and (folder / STAGE_FILE).is_file():
            changed = changes(read_stage_record(folder)["inputs"], json_ready(inputs))
            if changed:
                say(f"{name}: {'; '.join(changed)}: what was made before is now in {set_aside(folder, self.later())}")
        self.accelerator.wait_for_everyone()

    def add(self, name: str, folder: Path, report: dict[str, Any], lines: list[str], *, already_done: bool) -> None:
        """Note a finished step, and say what it came to, unless an earlier run did."""
        self.done.append({"name": name, "folder": str(folder), "already_done": already_done, "report": report})
        if self.accelerator.is_main_process:
            for line in [f"{name}: done before ({folder})"] if already_done else lines:
                say(line)

    def alone(
        self,
        name: str,
        inputs: dict[str, Any],
        action: Callable[[Path], Report],
        *,
        helped: bool = False,
        result: str = "",
        resumes: bool = False,
    ) -> Path:
        """Let the main process do a step, unless it is finished. Returns its folder.

        Args:
            name: of the step.
            inputs: what decides its result.
            action: does it.
            helped: every process does it, and the main process's report counts.
            result: file in the step's folder where a reader finds more.
            resumes: the action goes on with what a killed run left.

        Raises:
            TrainingError: the step is finished and its inputs have changed.
        """
        folder, inputs = self.announce(name), json_ready(inputs)
        unfinished = folder.exists() and not (folder / STAGE_FILE).is_file()
        if unfinished and not resumes and self.accelerator.is_main_process:
            _remove_step(folder)  # a killed run had not finished it
        self.accelerator.wait_for_everyone()
        stored = None if unfinished and resumes else finished(folder, inputs)
        self.accelerator.wait_for_everyone()  # all have looked before the main process begins the folder
        lines: list[str] = []
        if stored is None:
            if self.accelerator.is_main_process or helped:
                report = action(folder)
                lines = [*report.lines(), *([f"report: {folder / result}"] if result else [])]
            if self.accelerator.is_main_process:
                write_sealed(folder / _UNFINISHED, record_of(inputs, report.to_dict()))
                add_to_manifest(folder, STAGE_FILE, folder / _UNFINISHED)
                (folder / _UNFINISHED).rename(folder / STAGE_FILE)  # from here on the step is finished
            self.accelerator.wait_for_everyone()
        record = read_stage_record(folder)
        self.add(name, folder, record["report"], lines, already_done=stored is not None)
        return folder


def _convert_inputs(job: Job, steps: "_Steps") -> dict[str, Any]:
    """What decides a conversion. A mixer without settings in the recipe, now or when the step was finished, is left to
    `match_recipe`: its name meant the built-in one of its time."""
    layers, folder = dc.asdict(job.recipe.layers), steps.folder("convert")
    if layers["select"] is None:  # as in runs of versions without it, which go on
        del layers["select"]
    mixers = {name: dc.asdict(mixer) for name, mixer in job.recipe.mixers.items()}
    before = read_stage_record(folder)["inputs"]["mixers"] if (folder / STAGE_FILE).is_file() else mixers
    return {
        "model": job.identity,
        "layers": layers,
        "mixers": {name: mixers.get(name, stored) for name, stored in before.items()},
        "train": {"seed": job.recipe.train.seed},
    }


def _calibrate_inputs(recipe: Recipe, source: Path) -> dict[str, Any]:
    data = dc.asdict(recipe.data)
    planted = ["needles"] if recipe.data.needles.share else []
    return {
        "checkpoint": checkpoint_identity(source),
        "calibrate": dc.asdict(recipe.calibrate),
        "data": {key: data[key] for key in ("train", "seed", *planted)},
        "text": text_digests(recipe.data.train),
    }


def _eval_inputs(job: Job, checkpoint: Path) -> dict[str, Any]:
    data = job.recipe.data
    return {
        "checkpoint": checkpoint_identity(checkpoint),
        "model": job.identity,
        "eval": dc.asdict(job.recipe.eval),
        "data": {"valid": dc.asdict(data)["valid"], "seed": data.seed, "words": data.needles.words},
        "text": text_digests(data.valid),
    }
