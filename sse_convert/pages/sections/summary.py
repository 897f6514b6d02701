"""The headline figures, and how far the run has come."""

from sse_convert.evaluation.verdict import model_verdict
from sse_convert.pages.blocks import Block, Paragraph, Section, Tile, Tiles
from sse_convert.pages.collect import Evaluation, Run
from sse_convert.pages.commands import run_command
from sse_convert.pages.scores import CACHE, GAP, RATIO, SHARE, relative_measures
from sse_convert.report import format_bytes, format_number


def summary(run: Run) -> Section:
    """Tiles for what matters most; says what is unfinished and which limits were missed."""
    blocks: list[Block] = [Paragraph(_sentence(run))]
    unfinished = [step.name for step in run.steps if step.record is None]
    if unfinished:
        blocks.append(Paragraph(f"Not finished: {', '.join(unfinished)}. Continue with: {run_command(run)}"))
    if run.student is not None:
        verdict = model_verdict(run.student.data)
        said = [f"Verdict: {verdict.text}.", *verdict.notes]
        blocks += [Tiles(_tiles(run.student)), *map(Paragraph, said)]
    return Section(anchor="summary", title="Summary", blocks=tuple(blocks))


def _sentence(run: Run) -> str:
    if (model := run.model) is None:
        return "No checkpoint yet."
    converted = sum(name != "full" for name in model.layers)
    return (
        f"{model.base_model} with {converted} of its {len(model.layers)} softmax attention layers replaced; "
        f"{format_number(model.parameters)} parameters, {format_number(model.new_parameters)} of them new."
    )


def _tiles(evaluation: Evaluation) -> tuple[Tile, ...]:
    """The last (longest) setting of each quantity that was measured."""
    last = {measure.quantity: measure for measure in relative_measures(evaluation)}
    tiles = [
        Tile(label, last[quantity].text, last[quantity].setting)
        for label, quantity in (("loss above the teacher's (nats)", GAP), ("needles, share of the teacher's", SHARE))
        if quantity in last
    ]
    if rows := evaluation.data["cache"]:
        row = min(rows, key=lambda row: abs(row["length"] - (128 << 10)))
        ratio = row["student_bytes"] / row["teacher_bytes"]
        sizes = f"{format_bytes(row['student_bytes'])} of {format_bytes(row['teacher_bytes'])}"
        tiles.append(Tile(CACHE, f"{ratio:.0%}", f"{sizes} at {row['length']:,} tokens"))
    if RATIO in last:
        device = evaluation.data["conditions"].get("device")
        note = f"of the teacher's speed at {last[RATIO].setting}, one sequence, {device}"
        tiles.append(Tile("decoding", last[RATIO].text, note))
    return tuple(tiles)
