"""The gated delta rule: known answers, the paper's equation, extreme strengths and decays, the router's gradient."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.errors import ShapeError, UsageError
from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.torch import chunk as chunked
from sse_convert.kernels.torch.chunk import _opaque, gated_linear_attention
from tests.kernels.cases import BACKENDS, Case, run, run_with_gradients
from tests.tolerance import assert_same, relative_error

EVERY = ("reference", *BACKENDS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape: int, seed: int = 1) -> Tensor:
    return F.normalize(normal(*shape, seed=seed), dim=-1)


def gated_deltanet(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One head by the equation of arXiv:2412.06464: S = S (a (I - b k k^T)) + b v k^T, o = S q, with S [V, D]."""
    S, outs = torch.zeros(v.shape[1], k.shape[1], dtype=q.dtype), []
    for t in range(len(q)):
        S = S @ (decay[t] * (torch.eye(k.shape[1]) - beta[t] * torch.outer(k[t], k[t])))
        S = S + beta[t] * torch.outer(v[t], k[t])
        outs.append(S @ q[t])
    return torch.stack(outs)


@pytest.mark.parametrize("backend", EVERY)
def test_one_state_is_gated_deltanet(backend: str) -> None:
    T, H, D, V = 100, 2, 8, 6
    q, k, v = normal(T, H, D), unit(T, H, D), normal(T, H, V, seed=2)
    decay, beta = normal(T, H, seed=3).sigmoid(), normal(T, H, seed=4).sigmoid()
    o, _ = sse_attention(
        q, k, v, decay.log()[..., None].expand(T, H, D), torch.zeros(T, 1), top_k=1, scale=1.0, write_strength=beta,
        backend=backend,
    )  # fmt: skip
    expected = [gated_deltanet(*(x[:, h] for x in (q, k, v, decay, beta))) for h in range(H)]
    assert_same(o, torch.stack(expected, dim=1), "o")


@pytest.mark.parametrize("backend", EVERY)
def test_a_key_written_again_holds_the_second_value_alone(backend: str) -> None:
    """With strength 1, whatever was decayed before, and per channel; the plain update holds both values."""
    k, v, log_decay = unit(1, 1, 8).expand(2, 1, 8), normal(2, 1, 6), F.logsigmoid(normal(2, 1, 8, seed=3))
    options = {"top_k": 1, "scale": 1.0, "backend": backend}
    o, _ = sse_attention(k, k, v, log_decay, torch.zeros(2, 1), write_strength=torch.ones(2, 1), **options)  # type: ignore[arg-type]
    assert_same(o, v, "o")
    plain, _ = sse_attention(k, k, v, log_decay, torch.zeros(2, 1), **options)  # type: ignore[arg-type]
    assert relative_error(plain[1], v[1]) > 0.1


@pytest.mark.parametrize("backend", EVERY)
def test_writes_of_nothing_never_raise_a_state(backend: str) -> None:
    """The transition has a spectral norm of 1 or less, gated or not."""
    case = Case(lengths=(60,), delta=True, value_dim=1, decay_scale=0.0, top_k=2)
    x = case.inputs()
    x["v"].zero_()
    _, final = run(case, backend, x)
    assert bool((final.norm(dim=-2) <= x["initial_state"].norm(dim=-2) * (1 + 1e-12)).all())


@pytest.mark.parametrize("strength", [0.0, 1.0])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -80.0, None])
def test_bounds_of_strength_and_decay(strength: float, decay: float | None) -> None:
    """All gradients, with decays constant or drawn from none to -80 nats a step."""
    case = Case(lengths=(70, 33), delta=True, top_k=2, groups=2)
    x = case.inputs()
    drawn = torch.tensor([0.0, -1e-6, -5.0, -20.0, -80.0], dtype=torch.float64)
    for name in ("log_decay", "shared log_decay"):
        x[name] = drawn[torch.randint(5, x[name].shape)] if decay is None else torch.full_like(x[name], decay)
    for name in ("write_strength", "shared_write_strength"):
        x[name].fill_(strength)
    exact = run_with_gradients(case, "reference", x)
    for backend in BACKENDS:
        for name, value in run_with_gradients(case, backend, x).items():
            assert_same(value, exact[name], f"{backend} {name}")


LENGTHS = (7, 0, 33, 1, 16, 15, 64)


