"""Every scorer on hand-made answers in the form of the published set it is for."""

import builtins
import time
from difflib import SequenceMatcher
from typing import get_args

import pytest

from sse_convert.errors import DependencyError
from sse_convert.evaluation.scorers import SCORERS, listed, score
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
    # Qampari
    ("coverage", "Ratatouille, Up", [["Ratatouille"], ["Up", "Up (film)"], ["Coco"]], 2 / 3),
    # HELMET's and LOFT's questions
    ("f1", "Answer: the Eiffel Tower in Paris", ["Eiffel Tower", "Tour Eiffel"], 2 * 2 / (4 + 2)),
    ("f1", "", ["Paris"], 0),
    ("exact", "Final Answer: The Eiffel Tower.\nIt is high.", ["Eiffel tower"], 1),
    ("exact", "Eiffel Tower in Paris", ["Eiffel tower"], 0),
    ("exact", "", ["The"], 0),
    ("exact", "A", ["a"], 1),
    ("contains", "nothing of it", ["%"], 0),
    # Quest, Qampari and Table Query in LOFT's form
    ("list_f1", "Final Answer: ['Up', 'Coco', 'Brave']", [["Up"], ["Coco"]], 2 * 2 / (3 + 2)),
    ("list_f1", "- Up\n- the Coco\n", [["Up"], ["Coco"]], 1),
    ("list_f1", "Up, Coco", [["Up", "Up (film)"], ["Coco"]], 1),
    ("list_f1", "Up (film), Up", [["Up", "Up (film)"], ["Coco"]], 2 / 4),
    ("list_f1", "Final Answer: []", [["Up"]], 0),
    ("list_exact", "Final Answer: [3, 'Paris']", ["3", "Paris"], 1),
    ("list_exact", "Final Answer: ['Paris', 'Rome', '3']", ["3", "Paris"], 0),
    ("ratio", "xY3abcd", ["xY3abce"], SequenceMatcher(None, "abcd", "abce").ratio()),
    ("ratio", "abcd", ["xY3abcd"], 0),
    ("ratio", "<think>I see.</think>\n\nxY3abcd", ["xY3abcd"], 1),
]


@pytest.mark.parametrize(("scorer", "text", "answers", "expected"), CASES)
def test_hand_made_answers(scorer, text, answers, expected):
    spelled = [tuple(answer) if isinstance(answer, list) else (answer,) for answer in answers]
    prefix = "xY3" if scorer == "ratio" else ""
    assert score(scorer, text, spelled, prefix) == pytest.approx(expected)


def test_rouge():
    pytest.importorskip("rouge_score", reason="needs the extra eval")
    assert score("rouge", "the cat sat", [("the cat sat on the mat",)]) == pytest.approx(2 * 1 * 0.5 / 1.5)


def test_rouge_without_its_package_names_the_extra(monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("rouge_score"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(DependencyError, match="rouge-score"):
        score("rouge", "a", [("a",)])


def test_every_scorer_is_in_the_table_and_has_a_case():
    assert set(SCORERS) == set(get_args(Scorer))
    assert {case[0] for case in CASES} | {"rouge"} == set(SCORERS)


def test_lists_are_read_as_models_write_them():
    assert listed("I think so.\nFinal Answer: ['a, b', \"c\"]") == ["a, b", "c"]
    assert listed("1. one\n2) two\n* three") == ["one", "two", "three"]
    assert listed("Answer: [Up, Coco]") == ["Up", "Coco"]
    assert listed("[{{1}}, {{2}: 3}]") == ["{{1}}", "{{2}: 3}"]


def test_a_text_without_an_answer_is_read_in_time_linear_in_its_length():
    seconds = []
    for words in (2**9, 2**12):
        began = time.process_time()
        assert score("exact", "on and " * words, [("x",)]) == 0
        seconds.append(time.process_time() - began)
    assert seconds[1] < 32 * max(seconds[0], 0.01), "eight times the text"
