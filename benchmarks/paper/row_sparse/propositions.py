"""Propositions 1 to 4 of Appendix A, each checked on random instances: as it is stated, and as its proof needs it.

Inputs are unit vectors here, which divides every inner product of the paper by d. Class i holds the inputs that lie
within the angle theta_i of its classifier W^i; so a threshold of the paper is |W^i| cos(theta_i).

Shape letters: N instances, D dim, C rows of a state, T tokens.
"""

import dataclasses as dc
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.errors import UsageError

DIMS = (2, 3, 4, 8, 16)
"""vectors of these dims; what can fail fails most often in few"""
ROUNDING = 1e-12
"""margins down to minus this are none"""


@dc.dataclass(frozen=True, slots=True)
class Check:
    """One statement on many random instances."""

    proposition: int
    """1 to 4"""
    statement: str
    """what is checked"""
    expected: bool
    """whether it should hold in every instance; if not, there are counterexamples"""
    instances: int
    """instances that meet the conditions"""
    violations: int
    """of these, instances that break it"""
    least_margin: float
    """smallest left side minus right side; negative if broken"""

    @property
    def confirmed(self) -> bool:
        """Held wherever it should, or was broken where it should not hold in general."""
        return self.instances > 0 and (self.violations == 0) == self.expected


Sampler = Callable[[int, int, torch.Generator], Tensor]
"""(number of instances, dim, generator) to the margins of those that meet the conditions, [<= N]"""


def check_all(instances: int = 20000, seed: int = 0) -> list[Check]:
    """Every statement, in the order of the paper.

    Args:
        instances: drawn per dim; fewer meet the conditions.
        seed: of the draws.
    """
    if instances < 1:
        raise UsageError(f"{instances} instances", expected="at least 1")
    checks = []
    for i, (proposition, statement, expected, sampler) in enumerate(STATEMENTS):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        margins = torch.cat([sampler(instances, dim, generator) for dim in DIMS])
        least = float(margins.min()) if len(margins) else math.nan
        checks.append(Check(proposition, statement, expected, len(margins), int((margins < -ROUNDING).sum()), least))
    return checks


def unit(x: Tensor) -> Tensor:
    """Vectors [..., D] over their length."""
    return F.normalize(x, dim=-1, eps=0.0)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cos of vectors [..., D]."""
    return (unit(x) * unit(y)).sum(-1)


def cone(axis_ND: Tensor, angle_N: Tensor, generator: torch.Generator) -> Tensor:
    """Unit vectors [N, D] within an angle of unit axes."""
    away_ND = _normal(*axis_ND.shape, generator=generator)
    away_ND = unit(away_ND - (away_ND * axis_ND).sum(-1, keepdim=True) * axis_ND)
    own_N1 = (angle_N * _uniform(len(angle_N), generator=generator).sqrt())[:, None]
    return own_N1.cos() * axis_ND + own_N1.sin() * away_ND


def same_class(N: int, D: int, generator: torch.Generator) -> Tensor:
    """<x_r, x_s> - cos(2 theta) of two inputs of a class."""
    axis_ND, angle_N = unit(_normal(N, D, generator=generator)), _angles(N, generator=generator)
    inner_N = (cone(axis_ND, angle_N, generator) * cone(axis_ND, angle_N, generator)).sum(-1)
    return inner_N - (2 * angle_N).cos()


def other_class(share: float) -> Sampler:
    """cos(2 theta_i) - <x_r, x_s> of inputs of two classes, theta_i and theta_j under `share` of their axes' angle."""

    def margins(N: int, D: int, generator: torch.Generator) -> Tensor:
        axes_2ND = unit(_normal(2, N, D, generator=generator))
        between_N = cosine(*axes_2ND).clamp(-1, 1).acos()
        angle_2N = (share * between_N * _uniform(2, N, generator=generator)).clamp_max(math.pi / 2)
        inner_N = (cone(axes_2ND[0], angle_2N[0], generator) * cone(axes_2ND[1], angle_2N[1], generator)).sum(-1)
        return (2 * angle_2N[0]).cos() - inner_N

    return margins


