"""What is watched while a stage trains. Each monitor is a class of its own file, made in `attempt.py` and asked by the
loop; another one needs no change there."""

import dataclasses as dc
from typing import Any


@dc.dataclass(frozen=True, slots=True)
class Progress:
    """Where a stage stands."""

    step: int = 0
    """optimizer steps done, skipped ones included"""
    skipped: int = 0
    """steps that were left out"""
    bad_in_a_row: int = 0
    """of those, how many came last"""


class Monitor:
    """Looks at each step and changes nothing that is trained. Every process has one and calls every method."""

    key = ""
    """under which training checkpoints keep its memory; empty for one that remembers nothing"""

    def before_update(self, step: int, *, last: bool) -> dict[str, Any]:
        """Figures for the record of a step (from 1) whose gradients are there and not used yet."""
        return {}

    def after_update(self, step: int, *, last: bool) -> dict[str, Any]:
        """Figures for the record of a step (from 1) that is made."""
        return {}

    def note(self) -> str:
        """What the progress bar says behind the loss."""
        return ""

    def say(self, now: Progress, record: dict[str, Any]) -> None:
        """Say what is wrong with the step whose record was written last; an error ends the stage."""

    def memory(self) -> dict[str, Any]:
        """JSON-ready data that one of a continued stage is made with."""
        return {}

    def report(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """Fields of the stage's report, from all its records."""
        return {}
