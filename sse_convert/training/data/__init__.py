"""Text to rows of tokens: local files, hub datasets, chat, teacher samples; mixed, packed, in a seeded order."""

from sse_convert.training.data.rows import Row, RowReader, rows, stack
from sse_convert.training.data.teacher import Teacher

__all__ = ["Row", "RowReader", "Teacher", "rows", "stack"]
