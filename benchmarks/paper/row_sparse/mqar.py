"""Multi-query associative recall, bit for bit as the published generator (zoology) makes it.

A row holds K key-value pairs, k1 v1 k2 v2 ..., then query slots two tokens apart. Each key stands in one slot, early
slots much preferred; the label there is the key's value, which is not written. Everything else is filler.

Shape letters: N examples, T tokens of a row, K pairs.
"""

import dataclasses as dc

import numpy as np
import torch
from torch import Tensor

from sse_convert.errors import UsageError

NO_LABEL = -100
"""label of a position that asks nothing"""
POWER_A = 0.01
"""slot i is drawn with weight (i + 1) ** (POWER_A - 1); 1 would be uniform"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class MQAR:
    """One setting of the task."""

    length: int
    """tokens of a row, even, at least four per pair"""
    pairs: int
    """key-value pairs of a row, each asked for once"""
    vocab_size: int = 8192
    """0 is the filler, keys are the rest of the lower half, values the upper half; more than `length`"""
    noise: bool = False
    """filler is a random token each time, keys and values included (the published default), not 0"""
    power_a: float = POWER_A
    """how much early slots are preferred"""

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise UsageError(f"MQAR with {self.pairs} pairs", expected="at least 1")
        if self.length % 2 or self.length < 4 * self.pairs:
            raise UsageError(
                f"MQAR rows of {self.length} tokens with {self.pairs} pairs",
                expected=f"an even length of at least {4 * self.pairs}, two tokens per pair and per query",
                fix="use longer rows or fewer pairs",
            )
        if self.vocab_size <= self.length or self.vocab_size // 2 <= self.pairs:
            raise UsageError(
                f"MQAR vocabulary of {self.vocab_size} for rows of {self.length} tokens with {self.pairs} pairs",
                expected=f"more than {max(self.length, 2 * self.pairs + 1)}",
            )


@dc.dataclass(frozen=True, slots=True)
class Examples:
    """Rows of the task."""

    inputs: Tensor
    """int64 [N, T]"""
    labels: Tensor
    """int64 [N, T], the value at query positions, else `NO_LABEL`"""

    def queries(self) -> tuple[Tensor, Tensor]:
        """Where the queries stand, int64 [N, K] in order, and the value each asks for, [N, K]."""
        asked = self.labels != NO_LABEL
        positions = asked.nonzero()[:, 1].view(len(self.labels), -1)
        return positions, self.labels.gather(1, positions)

    def distances(self) -> Tensor:
        """Tokens from each key to its query, int64 [N, K], queries in order."""
        positions, values = self.queries()
        pairs = positions.shape[1]
        written = self.inputs[:, 1 : 2 * pairs : 2]
        pair = (values[:, :, None] == written[:, None]).int().argmax(2)
        return positions - 2 * pair


def mqar(task: MQAR, num_examples: int, seed: int) -> Examples:
    """Draw rows; the same numbers in the same order as the published generator, given the same seed.

    Noise is drawn by torch.randint from a generator seeded with `seed`, where the published code uses torch's global
    one.

    Args:
        task: the setting.
        num_examples: N.
        seed: 0 to 2 ** 32 - 1.

    Source: arXiv:2312.04927 and HazyResearch/zoology, multiquery_ar.
    """
    T, K, half = task.length, task.pairs, task.vocab_size // 2
    slots = (T - 2 * K) // 2
    weight = task.power_a * np.arange(1, slots + 1) ** (task.power_a - 1)
    weight = weight / weight.sum()
    rng = np.random.RandomState(seed)
    keys = np.stack([rng.choice(np.arange(1, half), K, replace=False) for _ in range(num_examples)])
    values = np.stack([rng.choice(np.arange(half, task.vocab_size), K, replace=False) for _ in range(num_examples)])
    chosen = np.stack([rng.choice(slots, K, replace=False, p=weight) for _ in range(num_examples)])
    inputs = np.zeros((num_examples, T), dtype=np.int64)
    labels = np.full((num_examples, T), NO_LABEL, dtype=np.int64)
    inputs[:, 0 : 2 * K : 2], inputs[:, 1 : 2 * K : 2] = keys, values
    np.put_along_axis(inputs, 2 * K + 2 * chosen, keys, axis=1)
    np.put_along_axis(labels, 2 * K + 2 * chosen, values, axis=1)
    examples = Examples(torch.from_numpy(inputs), torch.from_numpy(labels))
    return with_noise(examples, task.vocab_size, seed) if task.noise else examples


def with_noise(examples: Examples, vocab_size: int, seed: int) -> Examples:
    """The same rows with random tokens for filler."""
    noise = torch.randint(vocab_size, examples.inputs.shape, generator=torch.Generator().manual_seed(seed))
    return Examples(torch.where(examples.inputs == 0, noise, examples.inputs), examples.labels)


def segment_seeds(seed: int, train: int, test: int) -> tuple[list[int], list[int]]:
    """Seeds of the training and of the test segments of a published configuration (theirs is 123)."""
    rng = np.random.RandomState(seed)
    return rng.randint(0, 2**31, train).tolist(), rng.randint(2**31, 2**32, test, dtype=np.int64).tolist()
