"""What `run` would say of a recipe's text, in a plan: of files that are here, as far as they are soon read."""

from pathlib import Path

from sse_convert.data.overlap import overlap
from sse_convert.data.rows import check_sources, is_local, is_missing
from sse_convert.data.text_files import find_files
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Data, Source
from sse_convert.report import format_bytes

MOST_BYTES = 64 << 20
"""of local text that a plan reads, which takes about a second"""


def text_notes(data: Data) -> list[str]:
    """Why `run` would refuse the text, or what it would warn of. Nothing of files that are not here.

    Empty files are found whatever there is. All else is left to `run` where there is more than `MOST_BYTES`.

    Args:
        data: the recipe's text.
    """
    train, valid = ([source for source in part if not is_missing(source)] for part in (data.train, data.valid))
    try:
        if (size := sum(map(_bytes, (*train, *valid)))) > MOST_BYTES:
            of_run = "`run` looks for mistakes, and for what data.valid shares"
            return [f"{format_bytes(size)} of local text are not read here: {of_run}"]
        check_sources([*train, *valid])
        return overlap(train, valid)
    except DataError as error:
        return [f"`run` refuses this recipe: {'; '.join(filter(None, (error.what, error.fix)))}"]


def _bytes(source: Source) -> int:
    """Of the source's files; 0 for text that is not local."""
    return sum(file.stat().st_size for file in find_files(Path(source.path or ""))) if is_local(source) else 0
