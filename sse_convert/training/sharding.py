"""FSDP2: processes share out the weights of a model that only the first of them reads.

The others build it without data (torch's meta device). Then unit after unit, which is a decoder layer or what lies
around the layers, the first process hands out its tensors whole, and each process keeps its shard on its device. So one
process holds a model, and a device one unit beside its shards.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from sse_convert.checkpoints.meta_model import unfilled_model
from sse_convert.errors import SSEConvertError
from sse_convert.modeling.sink_attention import use_kernels
from sse_convert.trust import trusts_code


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether processes share out the weights."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def read_once(
    read: Callable[[], PreTrainedModel], empty: Callable[[], PreTrainedModel], accelerator: Accelerator
) -> PreTrainedModel:
    """A model. Where weights are shared out the first process alone reads it, and the others fail where it does.

    Args:
        read: reads and checks the model.
        empty: makes the same model without data.
        accelerator: of the stage.
    """
    if not is_sharded(accelerator):
        return read()
    model: PreTrainedModel | None = None
    failed: list[SSEConvertError | None] = [None]
    if accelerator.is_main_process:
        try:
            model = read()
        except SSEConvertError as error:
            failed = [error]
    if (failure := broadcast_object_list(failed)[0]) is not None:
        raise failure
    return empty() if model is None else model


def empty_model(folder: str | Path, dtype: torch.dtype, sse: dict[str, Any] | None) -> PreTrainedModel:
    """What `load_pretrained` gives, but for the data of parameters, which is missing. Arguments as there.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    own = {} if sse is None else {"sse": sse}
    model = unfilled_model(AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code(), **own))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.tie_weights()
    use_kernels(model)
    return model.eval()


def share_out(units: Iterable[nn.Module], accelerator: Accelerator, *, trained: bool) -> None:
    """Leave each process its shard of what the first one has, on its device; without FSDP nothing happens.

    Args:
        units: modules that gather their weights when they are called. What is in an earlier one is that one's.
        accelerator: of the stage.
        trained: Accelerate's settings hold for them; else torch's own, for a model that computes in its weights' dtype.
    """
    if not is_sharded(accelerator):
        return
    from torch.distributed.fsdp import fully_shard

    settings = _settings(accelerator) if trained else {}
    for unit in units:
        receive(unit, accelerator)
        fully_shard(unit, **settings)


def prepared(
    module: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """Both as Accelerate prepares them. A sharded module is prepared, and Accelerate would not tell its empty shards
    apart."""
    if is_sharded(accelerator):
        return module, accelerator.prepare_optimizer(optimizer)
    found: tuple[nn.Module, AcceleratedOptimizer] = accelerator.prepare(module, optimizer)
    return found


@torch.no_grad()
def receive(unit: nn.Module, accelerator: Accelerator) -> None:
    """Put what the first process has of a unit on every process's device, whole; without FSDP nothing happens.

    Args:
        unit: what is sharded in it stays so.
        accelerator: of the stage.
    """
    if not is_sharded(accelerator):
        return
    places = [place for place in _places(unit) if not isinstance(getattr(*place), DTensor)]
    kinds = [_kind(name, getattr(module, name)) for module, name in places]
    received: dict[Tensor, Tensor] = {}  # tied ones once
    for (module, name), kind in zip(places, broadcast_object_list([kinds])[0], strict=True):
        assert name == kind["name"], f"{name} where the first process has {kind['name']}"
        tensor: Tensor = getattr(module, name)
        if tensor not in received:
            received[tensor] = _received(tensor, kind, accelerator)
        setattr(module, name, received[tensor])


def _places(unit: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Each parameter and buffer as a module and the name it has there; tied ones as often as they have one."""
    for module in unit.modules():
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield module, name


def _kind(name: str, tensor: Tensor) -> dict[str, Any]:
    """What reading decides, beside the data: transformers keeps some tensors in another dtype than the model's."""
    return {"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "requires_grad": tensor.requires_grad}


def _received(tensor: Tensor, kind: dict[str, Any], accelerator: Accelerator) -> Tensor:
    """What the first process has in this tensor's place, on this process's device."""
    if accelerator.is_main_process:
        data = tensor.detach().to(accelerator.device).contiguous()
    else:
        data = torch.empty(kind["shape"], dtype=kind["dtype"], device=accelerator.device)
    torch.distributed.broadcast(data, 0)
    return nn.Parameter(data, kind["requires_grad"]) if isinstance(tensor, nn.Parameter) else data


def _settings(accelerator: Accelerator) -> dict[str, Any]:
    """How Accelerate's configuration wants weights to be shared out."""
    plugin: Any = accelerator.state.fsdp_plugin
    mesh, plan = accelerator.torch_device_mesh, accelerator.parallelism_config
    return {
        "mesh": None if mesh is None else mesh[tuple(plan.fsdp_dim_names)],
        "mp_policy": plugin.mixed_precision_policy,
        "offload_policy": plugin.cpu_offload,
        # None is torch's choice: sharded again, but for the root, which is called first. What it has itself, embedding
        # and head or a layer that is aligned, is needed as soon as the backward begins
        "reshard_after_forward": None if plugin.reshard_after_forward else False,
    }
