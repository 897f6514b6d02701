"""The classes of input: how cases of each are made, and how one is run. `CLASSES` lists them."""

import dataclasses as dc
import functools
import json
import os
import struct
from collections.abc import Callable, Sequence
from operator import getitem
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import GenerationConfig

from tests.fuzz import judges, reading
from tests.fuzz.answers import answer_cases, answered
from tests.fuzz.documents import text_files, yaml_documents
from tests.fuzz.outcome import Outcome, run_command
from tests.fuzz.places import FAMILIES, copied, recipe
from tests.fuzz.schema import recipes
from tests.fuzz.values import JSON_ONLY, NUMBERS, TEXTS, Raw, changed, json_text, odd_values, places, yaml_text

LENGTH = struct.Struct("<Q")
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
OF_HYBRID = ("config.json", "sse_convert.json", INDEX)
DTYPES = ("BOOL", "U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64", "F8_E4M3", "F4", "f32")
VALUES = odd_values(JSON_ONLY)
OTHER_TYPES = (None, [], {}, 3, "x", True)
KEY_COMMANDS = {
    "generate": ["generate", "hybrid", "w5", "--max-new-tokens", "1"],
    "eval": ["eval", "recipe.yaml", "-c", "hybrid"],
    "export": ["export", "recipe.yaml", "-c", "hybrid", "-o", "made"],
    "verify": ["verify", "hybrid"],
}
"""what reads the small files of a checkpoint"""


@dc.dataclass(frozen=True)
class FuzzClass:
    """One class of input."""

    name: str
    cases: Callable[[Path], st.SearchStrategy[Any]]
    """what `run` takes, from the folder that `places.build` filled"""
    run: Callable[[Path, Any], Outcome]
    """of a case, in copies of that folder"""


def _plan(root: Path, text: str) -> Outcome:
    """Any text as a recipe."""
    with copied(root, "qwen3") as folder:
        path = folder / "recipe.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return run_command(["plan", str(path)], functools.partial(judges.same_recipe, path, []))


def _overrides(root: Path, given: Sequence[str]) -> Outcome:
    """Assignments to keys of a recipe."""
    with copied(root, "qwen3", "recipe.yaml"):
        options = [part for text in given for part in ("--set", text)]
        judge = functools.partial(judges.same_recipe, Path("recipe.yaml"), list(given))
        return run_command(["plan", "recipe.yaml", *options], judge)


def _override_cases(root: Path) -> st.SearchStrategy[Any]:
    keys = [".".join(map(str, path)) for path in places(recipe())]
    odd = (
        "",
        ".",
        "a..b",
        "stages.9.lr",
        "stages.-1.lr",
        "stages.x.lr",
        "model.a",
        "data.train",
        "x" * 5000,
        "a." * 2000,
    )
    key = st.one_of(st.sampled_from(keys), st.sampled_from(keys), st.sampled_from(odd))
    value = st.one_of(odd_values(JSON_ONLY).map(yaml_text), st.sampled_from(TEXTS))
    as_they_are = st.sampled_from(places(recipe())).map(
        lambda path: f"{'.'.join(map(str, path))}={yaml_text(functools.reduce(getitem, path, recipe()))}"
    )
    return st.lists(
        st.builds("{}={}".format, key, value) | st.sampled_from(TEXTS) | as_they_are, min_size=1, max_size=2
    )


def _config(root: Path, case: tuple[str, Any]) -> Outcome:
    """A changed config.json."""
    family, data = case
    with copied(root, family, "bare.yaml") as folder:
        (folder / family / "config.json").write_text(json_text(data))
        return run_command(["plan", "bare.yaml", "--set", f"model={family}"], judges.plan_numbers)


def _config_cases(root: Path) -> st.SearchStrategy[Any]:
    bases = {family: json.loads((root / family / "config.json").read_text()) for family in FAMILIES}
    ways = [changed(base, VALUES).map(lambda data, family=family: (family, data)) for family, base in bases.items()]
    return st.one_of(*ways, VALUES.map(lambda data: ("qwen3", data)))


