"""Answers as the published sets write them: AIME's integers, AMC's decimals, MATH's LaTeX."""

import pytest

from sse_convert.evaluation.math_answers import boxed, same_answer


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"so \boxed{204}.", "204"),
        (r"\boxed{1} and then \boxed{\frac{14}{3}}", r"\frac{14}{3}"),
        (r"$\boxed{\left( 3, \frac{\pi}{2} \right)}$", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"\fbox{7}", "7"),
        (r"\boxed 12.", "12"),
        (r"\boxed{unclosed", None),
        ("the answer is 204", None),
        (r"\boxed", None),
    ],
)
def test_the_last_box_is_read(text, held):
    assert boxed(text) == held


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("204", "204"),
        ("033", "33"),
        ("142", "142.0"),
        ("1,234,567", "1234567"),
        ("1{,}000", "1000"),
        (r"\dfrac{14}{3}", r"\frac{14}{3}"),
        (r"\frac43", r"\frac{4}{3}"),
        ("0.5", r"\frac{1}{2}"),
        (".5", "0.5"),
        ("14/3", r"\frac{14}{3}"),
        (r"2\frac{1}{2}", "2.5"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"11\sqrt2", r"11 \sqrt{2}"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
        (r"\sqrt[3]{27}", "3"),
        (r"\frac{3\pi}{4}", r"\frac34\pi"),
        (r"2^{10}", "1024"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        (r"[0, 0.5)", r"[0,\frac{1}{2})"),
        ("7, 3, 5", "3,5,7"),
        (r"\{1, 2\}", r"\{2,1\}"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{(B)}", "(B)"),
        (r"90^\circ", "90"),
        (r"5 \text{ cm}", "5"),
        (r"12\%", "12"),
        (r"\$18", "18"),
        ("x = 5", "5"),
        (r"x \in [-2,7]", "[-2,7]"),
        ("6 - 5i", "6-5i"),
        (r"x^{2}+1", "x^2 + 1"),
        (r"3 \cdot 4", "12"),
        ("p - q", "p-q"),
    ],
)
def test_the_same_answer_in_other_words(given, expected):
    assert same_answer(given, expected)
    assert same_answer(expected, given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("204", "205"),
        ("10000000000000000000001", "10000000000000000000000"),
        ("0.333", r"\frac{1}{3}"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "(0,1]"),
        ("1,2", "1,2,3"),
        ("1,1", "1,2"),
        ("x+1", "x-1"),
        ("", "0"),
        ("9**9**9**9**9", "1"),
        ("((((9^99)^99)^99)^99)^99", "1"),
        ("__import__('os').system('true')", "0"),
        ("(" * 150 + "1" + ")" * 150, "2"),
        ("1/0", "0"),
        (r"\sqrt{-1}", "1"),
        ("2^{4000}", r"\pi"),
    ],
)
def test_other_answers(given, expected):
    assert not same_answer(given, expected)
