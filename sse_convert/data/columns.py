"""What text holds: running text, records with a column of text, or conversations."""

from collections.abc import Mapping
from pathlib import Path

from sse_convert.data.parquet_files import parquet_columns
from sse_convert.data.text_files import LARGEST_RECORD, parsed_record
from sse_convert.errors import DataError
from sse_convert.recipe.problems import shortened

RECORDS = (".jsonl", ".parquet")


def source_keys(path: Path, *, chats: bool) -> dict[str, str]:
    """What a recipe's source says of a file beside its path: `kind: chat`, or the `field` of its text.

    Args:
        path: of `find_files`.
        chats: whether the model has a chat template; else conversations cannot be read.

    Raises:
        DataError: its records are damaged, or have neither a column of text nor conversations that can be read.
    """
    if path.suffix not in RECORDS:
        return {}
    found = parquet_columns(path) if path.suffix == ".parquet" else _jsonl_columns(path)
    return column_keys(found, str(path), chats=chats)


def column_keys(found: Mapping[str, bool], where: str, *, chats: bool) -> dict[str, str]:
    """The same of columns.

    Args:
        found: names, and whether each holds text.
        where: they are.
        chats: as of `source_keys`.

    Raises:
        DataError: see `source_keys`.
    """
    if "messages" in found and chats:
        return {"kind": "chat"}
    texts = [name for name, is_text in found.items() if is_text]
    if "text" in texts:
        return {}
    if len(texts) == 1 and "messages" not in found:
        return {"field": texts[0]}
    if "messages" in found:
        raise DataError(
            f"{where} holds conversations (column messages), and the model has no chat template",
            expected="plain text, or a model with a chat template",
            fix="name the instruct model, add a chat_template.jinja to the model's folder, or give other text",
        )
    raise DataError(
        f"{where} has no column text or messages, but {shortened(', '.join(found)) or 'none at all'}",
        expected="records with text, or with messages: a list of role and content",
        fix="rename the column that is to be read, or give other text",
    )


def _jsonl_columns(path: Path) -> dict[str, bool]:
    """Columns of the first record, and whether each holds text."""
    with path.open("rb") as file:
        line = next((found for found in iter(lambda: file.readline(LARGEST_RECORD), b"") if not found.isspace()), b"")
    record = parsed_record(line, f"{path}, first record")
    return text_columns(record)


def text_columns(record: Mapping[str, object]) -> dict[str, bool]:
    """Columns of a record, and whether each holds text."""
    return {name: isinstance(value, str) for name, value in record.items()}