def _header(root: Path, case: tuple[int, Any, int, int]) -> Outcome:
    """A changed header of a shard; length prefix and data may be off by some bytes."""
    number, header, claimed, more = case
    with copied(root, "qwen3", "bare.yaml") as folder:
        shards = sorted((folder / "qwen3").glob("*.safetensors"))
        shard = shards[number % len(shards)]
        _, data = split_shard(shard)
        text = json_text(header).encode("utf-8", "surrogatepass")
        prefix = LENGTH.pack((len(text) + claimed) % 2**64)
        shard.write_bytes(prefix + text + (data + bytes(more) if more >= 0 else data[:more]))
        return run_command(["plan", "bare.yaml"], functools.partial(judges.readable_shards, shards))


def _header_cases(root: Path) -> st.SearchStrategy[Any]:
    headers = [split_shard(path)[0] for path in sorted((root / "qwen3").glob("*.safetensors"))]
    off = st.sampled_from((*[0] * 12, 1, -1, 100, 2**40, 2**63))
    cut = st.sampled_from((*[0] * 12, 1, 8, -1, -100))
    values = st.one_of(VALUES, st.sampled_from(DTYPES), st.lists(st.integers(0, 64), max_size=4))
    ways = [st.tuples(st.just(i), changed(header, values), off, cut) for i, header in enumerate(headers)]
    return st.one_of(*ways, st.tuples(st.just(0), VALUES, off, cut))


