"""Launch every kernel once or more on small inputs, for tools that watch each access to memory.

    for tool in memcheck racecheck initcheck synccheck; do
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool python -m tests.kernels.triton.every_kernel; done

Run it once without a tool first: that compiles the kernels. Whether the numbers are right is for the tests.
"""

import dataclasses as dc

import torch

from sse_convert.kernels.dispatch import sse_attention
from sse_convert.kernels.triton.generation.norm import rms_norm
from sse_convert.kernels.triton.generation.precise_linear import precise_linear
from sse_convert.kernels.triton.generation.ring_attention import ring_attention
from sse_convert.kernels.triton.generation.token_attention import token_attention
from sse_convert.kernels.triton.logit_losses import cross_entropy_, divergence_
from sse_convert.kernels.triton.state_slots import clear_rows, read_rows, write_rows
from tests.kernels.cases import SHARED_NAMES
from tests.kernels.triton.compile_cases import step_of_row
from tests.kernels.triton.trials import Trial, results

LAYER = Trial(
    lengths=(90, 0, 40), heads=1, groups=2, dim=64, value_dim=64, dtype=torch.bfloat16, k_map="softmax",
    normalizer=16.0,
)  # fmt: skip
TRIALS = (
    dc.replace(LAYER, initial_state=True),
    dc.replace(LAYER, lengths=(5, 1, 0, 9) * 4, num_partitions=16),
    dc.replace(LAYER, lengths=(100,), dim=128, value_dim=128, normalizer=None, decays="mixed"),
    dc.replace(LAYER, lengths=(90, 0, 40), initial_state=True, delta=True, k_map="l2"),
    dc.replace(LAYER, lengths=(70, 30), heads=2, dim=32, value_dim=32, dtype=torch.float32, top_k=2, k_scale=True),
)
"""states carried in and out; short sequences packed into shared chunks; strong decays; the delta rule; float32"""
STEP = dc.replace(LAYER, lengths=(1,) * 3, heads=2, num_partitions=9, top_k=2, initial_state=True)


def train(trial: Trial, device: str) -> None:
    """Forward and backward."""
    results(trial, trial.rounded(device))


@torch.no_grad()
def step(trial: Trial, device: str) -> None:
    """One token per sequence through the kernels of a decoding step."""
    x = trial.rounded(device)
    shared = tuple(x.pop(name) for name in SHARED_NAMES if name in x)
    options = {**trial.options(), "cu_seqlens": trial.cu_seqlens.to(device), "max_seqlen": 1}
    sse_attention(**x, shared=shared, **options, output_final_state=True, inplace_state=True, backend="triton")
    cached = torch.randn(len(trial.lengths), trial.heads, 300, trial.dim, device=device).to(trial.dtype)
    visible = torch.arange(300, device=device)[None] < 270
    o = token_attention(x["q"].contiguous(), cached, cached, visible, 0.1)
    rms_norm(o, torch.ones(o[0].numel(), device=device), 1e-6, False, 0.0, o.dtype)
    logits = torch.randn(3, 5000, device=device).bfloat16()
    divergence_(logits, logits.flip(0), (1.0, 1.0), (None, 30.0))
    cross_entropy_(logits, torch.tensor([0, 4999, 7], device=device), 1.0, None)
    precise_linear(o.flatten(1), torch.ones(9, o[0].numel(), device=device, dtype=o.dtype), None)
    pages, slots = torch.zeros(4, 3, 700, device=device, dtype=o.dtype), torch.tensor([2, -1, 0], device=device)
    write_rows(pages, slots, read_rows(pages, slots) + 1)
    clear_rows(pages, slots, torch.tensor([0, 0, 5], device=device))
    rings = torch.zeros(4, 2, 70, 1, trial.dim, device=device, dtype=o.dtype)
    past = torch.tensor([0, 3, 99], device=device)
    ring_attention(o, o[:, :1], o[:, :1], rings, slots, past, window=66, sinks=4, scale=0.1, soft_cap=None)


def at_most(trial: Trial, size: int) -> Trial:
    """The same call on sequences and heads of at most this size."""
    lengths = tuple(min(length, size) for length in trial.lengths)
    return dc.replace(trial, lengths=lengths, dim=min(trial.dim, size), value_dim=min(trial.value_dim, size))


def main(device: str = "cuda", size: int = 128) -> None:
    """Everything, one after the other, on sequences and heads of at most this size."""
    for trial in TRIALS:
        train(at_most(trial, size), device)
    step(STEP, device)
    step(dc.replace(STEP, delta=True, k_map="l2"), device)
    with torch.device(device):
        step_of_row(48, (2, 1, 16), 40, torch.bfloat16)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
