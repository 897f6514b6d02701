"""What takes long on a real model is done while a line says so: passes, weights and text that are read, files that are
written and hashed."""

import contextlib
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from sse_convert import console
from sse_convert.checkpoints.safetensors_io import write_shard
from sse_convert.checkpoints.tensor_data import file_pieces
from sse_convert.cli.app import app
from sse_convert.cli.runner import run_app
from sse_convert.data.text_files import check_text
from sse_convert.files import digest
from tests.surgery.models import recipe_data, save_source

WORK = {function.__code__: function.__name__ for function in (write_shard, file_pieces, check_text, digest)}
WORK[PreTrainedModel._load_pretrained_model.__code__] = "load"
STAGE = {"tokens": 128, "seq_len": 32, "batch_tokens": 64, "micro_batch": 2, "lr": 0.001}
RECIPE = {
    "layers": {"pattern": ["sse+sliding"], "select": {"keep": 1, "by": "layers"}},
    "mixers": {"sse+sliding": {"num_partitions": 4, "top_k": 1, "qk_rank": 4, "window": 4, "sinks": 2}},
    "stages": [{"name": "align", "loss": "layer_mse", **STAGE}, {"name": "distill", "loss": "kl", **STAGE}],
    "eval": {"lengths": [32], "tokens": 256, "throughput": [32]},
}


class Waits:
    """Work that is done while no bar is there; bars say nothing here."""

    def __init__(self) -> None:
        self.bars: list[threading.Event] = []
        self.silent: list[str] = []

    def event(self) -> threading.Event:
        """The end of a bar."""
        self.bars.append(threading.Event())
        return self.bars[-1]

    def found(self, what: str, frame) -> None:
        """Work has begun; that of a moment, a small file's digest, does not count."""
        chain = []
        while frame is not None:
            if "sse_convert" in frame.f_code.co_filename:
                chain.append(frame.f_code.co_name)
            frame = frame.f_back
        if all(bar.is_set() for bar in self.bars) and "add_to_manifest" not in chain:
            self.silent.append(f"{what}: {' < '.join(chain[:8])}")

    def called(self, frame, event, _) -> None:
        """A function is called."""
        if event == "call" and frame.f_code in WORK:
            self.found(WORK[frame.f_code], frame)

    def passes(self, module, _) -> None:
        """A module is called."""
        if isinstance(module, PreTrainedModel):
            self.found("pass", sys._getframe())

    @contextlib.contextmanager
    def watched(self):
        """Watch what is done."""
        passes = torch.nn.modules.module.register_module_forward_pre_hook(self.passes)
        sys.setprofile(self.called)
        try:
            yield
        finally:
            sys.setprofile(None)
            passes.remove()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny teacher, text and a recipe, of which `run` has made all."""
    folder = tmp_path_factory.mktemp("waits")
    save_source(folder / "teacher")
    for name, words in {"text": 20_000, "held-out": 600}.items():
        (folder / f"{name}.txt").write_text(" ".join(f"w{(i * i) % 90 + 3}" for i in range(words)))
    data = {"train": [{"path": str(folder / "text.txt")}], "valid": [{"path": str(folder / "held-out.txt")}]}
    more = {"data": data, "export": {"dir": str(folder / "final")}}
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe_data(folder / "teacher", **RECIPE, **more)))
    return folder


COMMANDS = {
    "plan": "plan r.yaml",
    "select": "select r.yaml -o chosen --tokens 512 --samples 8",
    "run": "run r.yaml",
    "convert": "convert r.yaml -o 0 --set layers.select=null",
    "calibrate": "calibrate r.yaml -c 0 -o 1 --set layers.select=null",
    "distill": "distill r.yaml -c 1 -o 2 --set layers.select=null",
    "eval": "eval r.yaml -c 2 --set layers.select=null --set eval.throughput=[]",
    "export": "export r.yaml -c 2 -o 3 --set layers.select=null",
    "push": "push 3 someone/tiny --dry-run",
    "verify": "verify 3",
}


def test_every_wait_speaks(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    silent = {}
    thread = SimpleNamespace(start=lambda: None, join=lambda: None)
    for name, command in COMMANDS.items():
        waits = Waits()
        quiet = SimpleNamespace(Event=waits.event, Thread=lambda *_, **__: thread)
        monkeypatch.setattr(console, "threading", quiet)
        with waits.watched():
            code = run_app(app, command.split())
        assert code == 0, (name, capsys.readouterr().err[-2000:])
        capsys.readouterr()
        silent[name] = list(dict.fromkeys(waits.silent))
    assert not any(silent.values()), "\n".join(f"{name}: {what}" for name, found in silent.items() for what in found)
