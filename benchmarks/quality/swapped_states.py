"""What lies below and above swapped layers: rows, the teacher's states at the first of them, and the way up from there.

Shape letters: R rows, T tokens per row, D hidden size.
"""

import dataclasses as dc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sse_convert.data.needle import NeedleSample, load_words
from sse_convert.data.rows import RowReader, stack
from sse_convert.evaluation.retrieval import needle_samples
from sse_convert.recipe.schema import NeedleEval, Recipe
from sse_convert.training.align import converted_arguments
from sse_convert.training.setup import decoder_layers

TOKENS_AT_ONCE = 65536


@dc.dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    """tokens per training row, one entry per phase"""
    rows: tuple[int, ...] = (4096, 3072, 384)
    """different training rows of each length"""
    text_rows: int = 32
    """held-out rows of the longest length; the same text is cut into the other lengths"""
    samples: int = 100
    """needle rows per length, kind and number of keys"""
    needles: tuple[tuple[str, int], ...] = (("number", 1), ("number", 8), ("code", 1))
    """kinds and numbers of keys that are asked for"""


@dc.dataclass(frozen=True, slots=True)
class States:
    """The teacher on some rows."""

    ids_RT: Tensor
    """tokens, int16 on the CPU"""
    first_RTD: Tensor
    """what the first swapped layer is given"""
    last_RTD: Tensor
    """final hidden states, which the head turns into predictions"""

    def batches(self) -> Iterator["States"]:
        """The same in parts."""
        rows = max(1, TOKENS_AT_ONCE // self.ids_RT.shape[1])
        for parts in zip(*(x.split(rows) for x in (self.ids_RT, self.first_RTD, self.last_RTD)), strict=True):
            yield States(*parts)


@dc.dataclass(frozen=True, slots=True)
class Bed:
    """Everything that variants of the same layers share."""

    teacher: PreTrainedModel
    first: int
    """index of the first swapped layer"""
    train: dict[int, States]
    """by row length"""
    text: dict[int, States]
    """held-out text by row length"""
    needles: list[tuple[list[NeedleSample], States]]
    """one entry per length, kind and number of keys"""


def make_bed(
    teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, first: int, sizes: Sizes
) -> Bed:
    """Read and plant rows as the recipe says, each one document to the model, and run the teacher on them.

    Raises:
        DataError: text is missing, or too short for the rows.
    """
    train = {
        length: _rows(recipe, tokenizer, length, count) for length, count in zip(sizes.lengths, sizes.rows, strict=True)
    }
    longest = max(sizes.lengths)
    held_out = _rows(recipe, tokenizer, longest, 2 * sizes.text_rows, "valid")
    text, haystack = held_out[: sizes.text_rows], held_out[sizes.text_rows :].flatten().tolist()
    words = load_words(recipe.data.needles.words)
    groups = [
        group
        for kind, keys in sizes.needles
        for group in needle_samples(
            NeedleEval(lengths=list(sizes.lengths[1:]), samples=sizes.samples, kinds=[kind], keys=[keys]),  # type: ignore[list-item]
            haystack, tokenizer, words,
        )
    ]  # fmt: skip
    return Bed(
        teacher,
        first,
        {length: _states(teacher, ids, first) for length, ids in train.items()},
        {length: _states(teacher, text.view(-1, length), first) for length in sizes.lengths[1:]},
        [(group, _states(teacher, _tokens(group), first)) for group in groups],
    )


def arguments(student: PreTrainedModel, rows: int, length: int) -> dict[str, Any]:
    """What decoder layers are called with for rows of one document each, beside their input and rotation."""
    positions = torch.arange(length, device=student.device).expand(rows, -1)
    return {"position_ids": positions, "attention_mask": None, **converted_arguments(student, positions)}


def climb(student: PreTrainedModel, hidden_RTD: Tensor, first: int, given: dict[str, Any]) -> Tensor:
    """Final hidden states [R, T, D] from the input of layer `first` (Llama-shaped families)."""
    backbone: Any = student.base_model
    rotation = backbone.rotary_emb(hidden_RTD, given["position_ids"])
    for layer in decoder_layers(student)[first:]:
        hidden_RTD = layer(hidden_RTD, position_embeddings=rotation, **given)
    final: Tensor = backbone.norm(hidden_RTD)
    return final


def _rows(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, length: int, count: int, role: Any = "train") -> Tensor:
    source = recipe.data.train if role == "train" else recipe.data.valid
    reader = RowReader(source, tokenizer, length, recipe.data.seed, needles=recipe.data.needles, role=role)
    return stack(list(islice(reader.rows(), count)))["input_ids"].to(torch.int16)


def _tokens(samples: list[NeedleSample]) -> Tensor:
    return torch.tensor([sample.token_ids for sample in samples], dtype=torch.int16)


@torch.no_grad()
def _states(teacher: PreTrainedModel, ids_RT: Tensor, first: int) -> States:
    given: list[Tensor] = []
    handle = decoder_layers(teacher)[first].register_forward_pre_hook(lambda _, args: given.append(args[0]))
    final = []
    for part in ids_RT.split(max(1, TOKENS_AT_ONCE // ids_RT.shape[1])):
        own: Any = teacher.base_model(input_ids=part.long().to(teacher.device), use_cache=False)
        final.append(own.last_hidden_state)
    handle.remove()
    return States(ids_RT, torch.cat(given), torch.cat(final))
