"""What `run` would say of a recipe's text, in a plan: of files that are here."""

from pathlib import Path

from sse_convert.data.rows import is_local, is_missing
from sse_convert.data.text_files import find_files
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Data


def text_notes(data: Data) -> list[str]:
    """Why `run` would refuse the text. Nothing of files that are not here.

    Args:
        data: the recipe's text.
    """
    try:
        for source in (*data.train, *data.valid):
            if is_local(source) and not is_missing(source):
                find_files(Path(source.path or ""))
    except DataError as error:
        return [f"`run` refuses this recipe: {'; '.join(filter(None, (error.what, error.fix)))}"]
    return []
