"""The fenced blocks of a page: which are files, commands or snippets, and how they are run.

- A block with a `title="name"` is a file; it is written before what comes after it runs.
- ```` ```console ```` holds commands (`$ `, continued after a backslash) and what they print on stdout and stderr.
  Classes say how the output is checked: none exactly, `.figures` apart from numbers, `.sample` only for being there;
  `.fails` commands must fail, `.eval` commands need the extra `eval`; where that is not installed they are not run.
- ```` ```python ```` without a title is a script that must succeed; `.trl`, `.torchao`, `.bitsandbytes` and
  `.llmcompressor` ones need a library that no extra brings.
- What stands in an admonition `!!! hub`, `gpu`, `setup` or `slow` is not run; `docs/parsing.py` checks its options.
"""

import dataclasses as dc
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from docs import warm

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "pages"
NOT_RUN = ("hub", "gpu", "setup", "slow")
"""admonitions whose commands need what a test machine may lack"""
EXTRAS = {
    "eval": ("lm_eval", "wonderwords"),
    "trl": ("trl",),
    "torchao": ("torchao",),
    "bitsandbytes": ("bitsandbytes",),
    "llmcompressor": ("llmcompressor",),
}
"""classes of blocks whose commands need an extra, and packages that it brings"""
LINKED = ("demo", "recipes", "benchmarks", "LICENSE")
"""what of the checkout that commands find beside them"""
TIMEOUT = 600
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_PYTHON_CALL = re.compile(
    r"""(?P<call>(?:sse-convert|python)\ (?:[^|<>&;'"`$]|'[^']*'|"[^"`$]*")+?)
        (?:\ >\ (?P<file>\S+))?(?P<merged>\ 2>&1)?(?:\ \|\ (?P<rest>.*))?""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"\b[0-9a-f]{12}\b|[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?%?")

_THIS_CPU = re.compile(r",? (about|below) [^,()\n]* on this CPU")
"""what a plan says where the machine at hand would take more than a minute"""
_PROGRESS = re.compile(r"[\w ().-]+: \d+/\d+(, |$)")
"""what `console.progress` prints of a step that takes more than two seconds, so on a slow machine of other steps"""


def _told(printed: str) -> list[str]:
    """Lines without those of progress, which a slow machine has more of."""
    return [line for line in printed.splitlines() if not _PROGRESS.match(line)]


@dc.dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    """first word after the fence"""
    classes: frozenset[str]
    """other words with a dot in front"""
    title: str | None
    """name of the file that the block is"""
    body: str
    """content without the page's indentation"""
    admonition: str
    """kind of the admonition around the block, empty for none"""
    line: int
    """line of the fence in the page, from 1"""
    span: tuple[int, int]
    """where the content lies in the page's text"""
    indent: str
    """the page's indentation"""

    @property
    def is_run(self) -> bool:
        """Whether tests execute what the block holds."""
        return self.admonition not in NOT_RUN

    @property
    def is_run_here(self) -> bool:
        """The same, with the packages that are installed."""
        packages = (name for word in self.classes for name in EXTRAS.get(word, ()))
        return self.is_run and all(map(find_spec, packages))


@dc.dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, and what it prints according to the page."""

    text: str
    """what follows `$ `, continuation lines included"""
    output: str
    """lines up to the next command"""


def page_paths() -> list[Path]:
    """The hand-written pages, sorted."""
    return sorted(PAGES.rglob("*.md"))


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page's text, in order."""
    for match in _FENCE.finditer(text):
        indent, info = match["indent"], match["info"]
        title = re.search(r'title="([^"]+)"', info)
        words = re.sub(r'\w+="[^"]*"|[{}]', " ", info).replace(".", " ").split()
        yield Block(
            language=words[0] if words else "",
            classes=frozenset(words[1:]),
            title=title[1] if title else None,
            body="".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True)),
            admonition=_admonition(text[: match.start()], len(indent)),
            line=text.count("\n", 0, match.start()) + 1,
            span=match.span("body"),
            indent=indent,
        )


def _admonition(before: str, indent: int) -> str:
    """Kind of the admonition that a line of this indentation is in."""
    for line in reversed(before.splitlines()):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            found = re.match(r" *(?:!!!|\?\?\?\+?) (\w+)", line)
            return found[1] if found else ""
    return ""


def commands(body: str) -> list[Command]:
    """The commands of a console block.

    Raises:
        ValueError: the block does not begin with a command.
    """
    found: list[Command] = []
    for line in body.splitlines():
        if found and found[-1].text.endswith("\\") and not found[-1].output:
            found[-1] = Command(f"{found[-1].text}\n{line}", "")
        elif line.startswith("$ "):
            found.append(Command(line[2:], ""))
        elif not found:
            raise ValueError(f"a console block begins with {line!r}, expected a command after '$ '")
        else:
            found[-1] = Command(found[-1].text, f"{found[-1].output}{line}\n")
    return found


