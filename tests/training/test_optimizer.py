import copy
import dataclasses as dc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sse_convert.errors import TrainingError
from sse_convert.recipe.schema import LearningRates, Stage
from sse_convert.training import model_objective as whole
from sse_convert.training import optimizer as module
from sse_convert.training.optimizer import MuonAdamW, learning_rates, make_optimizer, orthogonal
from tests.training.conftest import losses

STAGE = Stage(name="s", loss="ce", tokens=1, seq_len=1, lr=LearningRates(mixers=2.0, rest=1.0), weight_decay=0.5)


def parameter(*shape, seed=0):
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def parameters():
    return {
        "layers.mixer.w": parameter(2, 3),
        "layers.mixer.b": parameter(2),
        "layers.w": parameter(3, 2),
        "embed.w": parameter(4, 2),
        "layers.own": parameter(2, 2, 2),
        "layers.frozen": parameter(2, 2).requires_grad_(False),
    }


def make(named, *, fused=False, **changes):
    return make_optimizer(
        named.items(),
        dc.replace(STAGE, **changes),
        is_mixer=lambda name: "mixer" in name,
        is_inner=lambda name: name.startswith("layers."),
        fused=fused,
    )


def test_groups_by_rate_and_decay():
    optimizer, rates = make(parameters())
    groups = [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert groups == [(2.0, 0.5, 1), (2.0, 0.0, 1), (1.0, 0.5, 3)]
    assert rates == [2.0, 2.0, 1.0]
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert type(optimizer) is torch.optim.AdamW
    added = {"layers.mixer.sse_router.weight": parameter(2, 2), **parameters()}
    assert make(added, lr=LearningRates(mixers=2.0, new=3.0, rest=1.0))[1] == [3.0, 2.0, 2.0, 1.0]
    assert make(added)[1] == [2.0, 2.0, 1.0]
    assert learning_rates(Stage(name="s", loss="ce", tokens=1, seq_len=1, lr=3.0)).rest == 3.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_to_train(optimizer):
    with pytest.raises(TrainingError, match="nothing to train"):
        make({"layers.frozen": parameters()["layers.frozen"]}, optimizer=optimizer)


def test_muon_takes_the_matrices_of_decoder_layers():
    named = parameters()
    optimizer, rates = make(named, optimizer="muon")
    assert isinstance(optimizer, MuonAdamW)
    names = {id(p): name for name, p in named.items()}
    found = {name: "momentum" in g for g in optimizer.param_groups for name in (names[id(p)] for p in g["params"])}
    assert found == {
        "layers.mixer.w": True, "layers.w": True, "layers.mixer.b": False, "embed.w": False, "layers.own": False
    }  # fmt: skip
    assert rates == [g["lr"] for g in optimizer.param_groups] == [2.0, 1.0, 2.0, 1.0]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.5, 0.0, 0.5]


def gradients(named, step):
    for i, p in enumerate(named.values()):
        p.grad = parameter(*p.shape, seed=100 * step + i).data if p.requires_grad else None


def test_muon_steps_are_near_orthogonal_and_as_long_as_adams():
    """Root mean square 0.2 times the rate, all singular values within the bounds of Newton-Schulz's five iterations."""
    w = parameter(24, 16)
    (optimizer, _), before = make({"layers.w": w}, optimizer="muon", weight_decay=0.0, lr=1e-3), w.detach().clone()
    w.grad = parameter(24, 16, seed=1).data
    optimizer.step()
    moved = (before - w.detach()) / 1e-3
    values = torch.linalg.svdvals(moved) / (0.2 * 24**0.5)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert torch.cosine_similarity(moved.flatten(), w.grad.flatten(), 0) > 0.8


def newton_schulz(x, coefficients, steps):
    """In float64, a matrix at a time."""
    a, b, c = coefficients
    x = x.double() / x.double().norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 40), (4, 40, 8), (1, 1, 5)])
def test_matrices_of_a_shape_are_made_orthogonal_together(shape, fast, monkeypatch):
    """In bfloat16, but on a CPU without units for it, where one matrix of SmolLM2 took 28 times as long."""
    monkeypatch.setattr(module, "fast_in_bfloat16", lambda device: fast)
    x_NAB, coefficients = parameter(*shape).detach(), (3.4445, -4.775, 2.0315)
    found_NAB = orthogonal(x_NAB, coefficients, 5, 1e-7)
    assert found_NAB.dtype == (torch.bfloat16 if fast else torch.float32)
    for found, x in zip(found_NAB.double(), x_NAB, strict=True):
        expected = newton_schulz(x, coefficients, 5)
        close = 0.05 if fast else 1e-5  # what bf16 makes of the iteration
        assert (found - expected).norm() < close * expected.norm()
    assert not orthogonal(torch.zeros(shape), coefficients, 5, 1e-7).any()


@pytest.mark.parametrize(("at_once", "counts"), [(5 * 24, [5]), (2 * 24, [2, 2, 1]), (1, [1] * 5)])
def test_large_matrices_are_not_stacked(monkeypatch, at_once, counts):
    """What a step takes beside the weights does not grow with the number of layers."""
    stacks, real = [], module.orthogonal
    monkeypatch.setattr(module, "orthogonal", lambda x_NAB, *rest: stacks.append(x_NAB) or real(x_NAB, *rest))
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    named = {f"layers.{i}": parameter(4, 6, seed=i) for i in range(5)}
    gradients(named, 0)
    make(named, optimizer="muon")[0].step()
    assert [len(stack) for stack in stacks] == counts
    for p, x in zip(named.values(), torch.cat(stacks), strict=True):
        torch.testing.assert_close(x, p.grad + 0.95 * (0.05 * p.grad - p.grad))  # Nesterov's, in the first step


