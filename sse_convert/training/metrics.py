"""The step log: metrics.jsonl (one line per optimizer step), router health."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sse_convert.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate import Accelerator

FILE = "metrics.jsonl"
HEALTH_EVERY = 10
"""optimizer steps between looks at the routers"""
DEAD_SHARE = 0.01
"""a partition with less than this share of an even load is called dead"""


class MetricsLog:
    """Appends records; only the main process does.

    Args:
        folder: holds metrics.jsonl.
        accelerator: of the stage.
    """

    def __init__(self, folder: Path, accelerator: "Accelerator") -> None:
        self._path = folder / FILE
        self.written = 0
        """records of this start"""
        self._accelerator = accelerator

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. NaN and Inf are stored as null."""
        self.written += 1
        clean = {key: _finite(value) for key, value in record.items()}
        if self._accelerator.is_main_process:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(clean)}\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The whole records of a log; a last line cut short by a kill is left out.

    Raises:
        CheckpointError: a line is damaged, or one is missing.
    """
    if not path.is_file():
        return []
    records = [_record(line) for line in path.read_bytes().split(b"\n")[:-1]]
    for number, record in enumerate(records, start=1):
        if record is None or record["step"] != number:
            raise CheckpointError(
                f"{path} cannot be read: line {number} is not the record of step {number}",
                expected="one JSON object for each step",
                fix="restore the file from a copy; while its stage is unfinished, running that again mends it",
            )
    return [record for record in records if record is not None]


def mended(text: bytes, steps: int) -> bytes | None:
    """A log of the first `steps` steps, from one to which two runs may have written: the last record of each step. None
    where one is missing."""
    found = {record["step"]: line for line in text.split(b"\n")[:-1] if (record := _record(line)) is not None}
    if any(step not in found for step in range(1, steps + 1)):
        return None
    return b"".join(found[step] + b"\n" for step in range(1, steps + 1))


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def router_health(stats: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Router statistics of all layers as a few numbers.

    Args:
        stats: of the layers with a router, by `SSEAttention.router_stats`.

    Returns:
        load_entropy (mean over layers, as a share of the entropy of an even load), dead_partitions (their number),
        and `routers` with the entropy and the loads of each layer.
    """
    if not stats:
        return {}
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
    if not grads:
        return None
    norm = torch.nn.utils.get_total_norm(grads)
    return whole(norm)


def router_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The router weights of a prepared module."""
    return [parameter for name, parameter in module.named_parameters() if name.endswith("sse_router.weight")]


def whole(value: Tensor) -> Tensor:
    """A plain tensor from one that may be sharded."""
    full: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
