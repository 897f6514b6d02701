"""Result files that appear whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sse_convert.errors import OutputError
from sse_convert.report import json_ready


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` to write, renamed to it at the end; folders above are made, an older file replaced.

    Raises:
        OutputError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}", expected="a writable file", fix="choose another name"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, data: Any) -> None:
    """Write data as JSON; what JSON cannot say (NaN, paths) becomes what it can.

    Raises:
        OutputError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(json_ready(data), indent=1) + "\n", encoding="utf-8")
