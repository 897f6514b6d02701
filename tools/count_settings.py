"""Count the keys that recipes accept: every field of the schema's dataclasses, once, where it is declared.

    python tools/count_settings.py           # the number
    python tools/count_settings.py --list    # and the keys of each mapping

Mixers share their settings, whichever kind they are; those under `advanced` count like the others.
"""

import argparse
import dataclasses as dc
import typing
from typing import Any

from sse_convert.recipe.schema import Recipe

MOST = 120
"""keys that recipes may have; a key more needs one less"""


def settings() -> dict[str, list[str]]:
    """The keys by dataclass, those of its bases left out."""
    found: dict[str, list[str]] = {}
    _collect(Recipe, found)
    found["SSEMixer"].append("advanced")
    return found


def _collect(annotation: Any, found: dict[str, list[str]]) -> None:
    for part in typing.get_args(annotation):
        _collect(part, found)
    if not (isinstance(annotation, type) and dc.is_dataclass(annotation)):
        return
    for cls in annotation.__mro__[:-1]:
        if cls.__name__ not in found:
            found[cls.__name__] = list(vars(cls).get("__annotations__", {}))
            for hint in typing.get_type_hints(cls).values():
                _collect(hint, found)


def main() -> None:
    """Print the count."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true", help="the keys of each mapping")
    found = settings()
    if p.parse_args().list:
        for name, keys in sorted(found.items()):
            print(f"{name}: {', '.join(keys)}")
    print(sum(map(len, found.values())))


if __name__ == "__main__":
    main()
