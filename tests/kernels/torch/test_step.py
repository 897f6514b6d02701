"""The step of decoding computes what the reference defines, and is what decoding without gradients runs."""

import pytest
import torch

from sse_convert.kernels import dispatch
from sse_convert.kernels.torch import step
from sse_convert.kernels.torch.step import sse_attention_step
from tests.covering import covering_array
from tests.kernels.cases import Case, run
from tests.tolerance import assert_same

SETTINGS = {
    "lengths": [(1,), (1, 1, 1)],
    "routing": [(1, 1), (4, 1), (4, 3), (4, 4)],
    "groups": [1, 2],
    "shared": [True, False],
    "write_gate": [True, False],
    "read_gate": [True, False],
    "delta": [True, False],
    "inplace": [True, False],
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each call of the step."""
    calls: list[bool] = []

    def counted(*args, **kwargs):
        calls.append(True)
        return sse_attention_step(*args, **kwargs)

    monkeypatch.setattr(dispatch, "sse_attention_step", counted)
    return calls


@pytest.mark.parametrize("settings", covering_array(SETTINGS), ids=str)
@pytest.mark.parametrize("large", [False, True])
def test_equals_the_reference(large: bool, settings: dict, steps: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "LARGE", 0 if large else step.LARGE)
    rest = dict(settings)
    (partitions, top_k), inplace = rest.pop("routing"), rest.pop("inplace")
    case = Case(num_partitions=partitions, top_k=top_k, **rest)
    x = case.inputs()
    expected_o, expected = run(case, "reference", x)
    before = x["initial_state"].clone()
    o, final = run(case, "auto", x, inplace_state=inplace)
    assert steps == [True]
    assert_same(o, expected_o, "o")
    assert_same(final, expected, "final")
    assert torch.equal(x["initial_state"], final if inplace else before)


@pytest.mark.parametrize(
    "options",
    [
        {"k_map": "l2", "k_scale": torch.tensor([0.5, 2.0], dtype=torch.float64), "decay_normalizer": 16.0},
        {"k_map": "softmax", "scale": 0.3},
        {"k_map": "relu", "decay_normalizer": 2.0},
    ],
    ids=lambda options: options["k_map"],
)
@pytest.mark.parametrize("own_decay", [True, False])
def test_maps_keys_and_makes_decays(options: dict, own_decay: bool, steps: list[bool]) -> None:
    case = Case(lengths=(1, 1), top_k=2, groups=2)
    x = case.inputs()
    if not own_decay:
        x["shared log_decay"] = x["log_decay"]
    found, expected = (run(case, backend, x, **options) for backend in ("auto", "reference"))
    assert steps == [True]
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs, "result")