def split_shard(path: Path) -> tuple[Any, bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    (length,) = LENGTH.unpack(raw[: LENGTH.size])
    return json.loads(raw[LENGTH.size : LENGTH.size + length]), raw[LENGTH.size + length :]


def _index(root: Path, data: Any) -> Outcome:
    """A changed index of shards."""
    with copied(root, "qwen3", "bare.yaml") as folder:
        (folder / "qwen3" / INDEX).write_text(json_text(data))
        return run_command(["plan", "bare.yaml"], judges.plan_numbers)


def _index_cases(root: Path) -> st.SearchStrategy[Any]:
    base = json.loads((root / "qwen3" / INDEX).read_text())
    return st.one_of(
        changed(base, VALUES),
        changed(base, st.sampled_from(("../x", "config.json", *base["weight_map"].values()))),
        VALUES,
    )


def _tokenizer(root: Path, case: tuple[str, Any]) -> Outcome:
    """A changed file of a tokenizer, read by `plan` and then by `generate`."""
    name, data = case
    with copied(root, "qwen3", "bare.yaml") as folder:
        (folder / "qwen3" / name).write_text(data.text if isinstance(data, Raw) else json_text(data))
        planned = run_command(["plan", "bare.yaml"], judges.plan_numbers)
        if planned.fault or planned.code:
            return planned
        return run_command(["generate", "qwen3", "w5 w6", "--max-new-tokens", "1"], judges.one_token)


def _tokenizer_cases(root: Path) -> st.SearchStrategy[Any]:
    bases = {name: json.loads((root / "qwen3" / name).read_text()) for name in TOKENIZER_FILES[:3]}
    bases["tokenizer.json"]["added_tokens"] = [{"id": 96, "content": "<x>", "special": True}]
    bases["generation_config.json"] |= {"max_length": 20, "temperature": 1.0, "top_k": 5, "do_sample": False}
    ways = [changed(base, VALUES).map(lambda data, name=name: (name, data)) for name, base in bases.items()]
    template = st.sampled_from(("", "{{", "{% for %}", "{{ 1/0 }}", "\0", "{% include 'x' %}")).map(
        lambda t: ("chat_template.jinja", Raw(t))
    )
    return st.one_of(*ways, template)


def _text(root: Path, case: tuple[str, bytes, dict[str, Any]]) -> Outcome:
    """A text file that training would read."""
    name, data, settings = case
    with copied(root) as folder:
        path = folder / name if name != "folder" else folder / name / "t.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        arguments = ["read", name, json.dumps(settings), str(root / "qwen3")]
        return run_command(arguments, functools.partial(judges.same_text, path, settings), reading.app)


def _converted(root: Path, case: tuple[str, str, Any]) -> Outcome:
    """A changed small file of a converted checkpoint."""
    command, name, data = case
    with copied(root, "qwen3", "hybrid") as folder:
        (folder / "hybrid" / name).write_text(json_text(data))
        return run_command([command, "hybrid"], judges.no_number_missing)


def _converted_cases(root: Path) -> st.SearchStrategy[Any]:
    ways = []
    for name in OF_HYBRID:
        base = json.loads((root / "hybrid" / name).read_text())
        base = {"sse": base.pop("sse"), **base} if "sse" in base else base
        ways += [st.tuples(st.sampled_from(("inspect", "inspect", "verify")), st.just(name), changed(base, VALUES))]
        if "sse" in base:
            inner = changed(base["sse"], VALUES).map(lambda sse, base=base: {**base, "sse": sse})
            ways += [st.tuples(st.sampled_from(("inspect", "verify")), st.just(name), inner)]
    return st.one_of(*ways)


def _key(root: Path, case: tuple[str, tuple[str, tuple[Any, ...]], Any]) -> Outcome:
    """A value of another type under one key of a small file of a converted checkpoint."""
    command, (name, place), value = case
    with copied(root, "qwen3", "hybrid", "recipe.yaml") as folder:
        data = json.loads((folder / "hybrid" / name).read_text())
        functools.reduce(lambda inner, key: inner[key], place[:-1], data)[place[-1]] = value
        (folder / "hybrid" / name).write_text(json.dumps(data))
        return run_command(KEY_COMMANDS[command], judges.no_number_missing, refusal=judges.names(name, place))


def _key_cases(root: Path) -> st.SearchStrategy[Any]:
    files = {path.name: json.loads(path.read_text()) for path in sorted((root / "hybrid").glob("*.json"))}
    ways = [st.tuples(st.just(name), st.sampled_from(places(data))) for name, data in files.items() if places(data)]
    settings = [(name,) for name in sorted(vars(GenerationConfig()))]  # most of them are in no file as it is written
    ways.append(st.tuples(st.just("generation_config.json"), st.sampled_from(settings)))
    return st.tuples(st.sampled_from(sorted(KEY_COMMANDS)), st.one_of(*ways), st.sampled_from(OTHER_TYPES))


def _weights(root: Path, case: tuple[dict[int, str], str, list[int]]) -> Outcome:
    """Tensors stored as other types, or with bytes changed, converted with `--check`; what comes out verifies."""
    dtypes, fill, numbers = case
    with copied(root, "qwen3", "bare.yaml") as folder:
        for number in numbers:
            respoil(folder / "qwen3", number, dtypes.get(number % 3), fill)
        made = run_command(["convert", "bare.yaml", "-o", "made", "--check"], judges.no_number_missing)
        if made.fault or made.code:
            return made
        verified = run_command(["verify", "made"], judges.no_number_missing)
        expected = (0, 6) if fill == "huge" else (0,)  # finite weights whose logits overflow
        return verified if verified.fault or verified.code in expected else Outcome(verified.code, "verify refuses it")


def respoil(folder: Path, number: int, dtype: str | None, fill: str) -> None:
    """Store the tensors of a shard in another type, or their bytes as zeros, ones or noise."""
    shards = sorted(folder.glob("*.safetensors"))
    shard = shards[number % len(shards)]
    header, data = split_shard(shard)
    names = [name for name in header if name != "__metadata__"]
    entry = header[names[number % len(names)]]
    first, last = entry["data_offsets"]
    if dtype is not None:
        entry["dtype"] = dtype
    byte = {"keep": None, "zero": 0, "ones": 255, "huge": 0x7F}[fill]
    if byte is not None:
        data = data[:first] + bytes([byte]) * (last - first) + data[last:]
    text = json.dumps(header).encode()
    shard.write_bytes(LENGTH.pack(len(text)) + text + data)


def _weight_cases(root: Path) -> st.SearchStrategy[Any]:
    dtypes = st.dictionaries(
        st.integers(0, 2), st.sampled_from(("I32", "U32", "F32", "F8_E4M3", "I64", "BOOL")), max_size=2
    )
    fills = st.sampled_from(("keep", "zero", "ones", "huge"))
    return st.tuples(dtypes, fills, st.lists(st.integers(0, 60), min_size=1, max_size=3))


NUMBERED = {
    "generate": (["generate", "qwen3", "w5"], ("max-new-tokens", "temperature", "top-p", "seed", "device")),
    "select": (
        ["select", "recipe.yaml", "1", "-o", "made"],
        ("tokens", "length", "samples", "recall-weight", "stand-in"),
    ),
    "convert": (["convert", "recipe.yaml", "-o", "made"], ("link",)),
    "dequantize": (["dequantize", "qwen3", "-o", "made"], ("revision",)),
    "push": (["push", "hybrid", "a/b", "--dry-run"], ("revision",)),
    "inspect": (["inspect", "qwen3"], ("revision",)),
}
"""commands with all they need, and the options that cases give"""


def _arguments(root: Path, arguments: Sequence[str]) -> Outcome:
    """Arguments and options of commands."""
    with copied(root, "qwen3", "hybrid", "recipe.yaml"):
        return run_command(arguments, judges.no_number_missing)


def _argument_cases(root: Path) -> st.SearchStrategy[Any]:
    values = st.one_of(st.sampled_from(NUMBERS).map(str), st.sampled_from(TEXTS).filter(lambda text: "\0" not in text))
    ways = []
    for base, options in NUMBERED.values():
        for option in options:
            ways.append(st.builds(lambda value, base=base, option=option: [*base, f"--{option}={value}"], values))
    for base, _ in NUMBERED.values():
        ways.append(
            st.builds(
                lambda at, value, base=base: [*base[: at + 1], value, *base[at + 2 :]],
                st.sampled_from((0, 0, 1)),
                values,
            )
        )
    ways.append(
        st.lists(
            st.sampled_from(("plan", "run", "--json", "--set", "-o", "recipes", "show", "copy", "x", "qwen3-0.6b")),
            max_size=4,
        )
    )
    return st.one_of(*ways)


PATH_COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "convert": lambda path: ["convert", "recipe.yaml", "-o", path],
    "export.dir": lambda path: ["plan", "recipe.yaml", "--set", f"export.dir={yaml_text(path)}"],
    "model": lambda path: ["plan", "recipe.yaml", "--set", f"model={yaml_text(path)}"],
    "data": lambda path: [
        "calibrate",
        "recipe.yaml",
        "-c",
        "hybrid",
        "-o",
        "made",
        "--set",
        f"data.train.0.path={yaml_text(path)}",
    ],
    "checkpoint": lambda path: ["inspect", path],
    "dequantize": lambda path: ["dequantize", path, "-o", "made"],
    "teacher": lambda path: ["verify", "hybrid", "--teacher", path],
    "recipe": lambda path: ["plan", path],
    "copy": lambda path: ["recipes", "copy", "qwen3-0.6b", path],
    "eval out": lambda path: ["eval", "recipe.yaml", "-c", "hybrid", "--out", path, "--set", "eval.tokens=0"],
    "compare": lambda path: ["compare", "hybrid", path],
    "push": lambda path: ["push", path, "a/b", "--dry-run"],
}
"""where a path may stand"""


