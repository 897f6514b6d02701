"""`<out>.work`: where a stage lives while it runs, and where it, or one of a larger budget, goes on.

It holds inputs.json, metrics.jsonl, what was left to the machine, and training checkpoints.
"""

import contextlib
import dataclasses as dc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.identity import STAGE_FILE, read_sealed, read_stage_record, write_sealed
from sse_convert.checkpoints.output_folder import check_output, remove_partial, set_aside
from sse_convert.checkpoints.run_lock import LOCK, run_lock
from sse_convert.console import say
from sse_convert.errors import DataError, OutputError, TrainingError
from sse_convert.training import fit, metrics
from sse_convert.training.checkpoint import Checkpoints
from sse_convert.training.compiling import COMPILED, kept_code
from sse_convert.training.extend import Extension, differs_in_end, refuse_less
from sse_convert.training.fit import Chosen, Fit
from sse_convert.training.stage_job import StageJob
from sse_convert.training.stage_record import HISTORY, changes, finished, refuse_changes
from sse_convert.training.stage_report import StageReport

INPUTS = "inputs.json"
_FILES = {INPUTS, LOCK, COMPILED, fit.FILE, metrics.FILE}


class WorkFolder:
    """The work folder of a stage. Every process has one and calls every method.

    Args:
        ready: the stage.
        later: what was made from an earlier end of it, in order.

    Raises:
        TrainingError: the finished stage had a larger budget, or its training checkpoints are gone.
        CheckpointError: the record of the finished stage is damaged.
    """

    history: dict[str, Any]
    """earlier budgets as they stand in records; empty where there are none"""

    def __init__(self, ready: StageJob, later: Sequence[Path]) -> None:
        self.ready, self.out, self.later = ready, ready.out, later
        self.path = ready.out.with_name(f"{ready.out.name}.work")
        self.goes_on = (self.out / STAGE_FILE).is_file() and self._goes_on(read_stage_record(self.out)["inputs"])

    def _goes_on(self, before: dict[str, Any]) -> bool:
        """Whether a finished stage is the same but for its end, and can go on from there."""
        before = {key: value for key, value in before.items() if key != HISTORY}
        if not differs_in_end(before, self.ready.inputs):
            return False
        tokens = before["stage"]["tokens"]
        if tokens > self.ready.stage.tokens:
            raise refuse_less(self.out, self.path, tokens, self.ready.stage.tokens)
        if not any(self.path.glob("step-*")):
            raise TrainingError(
                f"{self.out} was trained on {tokens:,} tokens, and the training checkpoint in {self.path} is gone",
                expected=f"tokens: {tokens}, or the checkpoint, to go on from",
                fix=f"put more tokens into a stage of their own, or delete {self.out} to train it anew",
            )
        return True

    def finished(self) -> StageReport | None:
        """The report of an earlier run that came to the end of this budget, if there is one."""
        if self.goes_on or (done := finished(self.out, self.ready.inputs)) is None:
            return None
        return dc.replace(StageReport(**done), already_done=True)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Chosen]:
        """Make the folder, or check that it belongs to these inputs; only one run at a time has it open.

        Yields:
            What is chosen where the stage leaves something to the machine.
        """
        before, accelerator = self._checked(read_sealed(self.path / INPUTS)), self.ready.accelerator
        chosen = read_sealed(self.path / fit.FILE)
        accelerator.wait_for_everyone()
        with contextlib.ExitStack() as held:
            if self.ready.leads:
                if before is None:
                    if not self.goes_on:
                        check_output(self.out)
                    self.path.mkdir(exist_ok=True)
                held.enter_context(run_lock(self.path))
                if self.goes_on:
                    place = set_aside(self.out, self.later)
                    say(f"{self.ready.stage.name}: what was made before is now in {place}")
                check_output(self.out)  # another run may have come to the end meanwhile
                remove_partial(self.out)
            accelerator.wait_for_everyone()
            held.enter_context(kept_code(self.path, tidy=self.ready.leads))
            self.checkpoints = Checkpoints(self.path, accelerator)
            yield self._begin(before, chosen)

    def _check_own(self) -> None:
        """Make sure that a folder without readable inputs is one of a stage all the same.

        Raises:
            OutputError: it holds something else, which the end of the stage would remove.
        """
        found = (path.name for path in self.path.glob("*"))
        if foreign := sorted(name for name in found if name not in _FILES and not name.startswith(("step-", "."))):
            raise OutputError(
                f"{self.path} holds {foreign[0]}, which no stage wrote",
                expected="no such folder, or that of an interrupted stage",
                fix="move it away, or choose another output folder",
            )

    def _checked(self, before: dict[str, Any] | None) -> dict[str, Any] | None:
        """Inputs of an earlier run, after making sure of the folder, or of them where there is something to lose."""
        if before is None:
            self._check_own()
        elif any(self.path.glob("step-*")):
            self._check_inputs(before)
        return before

    def _check_inputs(self, before: dict[str, Any]) -> None:
        """Make sure that what was begun had these inputs, but for the budget."""
        if not differs_in_end(before, self.ready.inputs):
            refuse_changes(self.path, before, self.ready.inputs)

    def _begin(self, before: dict[str, Any] | None, earlier: dict[str, Any] | None) -> Chosen:
        """Choose, and write down choices and inputs; what a checkpoint says of these counts more than a damaged file.

        Raises:
            TrainingError: the checkpoint was made from other inputs.
        """
        path, state = self.path / INPUTS, self.checkpoints.newest() or {}
        if state:
            self._check_inputs(state["inputs"])
        extensions = [*state.get(HISTORY, []), *self._extended(state)] if state else []
        self.history = {HISTORY: extensions} if extensions else {}
        same = before is not None and not changes(before, self.ready.inputs)  # else `earlier` was chosen for others
        chosen = Fit(self.ready).choose((earlier if same else None) or state.get("chosen"))
        self.keep(chosen)
        if self.ready.leads and not same:
            if before is None and (path.is_file() or state):
                say(f"{path} was damaged or missing; written anew")
            write_sealed(path, self.ready.inputs)
        self.ready.accelerator.wait_for_everyone()
        return chosen

    def _extended(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The note of another budget than the newest checkpoint's, if it is another.

        Raises:
            TrainingError: more tokens than it allows were trained on.
        """
        stage, schedule, tokens = self.ready.stage, self.ready.schedule, state["inputs"]["stage"]["tokens"]
        if tokens == stage.tokens:
            return []
        if schedule.steps < state["step"]:
            raise refuse_less(self.out, self.path, state["step"] * schedule.step_tokens, stage.tokens)
        extension = Extension(stage, tokens, state["step"])
        if self.ready.leads:
            say(extension.line())
        return [extension.note()]

    def keep(self, chosen: Chosen) -> None:
        """Let this start's checkpoints and the next start have these choices."""
        self.checkpoints.beside = {"inputs": self.ready.inputs, "chosen": dc.asdict(chosen), **self.history}
        self.ready.accelerator.wait_for_everyone()
        if self.ready.leads:
            self.write(chosen)
            if self.ready.accelerator.device.type == "cuda":
                say(f"{self.ready.stage.name}: {chosen.line()}")

    def write(self, chosen: Chosen) -> None:
        """Let the next start have these choices; any process may do it alone."""
        write_sealed(self.path / fit.FILE, dc.asdict(chosen))

    def trim(self) -> None:
        """Leave of a finished stage's work what a larger budget goes on from: the last training checkpoint."""
        if self.ready.leads:
            self.checkpoints.drop_others()
            (self.path / metrics.FILE).unlink(missing_ok=True)  # the checkpoint has it
        self.ready.accelerator.wait_for_everyone()

    def say_where(self) -> None:
        """Say where an interrupted stage will go on."""
        if self.ready.leads:
            steps = f"{self.checkpoints.step} of {self.ready.schedule.steps} steps"
            say(f"{self.ready.stage.name}: {steps} are saved in {self.path}")

    def with_price(self, error: DataError) -> DataError:
        """An error of the text with what mending it costs: a stage is never continued with other text."""
        step = self.checkpoints.step
        lost = f"the {step} steps in {self.path} are lost: delete it first" if step else "nothing is lost"
        fixes = [text for text in (error.fix, f"other text starts anew, {lost}") if text]
        return DataError(error.what, expected=error.expected, fix="; ".join(fixes))
