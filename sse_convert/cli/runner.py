"""How every command runs: results to stdout or stderr, errors to messages and exit codes, Ctrl-C to one line."""

import contextlib
import errno
import functools
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Annotated, Any, ParamSpec

import typer
from typer.main import get_command

from sse_convert.errors import Ended, HardwareError, OutputError, SSEConvertError, TeacherError, UsageError
from sse_convert.process_memory import (
    keep_freed_memory,
    lacks_memory,
    memory_for,
    out_of_memory,
    reserve,
    share_cores,
)
from sse_convert.recipe.problems import shortened
from sse_convert.report import JSON_SCHEMA_VERSION, Report, found_by, json_ready

P = ParamSpec("P")

_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
"""Click's ClickException, or that of the copy inside newer typers"""
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer")
"""what torch's collectives say in the processes that are left"""
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

EXIT_CODES = {
    0: "success",
    1: "a bug in sse-convert; what is printed says how to report it",
    2: "usage: wrong arguments",
    3: "recipe: malformed, or does not fit the model",
    4: "checkpoint: missing, damaged, unknown family, already converted",
    5: "hardware: a GPU, kernel, parallel mode or memory is lacking",
    6: "verification: verify or an evaluation gate failed, or the model is destroyed",
    7: "data: text that cannot be used",
    8: "output: exists, not writable, disk full",
    9: "training: a stage cannot start, continue or resume",
    10: "hub: unreachable or refused",
    11: "dependency: an optional package is needed",
    129: "ended by SIGHUP, the terminal was closed",
    130: "interrupted (Ctrl-C)",
    143: "ended by SIGTERM",
}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NO_MEMORY = b"error: the machine is out of memory\nfix: free memory, or lower the sizes that were asked for\n"
_PANIC = "PanicException"
"""what libraries in Rust raise where they give up; no `Exception`"""
_IMPORTING = "<frozen importlib"
"""begins the file name of Python's own code for imports"""

_AS_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")],
)
_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Print the traceback of an internal error.")],
)


class UserInterruptError(SSEConvertError):
    """Ctrl-C, or another signal that ends the process."""

    exit_code = 130
    kind = "interrupted"

    def __init__(self, interrupt: KeyboardInterrupt | None = None, *, fix: str = "") -> None:
        number = interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT
        name = signal.Signals(number).name
        super().__init__("interrupted" if number == signal.SIGINT else f"ended by {name}", fix=fix)
        self.exit_code = 128 + number


def exit_code_table() -> str:
    """The exit codes, for `--help`."""
    return "\n".join(["\b", "Exit codes:", *(f"  {code:<4} {text}" for code, text in EXIT_CODES.items())])


def add_command(
    app: typer.Typer, name: str, function: Callable[..., Report], *, after_interrupt: str, to_stdout: bool
) -> None:
    """Register a function that returns a report as a command, with an option `--json`.

    Args:
        app: where to register.
        name: the command's name.
        function: what it does; its parameters carry what typer is to know.
        after_interrupt: said after Ctrl-C, for example how to go on.
        to_stdout: without `--json`, print the report's lines on stdout instead of stderr (for results that are text).
    """

    def run(*, as_json: bool, debug: bool, **given: Any) -> None:
        try:
            # what libraries print must not end up beside the JSON
            quiet = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
            with quiet, memory_for(f"running {name}"), _starting(_command_name(app, name)):
                report = function(**given)
        except KeyboardInterrupt as interrupt:
            raise UserInterruptError(interrupt, fix=after_interrupt) from interrupt
        except Exception as error:
            if (found := found_by(error)) is not None and not as_json:
                show(found)
            raise
        if as_json and _is_first_process():
            _print_json(_command_name(app, name), ok=True, result=json_ready(report.to_dict()))
        elif not as_json:
            show(report)

    def show(report: Report) -> None:
        if not _is_first_process():
            return
        if to_stdout:
            _print("\n".join(report.lines()))
        else:
            _say(*report.lines())

    own = inspect.signature(function).parameters.values()
    run.__signature__ = inspect.Signature([*own, _AS_JSON, _DEBUG])  # type: ignore[attr-defined]
    run.__doc__ = function.__doc__
    app.command(name)(run)


