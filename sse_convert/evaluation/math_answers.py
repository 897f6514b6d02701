"""Whether two written answers to a mathematical question are the same: by spelling, by parts, or by value.

LaTeX is reduced to one spelling first. Lists and intervals are compared part by part, numbers exactly as fractions, and
floats where roots or pi are in them. Expressions with variables are alike only when spelled alike. Nothing is executed.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

Number = Fraction | float
LONGEST = 200
"""characters of an answer whose value is computed"""
_MOST_BITS = 4096
"""of a power that is computed exactly"""
_CLOSE = 1e-9
_DROPPED = re.compile(r"\\(?:left|right|displaystyle|[]!,;: $()[%])|\^(?:\\circ|\{\\circ\})|[$%~\s]")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"(?<=[\d}])\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_SPELLINGS = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\frac(\d)(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac(\d)(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\})(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt(\w)"), r"\\sqrt{\1}"),
    (re.compile(r"\\(?:cdot|times)"), "*"),
    (re.compile(r"\\leq?(?![a-z])"), "<="),
    (re.compile(r"\\geq?(?![a-z])"), ">="),
    (re.compile(r"\\(?:lbrace|rbrace)|\\([{}])"), r"\1"),
    (re.compile(r"\^\{(\w)\}"), r"^\1"),
    (re.compile(r"(?<!\d)\.(?=\d)"), "0."),
    (re.compile(r"(?<![\d.])0+(?=\d)"), ""),
)
_FORMULAS = (
    (re.compile(r"(?<=\d)\\frac\{([^{}]*)\}\{([^{}]*)\}"), r"+((\1)/(\2))"),
    (re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"sqrt(\1)"),
    (re.compile(r"\\sqrt\[([^][]*)\]\{([^{}]*)\}"), r"((\2)**(1/(\1)))"),
    (re.compile(r"\^\{([^{}]*)\}"), r"**(\1)"),
    (re.compile(r"\^"), "**"),
    (re.compile(r"\\pi"), "pi"),
)
"""LaTeX as Python's syntax, innermost braces first"""
_PRODUCT = re.compile(r"(?<=[\d)])(?=[a-z(])|(?<=\))(?=\d)|(?<=pi)(?=[\d(s])")
_OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def same_answer(given: str, expected: str) -> bool:
    """Whether an answer is the expected one.

    Args:
        given: LaTeX or plain text, without the box around it.
        expected: the same of the right answer.
    """
    a, b = _normal(given), _normal(expected)
    return a == b or _same_parts(a, b) or _same_value(a, b)


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} of a text holds, None without one that is closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    rest = text[start:]
    if found := re.match(r"\\boxed\s+([^\s${}\\]+)", rest):
        return found[1].rstrip(".,")
    depth, begin = 0, rest.find("{")
    if begin < 0 or rest[:begin].strip() not in (r"\boxed", r"\fbox"):
        return None
    for i, letter in enumerate(rest[begin:], begin):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[begin + 1 : i]
    return None


def _normal(text: str) -> str:
    text = _THOUSANDS.sub("", _UNIT.sub("", text.strip()))
    text = _DROPPED.sub("", _WORDS.sub(r"\1", text)).rstrip(".")
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return re.sub(r"^[A-Za-z](?:\([a-z]\))?(?:=|\\in)", "", text)


def _same_parts(a: str, b: str) -> bool:
    """Tuples and intervals in order, with the same brackets; lists without brackets and sets in any order."""
    if ",," in a + b or len(parts := _parts(a)) != len(others := _parts(b)) or len(parts) < 2:
        return False
    if _bracketed(a) or _bracketed(b):
        return (a[0], a[-1]) == (b[0], b[-1]) and all(map(same_answer, parts, others))
    for part in parts:
        found = next((other for other in others if same_answer(part, other)), None)
        if found is None:
            return False
        others.remove(found)
    return True


def _bracketed(text: str) -> bool:
    return text[:1] in ("(", "[") and text[-1:] in (")", "]")


def _parts(text: str) -> list[str]:
    """The parts between commas that no bracket encloses, outer brackets left out."""
    inner = text[1:-1] if _bracketed(text) else text.strip("{}") if text[:1] == "{" and text[-1:] == "}" else text
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(inner):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(inner[start:i])
            start = i + 1
    return [*parts, inner[start:]]


def _same_value(a: str, b: str) -> bool:
    x, y = _value(a), _value(b)
    if x is None or y is None:
        return False
    if isinstance(x, Fraction) and isinstance(y, Fraction):
        return x == y
    try:
        return math.isclose(x, y, rel_tol=_CLOSE, abs_tol=_CLOSE)
    except OverflowError:  # a whole number that is larger than every float
        return False


def _value(text: str) -> Number | None:
    """The value of a normalised formula without variables, None for anything else."""
    if len(text) > LONGEST:
        return None
    for _ in range(text.count("{") + 1):
        for pattern, python in _FORMULAS:
            text = pattern.sub(python, text)
    try:
        value = _computed(ast.parse(_PRODUCT.sub("*", text), mode="eval").body)
        return value if isinstance(value, Fraction) or math.isfinite(value) else None
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError):
        return None


def _computed(node: ast.AST) -> Number:
    """The value of a syntax tree of numbers, roots and pi.

    Raises:
        ValueError: there is something else in it.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.Name(id="pi"):
            return math.pi
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_computed(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _computed(inner)
        case ast.Call(func=ast.Name(id="sqrt"), args=[inner], keywords=[]):
            return math.sqrt(_computed(inner))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_computed(left), _computed(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_computed(left), _computed(right))
    raise ValueError(f"{ast.dump(node)} is no number")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length())
        if size <= _MOST_BITS:
            return base ** int(exponent)
    value: float | complex = float(base) ** float(exponent)
    if isinstance(value, complex):
        raise ValueError("a root of a negative number")
    return value
