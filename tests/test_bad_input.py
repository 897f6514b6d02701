"""Every mistake of the issue's list, made through the real command line: a clear error and its exit code."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.console import Bar
from tests.surgery.models import recipe_file, save_source

TEXT = " ".join(f"w{i % 90 + 3}" for i in range(4000))
STAGE = {"tokens": 64, "seq_len": 32, "batch_tokens": 64, "micro_batch": 2, "lr": 0.001}
STAGES = [
    {"name": "align", "loss": "layer_mse", **STAGE},
    {"name": "distill", "loss": "kl", **STAGE},
    {"name": "uptrain", "loss": "ce", **STAGE},
]
COMMANDS = {"align": "layer_mse", "distill": "kl", "uptrain": "ce"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny checkpoint in several shards."""
    return save_source(tmp_path_factory.mktemp("teacher") / "tiny")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    """The tiny checkpoint converted."""
    folder = tmp_path_factory.mktemp("converted")
    assert run_app(app, ["convert", str(recipe_file(folder / "r.yaml", source)), "-o", str(folder / "c")]) == 0
    return folder / "c"


@pytest.fixture
def place(tmp_path, source):
    """A folder with a private copy of the checkpoint, a recipe for it, and text."""
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "train.txt").write_text(TEXT)
    data = {"train": [{"path": str(tmp_path / "train.txt")}], "valid": [{"path": str(tmp_path / "train.txt")}]}
    recipe_file(tmp_path / "r.yaml", tmp_path / "model", stages=STAGES, data=data)
    return tmp_path


@pytest.fixture
def fails(capsys):
    """Run a command that must fail; its exit code and the error object."""

    def run(*arguments):
        capsys.readouterr()
        code = run_app(app, [*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        error = json.loads(out)["error"]
        assert error["exit_code"] == code
        assert error["expected"] or error["fix"]
        return code, error["what"]

    return run


def edit(path, **changes):
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("lyers.keep=[0]", "did you mean 'layers'?"),
        ("layers.keep=[4]", "layers.keep: 4 is out of range, the model has 4 layers"),
        ("layers.keep=['0--1']", "so nothing is converted"),
        ("layers.pattern=[sse+sliding]", "calibrate.seq_len is 32, at least 256 for mixers.sse+sliding with a window"),
        ("stages.0.seq_len=512", "stages.0.seq_len is 512, beyond the 256 positions of the teacher"),
        (
            "mixers.sse.advanced.partition_gate=mine",
            "was retired, layers have text 'softmax'; remove it",
        ),
    ],
)
def test_recipes(place, fails, override, what):
    arguments = [
        "--set",
        override,
        *(["--set", "stages.0.batch_tokens=1024", "--set", "stages.0.tokens=1024"] * ("seq_len" in override)),
    ]
    code, message = fails("plan", place / "r.yaml", *arguments)
    assert code == 3
    assert what in message
    code, message = fails("convert", place / "r.yaml", "-o", place / "out", *arguments)
    assert code == 3
    assert what in message
    assert not (place / "out").exists()


def shard(place):
    """The first of the checkpoint's shards."""
    return min((place / "model").glob("*.safetensors"))


def edit_q_proj(place, change):
    """Replace a query projection's weight by what `change` makes of it; its name."""
    for path in sorted((place / "model").glob("*.safetensors")):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("q_proj.weight"):
                tensors[name] = change(tensors[name])
                save_file(tensors, path, metadata={"format": "pt"})
                return name
    raise AssertionError("no query projection")


def truncate(place):
    path = shard(place)
    path.write_bytes(path.read_bytes()[:-100])


def other_shape(place):
    edit_q_proj(place, lambda weight: torch.zeros(3, 32))


def absent_tensor(place):
    path = place / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = shard(place).name
    path.write_text(json.dumps(index))


