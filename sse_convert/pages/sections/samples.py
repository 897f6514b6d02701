"""Generated texts side by side."""

from sse_convert.pages.blocks import Block, Missing, Paragraph, Sample, Samples, Section
from sse_convert.pages.collect import Run
from sse_convert.pages.commands import samples_command


def samples(run: Run) -> Section:
    """How the teacher, the untrained conversion and the result go on from the same prompts."""
    if run.samples is None:
        blocks: tuple[Block, ...] = (Missing("No texts were generated.", samples_command(run)),)
    else:
        names = [model["label"] for model in run.samples["models"]]
        found = tuple(
            Sample(each["prompt"], tuple(zip(names, each["texts"], strict=True))) for each in run.samples["samples"]
        )
        text = (
            f"The likeliest continuation (greedy), at most {run.samples['max_new_tokens']} tokens; nothing was picked."
        )
        blocks = (Paragraph(text), Samples(found))
    return Section(anchor="samples", title="Samples", blocks=blocks)
