"""Whether a teacher predicts the training text at all: asked before anything is chosen, calibrated or trained."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.checkpoints.load_model import context_limit, tokenizer_of
from sse_convert.checkpoints.mapped_model import mapped_model
from sse_convert.checkpoints.open import CheckpointFiles, download
from sse_convert.checkpoints.provenance import UNTRAINED, read_provenance
from sse_convert.checkpoints.teacher import Teacher, source_view
from sse_convert.console import progress, say
from sse_convert.data.rows import RowReader, stack
from sse_convert.recipe.schema import Recipe
from sse_convert.surgery.guessing import guess_warnings

PREDICTED = 128
"""tokens of training text that a teacher is tried on"""


def guessing_teacher(recipe: Recipe, teacher: Teacher) -> list[str]:
    """A warning if the teacher hardly predicts the training text, as with broken weights or a foreign tokenizer. One on
    text of its own is not tried.

    Args:
        recipe: with text in `data.train`.
        teacher: its weights are downloaded, and read from disk for one short row.

    Raises:
        CheckpointError, HubError, DataError: it cannot be loaded, or the text not be read.
    """
    sources = [source for source in recipe.data.train if source.kind != "teacher"]
    if not sources:
        return []
    files = download(teacher.files)
    length = min(PREDICTED, context_limit(teacher.config) or PREDICTED)
    vocabulary = teacher.text.vocab_size
    reader = RowReader(sources, tokenizer_of(files), length, recipe.data.seed, vocab_size=vocabulary)
    row = next(reader.rows())
    with mapped_model(files, teacher.config) as model:
        return guesses_of(model, stack([row]))


def warn_of_guessing(recipe: Recipe, teacher: Teacher) -> None:
    """Say what `guessing_teacher` finds; arguments and errors are its own."""
    for warning in guessing_teacher(recipe, teacher):
        say(f"warning: {warning}")


def warn_of_guessing_copy(recipe: Recipe, files: CheckpointFiles) -> None:
    """The same of the teacher in a converted checkpoint that is not trained yet; nothing is said of another one."""
    provenance = read_provenance(files.folder)
    if provenance is not None and provenance.stage in UNTRAINED:
        warn_of_guessing(recipe, source_view(files))


@torch.no_grad()
def guesses_of(model: PreTrainedModel, row: dict[str, Tensor]) -> list[str]:
    """The warning of a loaded teacher by its loss on a row: `input_ids` and `position_ids` [1, T], on its device."""
    ids = row["input_ids"]
    if ids.shape[1] < 2:
        return []
    with progress("trying the teacher", 1):
        logits = model(ids, position_ids=row["position_ids"], use_cache=False).logits[0, :-1].float()
    return guess_warnings(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])), logits.shape[-1])
