"""How many kernels a step of one token would launch on a GPU, counted without one: what torch's operators compute, and
Triton kernels, which the interpreter runs. An operator counts as one launch, which is the least it takes.

    python -m tests.inference.launches
"""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

FREE = {
    "view", "_unsafe_view", "reshape", "expand", "t", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze",
    "split", "split_with_sizes", "detach", "alias", "as_strided", "empty", "empty_like", "new_empty", "unbind",
    "empty_strided", "_local_scalar_dense", "unsafe_split", "lift_fresh", "sym_size", "promote_types",
}  # fmt: skip
"""operators that launch nothing"""
KINDS = ("full", "paper", "sse", "gdn", "sse+sliding")


class Launches(TorchDispatchMode):
    """Counts launches by name while active."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        own = func.namespace not in ("aten", "prims", "prim")
        with _disable_current_modes() if own else contextlib.nullcontext():
            result = func(*args, **(kwargs or {}))
        if not own and name not in FREE:
            self.by_name[name] += 1
        return result

    @property
    def total(self) -> int:
        """Launches in all."""
        return self.by_name.total()


@contextlib.contextmanager
def counted() -> Iterator[Launches]:
    """Count the launches of this block; Triton's kernels must be interpreted."""
    from triton.runtime import interpreter

    launches, call = Launches(), interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        launches.by_name[self.fn.__name__] += 1
        with _disable_current_modes():
            return call(self, *args, **options)

    interpreter.GridExecutor.__call__ = noted
    try:
        with launches:
            yield launches
    finally:
        interpreter.GridExecutor.__call__ = call


def step_launches(kind: str, *, fused: bool) -> tuple[Counter[str], Counter[str]]:
    """Launches of a layer and of what surrounds the layers, by name, in the second step of a small Qwen3 in bfloat16.

    Args:
        kind: `full` for softmax, else a built-in mixer.
        fused: by fused layers, or by a call of each module.
    """
    from sse_convert.inference import fused_layers

    which = fused_layers.fused
    fused_layers.fused = which if fused else lambda model: {}
    try:
        two, four = (_counted_step(kind, layers) for layers in (2, 4))
    finally:
        fused_layers.fused = which
    layer = Counter({name: (four[name] - two[name]) // 2 for name in four if four[name] > two[name]})
    return layer, Counter({name: two[name] - 2 * layer[name] for name in two if two[name] > 2 * layer[name]})


def _counted_step(kind: str, layers: int) -> Counter[str]:
    from sse_convert.inference.cuda_graphs import TokenStep
    from sse_convert.kernels import triton_backend
    from tests.inference.test_cuda_graphs import prefill

    model = small_model(kind, layers)
    before, triton_backend.GPU = triton_backend.GPU, "cpu"
    try:
        cache, _, tokens = prefill(model, (11,))
        step = TokenStep(model, cache, tokens, slots=40)
        step()
        with counted() as launches:
            step()
    finally:
        triton_backend.GPU = before
    return launches.by_name


def small_model(kind: str, layers: int) -> Any:
    """A Qwen3 of one kind of layer, with random weights, whose recurrent layers run the kernels where they can."""
    from sse_convert.mixers import BUILT_IN, FULL, mixer_to_dict
    from sse_convert.modeling.configuration import build_config
    from sse_convert.modeling.hybrid import model_class_for
    from tests.modeling.tiny import tiny_config

    config = tiny_config("qwen3")
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:1] * layers
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    if kind == FULL:
        return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    mixers = {"own": mixer_to_dict(BUILT_IN[kind])}
    conversion = {"layers": ["own"] * layers, "mixers": mixers, "base_model": "random", "backend": "triton"}
    config = build_config(config, conversion)
    return model_class_for(Qwen3ForCausalLM)._from_config(config, dtype=torch.bfloat16).eval()


def main() -> None:
    """Print the launches of each kind of layer, before and after."""
    from tests.kernels.triton.interpreter import install

    install()
    for kind in sys.argv[1:] or KINDS:
        for fused in (False, True):
            layer, around = step_launches(kind, fused=fused)
            print(json.dumps({"kind": kind, "fused": fused, "layer": layer.total(), "around": around.total(),
                              "kernels": layer}))  # fmt: skip


if __name__ == "__main__":
    main()
