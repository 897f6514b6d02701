"""Text to rows of tokens: local files, hub datasets, chat, teacher samples; mixed, packed, in a seeded order."""

from sse_convert.data.rows import Row, RowReader, stack
from sse_convert.data.teacher_samples import SamplingTeacher

__all__ = ["Row", "RowReader", "SamplingTeacher", "stack"]
