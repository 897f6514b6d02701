"""Recipe keys of a stage's rotary embedding. Read with `schema.py`."""

import dataclasses as dc
from typing import Annotated

from sse_convert.recipe.ranges import Range


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding of the student from a stage on, a new base or yarn; stored in config.json."""

    rope_theta: Annotated[float, Range(1, 1e12, more=True)] | None = None
    """base of the frequencies; unset keeps the model's"""
    factor: Annotated[float, Range(1, 1e6)] | None = None
    """yarn, to this multiple of the positions that the model was trained for; unset keeps the model's own type"""

    def given(self) -> dict[str, float]:
        """The keys that are set, by their names in `rope_parameters`."""
        return {key: value for key, value in dc.asdict(self).items() if value is not None}
