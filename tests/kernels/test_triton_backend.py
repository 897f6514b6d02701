"""When the Triton kernels are taken, refused, or left for torch. What they compute is tested beside them."""

import ast
import dataclasses as dc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sse_convert.errors import HardwareError, UsageError
from sse_convert.kernels import dispatch, triton_backend
from sse_convert.kernels.dispatch import available_backends, explain
from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.triton import availability
from sse_convert.kernels.triton.config import Widths
from sse_convert.kernels.validation import build_inputs
from sse_convert.modeling import layer as layer_module
from sse_convert.modeling.layer import SSEAttention
from tests.kernels.cases import Case, run


@pytest.fixture
def reason(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What availability answers, last entry first; None to begin with. The GPU is the meta device: it has no values, so
    reading one fails.
    """
    answers: list[str | None] = [None]
    monkeypatch.setattr(dispatch, "unavailable_reason", lambda device, delta: answers[-1])
    monkeypatch.setattr(dispatch, "untrusted", lambda x: answers[-1])
    monkeypatch.setattr(dispatch, "_GPU", "meta")
    return answers


def on_gpu(case: Case, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Inputs:
    """Checked inputs that nobody can look into."""
    x = {name: t.to("meta", dtype) for name, t in case.inputs().items()}
    return build_inputs(**x, **{**case.options(), "cu_seqlens": case.cu_seqlens.to("meta"), **options})


SHORT, STEP = Case(lengths=(3, 4), shared=False), Case(lengths=(1, 1), shared=False)


@pytest.mark.parametrize(
    ("case", "options", "expected"),
    [
        (SHORT, {}, "triton"),
        (STEP, {"max_seqlen": 1}, "triton"),
        (SHORT, {"dtype": torch.float64}, "varlen"),
        (STEP, {"dtype": torch.float64, "max_seqlen": 1}, "recurrent"),
        (STEP, {"dtype": torch.float64}, "varlen"),
        (Case(lengths=(4,), dim=512, shared=False), {}, "varlen"),
        (Case(lengths=(0, 0), shared=False), {"max_seqlen": 0}, "varlen"),
        (Case(shared=False, delta=True), {}, "triton"),
        (dc.replace(STEP, delta=True), {"max_seqlen": 1}, "triton"),
        (SHORT, {"k_map": "l2"}, "triton"),
    ],
    ids=str,
)
def test_auto_on_a_gpu(case: Case, options: dict[str, Any], expected: str, reason: list[str | None]) -> None:
    x = on_gpu(case, **options)
    assert dispatch._chosen("auto", x) == expected
    reason.append("no luck")
    assert dispatch._chosen("auto", x) == ("recurrent" if x.one_token_each or expected == "recurrent" else "varlen")


def test_one_float64_tensor_is_enough_to_leave_triton(reason: list[str | None]) -> None:
    x = on_gpu(SHORT)
    double = x.router_logits.double()
    assert dispatch._chosen("auto", dc.replace(x, router_logits=double)) == "varlen"


def test_a_check_is_asked_for_the_widths_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's mistakes depend on them: heads of some widths may be wrong where others are right."""
    asked = []
    monkeypatch.setattr(triton_backend, "unavailable_reason", lambda *question: asked.append(question))
    x = on_gpu(Case(shared=False, delta=True, heads=3, groups=2, dim=64, value_dim=32))
    assert triton_backend.untrusted(x) is None
    assert asked == [(torch.device("meta"), True, (2, 64, 32))]


def test_a_compiled_call_asks_for_the_same_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        availability, "untrusted_reason", lambda device, *, delta, widths: asked.append((delta, widths))
    )
    x = build_inputs(
        **(case := Case(shared=False, delta=True, dim=64, value_dim=32)).inputs(torch.float32), **case.options()
    )
    torch.compile(lambda q: q if triton_backend.untrusted(x) is None else -q, fullgraph=True, backend="eager")(x.q)
    assert asked == [(True, Widths(1, 64, 32))]


