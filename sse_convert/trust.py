"""Whether code that a checkpoint or a task file carries may run: not unless the user says so, for one command."""

from contextvars import ContextVar

_TRUSTED = ContextVar("trusted", default=False)
OPTION = "--trust-remote-code"
"""stands before the command: `sse-convert --trust-remote-code run RECIPE`"""


def trusts_code() -> bool:
    """Whether the user allowed code from outside, for `trust_remote_code=` of transformers."""
    return _TRUSTED.get()


def trust_code() -> None:
    """Allow code from outside until the process ends, as the command line's option does."""
    _TRUSTED.set(True)
