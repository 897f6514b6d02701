"""How the next token is chosen."""

import contextlib
import dataclasses as dc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sse_convert.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""the settings of a model's generation that say where texts begin and end, not how they are written"""

SMALLEST = 1e-4
"""temperature; below it logits divided by it are no longer finite"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 128
    """most tokens of one answer"""
    temperature: float = 0.0
    """0 takes the likeliest token"""
    top_p: float = 1.0
    """sample from the likeliest tokens that together have this probability"""
    seed: int = 0
    """of the sampling"""

    def __post_init__(self) -> None:
        checks = [
            (self.max_new_tokens < 1, f"max_new_tokens is {self.max_new_tokens}", "1 or more"),
            (self.temperature < 0, f"temperature is {self.temperature}", "0 or more"),
            (0 < self.temperature < SMALLEST, f"temperature is {self.temperature}", f"0, or {SMALLEST} or more"),
            (not 0 < self.top_p <= 1, f"top_p is {self.top_p}", "more than 0, at most 1"),
        ]
        for bad, what, expected in checks:
            if bad:
                raise UsageError(what, expected=expected)


@contextlib.contextmanager
def as_asked(model: "PreTrainedModel") -> Iterator[None]:
    """In this block, what `generate` is given chooses tokens: of the model's own settings only `TOKENS` count."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig(**{name: getattr(own, name) for name in TOKENS})
    try:
        yield
    finally:
        model.generation_config = own
