"""What the benchmarks of real models build and choose, by hand."""

import random

import pytest
import torch
import torch.nn.functional as F

from benchmarks.real import programs
from benchmarks.real.heads import SINKS, WINDOW, Heads, greedy, ranked, refined, whole_layers
from benchmarks.real.needles import RULER, TASKS, Judge
from tests.modeling.tiny import tiny_model


def judge() -> Judge:
    """A judge whose tokens are characters, without a model."""
    made = object.__new__(Judge)
    made.device, made.seed, made.words = "cpu", 0, ("acorn", "birch", "cedar", "daisy", "elder")
    made.tokenizer = lambda text, add_special_tokens: {"input_ids": [ord(letter) for letter in text]}
    return made


@pytest.mark.parametrize("task", TASKS)
def test_a_row_has_its_length_its_fact_and_its_answer(task: str) -> None:
    text = [ord("x")] * 5000
    for seed in range(20):
        row = judge().row(task, 1500, random.Random(seed), RULER, [text])
        letters = "".join(map(chr, row.ids))
        answer, fact = letters[-row.answer :], letters[row.fact.start : row.fact.stop]
        assert len(row.ids) == 1500
        assert letters.endswith(f" is {answer}")
        assert fact.endswith(f" is: {answer}.")
        key = fact.removeprefix(" One of the special magic numbers for ").split(" ")[0]
        assert f"The special magic number for {key} mentioned" in letters[-120:]
        assert letters.count("One of the special magic numbers") == TASKS[task]


@torch.no_grad()
def test_heads_that_are_kept_see_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads are the teacher; one head of a layer is the teacher's beside others behind an explicit mask."""
    model = tiny_model("llama", ("full",) * 4, dtype=torch.float64)
    ids = torch.randint(2, 90, (1, WINDOW + 40))
    expected = model(ids, use_cache=False).logits
    heads = Heads(model)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    with heads.only([(2, 1)]):
        found = model(ids, use_cache=False).logits
    far = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    window = (far >= 0) & ((far < WINDOW) | (torch.arange(ids.shape[1]) < SINKS))
    masks = torch.stack([window, window, far >= 0, far >= 0])  # of four query heads

    def attend(module, q, k, v, *_, **__):
        mask = masks if module.layer_idx == 2 else window
        each = (x.repeat_interleave(2, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, *each, attn_mask=mask).transpose(1, 2), None

    monkeypatch.setattr(heads, "_attend", attend)
    from transformers import AttentionInterface

    AttentionInterface.register("kept_heads", attend)
    torch.testing.assert_close(model(ids, use_cache=False).logits, found)
    assert not torch.allclose(found, expected)


def test_choices_follow_what_they_cost() -> None:
    mass = torch.tensor([[0.1, 0.9], [0.8, 0.3]])
    assert ranked(mass) == [(0, 1), (1, 0), (1, 1), (0, 0)]
    assert whole_layers(mass) == [(1, 0), (1, 1), (0, 0), (0, 1)]
    worth = {(0, 0): 5.0, (0, 1): 1.0, (1, 0): 2.0, (1, 1): 4.0}
    cost = lambda kept: -sum(worth[head] for head in kept)  # noqa: E731
    assert greedy(cost, list(worth), 2) == [(0, 0), (1, 1)]
    assert refined(cost, ranked(mass), 2) == [(0, 1), (0, 0)]


PROBLEM = {
    "prompt": 'import math\n\n\ndef check(n):\n    """Whether n is square."""\n',
    "test": "def check(candidate):\n    assert candidate(9)\n    assert not candidate(8)\n",
    "entry_point": "check",
}


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("Sure:\n```python\ndef check(n):\n    return math.isqrt(n) ** 2 == n\n```\nDone.", True),
        ("```python\n    return math.isqrt(n) ** 2 == n\n", True),  # the body alone, cut off
        ("def check(n):\n    return math.isqrt(n) ** 2 == n", True),
        ("```python\ndef check(n):\n    return True\n```", False),
        ("```python\ndef check(n):\n    while True: pass\n```", False),
        ("I cannot.", False),
    ],
)
def test_a_program_passes_where_its_tests_do(answer: str, passed: bool) -> None:
    assert programs.passes(programs.program(PROBLEM, answer), seconds=2) == passed
