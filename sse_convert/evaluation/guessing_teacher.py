"""Whether a recipe's teacher predicts the training text at all: asked before anything is trained."""

from collections.abc import Iterator

import torch
from accelerate.utils.memory import clear_device_cache

from sse_convert.checkpoints.load_model import context_limit, pick_device, tokenizer_of
from sse_convert.checkpoints.open import download
from sse_convert.checkpoints.teacher import Teacher
from sse_convert.data.rows import RowReader, stack
from sse_convert.evaluation.guessing import guesses
from sse_convert.recipe.schema import Recipe, Source

PREDICTED = 512
"""tokens of training text that a teacher is tried on"""


def guessing_teacher(recipe: Recipe, teacher: Teacher) -> Iterator[str]:
    """A warning if the teacher hardly predicts the training text, as with broken weights or a foreign tokenizer. A
    teacher too large for the device is not tried, nor is one on text of its own.

    Args:
        recipe: with text in `data.train`.
        teacher: the recipe's model; its weights are downloaded and loaded for one row.

    Raises:
        CheckpointError, HubError, DataError: it cannot be loaded, or the text not be read.
    """
    sources = [source for source in recipe.data.train if source.kind != "teacher"]
    if not sources:
        return
    try:
        loss, vocabulary = _loss(recipe, sources, teacher)
    except torch.OutOfMemoryError:
        return
    finally:
        clear_device_cache(garbage_collection=True)
    if guesses(loss, vocabulary):
        yield (
            f"the teacher's loss on the training text is {loss:.2f} nats, no better than guessing one of "
            f"{vocabulary:,} tokens: check its weights, its tokenizer and the text"
        )


@torch.no_grad()
def _loss(recipe: Recipe, sources: list[Source], teacher: Teacher) -> tuple[float, int]:
    """The teacher's loss in nats on the first row, and V."""
    from sse_convert.modeling.auto import load_pretrained

    files = download(teacher.files)
    model = load_pretrained(files.folder, device=pick_device())
    length = min(PREDICTED, context_limit(model.config) or PREDICTED)
    row = next(RowReader(sources, tokenizer_of(files), length, recipe.data.seed).rows())
    given = {name: value.to(model.device) for name, value in stack([row]).items()}
    logits = model(given["input_ids"], position_ids=given["position_ids"], use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, given["labels"][0, 1:])), logits.shape[-1]
