"""What every choice of layers is asked: text to predict, and rows whose answer stands far back.

R rows, T tokens per row.
"""

import dataclasses as dc
import itertools

import torch

from sse_convert.checkpoints.load_model import tokenizer_of
from sse_convert.data.needle import load_words
from sse_convert.data.rows import RowReader, stack
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Source
from sse_convert.report import counted
from sse_convert.selection.recall_probes import RecallMaterial, Rows, recall_rows
from sse_convert.surgery.job import Job


@dc.dataclass(frozen=True, slots=True)
class Probe:
    """Rows for one model, made once."""

    text: Rows
    """running text, every token scored"""
    recall: dict[str, Rows]
    """rows of each kind of `recall_probes.NAMES`, their answers scored"""

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.text.ids.shape[1]

    def fingerprint(self) -> list[list[int]]:
        """Every token of every row."""
        rows = torch.cat([self.text.ids, *(rows.ids for rows in self.recall.values())])
        return rows.tolist()


def make_probe(
    job: Job,
    sources: list[Source],
    *,
    tokens: int,
    length: int,
    samples: int,
) -> Probe:
    """Read the text and plant the needles.

    Args:
        job: the model, `data.seed` and `data.needles.words` of the recipe are read.
        sources: text, read once in file order; packed rows are taken as running text.
        tokens: of running text, rounded down to whole rows.
        length: T.
        samples: rows of each recall kind.

    Raises:
        DataError: the text is not usable or too short, or needles do not fit into a row.
    """
    recipe, tokenizer, count = job.recipe, tokenizer_of(job.files()), tokens // length
    reader = RowReader(
        sources,
        tokenizer,
        length,
        recipe.data.seed,
        role="valid",
        sampled_as="train" if sources == recipe.data.train else "valid",  # so that training finds them sampled
        teacher=job.sampler,
        vocab_size=job.teacher().text.vocab_size,
    )
    read = stack(list(itertools.islice(reader.rows(), 2 * count + 2)))["input_ids"]
    if len(read) < count + 2:
        raise DataError(
            f"the text gives {counted(len(read), 'row')} of {length} tokens",
            expected=f"{count} rows to predict and two to plant needles in",
            fix="give more text, or lower --tokens or --length",
        )
    special = set(tokenizer.all_special_ids)
    haystack = [token for token in read[count:].flatten().tolist() if token not in special]
    words = load_words(recipe.data.needles.words)
    material = RecallMaterial(haystack, tokenizer, words, samples=samples, length=length, seed=recipe.data.seed)
    text = read[:count]
    return Probe(
        text=Rows(text, torch.ones(count, length - 1, dtype=torch.bool)),
        recall=recall_rows(material),
    )
