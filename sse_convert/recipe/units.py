"""Human units in recipes: `4K` tokens, `100M` tokens."""

import re
from decimal import Decimal

COUNT_UNITS = {"K": 1024, "M": 1_000_000, "B": 1_000_000_000}
"""K is 1024, as in context lengths (4K = 4096); M and B are decimal, as in token budgets (100M = 100,000,000)"""

_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMB])", re.IGNORECASE | re.ASCII)
_EXPONENT = re.compile(r"[+-]?\d+(?:\.\d*)?[eE][+-]?\d+|[+-]?\.\d+[eE][+-]?\d+")


def parse_count(text: str) -> int | None:
    """`4K` -> 4096, `1.5M` -> 1500000; None when the text is not a count that comes out whole."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return None
    value = Decimal(match[1]) * COUNT_UNITS[match[2].upper()]  # 8.2 million is whole, and is not as a float
    return int(value) if value == value.to_integral_value() else None


def format_count(count: int) -> str:
    """The shortest exact spelling that `parse_count` reads back: 4096 -> `4K`, 100000000 -> `100M`."""
    for unit in ("B", "M", "K"):
        if count and count % COUNT_UNITS[unit] == 0:
            return f"{count // COUNT_UNITS[unit]}{unit}"
    return str(count)


def spelled_float(text: str) -> str | None:
    """For text that YAML failed to read as a number, such as `3e-4`: the spelling it does read (`3.0e-4`)."""
    if _EXPONENT.fullmatch(text.strip()) is None:
        return None
    mantissa, exponent = re.split("[eE]", text.strip())
    sign = "" if exponent[0] in "+-" else "+"
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{mantissa}e{sign}{exponent}"
