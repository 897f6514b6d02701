"""What `run` would say of a recipe's text, in a plan: of files that are here, as far as they are soon read, and of hub
datasets."""

from collections.abc import Sequence
from pathlib import Path

from sse_convert.data.overlap import overlap
from sse_convert.data.rows import check_sources, is_local, is_missing
from sse_convert.data.text_files import find_files
from sse_convert.errors import DataError, HubError
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
    notes = []
    for look in (_of_datasets, _of_files):
        try:
            notes += look(train, valid)
        except (DataError, HubError) as error:
            notes.append(f"`run` refuses this recipe: {'; '.join(filter(None, (error.what, error.fix)))}")
    return notes


def _of_datasets(train: Sequence[Source], valid: Sequence[Source]) -> list[str]:
    check_sources([source for source in (*train, *valid) if not is_local(source)])
    return []


def _of_files(train: Sequence[Source], valid: Sequence[Source]) -> list[str]:
    files = [source for source in (*train, *valid) if is_local(source)]
    size = sum(file.stat().st_size for source in files for file in find_files(Path(source.path or "")))
    if size > MOST_BYTES:
        of_run = "`run` looks for mistakes, and for what data.valid shares"
        return [f"{format_bytes(size)} of local text are not read here: {of_run}"]
    check_sources(files)
    return overlap(train, valid)
