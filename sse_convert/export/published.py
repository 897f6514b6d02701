"""What leaves this machine: files and folders by their names, never where they lie."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

_WORD = r"[^\s,;:'\"()]"
_ABSOLUTE = r"/(?:[\w.@+-]+/)+[\w.@+-]+|[A-Za-z]:(?:\\[\w.@+~-]+)+"
"""a path in a sentence that is not known by name, of two parts or more"""
_OF_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\[\w.$-]+\\")
"""how a path of Windows begins, on whatever machine it is read"""


def published(data: Any, places: Iterable[str] = ()) -> Any:
    """Plain data without paths of this machine: `/home/ada/texts/books.jsonl` becomes `./books.jsonl`.

    Args:
        data: dictionaries and lists of text and numbers.
        places: further files and folders that its sentences may name.
    """
    found = {*paths_in(data), *places, os.getcwd(), os.path.expanduser("~")} - {"", ".", "/"}
    longest_first = [re.escape(place) for place in sorted(found, key=len, reverse=True)]
    known = rf"(?:{'|'.join(longest_first)})(?:[/{re.escape(os.sep)}]{_WORD}*)?(?![\w-])"
    return _mapped(data, re.compile(rf"(?<![\w./~-])(?:{known}|{_ABSOLUTE})"))


def is_path(text: str) -> bool:
    """Whether a text is a path of this machine, and not the name of something on a hub."""
    if not {"/", os.sep, "\\"} & {*text} or "\n" in text:
        return False
    path = Path(text)
    deep = bool(_OF_WINDOWS.match(text)) or (path.is_absolute() and len(path.parts) > 2)
    return text.startswith(("./", "../", "~/")) or deep or os.path.exists(text)


def is_absolute(path: str) -> bool:
    """Whether a path says where it lies, here or on Windows."""
    return Path(path).is_absolute() or bool(_OF_WINDOWS.match(path))


def paths_in(data: Any) -> set[str]:
    """Every path in plain data, keys among them: a text as a whole, or an item of a list written `one, two`."""
    return {item for text in _texts(data) for item in text.split(", ") if is_path(item)}


def _texts(data: Any) -> Iterator[str]:
    match data:
        case str():
            yield data
        case dict():
            for item in (*data.keys(), *data.values()):
                yield from _texts(item)
        case list() | tuple():
            for item in data:
                yield from _texts(item)


def _mapped(data: Any, pattern: re.Pattern[str]) -> Any:
    match data:
        case str():
            return pattern.sub(lambda found: _name(found[0]), data)
        case dict():
            return {_mapped(key, pattern): _mapped(value, pattern) for key, value in data.items()}
        case list() | tuple():
            return [_mapped(item, pattern) for item in data]
    return data


def _name(path: str) -> str:
    """What a path is called where it cannot be found; the home folder's own name is a person's."""
    kind = PureWindowsPath if _OF_WINDOWS.match(path) else Path
    return "~" if path == os.path.expanduser("~") else f"./{kind(path).name}"
