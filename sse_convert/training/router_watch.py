"""The routers of a stage: their loads and gradients in the step log, and those named that send every token to the same
partitions, which the entropy of their load shows."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from sse_convert.console import say
from sse_convert.training.monitors import Monitor, Progress
from sse_convert.training.objective import Objective, whole

EVERY = 10
"""optimizer steps between looks"""
DEAD_SHARE = 0.01
"""a partition with less than this share of an even load is called dead"""
ENTROPY = 0.2
"""a router counts as collapsed where its load's entropy is below: 0 is one partition for all tokens, 1 an even load"""
LOOKS = 5
"""looks in a row that must find it so"""


class RouterWatch(Monitor):
    """Counts, for each layer, the looks in a row that found its router collapsed.

    Args:
        objective: what is trained.
        memory: of an interrupted run, which decides on as it would have.
    """

    key = "guard"

    def __init__(self, objective: Objective, memory: dict[str, Any] | None = None) -> None:
        self._objective = objective
        self._counts = {int(i): count for i, count in memory["counts"].items()} if memory else {}

    def before_update(self, step: int, *, last: bool) -> dict[str, Any]:
        """The routers' health, where a look is due."""
        if (step - 1) % EVERY and not last:
            return {}
        health = self._loads()
        norms = [gradient_norm(router_parameters(part.module)) for part in self._objective.parts]
        found = [float(norm) for norm in norms if norm is not None]
        return {**health, "gate_grad_norm": math.hypot(*found)} if found else health

    def _loads(self) -> dict[str, Any]:
        student: Any = self._objective.student
        layers = student.sse_layers()
        stats = {i: stats for i, layer in layers.items() if (stats := layer.router_stats()) is not None}
        if not stats:
            return {}
        health = router_health(stats)
        own = [load_spread(health["routers"][str(i)]["load"], layers[i].mixer.top_k) for i in stats]
        accelerator = self._objective.accelerator
        shared = accelerator.reduce(torch.tensor(own, dtype=torch.float32, device=accelerator.device), "mean")
        if collapsed := self.collapsed(dict(zip(stats, shared.tolist(), strict=True))):
            health["collapsed"] = collapsed
        return health

    def collapsed(self, spread: dict[int, float]) -> list[int]:
        """Layers that count as collapsed after this look.

        Args:
            spread: of each layer's load, by `load_spread`.
        """
        for i, value in spread.items():
            self._counts[i] = self._counts.get(i, 0) + 1 if value < ENTROPY else 0
        return [i for i in spread if self._counts[i] >= LOOKS]

    def say(self, now: Progress, record: dict[str, Any]) -> None:
        """Name a layer once, when it has collapsed."""
        for i in record.get("collapsed", []):
            if self._counts[i] == LOOKS and self._objective.accelerator.is_main_process:
                say(_message(i, record))

    def memory(self) -> dict[str, Any]:
        """The counts."""
        return {"counts": {str(i): count for i, count in self._counts.items()}}

    def report(self, records: list[dict[str, Any]]) -> dict[str, Any]:
        """`collapsed`: one line for each layer, of the last look that found it so."""
        last = {i: _message(i, record) for record in records for i in record.get("collapsed", [])}
        return {"collapsed": [last[i] for i in sorted(last)]}


def load_spread(load: list[float], top_k: int) -> float:
    """Entropy of a load as a share of its range: 0 where all tokens take the same k partitions, 1 where it is even.

    Args:
        load: shares of the partitions, which sum to 1.
        top_k: partitions a token takes; as many as there are leave nothing to choose, which counts as even.
    """
    low, high = math.log(top_k), math.log(len(load))
    entropy = -sum(x * math.log(x) for x in load if x > 0)
    return (entropy - low) / (high - low) if high > low else 1.0


def _message(layer: int, record: dict[str, Any]) -> str:
    """What is wrong with a collapsed layer, and what to do."""
    load = record["routers"][str(layer)]["load"]
    busiest = f"{max(load):.0%} of its load is on one partition of {len(load)}"
    return (
        f"layer {layer}: router collapsed at step {record['step']}, {busiest}; "
        "lower the mixers' lr, or balance more: raise balance_coef"
    )


def router_health(stats: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Router statistics of all layers as a few numbers.

    Args:
        stats: of the layers with a router, one or more, by `SSEAttention.router_stats`.

    Returns:
        load_entropy (mean over layers, as a share of the entropy of an even load), dead_partitions (their number),
        and `routers` with the entropy and the loads of each layer.
    """
    even = {i: math.log(len(value["load"])) for i, value in stats.items()}
    loads = {i: (value["load"] / value["load"].sum().clamp_min(1e-12)).tolist() for i, value in stats.items()}
    return {
        "load_entropy": sum(value["entropy"] / even[i] for i, value in stats.items()) / len(stats),
        "dead_partitions": sum(sum(x < DEAD_SHARE / len(load) for x in load) for load in loads.values()),
        "routers": {
            str(i): {"entropy": value["entropy"], "gate": value["gate_mean"], "load": loads[i]}
            for i, value in stats.items()
        },
    }


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor | None:
    """Norm of the gradients of all parameters together, sharded or not, 0-d; None without any."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return whole(torch.nn.utils.get_total_norm(grads)) if grads else None


def router_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The router weights of a prepared module."""
    return [parameter for name, parameter in module.named_parameters() if name.endswith("sse_router.weight")]