@pytest.mark.parametrize(
    ("update", "dim", "backend", "expected"),
    [("delta", 64, "auto", "wrong"), ("gla", 64, "auto", None), ("delta", 128, "auto", None),
     ("delta", 64, "triton", None), ("delta", 256, "auto", None),
     ("gla", 300, "auto", "the head dim is 300, more than 256")],
)  # fmt: skip
def test_a_layer_says_why_its_gradients_are_left_to_torch(
    update: str, dim: int, backend: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = (torch.device("cuda"), True, (2, 64, 32))
    monkeypatch.setattr(layer_module, "unavailable_reason", lambda *asked: "wrong" if asked == wrong else None)
    layer = SimpleNamespace(
        backend=backend, mixer=SimpleNamespace(update=update), state_heads=2,
        dims=SimpleNamespace(head_dim=dim, value_dim=32, query_heads=4),
    )  # fmt: skip
    assert SSEAttention.trains_on_torch(layer, torch.device("cuda")) == expected
    assert SSEAttention.trains_on_torch(layer, torch.device("cpu")) is None


def test_the_self_check_of_the_delta_rule_runs_where_it_corrects(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(triton_backend, "unavailable_reason", lambda device, delta, widths: asked.append(delta))
    monkeypatch.setattr(dispatch, "_GPU", "meta")
    step = on_gpu(dc.replace(STEP, delta=True, dim=192), max_seqlen=1)
    assert dispatch._chosen("auto", step) == "triton"
    assert dispatch._chosen("auto", dc.replace(step, q=step.q.clone().requires_grad_())) == "triton"
    assert asked == [False, True]


def test_no_self_check_runs_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could end the process, on whatever way it is reached."""
    asked: list[bool] = []
    monkeypatch.setattr(triton_backend, "unavailable_reason", lambda device, delta, widths: asked.append(delta))
    monkeypatch.setattr(dispatch, "_GPU", "meta")
    wide = on_gpu(dc.replace(SHORT, delta=True, dim=300))
    with pytest.raises(UsageError, match="the head dim is 300, more than 256"):
        dispatch._chosen("triton", wide)
    assert dispatch._chosen("auto", wide) == "varlen"
    assert not asked


def test_auto_stays_on_torch_without_a_gpu(reason: list[str | None]) -> None:
    assert dispatch._chosen("auto", build_inputs(**SHORT.inputs(torch.float32), **SHORT.options())) == "varlen"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "backend 'triton' cannot run this: q is float64\nexpected: one of auto, reference"),
        ({"dtype": torch.bfloat16, "case": Case(lengths=(2,), dim=300)}, "the head dim is 300, more than 256"),
    ],
    ids=str,
)
def test_triton_says_what_it_cannot_run(options: dict[str, Any], message: str, reason: list[str | None]) -> None:
    case = options.get("case", SHORT)
    with pytest.raises(UsageError, match=message):
        run(case, "triton", case.inputs(options["dtype"]))


def test_triton_is_refused_with_the_reason(reason: list[str | None]) -> None:
    reason.append("the kernels are on strike")
    with pytest.raises(
        HardwareError, match="'triton' is not available: the kernels are on strike\nexpected: one of au"
    ):
        run(SHORT, "triton", SHORT.inputs(torch.float32))
    assert explain("triton") == "not available: the kernels are on strike"
    assert "triton" not in available_backends()
    assert "triton" not in explain("auto")


def test_triton_is_listed_where_it_runs(reason: list[str | None]) -> None:
    assert "triton" in available_backends()
    assert "GPU" in explain("triton")
    assert explain("auto").startswith("triton for what it can run on a GPU; recurrent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_real_reason_without_a_gpu() -> None:
    assert "triton" not in available_backends()
    assert explain("triton") == "not available: there is no CUDA device"


def test_triton_is_imported_in_its_folder_only() -> None:
    """And what imports it is imported inside functions only, so that the rest works where Triton is missing."""
    package = Path(dispatch.__file__).parents[1]
    for path in [*package.glob("kernels/*.py"), *package.glob("kernels/torch/*.py"), *package.glob("modeling/*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        every = {name for node in ast.walk(tree) for name in imported(node)}
        assert "triton" not in {name.partition(".")[0] for name in every}, path
        for name in {name for node in tree.body for name in imported(node)}:
            if name.startswith("sse_convert.kernels.triton."):
                text = (package.parent / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
                assert "import triton" not in text, f"{path} imports {name}"


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
