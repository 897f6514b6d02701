"""What a stage plants: `data.needles`, with what the stage says of its own."""

import dataclasses as dc

from sse_convert.recipe.schema import Data, Needles, Stage


def stage_needles(data: Data, stage: Stage) -> Needles:
    """The share of rows and the number of needles in a row are the stage's own where it names them; only kl stages
    take answers from rows."""
    needles = data.needles
    return dc.replace(
        needles,
        share=needles.share if stage.needle_share is None else stage.needle_share,
        keys=stage.needle_keys or needles.keys,
        answers=needles.answers if stage.loss == "kl" else "teacher",
    )