def reporting_errors(main: Callable[P, None]) -> Callable[P, int]:
    """The main function of a script, with an exit code: what the user can mend becomes a message, as in commands."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        keep_freed_memory()
        share_cores()
        try:
            main(*args, **kwargs)
        except Exception as error:
            if (known := _known(error)) is None:
                raise
            return _fail(known, "", as_json=False)
        return 0

    return run


def hush_libraries() -> None:
    """No warnings that no user can act on; without a terminal, no progress bars of the libraries, as ours know by
    themselves. Call before they are imported."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # of torch.compile; products are in bf16
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers follows it too
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def run_app(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. A bug says how to report it and gives 1."""
    try:
        hush_libraries()
        keep_freed_memory()
        share_cores()
        return _run_app(app, arguments, reserve())
    except MemoryError:  # not even an error can be made
        os.write(2, _NO_MEMORY)
        return HardwareError.exit_code


def _run_app(app: typer.Typer, arguments: Sequence[str], room: list[bytearray]) -> int:
    as_json = "--json" in arguments
    name = _invoked(app, arguments)
    came: list[Ended] = []
    if (wrong := next((text for text in arguments if not _is_text(text)), None)) is not None:
        return _fail(_no_text(wrong), name, as_json)
    try:
        with _signals_interrupt(came):
            result = _command(app).main(list(arguments), prog_name="sse-convert", standalone_mode=False)
        if result == UserInterruptError.exit_code:  # typer's, for an interrupt outside our own code
            return _fail(UserInterruptError(*came), name, as_json)
        return result if isinstance(result, int) else 0
    except typer.Abort:
        return _fail(UserInterruptError(*came), name, as_json)
    except KeyboardInterrupt as interrupt:
        return _fail(UserInterruptError(interrupt), name, as_json)
    except _CommandLineError as error:
        return _fail(_usage_error(error, name), name, as_json)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        room.clear()
        known = _known(error, name)
        if came and not isinstance(known, UserInterruptError):
            known = UserInterruptError(*came)  # of which a library has made another error
        if known is None:
            return _bug(error, name, as_json, debug="--debug" in arguments)
        return _fail(known, name, as_json, found_by(error))


def _is_text(argument: str) -> bool:
    """Whether an argument can be written as UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_text(argument: str) -> UsageError:
    encoding = sys.getfilesystemencoding()
    narrow = encoding.replace("-", "") != "utf8"
    given: str | bytes = argument
    with contextlib.suppress(UnicodeEncodeError):  # half of a surrogate pair comes from callers, never from a shell
        given = os.fsencode(argument)
    return UsageError(
        f"argument {shortened(ascii(given))} is no {encoding} text",
        expected="text in UTF-8",
        fix="set LC_ALL=C.UTF-8, and leave PYTHONUTF8 unset" if narrow else "convert it to UTF-8",
    )


@contextlib.contextmanager
def _signals_interrupt(came: list[Ended]) -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs as Ctrl-C does: by an exception, so that nothing half-made is left.

    An import is finished first: libraries make another error of an exception there, or lose it. A second signal does
    not wait. What the process ignores (SIGHUP under nohup) stays ignored.

    Args:
        came: gets the exception, once a signal came.
    """

    def end(number: int, frame: FrameType | None) -> None:
        importer = None if came else _importer(frame)
        came[:] = [Ended(number)]
        if importer is None:
            raise came[0]
        _raise_in(importer, came[0])

    before = {}
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in _ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _importer(frame: FrameType | None) -> FrameType | None:
    """What waits for the imports that a frame is part of; None where it is part of none."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            found = frame.f_back
        frame = frame.f_back
    return found


def _raise_in(frame: FrameType, error: BaseException) -> None:
    """Raise an error in a frame as soon as what it calls has returned."""

    def trace(*_: object) -> None:
        sys.settrace(None)
        raise error

    frame.f_trace = trace
    sys.settrace(lambda *_: None)


def _known(error: BaseException, name: str = "") -> SSEConvertError | None:
    """The error as a message for the user, if it is one of ours or one the machine caused."""
    if not isinstance(error, HardwareError | UserInterruptError) and lacks_memory(error):
        return out_of_memory(f"running {name or 'a command'}", error)
    if isinstance(error, TeacherError):  # of code that travels with checkpoints, and knows no options
        way = "give --teacher FOLDER" if name == "join" else "make it whole: `sse-convert join --teacher FOLDER`"
        return TeacherError(error.what, expected=error.expected, fix=f"{error.fix}; or {way}")
    if isinstance(error, SSEConvertError):
        return error
    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        where = f"{error.filename}: " if error.filename else ""
        return OutputError(
            f"{where}{error.strerror}",
            expected="room and permission to write",
            fix="free space, or choose another folder",
        )
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return UsageError(
            shortened(f"{where}{error.strerror}"), expected="files and folders that can be used", fix="correct the path"
        )
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _PEER_GONE):
        return HardwareError(
            "another process of this run ended first",
            expected="all processes to run to the end",
            fix="see what that process said, and run the same command again",
        )
    if type(error).__name__ == "OutOfMemoryError":  # torch's; importing torch to name it would be slow
        return HardwareError(
            f"the accelerator is out of memory: {str(error).partition('. ')[0]}",
            fix="leave micro_batch and gradient_checkpointing at auto, lower seq_len, or use more devices",
        )
    return None


