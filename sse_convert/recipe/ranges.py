"""What a plain value of a recipe may be, beyond its type: ranges of numbers, text without control characters, paths.

A field says so in its annotation, `tokens: Annotated[int, Range(1, 10**15)]`, which `build` and the JSON schema read.
Numbers and text without one have the ranges of `WHOLE`, `REAL` and `PlainText()`.
"""

import dataclasses as dc
import math
import os
import re
import unicodedata
from typing import Annotated

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
_ALLOWED_CONTROLS = "\n\r\t"
MOST_CHARACTERS = 4096
"""of any text; as much as a path may have"""
MOST_NAME_BYTES = 200
"""of the last part of a path that gets siblings such as `NAME.stages`; file systems take 255"""


@dc.dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; `more` leaves out `low` itself."""

    low: float
    high: float
    more: bool = False

    def problem(self, value: float) -> str | None:
        """What is wrong with a number, None if nothing."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"expected a finite number, got {value}"
        if value < self.low or (self.more and value == self.low):
            bound = f"more than {number_text(self.low)}" if self.more else f"{number_text(self.low)} or more"
            return f"{number_text(value)} is too small, expected {bound}"
        if value > self.high:
            return f"{number_text(value)} is too large, expected {number_text(self.high)} or less"
        return None


@dc.dataclass(frozen=True, slots=True)
class PlainText:
    """Text that can be written to files and terminals: no control characters, no halves of characters, not endless."""

    path: bool = False
    """a path here, or a name elsewhere: `~` and variables are expanded"""
    siblings: bool = False
    """a folder to make, with others beside it: it must have a name of its own that leaves room for theirs"""

    def read(self, value: str) -> str:
        """The text as it is meant.

        Raises:
            ValueError: it cannot be used; says why.
        """
        if len(value) > MOST_CHARACTERS:
            raise ValueError(f"text of {len(value)} characters, expected at most {MOST_CHARACTERS}")
        for letter in value:
            if unicodedata.category(letter) in ("Cc", "Cs") and letter not in _ALLOWED_CONTROLS:
                raise ValueError(f"expected text without control characters, got U+{ord(letter):04X} in it")
        text = expanded(value) if self.path else value
        if self.siblings:
            _check_name(text)
        return text


def expanded(path: str) -> str:
    """A path with `~` and `$VARIABLE` replaced.

    Raises:
        ValueError: there is no such user or variable.
    """
    if path.startswith("~"):
        home = os.path.expanduser(path)
        if home == path:
            raise ValueError(f"there is no home folder for {path.partition('/')[0]}; write the path out")
        path = home
    if unset := [name for name in _VARIABLE.findall(path) if name.strip("{}") not in os.environ]:
        raise ValueError(f"variable {unset[0].strip('{}')} is not set; set it, or write the path out")
    return os.path.expandvars(path)


def _check_name(path: str) -> None:
    name = os.path.basename(os.path.normpath(path)) if path.strip() else ""
    if not path.strip():
        raise ValueError("is empty, expected a folder")
    if name in ("", ".", ".."):
        raise ValueError(f"{path!r} has no name of its own, expected a new folder such as out/my-model")
    if (size := len(os.fsencode(name))) > MOST_NAME_BYTES:
        raise ValueError(f"the folder's name has {size} bytes, expected at most {MOST_NAME_BYTES}")


def number_text(value: float) -> str:
    """A number for messages; the size of one with more digits than anyone reads."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) >= 1e6 else str(value)


WHOLE = Range(-(2**53), 2**53)
"""of whole numbers: those that floats hold exactly"""
REAL = Range(-1e30, 1e30)
Count = Annotated[int, Range(1, 10**9)]
Tokens = Annotated[int, Range(1, 10**15)]
Length = Annotated[int, Range(1, 2**30)]
"""tokens of a row"""
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1)]
Rate = Annotated[float, Range(0, 1000, more=True)]
NotNegative = Annotated[float, Range(0, 1e9)]
Positive = Annotated[float, Range(0, 1e9, more=True)]
PathText = Annotated[str, PlainText(path=True)]
NewFolder = Annotated[str, PlainText(path=True, siblings=True)]
