"""Text files of every kind, whole or damaged: YAML, JSON lines, parquet, plain text."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.places import TEXT, recipe
from tests.fuzz.values import CONTAINERS, NUMBERS, TEXTS, Raw, depths, json_text, places, yaml_text

TAGGED = (
    *("2020-01-01", "2020-13-45", "2001-12-14t21:59:43.10-05:00", "!!timestamp 2020-01-01", "!!timestamp x"),
    *("!!python/object/apply:os.system [echo ran]", "!!python/name:os.system ''", "!unknown 1", "!!int x", "!!float x"),
    *("!!bool 3", "!!null 3", "!!binary a", "!!binary YQ==", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]"),
    *("!!str 3", "!!int '3'", "!!map []", "!!seq {}", "0o17", "017", "0x1F", "0b11", "1:30", "1_000", ".inf", "-.NaN"),
    *("+1", "1.", ".5", "1e3", "1.0e+3", "yes", "off", "Null", "~", "=", "'", '"', "{", "[", "*a", "&a", "&a *a"),
    *("9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "1.0e+" + "9" * 5000, "'\\0'", '"\\0"', '"\\ud800"'),
    *(
        '"\\x1b[2J"',
        "\u0085",
        "\ufeff",
        "\u2028",
        "{<<: 5}",
        "{<<: [1]}",
        "{<<: {a: 1}}",
        "{? [a, b] : 1}",
        "{? {a: 1} : 1}",
    ),
    *(
        "{a: 1, a: 2}",
        "{1: 1, '1': 2}",
        "{true: 1}",
        "{null: 1}",
        "{1.5: 1}",
        "{2020-01-01: 1}",
        "&a [*a]",
        "&a {b: *a}",
    ),
)


def _grown(first: str, ways: str) -> str:
    """Mappings in which each key repeats the one before it ten times; `ways` says how."""
    keys = [f"a: &a {first}"]
    for letter in range(ord("b"), ord("p")):
        keys.append(f"{chr(letter)}: &{chr(letter)} " + ways.replace("@", ", ".join([f"*{chr(letter - 1)}"] * 10)))
    return "{" + ", ".join(keys) + "}"


BOMBS = (
    f"bomb: {_grown('[x]', '[@]')}\n",
    f"merge: {_grown('{x: 1}', '{<<: [@]}')}\n",
    "long: [" + "0, " * 50_000 + "]\n",
    "text: '" + "x" * 3_000_000 + "'\n",
)
DEEP = tuple(Raw(raw.text) for raw in (*depths("[", "]"), *depths("{a: ", "}"), *depths("- ", ""), *depths("? ", "")))


@st.composite
def yaml_documents(draw: st.DrawFn) -> str:
    """A recipe with YAML in it that recipes do not need, or something else."""
    odd = st.one_of(st.sampled_from(TAGGED), st.sampled_from([raw.text for raw in DEEP]), st.text(max_size=5))
    kind = draw(st.sampled_from(("value", "value", "value", "value", "key", "appended", "cut", "bytes", "whole")))
    base = recipe()
    if kind == "value":
        owner, key = _place(draw, base)
        owner[key] = Raw(draw(odd))
    elif kind == "key":
        owner, key = _place(draw, base)
        if isinstance(owner, dict):
            owner[Raw(draw(odd))] = owner.pop(key)
    text = (
        "\n".join(
            f"{key if isinstance(key, str) else yaml_text(key)}: {yaml_text(value)}" for key, value in base.items()
        )
        + "\n"
    )
    if kind == "appended":
        return text + draw(st.sampled_from((*BOMBS, *(f"{extra}\n" for extra in TAGGED))))
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "bytes":
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(st.text(min_size=1, max_size=3)) + text[at:]
    return draw(odd) if kind == "whole" else text


def _place(draw: st.DrawFn, data: Any) -> tuple[Any, Any]:
    *path, key = draw(st.sampled_from(places(data)))
    for part in path:
        data = data[part]
    return data, key


NAMES = (
    "t.txt",
    "t.md",
    "t.jsonl",
    "t.parquet",
    "t.json",
    "t.csv",
    "t.tsv",
    "t.gz",
    "t",
    "t.JSONL",
    "t.arrow",
    "folder",
)
VALUES = (*TEXT.split()[:4], *NUMBERS[:8], *TEXTS, *CONTAINERS, None, True)


@st.composite
def text_files(draw: st.DrawFn) -> tuple[str, bytes, dict[str, Any]]:
    """Name and bytes of a text file, and settings of the source that names it."""
    name = draw(st.sampled_from(NAMES))
    chat = draw(st.integers(0, 4)) == 0
    content = draw(
        st.sampled_from((_plain, _lines, _parquet) if name in ("t", "folder") else _OF.get(name, (_plain, _lines)))
    )
    data = content(draw, chat)
    for _ in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
        data = _damaged(draw, data)
    settings: dict[str, Any] = {"kind": "chat"} if chat else {}
    if draw(st.integers(0, 6)) == 0:
        settings["field"] = draw(st.sampled_from(("body", "a.b", "", "text")))
    return name, data, settings


def _plain(draw: st.DrawFn, chat: bool) -> bytes:
    odd = st.one_of(st.sampled_from((TEXT, "", " \n", "\ufeff" + TEXT, "w3 " * 3, "\r\n".join([TEXT] * 2))), st.text())
    return draw(odd).encode("utf-8", "surrogatepass")


def _value(draw: st.DrawFn, chat: bool) -> Any:
    """Of a column, mostly what it should be."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(VALUES))
    if not chat:
        return TEXT
    message = {
        "role": draw(st.sampled_from(("user", "assistant", "x", ""))),
        "content": draw(st.sampled_from((TEXT, None, 3, []))),
    }
    return [{"role": "user", "content": TEXT}, message]


def _lines(draw: st.DrawFn, chat: bool) -> bytes:
    field = draw(st.sampled_from(("messages" if chat else "text",) * 4 + ("body",)))
    lines = [json_text({field: _value(draw, chat)}) for _ in range(draw(st.integers(1, 4)))]
    if draw(st.integers(0, 3)) == 0:
        odd = (
            "[]",
            "3",
            "",
            "{",
            "null",
            '{"text": NaN}',
            '{"text": "\\ud800"}',
            "9" * 5000,
            *(raw.text for raw in depths("[", "]")),
        )
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(odd)))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _parquet(draw: st.DrawFn, chat: bool) -> bytes:
    field = draw(st.sampled_from(("messages" if chat else "text",) * 4 + ("body", "a.b")))
    values = [_value(draw, chat) for _ in range(draw(st.integers(0, 3)))]
    try:
        table = pa.table({field: values, "n": [1] * len(values)})
    except (pa.ArrowException, UnicodeError, OverflowError):
        table = pa.table({field: [TEXT]})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=draw(st.sampled_from(("none", "snappy"))))
    return buffer.getvalue()


_OF = {"t.parquet": (_parquet,), "t.jsonl": (_lines,), "t.json": (_lines,)}


def _damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Cut, with bytes flipped, or with others put in."""
    at = draw(st.integers(0, max(0, len(data) - 1)))
    kind = draw(st.sampled_from(("cut", "flip", "flip", "insert")))
    if kind == "cut" or not data:
        return data[:at]
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]
