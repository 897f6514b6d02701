"""Layers are compiled once, whatever documents the rows hold; compiled code is kept; late compiling is told of."""

import os

import pytest
import torch
from accelerate import Accelerator
from torch._dynamo.utils import counters

from sse_convert.modeling import document_attention
from sse_convert.modeling.document_attention import DOCUMENT_ATTENTION
from sse_convert.recipe.schema import Stage, Train
from sse_convert.training import compiling
from sse_convert.training.compiling import COMPILED, LateCompiling, kept_code
from sse_convert.training.distill import Distill
from sse_convert.training.model_objective import Student
from sse_convert.training.monitors import Progress
from tests.modeling.tiny import MIXERS, VOCAB, tiny_model, tiny_source

LAYERS = ("full", "sse+sliding", "sse+sliding", "full")
HEADS = ("full", "sse+sliding@0", "sse+sliding@1", "full")
"""as many heads of two layers see the whole row, but not the same"""
ONE_STATE = {
    **MIXERS["sse+sliding"],
    **{"update": "delta", "k_feature_map": "l2", "num_partitions": 1, "top_k": 1, "state_heads": "query"},
    **{"shared_partition": False, "balance": "none", "qk_rank": 0},
}
ROW = 10
STARTS = [
    ([3, 7], []),
    ([], [4]),
    ([*range(1, ROW)], [*range(2, ROW)]),
    ([], []),
    ([ROW - 1], [ROW // 2]),
]
"""where documents begin in the rows of five batches, beside their first tokens"""


def batch_of(starts):
    """Rows [2, T] with documents that begin there."""
    positions = torch.arange(ROW).repeat(2, 1)
    for row, begins in zip(positions, starts, strict=True):
        for begin in begins:
            row[begin:] = torch.arange(ROW - begin)
    ids = torch.randint(VOCAB, (2, ROW), generator=torch.Generator().manual_seed(len(starts[0])))
    return {"input_ids": ids, "position_ids": positions, "targets": ids}


class Kernels(dict):
    """Notes for which kinds of arguments kernels would be compiled, and has them interpreted."""

    def get(self, key, default=None):
        return default


def flash_attention(q, k, v, offsets, longest, scaling, window):
    """What the kernel of a GPU computes."""
    index = torch.arange(len(q))
    document = torch.searchsorted(offsets[1:].long(), index, right=True)
    sees = (index[:, None] >= index) & (document[:, None] == document)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = scaling * torch.einsum("thd,shd->hts", q, k)
    return torch.einsum("hts,shd->thd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


def objective(compiled, backend, layers, **settings):
    """Distillation of a tiny model."""
    mixers = {f"sse+sliding@{head}": {**ONE_STATE, "full_heads": [head]} for head in (0, 1)}
    mixers["sse+sliding"] = {**MIXERS["sse+sliding"], "num_partitions": 2}
    student = tiny_model("llama", layers, {**MIXERS, **mixers})
    teacher = tiny_source("llama").requires_grad_(False)
    for layer in student.sse_layers().values():
        layer.backend = backend
    for model in (student, teacher):
        model.config._attn_implementation = DOCUMENT_ATTENTION
    stage = Stage(name="s", loss="kl", tokens=1024, seq_len=ROW, lr=1e-3, **{"train": "mixers", **settings})
    train = Train(compile=compiled)
    accelerator = Accelerator(cpu=True)
    return Distill(accelerator, Student.of(student.train(), accelerator, stage, train), teacher, stage, train)


def gradients(distill, starts):
    """Loss and gradients of a batch."""
    found = distill.backward(distill.on_device(batch_of(starts)), weight=1e-2, share=1.0, last=True)
    named = {name: p.grad.clone() for name, p in distill.student.named_parameters() if p.grad is not None}
    distill.student.zero_grad()
    return {"loss": found["loss"], **named}


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces as ever, and hands its graphs to no compiler, which takes a minute."""
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: whole(module, backend="aot_eager", fullgraph=True))
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("backend", "settings", "layers"), [("triton", {}, LAYERS), ("auto", {"gradient_checkpointing": True}, HEADS)]
)
def test_layouts_of_documents_compile_once(traced, monkeypatch, backend, settings, layers):
    """At most four programs: a layer of the teacher, of those before the first that is trained, a converted one, the
    last; with the kernels of a GPU, and with masks and recomputed activations."""
    kernels = Kernels()
    if backend == "triton":
        launching = pytest.importorskip("sse_convert.kernels.triton.launching")
        monkeypatch.setattr(launching, "_compiled", kernels)
        monkeypatch.setattr(launching, "_on_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(document_attention, "_has_kernel", lambda q: True)
        monkeypatch.setattr(document_attention, "varlen_attention", flash_attention)
    compiled, eager = (objective(on, backend, layers, **settings) for on in (True, False))
    made = []
    for starts in STARTS:
        found = gradients(compiled, starts)
        made.append((counters["stats"]["unique_graphs"], len(kernels)))
        if len(made) != 3:
            continue
        expected = gradients(eager, starts)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-3, msg=f"{name} {starts}")
    assert made[0][0] in (3, 4)
    assert bool(kernels) == (backend == "triton")
    assert made == made[:1] * len(STARTS)


def test_a_later_stage_of_cross_entropy_compiles_for_its_own_row_length(monkeypatch, make, train, text_folder):
    """torch.compile takes a length that has changed for any length, and thrice the time for it."""
    whole, sizes = torch.nn.Module.compile, []

    def seen(graph, inputs):
        given = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        sizes.extend(size for x in given if isinstance(x, torch.Tensor) and x.dim() > 1 for size in x.shape)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: whole(module, backend=seen))
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
    for name, length in (("first", 32), ("second", 64)):
        sizes.clear()
        settings = {"compile": True, "validate_every": 128}
        recipe = make(("uptrain", {"tokens": 256, "seq_len": length}), data=data, train=settings)
        train("uptrain", name, recipe=recipe)
        assert length in sizes
        assert {type(size) for size in sizes} == {int}
    torch.compiler.reset()


def test_late_compiling_is_told_with_its_reason(capsys):
    double = torch.compile(lambda x: x * 2, backend="eager")
    late, said = LateCompiling(aloud=True), []
    for step, length in enumerate([3, 4, 5, 5, 5], 1):
        double(torch.ones(length, dtype=torch.float32 if step < 5 else torch.int32))
        late.say(Progress(step), {})
        said.append(capsys.readouterr().err)
    torch.compiler.reset()
    assert said[:4] == [""] * 4
    assert "warning: step 5 compiled again, for " in said[4]
    assert "dtype mismatch. expected Float, actual Int" in said[4]


@pytest.fixture
def places(monkeypatch, tmp_path):
    """No place for compiled code is named yet."""
    for name in compiling._PLACES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_compiled_code_is_kept_until_the_run_is_finished(places):
    inside = {}

    def interrupted():
        inside.update({name: os.environ[name] for name in compiling._PLACES})
        for place in inside.values():
            os.makedirs(place)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), kept_code(places, tidy=True):
        interrupted()
    assert not compiling._PLACES.keys() & os.environ.keys()
    assert all(place.startswith(str(places / COMPILED / f"torch-{torch.__version__}")) for place in inside.values())
    with kept_code(places, tidy=True):
        assert {name: os.environ[name] for name in compiling._PLACES} == inside
        assert (places / COMPILED).is_dir()
        with kept_code(places / "stage", tidy=True):
            assert {name: os.environ[name] for name in compiling._PLACES} == inside
    assert not (places / COMPILED).exists()


def test_compiled_code_stays_where_the_user_wants_it(places, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    with kept_code(places, tidy=True):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
