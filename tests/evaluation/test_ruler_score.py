from types import SimpleNamespace

import pytest
import torch

from sse_convert.checkpoints.load_model import load_model
from sse_convert.evaluation.intervals import Accuracy, wilson
from sse_convert.evaluation.ruler_rows import NEW_TOKENS, RulerSample, ruler_samples
from sse_convert.evaluation.ruler_score import RulerScore, answer, ruler_score, string_match_all
from sse_convert.evaluation.tables import ruler_lines
from sse_convert.recipe.schema import RulerEval
from tests.evaluation.cases import MATERIAL


@pytest.fixture(scope="module")
def samples(tokenizer):
    settings = RulerEval(tasks=["niah_multiquery"], lengths=[1600], samples=1)
    (group,) = ruler_samples(settings, tokenizer, MATERIAL)
    short = RulerSample("niah_multiquery", 1600, None, group[0].token_ids[100:], *(getattr(group[0], n) for n in PARTS))
    return [*group, short]  # of two lengths, so that a batch is padded


PARTS = ("answers", "right", "wrong")


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        ("the number is 1234567.", ("1234567",), 1),
        ("123456", ("1234567",), 0),
        ("ABCD-ef and nothing", ("abcd-EF",), 1),
        ("1, 2 and 3", ("1", "2", "3", "4"), 0.75),
        ("12\x0034", ("1234",), 0),
        ("", ("1",), 0),
    ],
)
def test_string_match_all(text, answers, score):
    assert string_match_all(text, answers) == score


@pytest.fixture(scope="module")
def models(teacher_folder, student_folder):
    return [load_model(folder, device="cpu", dtype=torch.float64) for folder in (teacher_folder, student_folder)]


def test_a_padded_batch_writes_what_single_rows_do(models, tokenizer, samples):
    for model in models:
        together = answer(model, tokenizer, samples)
        assert together == [answer(model, tokenizer, [sample])[0] for sample in samples]


def test_greedy_answers_are_those_of_a_step_by_step_argmax(models, tokenizer, samples):
    row = torch.tensor([samples[-1].token_ids])
    for _ in range(NEW_TOKENS):
        row = torch.cat([row, models[1](row, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        if row[0, -1] == models[1].generation_config.eos_token_id:
            break
    text = tokenizer.decode(row[0, len(samples[-1].token_ids) :], skip_special_tokens=True)
    assert answer(models[1], tokenizer, samples[-1:]) == [text]


@torch.no_grad()
def dense_share(model, sample):
    """Share of the answers that beat all wrong values, each scored in a row of its own."""

    def score(value):
        row = torch.tensor([[*sample.token_ids, *value]])
        logs = torch.log_softmax(model(row, use_cache=False).logits, -1)[0, len(sample.token_ids) - 1 : -1]
        return logs.gather(1, torch.tensor(value)[:, None]).sum().item()

    wrong = max(map(score, sample.wrong))
    return sum(score(value) > wrong for value in sample.right) / len(sample.right)


def test_likelihood_equals_scoring_every_value_in_its_own_row(models, tokenizer, samples):
    for model in models:
        result = ruler_score(model, tokenizer, samples)
        expected = sum(dense_share(model, sample) for sample in samples)
        assert result.likelihood == Accuracy(pytest.approx(expected), len(samples))


class Parrot(torch.nn.Module):
    """Writes the answers of the rows it is given, as far as it was told to."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, said):
        super().__init__()
        self.config = self.generation_config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id, model_type="llama")
        self._tokenizer, self._said = tokenizer, iter(said)

    def generate(self, rows, **options):
        told = [self._tokenizer(next(self._said)).input_ids for _ in rows]
        longest = max(map(len, told))
        new = [ids + [self._tokenizer.eos_token_id] * (longest - len(ids)) for ids in told]
        return torch.cat([rows, torch.tensor(new)], 1)


def test_scores_count_parts_and_depths(tokenizer):
    (single,) = ruler_samples(RulerEval(tasks=["niah_single_1"], lengths=[1600], samples=4), tokenizer, MATERIAL)
    said = [" " + single[0].answers[0], " none", f" It is {single[2].answers[0]}.", " 7"]
    score = ruler_score(Parrot(tokenizer, said), tokenizer, single, likelihood=False)
    assert score.generated == Accuracy(2, 4)
    assert score.likelihood is None
    assert sum(depth.samples for depth in score.depths) == 4
    data = score.to_dict()
    assert (data["low"], data["high"]) == wilson(2, 4)
    assert [d["start"] for d in data["depths"]] == [0.0, 0.2, 0.4, 0.6, 0.8]

    (several,) = ruler_samples(RulerEval(tasks=["niah_multivalue"], lengths=[1600], samples=2), tokenizer, MATERIAL)
    said = [" ".join(several[0].answers), several[1].answers[3]]
    score = ruler_score(Parrot(tokenizer, said), tokenizer, several, likelihood=False)
    assert score.generated == Accuracy(1.25, 2)
    assert score.depths == ()


def test_the_table_has_the_mean_over_tasks():
    def scores(hits):
        return [
            RulerScore(name, 512, Accuracy(hit, 10), Accuracy(5, 10), ())
            for name, hit in zip(("niah_single_1", "niah_single_2"), hits, strict=True)
        ]

    lines = ruler_lines(scores([10, 4]), scores([9, 0]))
    assert lines[-1].split()[:4] == ["512", "mean", "20", "70.0%"]
    assert "45.0%" in lines[-1]
    assert ruler_lines([], []) == []
