"""The recall task against the published generator's own output, and its parts against what they say."""

import hashlib

import pytest
import torch

from benchmarks.paper.row_sparse.mqar import MQAR, NO_LABEL, Examples, mqar, segment_seeds, with_noise
from sse_convert.errors import UsageError

PUBLISHED = {
    (64, 4): "99f79f3db83aca0a",
    (64, 16): "7be2846015183d53",
    (128, 8): "d1e8459d8e354ab6",
    (256, 64): "61e2749b7da206cc",
    (512, 128): "34febd3c6e28f6a2",
}
"""(length, pairs) to the first digits of sha256(inputs, labels) of 200 published examples: vocabulary 8192, seed 123"""


def digest(examples: Examples) -> str:
    data = examples.inputs.numpy().tobytes() + examples.labels.numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize(("length", "pairs"), PUBLISHED)
def test_rows_are_the_published_ones_bit_for_bit(length: int, pairs: int) -> None:
    assert digest(mqar(MQAR(length=length, pairs=pairs), 200, 123)) == PUBLISHED[length, pairs]


@pytest.mark.smoke
def test_a_small_row_is_the_published_one() -> None:
    examples = mqar(MQAR(length=16, pairs=2, vocab_size=20), 1, 0)
    assert examples.inputs.tolist() == [[8, 13, 3, 11, 0, 0, 3, 0, 0, 0, 8, 0, 0, 0, 0, 0]]
    assert examples.labels.tolist() == [[NO_LABEL] * 6 + [11] + [NO_LABEL] * 3 + [13] + [NO_LABEL] * 5]
    positions, values = examples.queries()
    assert positions.tolist() == [[6, 10]]
    assert values.tolist() == [[11, 13]]
    assert examples.distances().tolist() == [[4, 10]]


def test_segment_seeds_are_the_published_ones() -> None:
    assert segment_seeds(123, 2, 2) == ([843828734, 914636141], [3376442750, 3987752258])


def test_noise_replaces_the_filler_and_nothing_else() -> None:
    task = MQAR(length=64, pairs=4, vocab_size=100, noise=True)
    plain, noisy = mqar(MQAR(length=64, pairs=4, vocab_size=100), 50, 7), mqar(task, 50, 7)
    filler = plain.inputs == 0
    assert torch.equal(plain.labels, noisy.labels)
    assert torch.equal(plain.inputs[~filler], noisy.inputs[~filler])
    drawn = noisy.inputs[filler]
    assert drawn.min() >= 0
    assert drawn.max() < 100
    assert len(drawn.unique()) == 100
    assert torch.equal(with_noise(plain, 100, 7).inputs, noisy.inputs)
    assert torch.equal(plain.distances(), noisy.distances())


def test_each_key_is_asked_once_for_its_own_value() -> None:
    examples = mqar(MQAR(length=40, pairs=8, vocab_size=60), 30, 3)
    positions, values = examples.queries()
    for row, asked, answers, distances in zip(examples.inputs, positions, values, examples.distances(), strict=True):
        pairs = dict(row[:16].view(8, 2).tolist())
        assert len(pairs) == 8
        assert sorted(row[asked].tolist()) == sorted(pairs)
        assert [pairs[key] for key in row[asked].tolist()] == answers.tolist()
        assert row[asked - distances].tolist() == row[asked].tolist()
        assert all(0 < key < 30 <= value < 60 for key, value in pairs.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 64, "pairs": 0}, "0 pairs"),
        ({"length": 63, "pairs": 4}, "an even length of at least 16"),
        ({"length": 12, "pairs": 4}, "an even length of at least 16"),
        ({"length": 64, "pairs": 4, "vocab_size": 64}, "more than 64"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MQAR(**settings)
