"""A small forward and backward pass held to the definition, before kernels that a compiler may have broken are trusted.

ptxas releases are known that compile correct programs for Hopper into wrong ones; their mistakes are large and many are
not the same twice. So one case with several chunks, an empty sequence, grouped heads, states and strong decays is run
twice, over memory full of NaN, and must agree with `kernels/torch/reference.py` in float64 and with itself to the bit.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from sse_convert.kernels.inputs import Inputs
from sse_convert.kernels.torch.operands import operands_of
from sse_convert.kernels.torch.reference import sse_attention_reference
from sse_convert.kernels.triton.config import USUAL, Widths
from sse_convert.kernels.triton.launching import compiled_together
from sse_convert.kernels.validation import build_inputs

BOUND = 1e-2
"""largest relative error of a right build, twice what the tests hold bfloat16 inputs to"""
OFFSETS = (0, 150, 150, 233)
PARTITIONS = 3
HEADS = 1


def self_check(device: torch.device, *, delta: bool = False, widths: Widths = USUAL) -> str | None:
    """What the kernels get wrong on `device` for heads of some widths, with numbers; None if nothing. With `delta`,
    under the delta rule.

    Restores what it changes, whatever mode the caller is in; uses none of torch's global random numbers. What it saves
    for its own backward passes no hook of the caller's: those of a gradient checkpoint would compute the caller again.
    """
    plain = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), plain:
        with in_threads(1):  # its products are small: ten threads took a minute to wait for each other
            exact = _results(_leaves(torch.device("cpu"), torch.float64, delta, widths), _reference)
        try:
            leaves = _leaves(device, torch.bfloat16, delta, widths)
            if device.type != "cpu":
                with compiled_together():
                    _results(leaves, _kernels)
            _fill_free_memory_with_nan(device)
            first, second = _results(leaves, _kernels), _results(leaves, _kernels)
        except Exception as error:  # a compiler or a driver that gives up must not take the process with it
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    errors = {name: _relative_error(first[name].cpu(), exact[name]) for name in exact}
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > BOUND:
        return f"{worst} is off by {errors[worst]:.1e} of its size (bound {BOUND:.0e})"
    different = [name for name in exact if not torch.equal(first[name], second[name])]
    return f"two runs differ in {', '.join(different)}" if different else None


@contextlib.contextmanager
def in_threads(count: int) -> Iterator[None]:
    """Let torch compute in so many threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _leaves(device: torch.device, dtype: torch.dtype, delta: bool, widths: Widths) -> dict[str, Tensor]:
    """The same numbers for every dtype: those of q, k and v are representable in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    T, S, Hq, D, V = OFFSETS[-1], len(OFFSETS) - 1, HEADS * widths.groups, widths.dim, widths.value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    low = {
        "q": normal(T, Hq, D),
        "k": normal(T, HEADS, D),
        "v": normal(T, HEADS, V),
        "shared q": normal(T, Hq, D),
        "shared k": normal(T, HEADS, D),
    }
    full = {
        "log_decay": F.logsigmoid(normal(T, HEADS, D)) / 4,
        "shared log_decay": F.logsigmoid(normal(T, HEADS, D)) / 4,
        "router_logits": normal(T, PARTITIONS),
        "initial_state": normal(S, PARTITIONS + 1, HEADS, D, V),
    }
    if delta:
        full["write_strength"] = normal(T, HEADS).sigmoid()
    full["log_decay"][20:30] = -30.0
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    leaves = {name: x.bfloat16().to(device, dtype) for name, x in low.items()}
    leaves |= {name: x.to(device, wide) for name, x in full.items()}
    return {name: x.requires_grad_() for name, x in leaves.items()}


def _results(leaves: dict[str, Tensor], run: Callable[[Inputs], tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
    """Output, final state, and the gradient of a fixed combination of both in every leaf."""
    inputs = build_inputs(
        leaves["q"], leaves["k"], leaves["v"], leaves["log_decay"], leaves["router_logits"],
        (leaves["shared q"], leaves["shared k"], leaves["shared log_decay"]),
        top_k=2, k_map="l2" if "write_strength" in leaves else "softmax",
        write_strength=leaves.get("write_strength"), initial_state=leaves["initial_state"],
        cu_seqlens=torch.tensor(OFFSETS, device=leaves["q"].device),
    )  # fmt: skip
    o, final = run(inputs)
    assert final is not None
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float32, device="cpu") for y in (o, final)]
    losses = [(y * weight.to(y)).sum() for y, weight in zip((o, final), weights, strict=True)]
    gradients = torch.autograd.grad(losses, list(leaves.values()))
    named = {f"the gradient of {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"the output": o.detach(), "the final state": final.detach(), **named}


def _reference(x: Inputs) -> tuple[Tensor, Tensor]:
    o_THGV, final = sse_attention_reference(operands_of(x))
    return o_THGV.flatten(1, 2), final


def _kernels(x: Inputs) -> tuple[Tensor, Tensor | None]:
    from sse_convert.kernels.triton.autograd import sse_attention_triton

    return sse_attention_triton(x, output_final_state=True)


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _fill_free_memory_with_nan(device: torch.device) -> None:
    """What is allocated next, small or large, mostly lands where these were, so a value nobody wrote shows."""
    sizes = [2**17] * 16 + [2**22] * 4
    blocks = [torch.full((size,), float("nan"), dtype=torch.float32, device=device) for size in sizes]
    del blocks


def _relative_error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact||; infinite if x is not finite everywhere."""
    error = ((x.double() - exact).norm() / exact.norm()).item()
    return error if math.isfinite(error) else math.inf