def test_muon_beside_adamw_is_each_of_them_alone():
    """Muon of torch is the reference; elsewhere its steps and ours may round to bf16 in another order."""
    named, alone, start = parameters(), parameters(), parameters()
    optimizer, rates = make(named, optimizer="muon")
    inner = [
        torch.optim.Muon([alone["layers.mixer.w"]], lr=2.0, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon([alone["layers.w"]], lr=1.0, weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([alone["layers.mixer.b"]], lr=2.0, weight_decay=0.0, betas=(0.9, 0.95)),
        torch.optim.AdamW([alone["embed.w"], alone["layers.own"]], lr=1.0, weight_decay=0.5, betas=(0.9, 0.95)),
    ]
    for step in range(3):
        factor = 1 - step / 4  # rates are set as the loop sets them
        for group, rate, other in zip(optimizer.param_groups, rates, inner, strict=True):
            group["lr"] = other.param_groups[0]["lr"] = rate * factor
        gradients(named, step)
        gradients(alone, step)
        for one in (optimizer, *inner):
            one.step()
    for name, value in named.items():
        moved, expected = value.detach() - start[name].detach(), alone[name].detach() - start[name].detach()
        if name in ("layers.mixer.w", "layers.w"):
            assert (moved - expected).norm() < 2**-7 * expected.norm(), name
        else:
            assert torch.equal(moved, expected), name


class NoWaiting(TorchDispatchMode):
    """Refuses to bring a tensor's value to Python, for which a GPU would be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_muon_takes_its_rate_from_a_tensor_without_waiting_for_it(weight_decay):
    """As a CUDA graph needs it, in which each step reads the rate anew."""
    shapes = {"layers.a": (2, 3), "layers.b": (3, 2), "layers.c": (3, 2)}
    plain, given = ({name: parameter(*shape) for name, shape in shapes.items()} for _ in range(2))
    (reference, _), (optimizer, _) = (make(p, optimizer="muon", weight_decay=weight_decay) for p in (plain, given))
    rate = torch.tensor(0.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    for step in range(3):
        rate.fill_(0.5 / (step + 1))
        for group in reference.param_groups:
            group["lr"] = float(rate)
        for held in (plain, given):
            gradients(held, step)
        reference.step()
        with NoWaiting():
            optimizer.step()
    for name, value in plain.items():
        torch.testing.assert_close(given[name], value)


@pytest.mark.gpu
def test_a_step_of_muon_beside_adamw_is_replayed_from_a_cuda_graph():
    """Each replay reads rate and gradients anew."""
    ends = []
    for record in (False, True):
        named = {name: p.detach().cuda().requires_grad_() for name, p in parameters().items()}
        optimizer, _ = make(named, optimizer="muon", fused=True)
        rate = torch.tensor(0.0, device="cuda")
        for group in optimizer.param_groups:
            group.update(lr=rate, capturable=True)
        for p in named.values():
            p.grad = torch.zeros_like(p)
        step = optimizer.step
        for i in range(4):
            rate.fill_(0.1 / (i + 1))
            for j, p in enumerate(named.values()):
                p.grad.copy_(parameter(*p.shape, seed=10 * i + j).detach())
            if record and i == 1:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
                step = graph.replay
            step()
        ends.append(named)
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)


def test_muon_goes_on_from_its_state():
    named, later = parameters(), parameters()
    optimizer, _ = make(named, optimizer="muon")
    gradients(named, 0)
    optimizer.step()
    with torch.no_grad():
        for name, p in later.items():
            p.copy_(named[name])
    resumed, _ = make(later, optimizer="muon")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, held in ((optimizer, named), (resumed, later)):
        gradients(held, 1)
        for group in one.param_groups:
            group["lr"] *= 0.5
        one.step()
    for name, value in named.items():
        assert torch.equal(value, later[name]), name


def test_embeddings_and_head_stay_with_adamw(train, monkeypatch):
    """In a whole model: what Muon moves are matrices of decoder layers, all of them."""
    made, real = [], whole.make_optimizer

    def seen(named, stage, **rest):
        named = dict(named)
        optimizer, rates = real(named.items(), stage, **rest)
        made.append((named, optimizer))
        return optimizer, rates

    monkeypatch.setattr(whole, "make_optimizer", seen)
    folder, _ = train("distill", optimizer="muon", tokens=8192)
    ((named, optimizer),) = made
    muon = {id(p) for g in optimizer.param_groups if "momentum" in g for p in g["params"]}
    matrices = {n for n, p in named.items() if p.requires_grad and p.dim() == 2 and ".layers." in n}
    assert {n for n, p in named.items() if id(p) in muon} == matrices
    assert any("embed_tokens" in n for n in named)
    assert len(matrices) > 20
    curve = losses(folder)
    assert sum(curve[-4:]) < 0.8 * sum(curve[:4])