def two_rows(*, one_direction: bool = False, as_in_the_proof: bool = False) -> Sampler:
    """Cos(S^1, S^2) of dense updates minus that of row-sparse ones, for two classes.

    x[i, j] is the direction of the sum of class j as row i weighs it. A dense row is the sum over both classes with
    weights >= 0; the row-sparse row i holds class i alone. Instances in which inputs of different classes are further
    apart than inputs of one class, as Proposition 1 has it.

    Args:
        one_direction: both rows see a class in the same direction, x[1, j] = x[2, j].
        as_in_the_proof: <x[1, 2], x[2, 1]> >= <x[1, 1], x[2, 2]>, which it assumes without loss of generality, and
            <S^1, S^2> >= 0, without which its bound on the norms turns around.
    """

    def margins(N: int, D: int, generator: torch.Generator) -> Tensor:
        axes_2ND, angle_2N = unit(_normal(2, N, D, generator=generator)), _angles(2, N, generator=generator)
        x = torch.stack([cone(axes_2ND.flatten(0, 1), angle_2N.flatten(), generator) for _ in range(2)])
        x = torch.unflatten(x, 1, (2, N))
        if one_direction:
            x[1] = x[0]
        rows_2ND = (_uniform(2, 2, N, 1, generator=generator) * x).sum(1)
        own_N, crossed_N = (x[0, 0] * x[1, 1]).sum(-1), (x[0, 1] * x[1, 0]).sum(-1)
        meets_N = torch.maximum(own_N, crossed_N) <= (2 * angle_2N.amax(0)).cos()
        if as_in_the_proof:
            meets_N = meets_N & (crossed_N >= own_N) & ((rows_2ND[0] * rows_2ND[1]).sum(-1) >= 0)
        return (cosine(*rows_2ND) - own_N)[meets_N]

    return margins


