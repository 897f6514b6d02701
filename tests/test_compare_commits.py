"""The tool that compares two commits: what it calls equal, different, refused and retired."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "compare_commits.py"))
TENSORS = {"loss": torch.tensor(1.5), "gradient.w": torch.tensor([0.0, 2.0])}


def verdict(folder: Path, new: dict[str, torch.Tensor] | str, retired: tuple[str, ...] = ()) -> dict[str, object]:
    for name, results in (("old", TENSORS), ("new", new)):
        (folder / name).mkdir()
        if isinstance(results, str):
            (folder / name / "case.json").write_text(json.dumps({"error": results}))
        elif results:
            save_file(results, folder / name / "case.safetensors")
    return TOOL["compare"](folder / "old", folder / "new", {"case": list(retired)})["case"]


def test_the_same_bits_are_equal(tmp_path: Path) -> None:
    assert verdict(tmp_path, dict(TENSORS)) == {"verdict": "equal", "tensors": 2}


@pytest.mark.parametrize(
    ("new", "differs"),
    [
        ({**TENSORS, "loss": torch.tensor(1.5).nextafter(torch.tensor(2.0))}, {"loss": pytest.approx(1.2e-7, rel=0.1)}),
        ({**TENSORS, "gradient.w": torch.tensor([-0.0, 2.0])}, {"gradient.w": 0.0}),
        ({"loss": TENSORS["loss"]}, {"gradient.w": "missing in the newer"}),
        ({**TENSORS, "gradient.v": torch.ones(1)}, {"gradient.v": "missing in the older"}),
        (
            {**TENSORS, "gradient.w": torch.tensor([[0.0, 2.0]])},
            {"gradient.w": "torch.float32 [2] and torch.float32 [1, 2]"},
        ),
    ],
    ids=["one bit", "sign of zero", "lost", "added", "shape"],
)  # fmt: skip
def test_anything_else_is_different(tmp_path: Path, new: dict[str, torch.Tensor], differs: dict[str, object]) -> None:
    assert verdict(tmp_path, new) == {"verdict": "different", "tensors": 2, "differences": differs}


@pytest.mark.parametrize(
    ("error", "retired", "expected"),
    [
        ("ValueError: decay_rank is retired", ("decay_rank",), "retired"),
        ("ValueError: decay_rank is retired", (), "refused"),
        ("ValueError: no such file", ("decay_rank",), "refused"),
        ("ValueError: unknown field x, expected some of decay_rank, qk_rank", ("decay_rank",), "refused"),
    ],
    ids=["listed and named", "not listed", "not named", "named as known"],
)
def test_a_refusal_passes_only_where_it_is_listed(
    tmp_path: Path, error: str, retired: tuple[str, ...], expected: str
) -> None:
    assert verdict(tmp_path, error, retired) == {"verdict": expected, "why": error}


def test_a_case_that_was_not_computed_does_not_pass(tmp_path: Path) -> None:
    assert verdict(tmp_path, {}) == {"verdict": "refused", "why": "nothing was computed"}
