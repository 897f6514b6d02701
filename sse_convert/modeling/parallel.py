"""Refuses tensor, context and sequence parallelism of libraries, which would run on converted models and compute
something else.

They exchange no recurrent states between ranks, and a tensor-parallel plan would shard the teacher's projections but
not the new tensors. The libraries' own guards look at `layer_types` and stay silent. What a training stage's
`context_parallel` does instead is in `context.py`.
"""

from typing import Any

from torch import Tensor

from sse_convert.errors import HardwareError

_MODES = {"tp": "tensor", "cp": "context", "sp": "sequence"}


def refuse(mode: str, how: str) -> HardwareError:
    """The error for a parallel mode that is not offered.

    Args:
        mode: tp, cp or sp.
        how: what asked for it.
    """
    return HardwareError(
        f"{_MODES[mode]} parallelism of a model with converted layers ({how})",
        expected="data parallelism or fully sharded data parallelism: recurrent states are not exchanged between ranks",
        fix=f"drop {how}; use FSDP if the model does not fit one GPU, context_parallel in a stage if rows do not",
    )


def refuse_parallel_load(arguments: dict[str, Any]) -> None:
    """Check the keyword arguments of `from_pretrained`.

    Raises:
        HardwareError: they ask for tensor, context or sequence parallelism.
    """
    if arguments.get("tp_plan") is not None:
        raise refuse("tp", f"tp_plan={arguments['tp_plan']!r}")
    if (arguments.get("tp_size") or 1) > 1:
        raise refuse("tp", f"tp_size={arguments['tp_size']}")
    plan = arguments.get("distributed_config")
    if plan is not None:
        refuse_parallel_plan(plan)
    if (mesh := arguments.get("device_mesh")) is not None:
        names = getattr(mesh, "mesh_dim_names", None) or ("tp",)  # an unnamed mesh is a tensor-parallel one
        for mode in _MODES:
            if mode in names:
                raise refuse(mode, f"device_mesh with dimension {mode!r}")


def refuse_parallel_plan(plan: Any) -> None:
    """Check a parallelism configuration, Accelerate's `ParallelismConfig` or transformers' `DistributedConfig`.

    Raises:
        HardwareError: it asks for tensor, context or sequence parallelism.
    """
    for mode in _MODES:
        if (getattr(plan, f"{mode}_size", None) or 1) > 1:
            raise refuse(mode, f"{mode}_size={getattr(plan, f'{mode}_size')}")
    if getattr(plan, "tp_plan", None):
        raise refuse("tp", f"tp_plan={plan.tp_plan!r}")


def refuse_sharded(parameter: Tensor, attention_kind: str | None) -> None:
    """Check, at run time and by one of its parameters, how a converted layer's weights are spread over devices.

    Raises:
        HardwareError: a device mesh has a tensor, context or sequence dimension, or attention runs Ulysses style.
    """
    if attention_kind == "ulysses":
        raise refuse("sp", "attention implementation 'ulysses'")
    names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()
    for mode in _MODES:
        if any(mode in name.split("_") for name in names):
            raise refuse(mode, f"device mesh {tuple(names)}")
