import json
import math

import pytest
import torch

from sse_convert import api
from sse_convert.analysis import analyze as analysis
from sse_convert.analysis.analyze import QUANTITIES, TEACHER_QUANTITIES, inapplicable, measure_layers
from sse_convert.analysis.quantity import quantiles
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.console import Bar
from sse_convert.errors import OutputError
from sse_convert.kernels import routing
from tests.analysis.cases import text
from tests.conftest import SHARED
from tests.modeling.tiny import SSE, tiny_model
from tests.surgery.models import recipe, tokens

FIGURES = ["routing.png", "tokens.png", "branches.png", "output_error.png", "memory.png"]
NAMES = [quantity.name for quantity in QUANTITIES]


def test_command_writes_report_and_figures(converted, source, words, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    arguments = ["analyze", str(converted), "--text", str(words), "--teacher", str(source), "-o", str(out), "--json"]
    assert run_app(app, [*arguments, "--length", "128", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert json.loads((out / "analysis.json").read_text()) == result
    assert result["files"] == FIGURES
    assert {path.name for path in out.iterdir()} == {"analysis.json", *result["files"]}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in FIGURES)
    assert [(layer["index"], layer["mixer"], layer["kind"]) for layer in result["layers"]] == [
        *((0, "sse", "sse"), (1, "sliding", "sliding"), (2, "gla", "gla"), (3, "full", "full"))
    ]
    sse, sliding, gla, full = result["layers"]
    assert (sse["partitions"], sse["shared"], sse["heads"], sse["query_heads"], sse["head_dim"]) == (4, True, 2, 4, 8)
    assert (gla["partitions"], gla["shared"]) == (1, False)
    assert set(NAMES) <= set(sse)
    assert set(NAMES) - set(gla) == {"routing", "tokens", "branches"}
    assert set(full) == {"index", "mixer", "kind", "attention"}
    assert set(sliding) == {"index", "mixer", "kind", "attention", "output_error"}
    assert sse["output_error"]["relative"] > 0
    assert sum(sse["routing"]["load"]) == pytest.approx(1)
    assert sse["tokens"]["top"][0][0]["text"].startswith("w")
    conditions = result["conditions"]
    assert (conditions["tokens"], conditions["rows"], conditions["length"]) == (512, 4, 128)
    assert conditions["attention_length"] == 128


def test_table_for_a_person(converted, words, capsys):
    assert run_app(app, ["analyze", str(converted), "--text", str(words), "--length", "128"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert f"{converted}: 3 of 4 layers converted" in lines
    header = next(i for i, line in enumerate(lines) if line.startswith("layer  mixer"))
    assert [line.split()[1] for line in lines[header + 2 : header + 5]] == ["sse", "sliding", "gla"]
    assert "left out in layer 2: routing, tokens (one partition: nothing is routed)" in lines
    assert "left out in layer 2: branches (no shared partition)" in lines
    assert f"left out in layers 1, 3: {', '.join(NAMES)} (softmax attention: no recurrent state)" in lines
    assert "left out in layers 0, 1, 2, 3: output_error, attention (no teacher was given (--teacher))" in lines
    assert not any(line.startswith("wrote") for line in lines)


def test_without_teacher_its_quantities_are_absent(converted, words):
    report = api.analyze(converted, words, length=128)
    assert not any(name in layer.quantities for layer in report.layers for name in TEACHER_QUANTITIES)
    assert report.teacher is None
    assert report.to_dict()["files"] == []


def test_default_row_is_what_model_and_text_allow(converted, words):
    assert api.analyze(converted, words).conditions["length"] == 256, "the model's context"
    assert api.analyze(converted, words, tokens=200).conditions["length"] == 200
    report = api.analyze(converted, words, tokens=300, length=140)
    assert (report.conditions["rows"], report.conditions["tokens"]) == (2, 280)


def test_result_does_not_depend_on_the_batches(converted, source, words, monkeypatch):
    whole = api.analyze(converted, words, teacher=source, length=128)
    monkeypatch.setattr(analysis, "TOKENS_PER_PASS", 128)
    apart = api.analyze(converted, words, teacher=source, length=128)
    numbers = [list(flat(report.to_dict()["layers"])) for report in (whole, apart)]
    assert len(numbers[0]) > 150
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-5)


def flat(value):
    """All numbers inside."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    elif isinstance(value, int | float):
        yield value


def test_sums_do_not_grow_with_the_text():
    model = tiny_model("qwen3", ("sse", "gla", "full", "full"), {"gla": {"kind": "gla"}})

    def held(rows):
        found = measure_layers(model, text(tokens(rows, 128, seed=0) % 20), bar=Bar(None, "", 1))
        return sum(numel(vars(quantity)) for layer in found.values() for quantity in layer)

    assert held(16) <= held(32) < 1.05 * held(16)


def numel(parts):
    """Elements of the tensors among the attributes, but for the text itself."""
    return sum(value.numel() for name, value in parts.items() if isinstance(value, torch.Tensor) and name != "text")


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gemma2"])
def test_families(family):
    model = tiny_model(family, ("sse", "sliding", "sse", "full"))
    found = measure_layers(model, text(tokens(2, 128)), bar=Bar(None, "", 1))
    assert list(found) == [0, 2]
    for quantities in found.values():
        assert [quantity.name for quantity in quantities] == NAMES
        assert all(math.isfinite(number) for quantity in quantities for number in flat(quantity.result()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_types(dtype):
    rows = text(tokens(2, 128))
    exact, low = (
        {q.name: q.result() for q in measure_layers(tiny_model("qwen3", dtype=kind), rows, bar=Bar(None, "", 1))[0]}
        for kind in (torch.float64, dtype)
    )
    assert list(exact) == list(low) == NAMES
    for name, key in (("routing", "gate_mean"), ("branches", "sparse_share")):
        assert low[name][key] == pytest.approx(exact[name][key], rel=0.1)
        assert low[name][key] != exact[name][key]


@pytest.mark.parametrize(
    "changes",
    [
        {"state_heads": "query", "k_feature_map": "silu"},
        {"num_partitions": 3, "top_k": 2, "read_top_k": 3, "decay_params": "separate"},
        {"row_top_k": 3},
        {"shared_params": False},
        {"shared_partition": False, "qk_rank": 0, "top_k": 2},
        {"decay": "scalar", "rope": "keep", "gate": {"write": True, "read": False}},
    ],
)
def test_variants(changes):
    model = tiny_model("qwen3", ("sse", "full", "full", "full"), {"sse": {**SSE, **changes}})
    found = measure_layers(model, text(tokens(2, 128)), bar=Bar(None, "", 1))[0]
    missing = {"branches"} if changes.get("shared_partition") is False else set()
    assert {quantity.name for quantity in found} == set(NAMES) - missing
    assert all(math.isfinite(number) for quantity in found for number in flat(quantity.result()))


def test_no_decay():
    model = tiny_model("qwen3", ("sse", "full", "full", "full"), {"sse": {**SSE, "decay": "none"}})
    found = {q.name: q.result() for q in measure_layers(model, text(tokens(1, 128)), bar=Bar(None, "", 1))[0]}
    assert "half_life" not in found
    reasons = {part.reason: part for part in inapplicable(model, with_teacher=True)}
    assert reasons["the layer has no decay"].quantities == ("half_life",)
    assert reasons["not converted: the output is its teacher's"].layers == (1, 2, 3)


class FullestGets:
    """A gate that reads the state."""

    needs_state = True

    def __call__(self, router_logits_RN, positions_R, state_RNHDV):
        return torch.softmax(router_logits_RN + state_RNHDV.flatten(2).norm(dim=-1), dim=-1)


def test_a_gate_that_reads_the_state_has_no_routes(monkeypatch):
    monkeypatch.setitem(routing._GATES, "fullest", FullestGets())
    mixer = {**SSE, "partition_gate": "fullest", "balance": "none"}
    model = tiny_model("qwen3", ("sse", "full", "full", "full"), {"sse": mixer}, seed=1)  # uses every partition
    found = measure_layers(model, text(tokens(1, 128)), bar=Bar(None, "", 1))[0]
    assert [quantity.name for quantity in found] == ["branches"]
    assert all(math.isfinite(number) for quantity in found for number in flat(quantity.result()))
    reasons = [part.reason for part in inapplicable(model, with_teacher=False)]
    assert "the partition gate reads the state: no routes before" in reasons


@pytest.mark.parametrize("shared", [True, False])
def test_partitions_chosen_by_keys_leave_the_size_of_branches(shared):
    mixer = {**SSE, "router": "keys", "balance": "none", "shared_partition": shared, "qk_rank": 4 * shared}
    model = tiny_model("qwen3", ("sse", "full", "full", "full"), {"sse": mixer})
    found = measure_layers(model, text(tokens(1, 128)), bar=Bar(None, "", 1))[0]
    assert [quantity.name for quantity in found] == ["branches"] * shared
    assert all(math.isfinite(number) for quantity in found for number in flat(quantity.result()))
    reasons = {part.reason: set(part.quantities) for part in inapplicable(model, with_teacher=True)}
    assert reasons["partitions are chosen by keys: not built"] == set(NAMES) - {"branches"}
    assert ("no shared partition" in reasons) != shared


def test_only_sliding_layers(words, tmp_path, source):
    api.convert(recipe(source, layers={"pattern": ["sliding", "full"]}), tmp_path / "windows")
    report = api.analyze(tmp_path / "windows", words, teacher=source, out=tmp_path / "out", length=128)
    assert report.files == ("output_error.png", "memory.png")
    assert report.layers[0].get("output_error", "relative") > 0


def test_quantiles():
    assert quantiles(torch.arange(11.0)) == {"p10": 1, "median": 5, "p90": 9}
    assert quantiles(torch.tensor([1.0, math.inf, 2.0])) == {"p10": 1, "median": 2, "p90": math.inf}
    assert all(math.isnan(value) for value in quantiles(torch.zeros(0)).values())


def test_a_failed_write_leaves_nothing(converted, words, tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(analysis, "draw", full_disk)
    with pytest.raises(OutputError):
        api.analyze(converted, words, out=tmp_path / "out", length=128)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def fails(capsys):
    """Run the command, which must fail; its exit code and message."""

    def run(*arguments):
        code = run_app(app, ["analyze", *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        error = json.loads(out)["error"]
        assert error["exit_code"] == code
        assert error["expected"] or error["fix"]
        return code, error["what"]

    return run


@pytest.mark.parametrize(
    ("name", "content", "code", "what"),
    [
        ("missing.txt", None, 7, "does not exist"),
        ("empty.txt", b"", 7, "is empty"),
        ("spaces.txt", b" \n" * 200, 7, "has 0 tokens"),
        ("short.txt", b"w5 " * 127, 7, "has 127 tokens"),
        ("latin.txt", b"w5 \xe9 " * 200, 7, "is not UTF-8"),
        ("binary.txt", b"w5 \0 " * 200, 7, "is binary"),
        ("rows.jsonl", b'{"text": "w5"}\n' * 200, 7, "holds its text in columns"),
    ],
)
def test_bad_text(converted, tmp_path, fails, name, content, code, what):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    found, message = fails(converted, "--text", path)
    assert (found, what in message) == (code, True), message


def test_just_enough_text(converted, tmp_path):
    path = tmp_path / "enough.txt"
    path.write_text("w5 " * 128)
    assert api.analyze(converted, path).conditions["tokens"] == 128


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["--tokens", "100"], 2, "tokens is 100"),
        (["--tokens", "150", "--length", "200"], 2, "tokens is 150"),
        (["--length", "100"], 2, "length is 100"),
        (["--length", "257"], 2, "length is 257"),
        (["--device", "cuda:77"], 5, "cuda:77"),
        (["--teacher", "nowhere/at/all"], 4, "does not exist"),
        (["--teacher", "CONVERTED"], 4, "sse_qwen3"),
        (["--out", "TAKEN"], 8, "exists"),
    ],
)
def test_bad_options(converted, words, tmp_path, fails, arguments, code, what):
    (tmp_path / "taken").mkdir()
    places = {"CONVERTED": str(converted), "TAKEN": str(tmp_path / "taken")}
    found, message = fails(converted, "--text", words, *(places.get(word, word) for word in arguments))
    assert (found, what in message) == (code, True), message


def test_bad_models(source, words, tmp_path, fails):
    code, message = fails(source, "--text", words)
    assert (code, "is a plain qwen3 checkpoint" in message) == (4, True)
    code, message = fails(tmp_path / "nothing", "--text", words)
    assert (code, "does not exist" in message) == (4, True)


def test_text_shorter_than_the_row_asked_for(converted, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text("w5 " * 200)
    assert run_app(app, ["analyze", str(converted), "--text", str(path), "--length", "250", "--json"]) == 7
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["what"] == f"{path} has 200 tokens"
    assert (error["expected"], error["fix"]) == (
        "at least 250, one row",
        "give a longer text, or a --length of 128 to 200",
    )


@pytest.mark.gpu
def test_gpu_gives_the_same():
    found = []
    for device in ("cpu", "cuda"):
        model = tiny_model("qwen3", dtype=torch.float64).to(device)
        layers = measure_layers(model, text(tokens(2, 128)), bar=Bar(None, "", 1))
        found.append(list(flat([quantity.result() for layer in layers.values() for quantity in layer])))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "converted_layers"),
    [
        ("stories260K", {"pattern": ["sse"], "keep": [2]}, [0, 1, 3, 4]),
        ("teacher-qwen3-32m", {"pattern": ["gla", "sse", "sliding", "full", "full"]}, [0, 1, 2, 5, 6, 7]),
    ],
)
def test_real_checkpoints(tmp_path, name, layers, converted_layers):
    teacher = SHARED / "checkpoints" / name
    mixers = {"sse": {"kind": "sse", "qk_rank": 8}, "gla": {"kind": "gla", "k_feature_map": "softmax"}, "sliding": {}}
    named = {mixer: settings for mixer, settings in mixers.items() if mixer in layers["pattern"]}
    api.convert(recipe(teacher, layers=layers, mixers=named), tmp_path / "model")
    stories = SHARED / "text" / "tinystories" / "valid.txt"
    report = api.analyze(tmp_path / "model", stories, teacher=teacher, tokens=512, length=256, out=tmp_path / "out")
    assert [layer.index for layer in report.layers if "output_error" in layer.quantities] == converted_layers
    assert len(report.layers) == 5 if name == "stories260K" else 10
    for layer in report.layers:
        assert all(math.isfinite(number) for number in flat(layer.to_dict()))
        if layer.get("routing", "load_entropy") is not None:
            assert 0 < layer.get("routing", "load_entropy") <= 1
            assert layer.get("half_life", "sparse", "median") > 1
    assert set(report.files) == set(FIGURES)
