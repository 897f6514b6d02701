"""Passes replayed as a CUDA graph train to the bit as plain ones; a stand-in for the GPU runs again what it took."""

import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from transformers import masking_utils

from sse_convert.modeling.auto import load_pretrained
from sse_convert.training import cuda_graphs as recording
from sse_convert.training import model_objective as whole
from sse_convert.training.cuda_graphs import one_document_per_row, padded_offsets, unrecordable
from sse_convert.training.metrics import read
from tests.training.conftest import MIXERS, losses, make_text

SETTINGS = {"tokens": 2048, "batch_tokens": 128, "micro_batch": 2}
"""16 steps of two micro batches"""


class Player:
    """Records what a pass is and runs it again; like a graph it has no effect until then, and one set of results."""

    def __init__(self, device):
        self.recorded = self.replays = 0

    def aside(self, body):
        return body()

    def record(self, body):
        parameters = [p for p in self.student.parameters() if p.grad is not None]
        before = [p.grad.clone() for p in parameters]
        found = body()
        for p, gradient in zip(parameters, before, strict=True):
            p.grad.copy_(gradient)
        self.recorded += 1
        routers = {layer: layer.trace.logits_TN for layer in self.student.sse_layers().values()}

        def replay():
            self.replays += 1
            for name, value in body().items():
                found[name].copy_(value)
            for layer, logits in routers.items():
                logits.data.copy_(layer.trace.logits_TN)

        return replay, found


@pytest.fixture
def player(monkeypatch):
    """Makes stages record on this machine."""
    made = []

    class Device(Player):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    real = recording.RecordedPass

    def recorded(run, student, device):
        device.student = student
        passes = real(run, student, device)
        device.owner = weakref.ref(passes)
        return passes

    monkeypatch.setattr(whole, "unrecordable", lambda *_: None)
    monkeypatch.setattr(whole, "CudaDevice", Device)
    monkeypatch.setattr(whole, "RecordedPass", recorded)
    return made


def same(one, other):
    """Whether two stages ended with the same weights after the same steps."""
    weights = [load_pretrained(folder, dtype=torch.float32).state_dict() for folder in (one, other)]
    steps = [[{**record, "seconds": 0} for record in read(folder / "metrics.jsonl")] for folder in (one, other)]
    assert steps[0] == steps[1]
    assert "load_entropy" in steps[0][-1]
    return all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.fixture
def recipe_with(make, tmp_path):
    """Recipes over documents that end in every third micro batch or so."""
    folder = tmp_path / "short"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(make_text(60, seed=i))

    def build(*, cuda_graphs, **settings):
        data = {"train": [{"path": str(folder)}]}
        return make(("distill", SETTINGS | settings), data=data, train={"cuda_graphs": cuda_graphs})

    return build


@pytest.fixture(scope="module")
def made_once():
    return {}


@pytest.fixture
def plain(train, recipe_with, made_once):
    """The folder of a stage without graphs, made once for all tests of these settings."""

    def folder(**settings):
        if (key := str(settings)) not in made_once:
            made_once[key], _ = train("distill", "plain", recipe=recipe_with(cuda_graphs=False, **settings))
        return made_once[key]

    return folder


@pytest.mark.parametrize("settings", [{}, {"train": "lora"}], ids=str)
def test_replayed_passes_train_as_plain_ones(train, recipe_with, player, plain, settings):
    expected = plain(**settings)
    assert player == []
    folder, _ = train("distill", "recorded", recipe=recipe_with(cuda_graphs=True, **settings))
    assert same(folder, expected)
    assert player[0].recorded == 2, "rows of one document, and up to eight documents"
    assert player[0].replays > 20
    assert player[0].owner() is None, "what was recorded outlives its stage"