def clustered_states(N: int, D: int, generator: torch.Generator, C: int = 4, T: int = 64) -> Tensor:
    """Row similarity of states that tokens around C centres wrote, averaged over N / 100 states: dense minus top 1.

    The classifier rows are the centres, the weights relu(x W_k), the values x itself.
    """
    N = max(1, N // 100)
    centre_NCD = unit(_normal(N, C, D, generator=generator))
    kind_NT = torch.randint(C, (N, T), generator=generator)
    noise_NTD = 0.3 * _normal(N, T, D, generator=generator) / math.sqrt(D)
    x_NTD = unit(centre_NCD.gather(1, kind_NT[..., None].expand(-1, -1, D)) + noise_NTD)
    weight_NTC = (x_NTD @ centre_NCD.mT).clamp_min(0)
    top_NTC = torch.zeros_like(weight_NTC).scatter(-1, weight_NTC.argmax(-1, keepdim=True), 1)
    filled_N = top_NTC.sum(1).amin(-1) > 0
    difference_N = _similarity(weight_NTC.mT @ x_NTD) - _similarity((weight_NTC * top_NTC).mT @ x_NTD)
    return difference_N[filled_N].mean(0, keepdim=True)


def distinguishability(*, alike: bool) -> Sampler:
    """Cos(qS, pS) - min_ij <S^i, S^j> / |S|^2 for queries >= 0.

    Args:
        alike: only states whose rows have inner products >= 0.
    """

    def margins(N: int, D: int, generator: torch.Generator) -> Tensor:
        state_NCD = _normal(N, 4, D, generator=generator)
        if alike:
            state_NCD = state_NCD.abs()
        q_NC, p_NC = _queries(N, generator), _queries(N, generator)
        answer_q, answer_p = (torch.einsum("nc,ncd->nd", x, state_NCD) for x in (q_NC, p_NC))
        bound_N = (state_NCD @ state_NCD.mT).flatten(1).amin(1) / torch.linalg.matrix_norm(state_NCD, 2).square()
        margin_N: Tensor = cosine(answer_q, answer_p) - bound_N
        return margin_N

    return margins


def receptive_field(N: int, D: int, generator: torch.Generator, T: int = 64) -> Tensor:
    """max_k log(P / d) / log(max_j a_j^k) minus max {t - s: p_ts >= P}, its bound, at the last of T tokens.

    q and k are all ones, so p_ts is the sum over k of the product of the decays after s.
    """
    N = max(1, N // 100)
    slowest_N11 = 0.3 + 0.69 * _uniform(N, 1, 1, generator=generator)
    decay_NTD = slowest_N11 + (1 - slowest_N11) * _uniform(N, T, D, generator=generator)
    threshold_N = D * _uniform(N, generator=generator)
    field_N = attention_field(decay_NTD, threshold_N)
    since = [decay_NTD[:, T - n :].amax(1) for n in range(1, T)]
    margins = []
    for n in range(1, T):
        bound_N = (torch.log(threshold_N / D)[:, None] / torch.log(since[n - 1])).amax(1)
        margins.append((bound_N - n)[field_N == n])
    return torch.cat(margins)


def spared_rows(enough: bool) -> Sampler:
    """Receptive field minus T - 1, with some rows of the state never written after the first token.

    Args:
        enough: the threshold is at most the number of spared rows; else it is more.
    """

    def margins(N: int, D: int, generator: torch.Generator) -> Tensor:
        N, T = max(1, N // 100), 64
        decay_NTD = 0.9 * _uniform(N, T, D, generator=generator)
        spared = D // 2
        decay_NTD[..., :spared] = 1
        share_N = _uniform(N, generator=generator)
        threshold_N = spared * share_N if enough else spared + 0.5 * (D - spared) * (0.5 + 0.5 * share_N)
        return attention_field(decay_NTD, threshold_N).double() - (T - 1)

    return margins


def attention_field(decay_NTD: Tensor, threshold_N: Tensor) -> Tensor:
    """M_t of the last token: the largest t - s with p_ts >= threshold, 0 to T - 1, for q and k of ones.

    Source: arXiv:2507.16577, Appendix A, definitions before Proposition 4.
    """
    after_NTD = torch.cat([decay_NTD[:, 1:].flip(1).cumprod(1).flip(1), torch.ones_like(decay_NTD[:, :1])], 1)
    T = decay_NTD.shape[1]
    reached_NT = after_NTD.sum(-1) >= threshold_N[:, None]
    return torch.where(reached_NT, torch.arange(T - 1, -1, -1), 0).amax(1)


STATEMENTS: tuple[tuple[int, str, bool, Sampler], ...] = (
    (1, "inputs of one class: <x_r, x_s> > d cos(2 theta)", True, same_class),
    (1, "inputs of two classes: <x_r, x_s> <= d cos(2 theta), thetas under a quarter of the axes' angle", True,
     other_class(1 / 4)),
    (1, "the same with thetas under half of that angle", False, other_class(1 / 2)),
    (2, "two rows, each class one direction: dense rows are more alike than row-sparse ones", True,
     two_rows(one_direction=True)),
    (2, "two rows, with what the proof assumes: dense rows are more alike", True, two_rows(as_in_the_proof=True)),
    (2, "two rows, as stated: dense rows are more alike", False, two_rows()),
    (2, "states of clustered tokens, on average: dense rows are more alike", True, clustered_states),
    (3, "rows with inner products >= 0: Cos(qS, pS) >= min <S^i, S^j> / |S|^2", True, distinguishability(alike=True)),
    (3, "any rows, as stated: the same bound", False, distinguishability(alike=False)),
    (4, "dense decay: the receptive field is within the bound", True, receptive_field),
    (4, "spared rows, at least as many as the threshold: the receptive field is the whole context", True,
     spared_rows(enough=True)),
    (4, "spared rows, fewer than the threshold: the same", False, spared_rows(enough=False)),
)  # fmt: skip
"""number, statement, whether it holds always, margins; those that do not are tacit conditions of the paper"""


def _similarity(state_NCD: Tensor) -> Tensor:
    """Mean Cos(S^i, S^j) over i != j, [N]."""
    rows_NCD = unit(state_NCD)
    C = rows_NCD.shape[1]
    return ((rows_NCD @ rows_NCD.mT).sum((1, 2)) - C) / (C * (C - 1))


def _queries(N: int, generator: torch.Generator) -> Tensor:
    """Queries [N, 4] >= 0, half of them of a single row."""
    dense = _uniform(N, 4, generator=generator)
    single = F.one_hot(torch.randint(4, (N,), generator=generator), 4).to(dense.dtype)
    return torch.where(torch.rand(N, 1, generator=generator) < 0.5, dense, single)


def _angles(*shape: int, generator: torch.Generator) -> Tensor:
    """0 to a right angle."""
    return math.pi / 2 * _uniform(*shape, generator=generator)


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _uniform(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator)
