"""What is wrong with a recipe: places, messages and suggestions."""

import dataclasses as dc
from collections.abc import Iterable
from difflib import get_close_matches

Path = tuple[str | int, ...]


@dc.dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe: where (a path of keys and list indices) and what."""

    path: Path
    message: str


MOST_SHOWN = 80
"""characters of a value that messages repeat"""


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """A text of the user's as messages repeat it: not all of a long one, and no control characters."""
    shown = text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
    return "".join(letter if letter.isprintable() else "?" for letter in shown)


def dotted(path: Path) -> str:
    """`("stages", 0, "lr")` -> `stages.0.lr`, the spelling that `--set` takes."""
    return ".".join(shortened(str(part)) for part in path)


def suggest(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a near miss, otherwise the list of what is known."""
    options = [str(option) for option in known]
    near = get_close_matches(str(word), options, 1)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; expected one of {', '.join(options)}" if options else ""


def location(path: Path, lines: dict[Path, int], sets: dict[Path, str], causes: dict[Path, str]) -> str:
    """Where a problem is, for the message: `line 12: stages.0.lr`, or the `--set` that put it there or led to it."""
    if path in sets:
        return sets[path]
    around = (path[:end] for end in range(len(path), 0, -1))
    near = next((sets.get(place) or f"line {lines[place]}" for place in around if place in sets or place in lines), "")
    made = [spelling for place, spelling in sets.items() if place[: len(path)] == path]
    if path and made and not near:
        return made[0]
    where = causes.get(path, near)
    return f"{where}: {dotted(path)}" if where else dotted(path)
