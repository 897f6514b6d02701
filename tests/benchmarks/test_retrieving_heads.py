"""Where the benchmark of retrieving heads looks, by hand."""

import random

import torch

from benchmarks.quality import retrieving_heads
from benchmarks.quality.retrieving_heads import earlier_places, repeated_rows
from sse_convert.selection.recall_probes import RecallMaterial, Rows


def test_a_passage_of_the_first_half_comes_again(monkeypatch):
    monkeypatch.setattr(retrieving_heads, "PASSAGE", 16)
    haystack = random.Random(0).sample(range(1000), 500)
    rows = repeated_rows(RecallMaterial(haystack, None, None, samples=3, length=100, seed=0))
    assert rows.ids.shape == (3, 100)
    for ids, places in zip(rows.ids.tolist(), earlier_places(rows), strict=True):
        assert len(places) == 8
        assert [at for at, _ in places] == list(range(91, 99))
        for at, to in places:
            assert ids[at + 1] == ids[to]
            assert to < 50


def test_the_last_earlier_copy_counts_and_rows_without_one_are_left_out():
    ids = torch.tensor([[1, 7, 8, 2, 7, 8, 3, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    asked = torch.zeros(2, 8, dtype=torch.bool)
    asked[:, -2:] = True
    assert earlier_places(Rows(ids, asked)) == [[(6, 4), (7, 5)], []]
