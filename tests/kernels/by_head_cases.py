"""Partitions that every head chooses for itself, by a loop over sequences, tokens and heads: the definition."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sse_convert.kernels.dispatch import sse_attention
from tests.kernels.cases import SHARED_NAMES, Case

OWN = ("router_logits", "read_logits")


def inputs_of(case: Case) -> dict[str, Tensor]:
    """Tensors by argument name, with logits for each head."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    shape = case.tokens, case.heads, case.num_partitions
    own = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in OWN}
    return {**case.inputs(), **own}


def run(case: Case, backend: str, x: dict[str, Tensor], **more: Any) -> tuple[Tensor, Tensor | None]:
    """The operator."""
    shared = tuple(x[name] for name in SHARED_NAMES if name in x) or None
    others = {name: value for name, value in x.items() if name not in SHARED_NAMES}
    options = {**case.options(), "output_final_state": True, **more}
    options["cu_seqlens"] = options["cu_seqlens"].to(x["q"].device)
    return sse_attention(**others, shared=shared, backend=backend, **options)


def by_loop(case: Case, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs [T, Hq, V] and final states [S, M, H, D, V] of inputs as `inputs_of` makes them."""
    T, N, H = case.tokens, case.num_partitions, case.heads
    outputs = [[torch.zeros(())] * (H * case.groups) for _ in range(T)]
    finals = []
    for s, (begin, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
        states = [[_start(case, x, s, m, h) for h in range(H)] for m in range(N + case.shared)]
        for t in range(begin, end):
            for h in range(H):
                for m, weight in _weights(x["router_logits"][t, h], case.top_k, case.write_gate, case.renormalise):
                    states[m][h] = _written(states[m][h], x, "", t, h, weight)
                if case.shared:
                    states[N][h] = _written(states[N][h], x, "shared ", t, h, torch.tensor(1.0))
                read = _weights(x["read_logits"][t, h], case.top_k, case.read_gate, case.renormalise)
                for q in range(h * case.groups, (h + 1) * case.groups):
                    scale = case.dim**-0.5
                    o = sum(weight * (x["q"][t, q] * scale @ states[m][h]) for m, weight in read)
                    outputs[t][q] = o + x["shared q"][t, q] * scale @ states[N][h] if case.shared else o
        finals.append(torch.stack([torch.stack(row) for row in states]))
    return torch.stack([torch.stack(row) for row in outputs]), torch.stack(finals)


def _start(case: Case, x: dict[str, Tensor], s: int, m: int, h: int) -> Tensor:
    given = x.get("initial_state")
    return torch.zeros(case.dim, case.value_dim, dtype=torch.float64) if given is None else given[s, m, h]


def _weights(logits: Tensor, top_k: int, gated: bool, renormalise: bool) -> list[tuple[int, Tensor]]:
    e = F.softmax(logits, -1)
    chosen = e.argsort(descending=True)[:top_k].tolist()
    total = e[chosen].sum() if renormalise else 1.0
    return [(m, e[m] / total if gated else torch.ones_like(e[m])) for m in chosen]


def _written(state: Tensor, x: dict[str, Tensor], kind: str, t: int, h: int, weight: Tensor) -> Tensor:
    k, v = x[f"{kind}k"][t, h], x[f"{kind}v" if f"{kind}v" in x else "v"][t, h]
    if "k_scale" in x:
        k = k * x["k_scale"][h]
    state = state * x[f"{kind}log_decay"][t, h].exp()[:, None]
    strength = x.get(f"{kind.replace(' ', '_')}write_strength", x.get("write_strength"))
    if strength is None:
        return state + weight * torch.outer(k, v)
    return state + weight * strength[t, h] * torch.outer(k, v - k @ state)
