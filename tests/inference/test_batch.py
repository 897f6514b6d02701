"""Batches of continuations: greedy as transformers', samples that are a row's own and follow the distribution."""

import pytest
import torch

from sse_convert.inference.batch import continue_rows
from sse_convert.inference.sampling import Sampling
from sse_convert.inference.seeded_choice import SeededChoice
from tests.modeling.tiny import HEADS, LAYOUT, tiny_model, tiny_source

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [20] * 11, [30]]
OWN = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 2, "suppress_tokens": list(range(2, 60))}
"""settings of a model's generation that change what it writes"""
SAMPLED = Sampling(max_new_tokens=9, temperature=1.0, top_p=0.7)


@pytest.fixture(scope="module", params=["teacher", "sse", "beside"])
def model(request):
    layers = {"sse": LAYOUT, "beside": HEADS}.get(request.param)
    made = tiny_source("qwen3") if layers is None else tiny_model("qwen3", layers)
    made.generation_config.eos_token_id = [3, 50]
    return made.double()


def generated(model, prompt, **options):
    row = torch.tensor([prompt])
    out = model.generate(row, attention_mask=torch.ones_like(row), pad_token_id=0, max_new_tokens=9, **options)
    return out[0, len(prompt) :].tolist()


def test_greedy_batches_write_what_generate_writes_row_by_row(model):
    assert continue_rows(model, PROMPTS, Sampling(max_new_tokens=9)) == [
        generated(model, prompt, do_sample=False) for prompt in PROMPTS
    ]


def test_samples_of_a_batch_are_those_of_single_rows(model):
    together = continue_rows(model, PROMPTS, SAMPLED, seeds=[3, 4, 5, 6])
    alone = [continue_rows(model, [row], SAMPLED, seeds=[3 + i])[0] for i, row in enumerate(PROMPTS)]
    assert together == alone
    assert continue_rows(model, PROMPTS, SAMPLED, seeds=[7, 8, 9, 10]) != together


def test_rows_end_with_their_end_token(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    free = continue_rows(model, PROMPTS[:1], SAMPLED, seeds=[1])[0]
    assert len(free) == 9
    monkeypatch.setattr(model.generation_config, "eos_token_id", free[3])
    stopped = continue_rows(model, [PROMPTS[0], PROMPTS[1]], SAMPLED, seeds=[1, 2])
    assert stopped[0] == free[: free.index(free[3]) + 1]


def test_the_model_s_own_settings_do_not_count(model, monkeypatch):
    free = continue_rows(model, PROMPTS, Sampling(max_new_tokens=9))
    for name, value in OWN.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert continue_rows(model, PROMPTS, Sampling(max_new_tokens=9)) == free


def test_draws_follow_the_warped_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
    choose = SeededChoice(Sampling(max_new_tokens=1, temperature=2.0, top_p=0.85), range(4000), 0, logits.device)
    drawn = choose(torch.zeros(4000, 0, dtype=torch.long), logits).argmax(-1).bincount(minlength=4) / 4000
    expected = torch.softmax(logits[0, :3] / 2, -1)  # the fourth is beyond the likeliest that make 85%
    assert drawn[3] == 0
    assert torch.allclose(drawn[:3], expected, atol=4 * 0.5 / 4000**0.5)