def _usage_error(error: Any, name: str) -> UsageError:
    """Typer's own complaint about the arguments in our form."""
    text = error.format_message() or str(error)
    return UsageError(text, fix=f"see `sse-convert {name} --help`" if name else "see `sse-convert --help`")


def _fail(error: SSEConvertError, name: str, as_json: bool, found: Report | None = None) -> int:
    if as_json and _is_first_process():
        _print_error(name, json_ready(error.to_dict()), found)
    if isinstance(error, UserInterruptError):
        _say("; ".join([error.what, *([error.fix] if error.fix else [])]))
        return error.exit_code
    _complain("error", str(error))
    return error.exit_code


def _bug(error: BaseException, name: str, as_json: bool, *, debug: bool) -> int:
    """Say that it is our mistake, and keep the traceback: a run of days is not started again to see it."""
    what, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    file = _kept(trace)
    fix = f"report it with {file}" if file else "run it again with --debug, and report it with the traceback"
    if as_json and _is_first_process():
        told = {"kind": "bug", "exit_code": 1, "what": what, "expected": "", "fix": fix}
        _print_error(name, told, found_by(error))
    if debug:
        print(trace, file=sys.stderr)
    _complain("internal error", f"{what}\nthis is a mistake in sse-convert, not yours\nfix: {fix}")
    return 1


def _kept(trace: str) -> str | None:
    """A new file with a traceback; None where none can be made."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="sse-convert-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(trace)
            return file.name
    except OSError:
        return None


def _complain(kind: str, text: str) -> None:
    from sse_convert.console import stderr

    console = stderr()
    console.print(f"{kind}: ", style="bold red", end="")
    console.print(text, markup=False)


def _print_error(name: str, error: dict[str, Any], found: Report | None) -> None:
    _print_json(name, ok=False, error=error, **({} if found is None else {"result": json_ready(found.to_dict())}))


def _print_json(name: str, **content: Any) -> None:
    _print(json.dumps({"schema": JSON_SCHEMA_VERSION, "ok": content.pop("ok"), "command": name, **content}))


def _print(text: str) -> None:
    print(text, flush=True)


def _is_first_process() -> bool:
    """True for one of the processes that `accelerate launch` starts."""
    return os.environ.get("RANK", "0") == "0"


def _starting(name: str) -> contextlib.AbstractContextManager[None]:
    from sse_convert.console import starting

    return starting(name) if _is_first_process() else contextlib.nullcontext()


def _say(*lines: str) -> None:
    from sse_convert.console import say

    for line in lines:
        say(line)


@functools.cache
def _command(app: typer.Typer) -> Any:
    """The commands of an application, which typer makes of its functions anew each time it is asked."""
    return get_command(app)


def _command_name(app: typer.Typer, name: str) -> str:
    return f"{app.info.name} {name}" if app.info.name else name


def _invoked(app: typer.Typer, arguments: Sequence[str]) -> str:
    """The command that the arguments name, as far as they name one: `plan`, `recipes show`, or nothing."""
    words = [word for word in arguments if not word.startswith("-")]
    commands = getattr(_command(app), "commands", {})
    if not words or words[0] not in commands:
        return ""
    inner = getattr(commands[words[0]], "commands", {})
    return " ".join(words[:2]) if len(words) > 1 and words[1] in inner else words[0]