def _paths(root: Path, case: tuple[str, str]) -> Outcome:
    """A path in a recipe or on the command line."""
    command, path = case
    with copied(root, "qwen3", "hybrid", "recipe.yaml"):
        return run_command(PATH_COMMANDS[command](path), judges.no_number_missing)


def _stays(path: str) -> bool:
    """Whether a path stays near the case's folder: to read the whole machine for text takes long, and rightly so."""
    return not path.startswith("/") and path.count("..") < 2


def _path_cases(root: Path) -> st.SearchStrategy[Any]:
    part = st.sampled_from(
        (
            "a",
            ".",
            "..",
            "~",
            "~x",
            "$HOME",
            "${X}",
            "qwen3",
            "train.txt",
            "a b",
            "-x",
            "é" * 60,
            "n" * 200,
            "n" * 240,
            "n" * 252,
            "n" * 256,
            "",
            "config.json",
            "*",
            "\n",
        )
    )
    joined = st.lists(part, min_size=1, max_size=3).map("/".join).filter(_stays)
    path = st.one_of(joined, st.sampled_from([*filter(_stays, TEXTS)]))
    return st.tuples(st.sampled_from(sorted(PATH_COMMANDS)), path)


TEMPLATE = (
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0].content }}", "{{ messages[9].role }}",
    "{{ raise_exception('no') }}", "{% import 'a' as b %}", "{% include 'a' %}", "{{ 1 / 0 }}", "{{ ''.__class__ }}",
    "{% if add_generation_prompt %}", "{% endif %}", "{% else %}", "{{ nothing.at.all }}", "{{ 'a' * 9 }}", "{% x %}",
    "{{ messages | tojson }}", "{{ range(3) | list }}", "{{ m | nosuch }}", "{{", "%}", "{# ", "text", "\n",
    "{{ range(10**9) | list }}",
)  # fmt: skip


