"""Every scorer on hand-made answers in the form of the published set it is for."""

import time
from typing import get_args

import pytest

from sse_convert.evaluation.scorers import SCORERS, score
from sse_convert.recipe.schema import Scorer

CASES = [
    # AIME, MATH500 and AMC
    ("boxed", r"We add. \boxed{204}", ["204"], 1),
    ("boxed", r"<think>\boxed{3}</think> \boxed{\dfrac{14}{3}}", [r"\frac{14}{3}"], 1),
    ("boxed", r"so \boxed{142}", ["142.0"], 1),
    ("boxed", "the answer is 204", ["204"], 0),
    ("boxed", r"\boxed{204}</think> I do not know", ["204"], 0),
    # GSM8K
    ("number", "She sells 9 eggs.\n#### 18", ["Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 18"], 1),
    ("number", "It costs $1,800.00 in total.", ["#### 1,800"], 1),
    ("number", "#### 17\nand 18", ["#### 18"], 0),
    ("number", "none", ["#### 18"], 0),
    # LongBench v2
    ("choice", "The correct answer is (B)", ["B"], 1),
    ("choice", "**The correct answer is (C).** A was close", ["C"], 1),
    ("choice", "The answer is a matter of taste, so (D)", ["D"], 1),
    ("choice", "Answer: A", ["A"], 1),
    ("choice", r"\boxed{\text{B}}", ["B"], 1),
    ("choice", "B. because", ["B"], 1),
    ("choice", "The correct answer is (B)", ["A"], 0),
    ("choice", "", ["A"], 0),
    # NoLiMa and HELMET's recall
    ("contains", "The character is Yuki, I think.", ["Yuki"], 1),
    ("contains", "Megan", ["Yuki"], 0),
    ("contains", "In nineteen-fifty.", ["1950", "nineteen fifty", "nineteenfifty"], 1),
    # short answers
    ("exact", "Final Answer: The Eiffel Tower.\nIt is high.", ["Eiffel tower"], 1),
    ("exact", "Eiffel Tower in Paris", ["Eiffel tower"], 0),
    ("exact", "", ["The"], 0),
    ("exact", "A", ["a"], 1),
    ("contains", "nothing of it", ["%"], 0),
]


@pytest.mark.parametrize(("scorer", "text", "answers", "expected"), CASES)
def test_hand_made_answers(scorer, text, answers, expected):
    assert score(scorer, text, [(answer,) for answer in answers]) == expected


def test_every_scorer_is_in_the_table_and_has_a_case():
    assert set(SCORERS) == set(get_args(Scorer))
    assert {case[0] for case in CASES} == set(SCORERS)


def test_a_text_without_an_answer_is_read_in_time_linear_in_its_length():
    seconds = []
    for words in (2**9, 2**12):
        began = time.process_time()
        assert score("exact", "on and " * words, [("x",)]) == 0
        seconds.append(time.process_time() - began)
    assert seconds[1] < 32 * max(seconds[0], 0.01), "eight times the text"