def engine_inputs(lengths: tuple[int, ...], G: int = 2, H: int = 2, D: int = 4, V: int = 3) -> list[Tensor]:
    T = sum(lengths)
    log_decay, state = F.logsigmoid(normal(T, H, D, seed=3)), normal(len(lengths), H, D, V, seed=5)
    return [normal(T, H, G, D), unit(T, H, D), normal(T, H, V, seed=2), log_decay, state, normal(T, H).sigmoid()]


def attend(inputs: list[Tensor], lengths: tuple[int, ...], chunk_size: int) -> tuple[Tensor, Tensor]:
    offsets = torch.tensor([0, *accumulate(lengths)])
    *tokens, state, strength = inputs
    return gated_linear_attention(*tokens, offsets, state, write_strength_TH=strength, chunk_size=chunk_size)


@pytest.mark.parametrize("slab_bytes", [1, 2**12, 2**20])
@pytest.mark.parametrize("chunk_size", [2, 16, 128])
def test_chunks_of_every_size_equal_those_of_one_token(
    chunk_size: int, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(chunk_size: int) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in engine_inputs(LENGTHS)]
        o, final = attend(leaves, LENGTHS, chunk_size)
        loss = (o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum() + final.square().sum()
        return [o.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]

    exact = results(1)
    monkeypatch.setitem(chunked.SLAB_BYTES, "cpu", slab_bytes)
    for i, value in enumerate(results(chunk_size)):
        assert_same(value, exact[i], f"result {i}")


def test_gradients_match_finite_differences() -> None:
    inputs = [x.requires_grad_() for x in engine_inputs((5, 0, 3), G=1, H=1, D=2, V=2)]
    assert torch.autograd.gradcheck(lambda *x: attend(list(x), (5, 0, 3), 4), tuple(inputs))


def test_the_operator_is_registered_as_torch_wants_it() -> None:
    *tokens, state, strength = (x.requires_grad_() for x in engine_inputs((9, 0, 70)))
    torch.library.opcheck(_opaque, (*tokens, strength, state, torch.tensor([0, 9, 9, 79]), 64))


def test_the_router_gets_the_gradient_that_a_gate_before_the_norm_loses() -> None:
    """Published SSE over the delta rule scales q and k by e, and normalises them afterwards: e cancels."""
    case = Case(lengths=(40,), delta=True, shared=False, initial_state=False)
    x = case.inputs()
    logits = x["router_logits"].requires_grad_()
    weight = normal(40, 2, 6, seed=7)

    def gradient(o: Tensor) -> Tensor:
        return torch.autograd.grad((o * weight).sum(), logits)[0].abs().max()

    e = logits.softmax(-1).max(-1).values[:, None, None]
    cancelled = {**x, "q": F.normalize(e * x["q"], dim=-1), "k": F.normalize(e * x["k"], dim=-1)}
    lost = gradient(run(case, "varlen", cancelled, write_gate=False, read_gate=False)[0])
    assert lost < 1e-12
    for gates in ({"write_gate": False}, {"read_gate": False}, {}):
        assert gradient(run(case, "varlen", x, **gates)[0]) > 0.1


def test_the_shared_partition_has_the_strength_of_the_others_unless_it_is_given_one() -> None:
    case = Case(lengths=(9,), delta=True)
    x = case.inputs()
    same = {**x, "shared_write_strength": x["write_strength"]}
    del x["shared_write_strength"]
    assert torch.equal(run(case, "varlen", x)[0], run(case, "varlen", same)[0])
    assert not torch.equal(run(case, "varlen", x)[0], run(case, "varlen")[0])


def test_wrong_write_strengths_are_refused() -> None:
    case, x = Case(lengths=(9,), delta=True), Case(lengths=(9,), delta=True).inputs()
    with pytest.raises(ShapeError, match=r"write_strength has shape \[9, 1\]\nexpected: write_strength \[9, 2\]"):
        run(case, "auto", {**x, "write_strength": torch.zeros(9, 1)})
    alone = {name: t for name, t in x.items() if name != "write_strength"}
    with pytest.raises(UsageError, match="shared_write_strength is given without write_strength"):
        run(case, "auto", alone)
    alone = {name: t for name, t in x.items() if not name.startswith("shared ")}
    with pytest.raises(UsageError, match="shared_write_strength is given without shared partition"):
        run(case, "auto", {**alone, "initial_state": x["initial_state"][:, :4]})