def test_tokens_that_do_not_count_have_no_part_in_a_recording(make, train, player, tmp_path):
    """A graph's sizes are fixed, so it takes nothing out of a row: what does not count is the same for both models."""
    chats = [
        {"messages": [{"role": role, "content": make_text(12, seed=i)} for role in ("user", "assistant")]}
        for i in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    data = {"train": [{"path": str(tmp_path / "chats.jsonl"), "kind": "chat"}]}
    records = []
    for graphs in (False, True):
        settings = {**SETTINGS, "loss_mask": "assistant"}
        recipe = make(("distill", settings), data=data, train={"cuda_graphs": graphs})
        folder, _ = train("distill", f"graphs-{graphs}", recipe=recipe)
        records.append(read(folder / "metrics.jsonl"))
    assert player[0].replays > 20
    for name in ("loss", "grad_norm", "tokens"):
        plain, recorded = ([record[name] for record in every] for every in records)
        assert recorded == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("fault", ["cannot", "other error", "wrong", "wrong later"])
def test_what_cannot_be_recorded_goes_on_without(train, recipe_with, player, plain, monkeypatch, capsys, fault):
    real = Player.record

    def record(self, body):
        if fault == "cannot":
            raise RuntimeError("operation not permitted when stream is capturing\nmore of that")
        if fault == "other error":
            raise ValueError
        replay, found = real(self, body)

        def wrong():
            replay()
            if fault == "wrong" or self.replays > 1:
                next(p.grad for p in self.student.parameters() if p.grad is not None).mul_(2)

        return wrong, found

    monkeypatch.setattr(Player, "record", record)
    folder, _ = train("distill", "recorded", recipe=recipe_with(cuda_graphs=True))
    assert same(folder, plain())
    said = capsys.readouterr().err
    assert said.count("the stage goes on without CUDA graphs: ") == 1
    why = {"cannot": "stream is capturing (", "other error": ": ValueError ("}
    assert why.get(fault, "a graph has loss and gradient norm [") in said
    assert (f"{__file__}:" in said) == (fault in why)


def test_a_pass_that_is_not_finite_is_not_compared(train, recipe_with, player, plain, monkeypatch):
    """The first that would be recorded; the next one is."""
    real, seen = recording.RecordedPass._size, []

    def size(self, found):
        seen.append(real(self, found))
        return seen[0] * torch.nan if len(seen) == 1 else seen[-1]

    monkeypatch.setattr(recording.RecordedPass, "_size", size)
    folder, _ = train("distill", "recorded", recipe=recipe_with(cuda_graphs=True))
    assert same(folder, plain())
    assert player[0].recorded == 2


@pytest.mark.parametrize(("again", "accepted"), [((1.002, 0.999), True), ((1.0, 1.0), False)])
def test_a_graph_may_be_off_as_plain_passes_are(
    train, recipe_with, player, plain, monkeypatch, capsys, again, accepted
):
    """The graph is off by 0.3%, and so is the plain pass when it is repeated, or not at all."""
    real, sizes = recording.RecordedPass._size, iter((1.0, 1.003, *again))

    def size(self, found):
        return real(self, found) * next(sizes, 1.0)

    monkeypatch.setattr(recording.RecordedPass, "_size", size)
    folder, _ = train("distill", "recorded", recipe=recipe_with(cuda_graphs=True))
    assert same(folder, plain())
    assert ("goes on without" not in capsys.readouterr().err) == accepted
    assert (player[0].replays > 20) == accepted


def test_a_machine_without_a_gpu_says_so_and_trains(train, recipe_with, plain, capsys):
    folder, _ = train("distill", "recorded", recipe=recipe_with(cuda_graphs=True))
    assert "distill: no CUDA graphs, since there is no CUDA device" in capsys.readouterr().err
    assert same(folder, plain())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"device": torch.device("cpu")}, "no CUDA device"),
        ({"distributed_type": DistributedType.MULTI_GPU}, "data-parallel"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"loss": "ce"}, "ce"),
        ({"loss_mask": "assistant"}, None),
        ({"loss_mask": "assistant", "bias": torch.zeros(4)}, "loss_mask picks"),
        ({"attention_dropout": 0.1}, "drops out"),
        ({"modules": lambda: [torch.nn.Dropout(0.1)]}, "drops out"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type longrope"),
        ({"backend": "varlen"}, "a backend other than triton"),
        ({"trains_on_torch": lambda device: "the kernels are on strike"}, "a backend other than triton"),
        ({"model_type": "sse_qwen3_moe", "num_experts_per_tok": 2}, "experts are chosen"),
    ],
)
def test_why_a_stage_is_not_recorded(change, why):
    """One object in the part of all those that are asked."""
    everything = SimpleNamespace(
        device=torch.device("cuda"), distributed_type=DistributedType.NO, mixed_precision="bf16", loss="kl",
        loss_mask="all", gradient_checkpointing=False, balance="aux_loss", attention_dropout=0.0, backend="auto",
        rope_parameters={"rope_type": "yarn"}, model_type="sse_llama", modules=lambda: [torch.nn.Dropout(0.0)],
        trains_on_torch=lambda device: None, bias=None,
    )  # fmt: skip
    everything.sse_layers = lambda: {0: everything}
    everything.mixer = everything.config = everything
    everything.get_output_embeddings = lambda: everything
    vars(everything).update(change)
    reason = unrecordable(everything, everything, everything)
    assert reason is None if why is None else why in reason


def test_a_recording_makes_no_mask_of_all_pairs(teacher_folder, monkeypatch):
    """What transformers does in a capture, which is tracing to it, and afterwards with packed rows."""
    model = load_pretrained(teacher_folder)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    given = {"config": model.config, "inputs_embeds": torch.zeros(1, 6, 32), "attention_mask": None}
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
    whole = {**given, "past_key_values": None, "position_ids": torch.arange(6)[None]}
    assert masking_utils.create_causal_mask(**whole) is not None
    with one_document_per_row():
        assert masking_utils.create_causal_mask(**whole) is None
    monkeypatch.undo()
    mask = masking_utils.create_causal_mask(**whole | {"position_ids": packed})
    assert mask[0, 0, 5].tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize(("documents", "room"), [(1, 8), (8, 8), (9, 16), (17, 32)])
def test_offsets_have_room_for_more_documents(documents, room):
    starts = torch.zeros(64, dtype=torch.bool)
    starts[torch.arange(documents) * 3] = True
    offsets = padded_offsets(starts)
    assert offsets.tolist() == [3 * i for i in range(documents)] + [64] * (room + 1 - documents)


@pytest.fixture
def deterministic(monkeypatch):
    """Sums on a GPU in one order, so that two runs of the same steps agree."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_on_a_gpu_trains_as_plain_passes(train, make, capsys, compiled, deterministic):
    folders = []
    for name in ("plain", "recorded"):
        recipe = make(
            ("distill", SETTINGS), mixers=MIXERS, train={"cuda_graphs": name == "recorded", "compile": compiled}
        )
        folders.append(train("distill", f"{name}{compiled}", recipe=recipe)[0])
    assert "CUDA graphs" not in capsys.readouterr().err
    plain, recorded = map(losses, folders)
    assert plain == pytest.approx(recorded, rel=1e-3)
