"""Recipe keys of a stage's rotary embedding. Read with `schema.py`."""

import dataclasses as dc
from typing import Annotated, Literal

from sse_convert.recipe.ranges import Range


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding of the student from a stage on, in transformers' `rope_parameters`; stored in config.json."""

    rope_type: Literal["yarn"] | None = None
    """yarn; unset keeps the model's own type"""
    rope_theta: Annotated[float, Range(1, 1e12, more=True)] | None = None
    """base of the frequencies; unset keeps the model's"""
    factor: Annotated[float, Range(1, 1e6)] | None = None
    """yarn: positions the model is stretched to, as a multiple of those it was trained for"""

    def given(self) -> dict[str, float | int | str]:
        """The keys that are set."""
        return {key: value for key, value in dc.asdict(self).items() if value is not None}
