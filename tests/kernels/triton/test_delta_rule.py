"""The kernels of the gated delta rule against the definition in float64, and what they promise."""

import dataclasses as dc

import pytest
import torch

from sse_convert.kernels.triton import chunk as launch
from tests.kernels.triton.trials import DELTA_TOLERANCE, Trial, assert_right, call, exact_results, results
from tests.tolerance import assert_same

BF16, FP16 = torch.bfloat16, torch.float16
DELTA = Trial(delta=True)
LONG = dc.replace(DELTA, lengths=(330, 20), num_partitions=2)
"""segments of more than one group of chunks"""
TRIALS = (
    dc.replace(DELTA, lengths=(63, 0, 64, 1, 65), num_partitions=3, top_k=2, groups=2, initial_state=True),
    dc.replace(DELTA, lengths=(20, 0, 1, 9), heads=2, final_state=True, top_k=2),
    dc.replace(DELTA, lengths=(0, 1, 0), initial_state=True),
    dc.replace(DELTA, shared=False, write_gate=False, read_gate=False, top_k=2),
    dc.replace(DELTA, lengths=(200,), num_partitions=1, decays="0", initial_state=True),
    dc.replace(DELTA, decays="mixed", initial_state=True, top_k=2),
    dc.replace(DELTA, decays="mixed", dtype=BF16, top_k=2),
    dc.replace(DELTA, decays="-1e4"),
    dc.replace(DELTA, dim=24, value_dim=40, num_partitions=3, top_k=3, dtype=FP16),
    dc.replace(DELTA, per_partition=True, top_k=2, k_map="l2", k_scale=True, normalizer=16.0, value_dim=24),
    dc.replace(DELTA, per_partition=True, top_k=2, groups=2, initial_state=True),
    dc.replace(DELTA, top_k=2),
    dc.replace(LONG, initial_state=True),
    dc.replace(LONG, dim=128, value_dim=128, groups=2, dtype=BF16, lengths=(70, 9), initial_state=True),
    dc.replace(DELTA, lengths=(0, 1, 5, 3), num_partitions=24, top_k=4),
)


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_equals_float64(trial: Trial, device: str) -> None:
    assert_right(trial, trial.rounded(device))


def test_states_of_few_groups_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = dc.replace(LONG, initial_state=True)
    x = trial.rounded(device)
    whole = results(trial, x)
    monkeypatch.setattr(launch, "SLAB_BYTES", 1)
    for name, tensor in results(trial, x).items():
        assert torch.equal(tensor, whole[name]), name


def test_what_waits_for_the_backward_pass_does_not_grow_with_documents(device: str) -> None:
    """Every document has chunks of its own in every partition, which for short ones are mostly padding."""

    def kept(lengths: tuple[int, ...]) -> int:
        """Bytes of the numbers, but for the tables of slots."""
        trial = dc.replace(DELTA, lengths=lengths, num_partitions=4)
        x = {name: tensor.requires_grad_() for name, tensor in trial.rounded(device).items()}
        tensors: dict[int, torch.Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.setdefault(t.data_ptr(), t), lambda t: t):
            call(trial, x)
        return sum(t.nbytes for t in tensors.values() if t.is_floating_point())

    assert kept((8,) * 8) == kept((64,))


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_strengths_of_nothing_and_of_all(strength: float, device: str) -> None:
    """Their gradients too; keys that repeat make the system of a chunk as ill as it gets."""
    trial = dc.replace(DELTA, num_partitions=1)
    x = trial.rounded(device)
    for name in ("write_strength", "shared_write_strength"):
        x[name][:] = strength
    for name in ("k", "shared k"):
        x[name][3:] = x[name][3]
    found, exact = results(trial, x), exact_results(trial, x)
    for name, expected in exact.items():
        assert_same(found[name], expected, name, 2e-5)


def test_strengths_of_any_sign(device: str) -> None:
    """They need not be between 0 and 1."""
    trial = Trial(delta=True, top_k=3, lengths=(20, 3))
    x = trial.rounded(device)
    x["write_strength"][::2] = -0.5
    assert_right(trial, x)


def test_a_token_depends_on_nothing_after_it(device: str) -> None:
    """To the bit, also where padding would have let segments share chunks under gated linear attention."""
    trial = dc.replace(DELTA, lengths=(100,), num_partitions=4)
    x = trial.rounded(device)
    other = {name: torch.cat([t[:70], t[70:].flip(0)]) for name, t in x.items()}
    first, second = results(trial, x)["o"], results(trial, other)["o"]
    assert torch.equal(first[:70], second[:70])
    assert not torch.equal(first[70:], second[70:])


def test_unit_keys_are_mapped_for_the_kernels(device: str) -> None:
    trial = Trial(k_map="l2", k_scale=True, top_k=2)
    assert_right(trial, trial.rounded(device))


def test_mixed_dtypes(device: str) -> None:
    x = {name: t.to(BF16) if name in ("v", "write_strength") else t for name, t in DELTA.rounded(device).items()}
    found, exact = results(DELTA, x), exact_results(DELTA, x)
    for name, expected in exact.items():
        assert_same(found[name], expected, name, DELTA_TOLERANCE[BF16])
        assert found[name].dtype == x[name.removeprefix("d ") if name != "o" else "v"].dtype
