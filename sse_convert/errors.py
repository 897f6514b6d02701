"""The errors a user can cause. Each says what is wrong (with the value), what was expected, and how to fix it.

Exit codes: 0 success, 1 bug (traceback), then one code per class below; 128 and the signal's number after a signal.
"""

import copyreg
from typing import Any


class SSEConvertError(Exception):
    """A mistake the user can mend. Never raised for our own bugs.

    Args:
        what: what is wrong, with the offending value.
        expected: what was expected, with the bound.
        fix: a command or an edit that mends it.
    """

    exit_code = 2
    kind = "usage"

    def __init__(self, what: str, *, expected: str = "", fix: str = "") -> None:
        super().__init__(what, expected, fix)
        self.what = what
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.expected:
            lines.append(f"expected: {self.expected}")
        if self.fix:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        """As pickle needs it, by which other processes get it."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-ready data."""
        return {
            "kind": self.kind,
            "exit_code": self.exit_code,
            "what": self.what,
            "expected": self.expected,
            "fix": self.fix,
        }


class UsageError(SSEConvertError):
    """A wrong argument or a combination of arguments that cannot work."""


class ShapeError(UsageError, ValueError):
    """A tensor handed to a public function disagrees with the others."""


class RecipeError(SSEConvertError):
    """The recipe is malformed or does not fit the model."""

    exit_code = 3
    kind = "recipe"

    def __init__(self, what: str, *, expected: str = "", fix: str = "", problems: list[str] | None = None) -> None:
        super().__init__(what, expected=expected, fix=fix)
        self.problems = problems or []

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-ready data, with each problem on its own."""
        return {**super().to_dict(), "problems": self.problems}


class CheckpointError(SSEConvertError):
    """A checkpoint is missing, damaged, of an unknown family, or already converted."""

    exit_code = 4
    kind = "checkpoint"


class TeacherError(CheckpointError):
    """The teacher that a small checkpoint needs is not at hand, or another."""


class HardwareError(SSEConvertError):
    """The machine lacks what was asked of it (a GPU, a kernel, a parallel mode)."""

    exit_code = 5
    kind = "hardware"


class VerificationError(SSEConvertError):
    """A verification or an evaluation gate failed."""

    exit_code = 6
    kind = "verification"


class DataError(SSEConvertError):
    """Training or evaluation text cannot be used."""

    exit_code = 7
    kind = "data"


class OutputError(SSEConvertError):
    """Results cannot be written: the folder exists, is not writable, or the disk is full."""

    exit_code = 8
    kind = "output"


class TrainingError(SSEConvertError):
    """A training stage cannot start, continue or resume."""

    exit_code = 9
    kind = "training"


class HubError(SSEConvertError):
    """The hub refused a request or cannot be reached."""

    exit_code = 10
    kind = "hub"


class DependencyError(SSEConvertError):
    """An optional package is needed for what was asked."""

    exit_code = 11
    kind = "dependency"


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C ends the process; cleaned up after as after Ctrl-C.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)  # what another process is told of it
        self.number = number
