"""The operator benchmark: its peers compute what they should, its checks catch errors, its tables follow the JSON."""

import dataclasses as dc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import operator_decode, operator_slots, plot_operator, sse_operator
from benchmarks.kernels import operator_published as published
from benchmarks.kernels.operator_candidates import Problem, gla, problem, sse
from benchmarks.kernels.operator_cases import FLA_STEP, FLASH, GLA, GROUPS, OURS, VARLEN, Case
from benchmarks.kernels.operator_check import HUGE, WRONG, Exact, outcome
from benchmarks.kernels.operator_decode import Step, sse_step
from benchmarks.kernels.operator_inputs import Inputs, make, make_state
from benchmarks.kernels.operator_targets import verdicts
from sse_convert.kernels.torch.chunk import gated_linear_attention
from tests.tolerance import assert_same, relative_error

CPU = torch.device("cpu")
FLOAT32_GATES = 1e-6
"""the published operator's softmax is in float32 whatever it is given, and so are the log decays of libraries"""


def case(**changes: Any) -> Case:
    return Case(**{"group": "figure", "lengths": (40, 3, 30), "candidates": (), "heads": 2, "query_heads": 2, "dim": 8,
                   "partitions": 4, **changes})  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gated linear attention of a whole segment list, as fla's."""
    assert (cu_seqlens.diff() > 0).all(), "an empty segment"
    if state is None:
        state = q.new_zeros(len(cu_seqlens) - 1, *q.shape[1:], v.shape[2])
    scaled = q[:, :, None] * q.shape[-1] ** -0.5
    o, final = gated_linear_attention(scaled, k, v, log_decay.to(q.dtype), cu_seqlens, state.to(q.dtype))
    return o[:, :, 0], final


def doubles(case: Case) -> Inputs:
    x = make(case, CPU, torch.float64)
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in x.leaves.items()}
    return Inputs(case, leaves, x.d_o, x.cu_seqlens)


def problem_of(x: Inputs, run: Any) -> Problem:
    return Problem(leaves=x.leaves, d_o=x.d_o, run=run, exact=lambda t: sse(t, x, "reference")[0], kind="sse")


@pytest.mark.parametrize("algorithm", [published.varlen, published.mask])
@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 2}, {"partitions": 64}, {"busiest": 1.0}, {"partitions": 1}], ids=str
)
def test_published_operators_compute_sse(algorithm: Any, changes: dict[str, Any]) -> None:
    x = doubles(case(**changes))
    errors = Exact(x.case).errors(problem_of(x, lambda: algorithm(x, attend)))
    assert errors is not None
    assert set(errors) == {"o", *(f"d {name}" for name in x.leaves)}
    assert max(errors.values()) <= FLOAT32_GATES, errors


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_published_step_computes_sse(top_k: int) -> None:
    x = doubles(case(lengths=(1,) * 5, top_k=top_k))
    state = make_state(x.case, CPU).double()
    S = len(state)
    flat = torch.cat([state[:, -1], state[:, :-1].flatten(0, 1)])
    step = Step(
        state=flat, run=lambda s: published.varlen_step(x, s, attend), leaves=x.leaves,
        by_row=lambda s: torch.cat([s[S:].unflatten(0, (S, -1)), s[:S, None]], 1),
        exact=lambda t, s: sse_step(t, s, x, "recurrent"),
    )  # fmt: skip
    errors = step.errors()
    assert max(errors.values()) <= FLOAT32_GATES, errors
    assert_same(step.by_row(flat), state, "checking leaves the state alone")


def test_plain_attention_has_its_reference() -> None:
    x = doubles(case())
    leaves = {name: x.leaves[name] for name in ("q", "k", "v", "log_decay")}
    assert_same(gla(leaves, x.cu_seqlens), attend(*leaves.values(), x.cu_seqlens, None)[0], "o")


