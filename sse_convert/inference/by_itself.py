"""`model.generate` of a converted model replays its steps by itself, where only the clock would notice."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import distributed, nn
from transformers import PreTrainedModel

from sse_convert.compat import has_compiled_part
from sse_convert.inference.cuda_graphs import graphed, runs_graphs
from sse_convert.modeling.compat import hooks_of

OWN = "sse_convert."
"""start of the names of modules whose hooks may be replayed"""


@contextmanager
def graphed_by_itself(model: PreTrainedModel) -> Iterator[None]:
    """In this block, steps of a model on one GPU are replayed, with as many columns as its `generate` says.

    A model stays as it is that trains, has compiled parts, works with other processes, or has hooks or a forward from
    elsewhere, which would not run in a replayed step.
    """
    alone = runs_graphs(model) and not (model.training or _in_company() or has_compiled_part(model))
    with graphed(model) if alone and not any(map(_is_watched, model.modules())) else nullcontext():
        yield


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody else's code runs with a module's forward, or in its place."""
    owners = (type(getattr(hook, "__self__", hook)) for hook in hooks_of(module))
    return "forward" in vars(module) or not all(owner.__module__.startswith(OWN) for owner in owners)


def _in_company() -> bool:
    """Whether other processes have a part in the work."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
