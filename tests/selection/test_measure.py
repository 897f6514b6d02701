"""A measurement is what the evaluation measures; and what was measured is not measured again."""

import dataclasses as dc
import math

import pytest
import torch

from sse_convert.checkpoints.load_model import load_model
from sse_convert.data.needle import load_words
from sse_convert.errors import CheckpointError
from sse_convert.evaluation.perplexity import held_out_loss, make_windows
from sse_convert.evaluation.retrieval import needle_samples, needle_score
from sse_convert.mixers import SlidingMixer
from sse_convert.recipe.schema import NeedleEval
from sse_convert.selection.layer_swap import Swap
from sse_convert.selection.measure import Meter, passes, read_measurements
from sse_convert.selection.probe import Rows
from tests.selection.conftest import RETRIEVES, TEACHER


@pytest.fixture(scope="module")
def swap():
    model = load_model(TEACHER, dtype=torch.float32, device="cpu")
    return Swap(model, SlidingMixer(window=32, sinks=4))


@pytest.fixture
def meter(swap, probe, tmp_path):
    return Meter(lambda: swap, probe, range(6), tmp_path / "m.csv")


def test_the_teacher_as_the_evaluation_sees_it(meter, swap, probe, tokenizer):
    found = meter.measure(range(6))
    assert found.text_kl == 0
    assert found.recall_kl == 0
    assert found.text_loss == pytest.approx(
        held_out_loss(swap.model, make_windows(probe.text.ids, tokenizer)).loss, rel=1e-6
    )
    assert found.tokens == 2 * 256 + 6 * 256


def test_replaced_layers_as_the_evaluation_sees_them(meter, swap, probe, tokenizer):
    kept = (0, 2, RETRIEVES)
    found = meter.measure(kept)
    with swap.keeping(kept) as model, torch.no_grad():
        assert found.text_loss == pytest.approx(
            held_out_loss(model, make_windows(probe.text.ids, tokenizer)).loss, rel=1e-6
        )
        swapped = model(probe.text.ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    teacher = swap.model(probe.text.ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    kl = torch.nn.functional.kl_div(swapped, teacher, reduction="none", log_target=True).sum(-1).mean()
    assert found.text_kl == pytest.approx(kl.item(), rel=1e-4)
    assert found.text_kl > 0.001


def test_needle_accuracy_is_exact_answers(swap, probe, tokenizer, tmp_path):
    haystack = probe.text.ids.flatten().tolist() * 2
    (samples,) = needle_samples(NeedleEval(lengths=[256], samples=10, keys=[4]), haystack, tokenizer, load_words())
    asked = torch.zeros(10, 255, dtype=torch.bool)
    for row, sample in zip(asked, samples, strict=True):
        row[-sample.answer_len :] = True
    rows = Rows(torch.tensor([sample.token_ids for sample in samples]), asked)
    meter = Meter(lambda: swap, dc.replace(probe, recall={"needle": rows}), range(6), tmp_path / "m.csv")
    hits = []
    for kept in (range(6), (0, RETRIEVES), (RETRIEVES, 5), ()):
        with swap.keeping(kept) as model:
            hits.append(needle_score(model, samples).total.correct)
        assert meter.measure(kept).recall_accuracy == pytest.approx(hits[-1] / 10)
    assert hits[0] > 8
    assert hits[-1] < 2


def test_copies_count_by_token(meter):
    meter.recall = "copy"
    found = meter.measure(range(6))
    assert found.probe == "copy"
    assert 0 < found.recall_accuracy < 1
    assert not math.isclose(found.recall_accuracy * 6, round(found.recall_accuracy * 6))


def test_a_known_set_is_not_measured_again(meter, swap, probe, tmp_path):
    found = [meter.measure(kept) for kept in ((1, RETRIEVES), range(6))]
    assert read_measurements(tmp_path / "m.csv") == found

    def fail():
        raise AssertionError("the model was loaded")

    later = Meter(fail, probe, range(6), tmp_path / "m.csv")
    with later.costing() as cost:
        assert later.measure([RETRIEVES, 1]) == found[0]
        assert later.measure(range(6)) == found[1]
        later.measure(range(6))
    assert cost.tokens == 2 * found[0].tokens
    with pytest.raises(AssertionError):
        later.measure((2,))


def test_rows_are_cut_into_passes():
    rows = Rows(torch.zeros(9, 1024, dtype=torch.long), torch.ones(9, 1023, dtype=torch.bool))
    assert [len(part.ids) for part in passes(rows, torch.device("cpu"))] == [4, 4, 1]
    assert [len(part.ids) for part in passes(Rows(rows.ids.repeat(1, 9), rows.asked), torch.device("cpu"))] == [1] * 9


def test_a_damaged_memory_is_refused_by_name(tmp_path):
    (tmp_path / "m.csv").write_text("probe,kept\nneedle,1 x\n")
    with pytest.raises(CheckpointError, match=r"m\.csv is damaged"):
        read_measurements(tmp_path / "m.csv")