def attend_slots(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, cu_seqlens: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, None]:
    """The recurrence of all the libraries, token by token."""
    scaled, decay, rows = q[0] * q.shape[-1] ** -0.5, (g[0] if g.dim() == 4 else g[0][..., None]).exp(), []
    for t in range(len(scaled)):
        if t in cu_seqlens:
            state = k.new_zeros(*k.shape[2:], v.shape[3])
        state = decay[t][..., None] * state
        value = v[0, t] if beta is None else beta[0, t, :, None] * (v[0, t] - (k[0, t, :, None] @ state)[:, 0])
        state = state + k[0, t][..., None] * value[:, None]
        rows.append((scaled[t, :, None] @ state)[:, 0])
    return torch.stack(rows)[None], None


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.note}, {case.tokens}") for case in GROUPS["models"]() if case.tokens == 2**15],
)
def test_libraries_get_as_many_slots_as_models_have(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of what models run, of few tokens and small heads, with each of its peers."""
    monkeypatch.setattr(operator_slots, "library", lambda name: attend_slots)
    small = dc.replace(case, lengths=(5, 3), heads=2, query_heads=2 * case.query_heads // case.heads, dim=4)
    x = doubles(small)
    for candidate in set(case.candidates) - {OURS}:
        p = problem(candidate, x)
        assert len(p.d_o) == 8 * (case.top_k + 1)
        errors = Exact(small).errors(p)
        assert errors is not None
        assert set(errors) == {"o", *(f"d {name}" for name in p.leaves)}
        assert max(errors.values()) <= FLOAT32_GATES, (candidate, errors)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{case.note}, {case.scalar}") for case in GROUPS["engines"]() if case.tokens == 2**12],
)
def test_engines_compute_sse_over_the_delta_rule(case: Case, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting, of few tokens and small heads, with each of its engines; many partitions stay empty."""
    monkeypatch.setattr(operator_slots, "library", lambda name: attend_slots)
    small = dc.replace(case, lengths=(9, 1, 6), heads=2, query_heads=2, dim=4, top_k=min(top_k, case.partitions))
    x = doubles(small)
    for candidate in set(case.candidates) - {OURS}:
        errors = Exact(small).errors(problem(candidate, x))
        assert errors is not None
        assert max(errors.values()) <= FLOAT32_GATES, (candidate, errors)


@pytest.mark.parametrize("note", ["", "SmolLM2, one state", "SmolLM2, N = 16"])
def test_steps_of_the_library_are_those_of_the_operator(note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the states that a step uses, gathered before."""
    found = next(case for case in GROUPS["decode"]() if case.note == note)
    x = doubles(dc.replace(found, lengths=(1,) * 3, heads=2, query_heads=2, dim=4))

    def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *beta, _, state = rest
        kept = g.exp()[..., None] * state.to(q.dtype)
        value = v if not beta else beta[0][..., None] * (v - (k[..., None, :] @ kept)[..., 0, :])
        kept = kept + k[..., None] * value[..., None, :]
        return (q[..., None, :] @ kept)[..., 0, :] * q.shape[-1] ** -0.5, kept

    monkeypatch.setattr(operator_decode, "delta_step", recur)
    monkeypatch.setattr(operator_decode, "fla_attend", lambda **options: recur)
    errors = operator_decode.step(FLA_STEP, x).errors()
    assert max(errors.values()) <= FLOAT32_GATES, errors


@pytest.mark.parametrize("tokens", [64, 2**14])
def test_the_check_finds_a_small_mistake(tokens: int) -> None:
    """On long cases one head is compared, on short ones all."""
    x = doubles(case(lengths=(tokens,), dim=4, backward=False))

    def wrong() -> Tensor:
        o = sse(x.leaves, x, "varlen")[0].clone()
        o[tokens // 2 :, 0] *= 1 + 3 * WRONG
        return o

    right = Problem(leaves=x.leaves, d_o=x.d_o, run=lambda: sse(x.leaves, x, "varlen")[0], kind="sse",
                    exact=lambda t: sse(t, x, "varlen")[0])  # fmt: skip
    exact = Exact(x.case)
    errors = exact.errors(right)
    assert errors is not None
    assert errors["o"] < 1e-9
    sse_operator.refuse_wrong(errors)
    found = exact.errors(Problem(leaves=x.leaves, d_o=x.d_o, run=wrong, kind="sse", exact=right.exact))
    with pytest.raises(
        sse_operator.NotTimedError, match=r"wrong, not timed: relative errors o [0-9.e-]+, allowed 3e-02"
    ):
        sse_operator.refuse_wrong(found)


def test_unwritten_memory_is_wrong() -> None:
    x = doubles(case(backward=False))
    errors = Exact(x.case).errors(problem_of(x, lambda: torch.empty_like(x.d_o)))
    assert errors == {"o": HUGE}


def test_the_floor_is_each_tensor_once() -> None:
    """Per token and head: q, k of both kinds, v and o in bfloat16, two decays in float32; and the router logits."""
    x = make(case(dim=128), CPU)
    p = problem_of(x, lambda: x.d_o)
    T, N, H, row = x.case.tokens, 4, 2, 2 * 128
    forward = T * (H * (6 * row + 2 * 2 * row) + 4 * N)
    gradients = T * (H * (5 * row + 2 * 2 * row) + 4 * N)
    assert sse_operator.floor_bytes(p, backward=False) == forward
    assert sse_operator.floor_bytes(p, backward=True) == 2 * forward + gradients


@pytest.mark.smoke
def test_inputs_are_the_same_every_time_and_never_zero() -> None:
    first, second = (make(case(), CPU) for _ in range(2))
    for name, leaf in first.leaves.items():
        assert torch.equal(leaf, second.leaves[name])
        assert leaf.count_nonzero() == leaf.numel(), name


def test_skewed_inputs_prefer_one_partition() -> None:
    x = make(case(lengths=(4000,), partitions=16, busiest=0.9), CPU)
    share = (x.leaves["router_logits"].argmax(1) == 0).double().mean().item()
    assert abs(share - 0.9) < 0.02


def test_sequences_and_positions_of_tokens() -> None:
    x = make(case(lengths=(2, 3)), CPU)
    assert x.sequences.tolist() == [0, 0, 1, 1, 1]
    assert x.positions.tolist() == [0, 1, 0, 1, 2]


def test_every_cell_is_listed_once_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    sse_operator.main(["--list", "--groups", "figure", "--candidates", OURS, FLASH])
    *lines, count = capsys.readouterr().out.splitlines()
    assert len(set(lines)) == len(lines) == int(count.split()[0])
    assert "figure: 1048576 tokens in 2, N=4 K=1 heads=8/8x128 : ours" in lines
    cells = [sse_operator.identity(c.key(), who) for group in GROUPS.values() for c in group() for who in c.candidates]
    assert len(set(cells)) == len(cells)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sse_operator.main(["--out", str(tmp_path / "o.json")]) == 5
    assert "no CUDA device" in capsys.readouterr().err


def measured(ms: float, graph: float | None = None) -> dict[str, Any]:
    time = {"ms": ms, "p10_ms": ms, "p90_ms": ms, "repeats": 3}
    return {"eager": time, "graph": "cannot be captured: waits" if graph is None else {**time, "ms": graph},
            "extra_mib": 30 * ms, "syncs": int(graph is None), "floor_ms": 0.25}  # fmt: skip


def cell(candidate: str, tokens: int, ms: float, graph: float | None = None, **changes: Any) -> dict[str, Any]:
    lengths = (1,) * tokens if changes.get("group") == "decode" else (tokens // 2,) * 2
    return {**case(lengths=lengths, **changes).key(), "candidate": candidate, "errors": {"o": 4e-3, "d q": 2e-3},
            "forward": measured(ms, graph), "forward_backward": measured(3 * ms, graph and 3 * graph)}  # fmt: skip


@pytest.fixture
def report() -> dict[str, Any]:
    names = ("device", "torch", "triton", "ptxas", "fla_core", "copy_tb_per_s", "commit", "date", "command")
    cells = [
        cell(VARLEN, 2**16, 8.0), cell(OURS, 2**16, 1.0, 0.9), cell(GLA, 2**16, 0.8), cell(FLASH, 2**16, 9.0, 9.0),
        cell(OURS, 2**10, 0.3, 0.1), cell(FLASH, 2**10, 0.2, 0.04), cell(OURS, 2**16, 1.04, 0.9, partitions=64),
        cell(OURS, 64, 0.6, 0.4, group="decode"), {**cell(OURS, 64, 0.6, 0.6, group="decode", partitions=64)},
        {**case(lengths=(2**17,) * 2).key(), "candidate": OURS, "error": "out of memory"},
    ]  # fmt: skip
    return {"schema": 1, "environment": dict.fromkeys(names, "?"), "cells": cells}


def test_verdicts_follow_from_the_cells(report: dict[str, Any]) -> None:
    found = {(v.target, v.case, v.direction): (v.ratio, v.met) for v in verdicts(report["cells"])}

    def check(target: str, of: str, direction: str, ratio: float, met: bool) -> None:
        assert found[target, of, direction] == (pytest.approx(ratio), met), target

    for direction in ("forward", "forward_backward"):
        check("speed-up over published varlen, both eager", "65536 tokens, N = 4", direction, 8.0, True)
        check("time over chunk_gla of the same tokens, both eager", "65536 tokens, N = 4", direction, 1.25, False)
        check("peak extra memory over published varlen", "65536 tokens, N = 4", direction, 1 / 8, True)
        check("time of N = 64 over N = 4, eager", "65536 tokens", direction, 1.04, True)
    check("time over flash attention, both as CUDA graphs", "65536 tokens, N = 4", "forward_backward", 0.1, True)
    check("time over flash attention, both as CUDA graphs", "1024 tokens, N = 4", "forward_backward", 2.5, False)
    check("decoding step over the bytes floor, CUDA graph", "batch 64, N = 4", "forward", 1.6, True)
    check("decoding step over the bytes floor, CUDA graph", "batch 64, N = 64", "forward", 2.4, False)
    check("decoding step of N = 64 over N = 4, CUDA graph", "batch 64", "forward", 1.5, False)
    check("relative error against float64", f"worst of {2 * 5}: o", "", 4e-3, True)
    assert found["speed-up over published varlen, both eager", "262144 tokens, N = 4", "forward"] == (None, False)


def test_tables_say_met_missed_or_not_measured(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    plot_operator.main([str(path), "--all", "--png", str(tmp_path / "figure.png")])
    printed = capsys.readouterr().out
    assert "| speed-up over published varlen, both eager | 65536 tokens, N = 4 | forward | 8x | ≥ 5x | met |" in printed
    assert "| 65536 tokens, N = 4 | forward | 1.2x | ≤ 1x | missed |" in printed
    assert "| 262144 tokens, N = 4 | forward |  | ≥ 5x | not measured |" in printed
    assert "| figure | 256k | 4 | 1 | 2 sequences | ours | out of memory |" in printed
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_each_curve_by_tokens(report: dict[str, Any]) -> None:
    cells = report["cells"]
    assert plot_operator.curve(cells, "forward", OURS, 4, "eager") == [(2**10, 0.3), (2**16, 1.0)]
    assert plot_operator.curve(cells, "forward_backward", OURS, 64, "eager") == [(2**16, pytest.approx(3.12))]
    assert plot_operator.curve(cells, "forward", VARLEN, 4, "graph") == []


def test_outcome_has_gradients_only_if_asked() -> None:
    x = doubles(case())
    p = problem_of(x, lambda: sse(x.leaves, x, "varlen")[0])
    o, *gradients = outcome(p, backward=True)
    assert len(gradients) == len(x.leaves)
    (alone,) = outcome(p, backward=False)
    assert not alone.requires_grad
    assert relative_error(alone, o) == 0


def test_a_run_that_goes_on_keeps_the_commits_of_its_cells() -> None:
    left = {"error": sse_operator.NO_TIME}
    first = {"environment": {"commit": "first"}, "cells": [{"ms": 1.0}, left], "seconds": {"figure": 1.0}}
    report = sse_operator.continued(first)
    assert report["cells"] == [{"ms": 1.0, "commit": "first"}]
    report |= {"environment": {"commit": "second"}, "cells": [*report["cells"], {"ms": 2.0, "commit": "second"}]}
    again = sse_operator.continued(report)
    assert [cell["commit"] for cell in again["cells"]] == ["first", "second"]
    assert [env["commit"] for env in again["earlier"]] == ["first", "second"]
    assert first["cells"] == [{"ms": 1.0}, left]
