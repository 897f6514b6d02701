"""Commands that do with text what training and evaluation do first: check files, make rows of tokens or prompts."""

import copy
import functools
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.cli.runner import add_command
from sse_convert.data.documents import rendered
from sse_convert.data.packing import IGNORED
from sse_convert.data.rows import RowReader, check_sources
from sse_convert.recipe.schema import Source
from sse_convert.report import TextReport

app = typer.Typer(name="", pretty_exceptions_enable=False, rich_markup_mode=None)
ROW = 8
_tokenizer = functools.cache(load_tokenizer)


def _read(
    path: Annotated[str, typer.Argument()],
    settings: Annotated[str, typer.Argument()],
    model: Annotated[Path, typer.Argument()],
) -> TextReport:
    """The words of a source as a model is given them.

    Args:
        path: file or folder.
        settings: others of the source, as JSON.
        model: folder with the tokenizer.
    """
    source = Source(**{"path": path, **json.loads(settings)})
    check_sources([source])
    tokenizer = _tokenizer(model)
    rows = list(RowReader([source], tokenizer, ROW, 0, role="valid").rows())
    words: list[Any] = [word for row in rows for word in tokenizer.convert_ids_to_tokens(row.input_ids.tolist())]
    hidden = sum(int((row.labels == IGNORED).sum()) for row in rows)
    return TextReport({"words": words, "hidden": hidden}, [])


def _render(
    path: Annotated[Path, typer.Argument()],
    model: Annotated[Path, typer.Argument()],
) -> TextReport:
    """A conversation in a chat template.

    Args:
        path: file with the template.
        model: folder with the tokenizer.
    """
    tokenizer = copy.copy(_tokenizer(model))
    tokenizer.chat_template = path.read_text("utf-8")
    turns = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]
    return TextReport({"text": rendered(tokenizer, turns, "case", prompt=True)}, [])


@app.callback()
def _several() -> None:
    """Makes `read` a command beside others."""


add_command(app, "read", _read, after_interrupt="", to_stdout=False)
add_command(app, "render", _render, after_interrupt="", to_stdout=False)