def other_tokenizer(place):
    path = place / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= {f"extra{i}": 97 + i for i in range(50)}
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda place: edit(place / "model" / "config.json", num_key_value_heads=3), "4 attention heads over 3"),
        (lambda place: edit(place / "model" / "config.json", model_type="rwkv"), "rwkv"),
        (lambda place: shard(place).unlink(), "model-00001"),
        (truncate, "truncated"),
        (other_shape, "q_proj.weight"),
        (absent_tensor, "model.extra.weight"),
        (other_tokenizer, "tokenizer"),
        (lambda place: (place / "model" / "config.json").unlink(), "config.json"),
        (lambda place: (place / "model" / "config.json").write_text("{"), "config.json"),
        (lambda place: shutil.rmtree(place / "model"), "does not exist"),
    ],
)
def test_checkpoints(place, fails, damage, what):
    damage(place)
    code, message = fails("convert", place / "r.yaml", "-o", place / "out")
    assert code == 4
    assert what in message
    assert not (place / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(place, fails, value):
    name = edit_q_proj(place, lambda weight: weight.index_fill(1, torch.tensor([3]), value))
    code, message = fails("convert", place / "r.yaml", "-o", place / "out", "--check")
    assert code == 4
    assert name in message
    assert not (place / "out").exists()


def test_an_already_converted_checkpoint(place, fails, converted):
    code, message = fails("plan", place / "r.yaml", "--set", f"model={converted}")
    assert code == 4
    assert "already converted" in message


def test_a_converted_checkpoint_that_lost_a_tensor(place, fails, converted):
    shutil.copytree(converted, place / "c")
    path = place / "c" / "sse-00001-of-00001.safetensors"
    tensors = load_file(path)
    name, _ = tensors.popitem()
    save_file(tensors, path, metadata={"format": "pt"})
    code, message = fails("verify", place / "c")
    assert code in (4, 6)
    assert name in message


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "empty"), (b"\x00\x01\x02\xff" * 50, "binary"), ("caf\xe9 ".encode("latin-1") * 50, "UTF-8")],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_text(place, fails, converted, command, content, what):
    (place / "train.txt").write_bytes(content)
    code, message = fails(command, place / "r.yaml", "-c", converted, "-o", place / "out")
    assert code == 7
    assert what.lower() in message.lower()
    assert not (place / "out").exists()


def test_text_that_is_not_there(place, fails, converted):
    code, message = fails(
        "align", place / "r.yaml", "-c", converted, "-o", place / "out", "--set", "data.train.0.path=none.txt"
    )
    assert code in (7, 10)
    assert "none.txt" in message


@pytest.mark.parametrize("command", ["convert", "calibrate", "align", "distill", "uptrain", "export"])
def test_output_folders(place, fails, converted, command):
    start = [] if command == "convert" else ["-c", converted]
    (place / "taken").mkdir()
    (place / "taken" / "file").touch()
    (place / "file").touch()
    for out in (place / "taken", place / "file" / "below"):
        code, _ = fails(command, place / "r.yaml", *start, "-o", out)
        assert code == 8
    assert [path.name for path in (place / "taken").iterdir()] == ["file"]


@pytest.mark.parametrize("command", ["convert", "calibrate", "align", "export"])
def test_a_full_disk(place, fails, converted, command, monkeypatch):
    from sse_convert.checkpoints import output_folder as output

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("link", "rename"):
        monkeypatch.setattr(os, name, full)
    monkeypatch.setattr(output.shutil, "copyfile", full)
    start = [] if command == "convert" else ["-c", converted]
    code, _ = fails(command, place / "r.yaml", *start, "-o", place / "out")
    assert code == 8
    assert not (place / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(fails, converted):
    assert fails("generate", converted, "w5 w6", "--device", "cuda")[0] == 5


@pytest.mark.parametrize("degree", ["tp", "cp", "sp"])
def test_parallel_modes_that_are_not_offered(place, fails, converted, degree, monkeypatch):
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{degree.upper()}_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    code, _ = fails("distill", place / "r.yaml", "-c", converted, "-o", place / "out")
    assert code == 5


def test_training_stages_that_do_not_exist(place, fails, converted):
    code, message = fails("align", place / "r.yaml", "-c", converted, "-o", place / "out", "--stage", "algn")
    assert code == 3
    assert "'algn'" in message


def test_prompts(fails, converted):
    assert fails("generate", converted, "")[0] == 2
    assert fails("generate", converted, "w5 " * 300)[0] == 2
    assert fails("generate", converted, "w5", "--top-p", "0")[0] == 2
    assert fails("generate", converted, "w5", "--temperature", "1e-320")[0] == 2


@pytest.mark.parametrize("command", ["convert", "calibrate", "align", "distill", "uptrain", "eval", "export", "run"])
def test_ctrl_c_in_every_stage(place, converted, command, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "update", interrupt)
    start = [] if command in ("convert", "run") else ["-c", converted]
    out = [] if command == "run" else ["-o", place / ("out.json" if command == "eval" else "out")]
    extra = ["--check"] if command == "convert" else []
    arguments = [command, place / "r.yaml", *start, *out, *extra, "--set", f"export.dir={place / 'final'}"]
    assert run_app(app, list(map(str, arguments))) == 130
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("interrupted; ")
    assert "Traceback" not in err
    assert not (place / "out").exists()
    assert not (place / "final").exists()
    assert not list(place.glob(".out.*"))