def _template(root: Path, parts: Sequence[str]) -> Outcome:
    """A chat template."""
    with copied(root, "qwen3") as folder:
        (folder / "template.jinja").write_text("".join(parts))
        return run_command(["render", "template.jinja", "qwen3"], lambda _: None, reading.app)


def _prompt(root: Path, text: str) -> Outcome:
    """A prompt, of which some bytes may be no UTF-8, as Python hands them to a process."""
    with copied(root, "hybrid"):
        return run_command(["generate", "hybrid", "--max-new-tokens", "1", "--", text], lambda _: None)


def _prompt_cases(root: Path) -> st.SearchStrategy[Any]:
    bytes_ = st.lists(st.sampled_from((b"w3 ", b"\xff", b"\xc3", b"\xa4", b"\xed\xa0\x80", b" "))).map(b"".join)
    return st.one_of(bytes_.map(os.fsdecode), st.sampled_from(TEXTS).filter(lambda text: "\0" not in text))


CLASSES = (
    FuzzClass("yaml", lambda root: yaml_documents(), _plan),
    FuzzClass("recipe", lambda root: recipes().map(yaml_text), _plan),
    FuzzClass("overrides", _override_cases, _overrides),
    FuzzClass("config", _config_cases, _config),
    FuzzClass("header", _header_cases, _header),
    FuzzClass("index", _index_cases, _index),
    FuzzClass("tokenizer", _tokenizer_cases, _tokenizer),
    FuzzClass("text", lambda root: text_files(), _text),
    FuzzClass("converted", _converted_cases, _converted),
    FuzzClass("keys", _key_cases, _key),
    FuzzClass("weights", _weight_cases, _weights),
    FuzzClass("arguments", _argument_cases, _arguments),
    FuzzClass("paths", _path_cases, _paths),
    FuzzClass("templates", lambda root: st.lists(st.sampled_from(TEMPLATE), max_size=6), _template),
    FuzzClass("prompts", _prompt_cases, _prompt),
    FuzzClass("answers", lambda root: answer_cases(), answered),
)