@dc.dataclass(frozen=True, slots=True)
class PythonCall:
    """A command line that begins with a Python process."""

    arguments: list[str]
    """what follows `python`"""
    file: str | None
    """where stdout goes, None for what `rest` reads"""
    merged: bool
    """whether stderr goes where stdout goes"""
    rest: str
    """shell command that reads its stdout, empty for none"""

    @classmethod
    def parse(cls, command: str) -> "PythonCall | None":
        """The call, or None for anything else: the shell starts that."""
        found = _PYTHON_CALL.fullmatch(command.replace("\\\n", " "))
        if found is None:
            return None
        program, *words = shlex.split(found["call"])
        if program == "python" and words[0].startswith("-") and words[0] != "-m":
            return None
        module = ["-m", "sse_convert"] if program == "sse-convert" else []
        return cls([*module, *words], found["file"], found["merged"] is not None, found["rest"] or "")


class Workplace:
    """An empty folder in which the blocks of one page run, in order.

    Args:
        folder: where to work; gets links to the checkout's data, and its programs `sse-convert` and `python`.
        cache: folder that text sampled from teachers is kept in; None for one of its own.
    """

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder / "work"
        self._cache = cache or folder / "cache"
        self._programs = folder / "bin"
        self.folder.mkdir()
        self._programs.mkdir()
        for name in LINKED:
            (self.folder / name).symlink_to(ROOT / name)
        for name, arguments in (("python", ""), ("sse-convert", " -m sse_convert")):
            program = self._programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
            program.chmod(0o755)

    def write(self, block: Block) -> None:
        """Write a block that is a file."""
        assert block.title is not None
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.body, encoding="utf-8")

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run a shell command line; returns what it printed.

        Raises:
            RuntimeError: it failed (or succeeded, if it should fail); the message holds what it printed.
        """
        printed = self.folder.parent / "printed"
        printed.write_text("")
        code = self._run(command, printed)
        text = printed.read_text(encoding="utf-8")
        if (code != 0) != fails:
            raise RuntimeError(f"exit code {code} of: {command}\n{text}")
        return "".join(f"{line.rstrip()}\n" for line in _told(text))

    def _run(self, command: str, printed: Path) -> int:
        """Exit code of a command line whose output goes to a file; a Python process at its head starts warm."""
        call = PythonCall.parse(command)
        if call is None:
            return self._shell(command, printed)
        piped = self.folder.parent / "piped"
        piped.write_text("")
        out = self.folder / call.file if call.file else piped if call.rest else printed
        if call.file:
            out.write_text("")
        error = out if call.merged else printed
        code = warm.run(call.arguments, self.folder, self._environment(), out, error, timeout=TIMEOUT)
        if not call.rest:
            return code
        piped.write_text("".join(f"{line}\n" for line in _told(piped.read_text(encoding="utf-8"))), encoding="utf-8")
        return self._shell(call.rest, printed, piped) or code

    def _shell(self, command: str, printed: Path, stdin: Path = Path(os.devnull)) -> int:
        with printed.open("a") as out, stdin.open() as given:
            return subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=self.folder,
                env=self._environment(),
                stdin=given,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
                check=False,
            ).returncode

    def run_script(self, block: Block) -> str:
        """Run a python block; returns what it printed.

        Raises:
            RuntimeError: it failed; the message holds what it printed.
        """
        (self.folder / "snippet.py").write_text(block.body, encoding="utf-8")
        return self.run("python snippet.py")

    def _environment(self) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ},
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SSE_CONVERT_CACHE": str(self._cache),
            "HF_HOME": str(self.folder.parent / "huggingface"),
            "COLUMNS": "120",
            "NO_COLOR": "1",
            **warm.FIXED,
        }


def agrees(expected: str, actual: str, classes: frozenset[str]) -> bool:
    """Whether what a command printed is what its page shows, as exactly as the block's classes ask, wherever it ran."""
    expected, actual = (_THIS_CPU.sub("", text) for text in (expected, actual))
    if "sample" in classes:
        return bool(actual.strip()) == bool(expected.strip())
    if "figures" in classes:
        return without_figures(expected) == without_figures(actual)
    return expected == actual


def without_figures(text: str) -> list[str]:
    """The lines with every number as `#`, and without the widths of columns that follow from them."""
    return [re.sub(r"-{2,}", "--", " ".join(_NUMBER.sub("#", line).split())) for line in text.splitlines()]


def machine() -> str:
    """What outputs come from, in words; the commit is the last one that changed the code."""
    import torch

    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", "sse_convert", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return f"one CPU core ({platform.machine()}), torch {torch.__version__.partition('+')[0]}, commit {commit}"
