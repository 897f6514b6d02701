import random
from pathlib import Path

import pytest
import torch

from sse_convert.checkpoints.load_model import load_model, load_tokenizer
from sse_convert.data import needle
from sse_convert.evaluation.retrieval import needle_samples, needle_score
from sse_convert.recipe.schema import NeedleEval

WORDS = needle.load_words()


class Teller(torch.nn.Module):
    """A model that repeats the row it is shown, except for chosen rows, where one answer token is wrong."""

    def __init__(self, vocab_size, wrong):
        super().__init__()
        self.vocab_size, self.wrong, self.device = vocab_size, wrong, torch.device("cpu")

    def forward(self, input_ids, use_cache, logits_to_keep):
        told = torch.roll(input_ids, -1, 1)
        for row, back in self.wrong.items():
            told[row, -1 - back] += 1
        logits = torch.nn.functional.one_hot(told, self.vocab_size).float()
        return type("Out", (), {"logits": logits[:, -logits_to_keep:]})


@pytest.fixture(scope="module")
def samples(tokenizer, haystack):
    settings = NeedleEval(lengths=[400], samples=10, kinds=["code"], keys=[2])
    (group,) = needle_samples(settings, haystack, tokenizer, WORDS)
    return group


def test_one_wrong_answer_token_is_a_miss_and_a_wrong_question_token_is_not(tokenizer, samples):
    size = len(tokenizer) + 1
    assert needle_score(Teller(size, {}), samples).total.value == 1.0
    lens = [sample.answer_len for sample in samples]
    wrong = {0: 1, 3: lens[3], 5: lens[5] + 1}
    score = needle_score(Teller(size, wrong), samples, batch_tokens=10**6)
    assert (score.total.correct, score.total.samples) == (8, 10)
    assert [d.correct for d in score.depths] == [1, 2, 2, 1, 2]


def test_depths_are_spread_evenly(samples):
    assert [sum(int(s.depth * 5) == i or (i == 4 and s.depth == 1) for s in samples) for i in range(5)] == [2] * 5


def test_score_equals_greedy_generation(tokenizer, haystack, llama):
    """A model that copies: random weights never answer right, so the answer is replaced by what the model says."""
    rng = random.Random(0)
    samples = []
    for i in range(6):
        sample = needle.evaluation_sample(rng, haystack, 300, kind="number", keys=1, tokenizer=tokenizer, words=WORDS)
        prompt = torch.tensor([sample.token_ids[: -sample.answer_len]])
        told = llama.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=sample.answer_len,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
        if i % 2:
            told[-1 - i] = (told[-1 - i] + 1) % len(tokenizer)
        samples.append(needle.NeedleSample("number", 1, sample.depth, tuple(told), sample.answer_len))
    score = needle_score(llama, samples, batch_tokens=900)
    assert (score.total.correct, score.total.samples) == (3, 6)


def test_groups_do_not_depend_on_each_other(tokenizer, haystack):
    def texts(**changes):
        settings = NeedleEval(**{"lengths": [300], "samples": 3, "kinds": ["number"], "keys": [1], **changes})
        return {
            (len(g[0].token_ids), g[0].kind, g[0].keys): [s.token_ids for s in g]
            for g in needle_samples(settings, haystack, tokenizer, WORDS)
        }

    alone = texts()
    more = texts(lengths=[200, 300], kinds=["word", "number"], keys=[2, 1])
    assert len(more) == 8
    assert more[300, "number", 1] == alone[300, "number", 1]


def test_report_form(tokenizer, samples):
    data = needle_score(Teller(len(tokenizer) + 1, {}), samples).to_dict()
    assert {k: data[k] for k in ("kind", "keys", "length", "samples", "accuracy", "high")} == {
        "kind": "code",
        "keys": 2,
        "length": 400,
        "samples": 10,
        "accuracy": 1.0,
        "high": 1.0,
    }
    assert [(d["start"], d["samples"]) for d in data["depths"]] == [(0.0, 2), (0.2, 2), (0.4, 2), (0.6, 2), (0.8, 2)]


@pytest.mark.shared
@pytest.mark.slow
def test_a_teacher_trained_on_this_form_answers_keys_it_was_never_asked_for():
    shared = Path(__file__).resolve().parents[3] / "shared"
    folder = shared / "checkpoints" / "teacher-qwen3-32m"
    model, tokenizer = load_model(folder, device="cpu", dtype=torch.float32), load_tokenizer(folder)
    text = (shared / "text" / "tinystories" / "valid.txt").read_text()[:20_000]
    haystack = tokenizer(text.replace("<|endoftext|>", ""))["input_ids"]
    settings = NeedleEval(lengths=[512], samples=3, kinds=["number", "word", "code"], keys=[4])
    words = needle.load_words(folder / "needle_words.json")
    scores = [needle_score(model, group) for group in needle_samples(settings, haystack, tokenizer, words)]
    assert [score.total.correct for score in scores] == [3, 3, 3]
