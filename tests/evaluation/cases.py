"""What several tests of evaluation use."""

from sse_convert.evaluation.ruler import Material

PROSE = (
    "The keeper of the lighthouse walked down to the harbor before dawn. He carried a lantern and a ledger! Did he "
    "write down each ship that passed? Nobody knew, and the winter was long. "
)
MATERIAL = Material(
    adjectives=("calm", "eager", "gentle", "huge", "jolly", "keen", "lucid", "mild"),
    nouns=("acorn", "bridge", "cabin", "dinner", "engine", "forest", "garden", "harbor"),
    essay=tuple((PROSE * 5).split()),
)
