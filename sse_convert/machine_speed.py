"""How long small calls take on this machine, and which of them the number of threads slows down."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Call = Callable[[], Any]
SLOWER_WITH_THREADS = 1.5
"""times as slow as with fewer threads, from which on the threads harm"""
ENOUGH = 0.5
"""seconds after which a call is not repeated"""
TOKENS = 256
"""of a row in training"""
DECODED = 16
"""steps of a timed decoding"""


def small_calls(device: str) -> dict[str, Call]:
    """What is timed, by what a person calls it.

    Args:
        device: where the calls compute.
    """
    model = _model(device)
    return {
        f"training step of one layer: {TOKENS} tokens, 4 heads of 64 channels, mixer sse": _training(model),
        "its operator alone, forward": _operator(device, backward=False),
        "its operator alone, forward and backward": _operator(device, backward=True),
        f"{DECODED} tokens decoded one by one": _decoding(model),
    }


def time_calls(
    calls: dict[str, Call], threads: int, measure: Callable[[Call], float] | None = None
) -> tuple[dict[str, float], list[str]]:
    """Milliseconds of calls under the threads that torch uses and, of those on a CPU, under fewer; and what that says.

    Args:
        calls: by name.
        threads: that torch uses; 1 where their number does not matter, as on a GPU.
        measure: milliseconds of a call; None for a clock.

    Returns:
        The milliseconds by what was called, and a problem for each number of threads that is much too large.
    """
    measure = measure or median_milliseconds
    from sse_convert.kernels.triton.selfcheck import in_threads

    milliseconds = {what: measure(call) for what, call in calls.items()}
    fewer: dict[int, dict[str, float]] = {}
    for count in sorted({1, threads // 2} & set(range(1, threads))):
        with in_threads(count):
            fewer[count] = {what: measure(call) for what, call in calls.items()}
    slow = [(now / fewer[count][what], what, count) for what, now in milliseconds.items() for count in fewer]
    worst = max(slow, default=(0.0, "", 0))
    for count, took in fewer.items():
        milliseconds |= {f"  with {count} of {threads} threads: {what}": value for what, value in took.items()}
    if worst[0] < SLOWER_WITH_THREADS:
        return milliseconds, []
    ratio, what, count = worst
    return milliseconds, [
        f"{threads} threads take {ratio:.1f} times as long as {count} ({what}): other programs use the cores, or there "
        f"are fewer than threads. Set OMP_NUM_THREADS={count}"
    ]


def median_milliseconds(call: Call) -> float:
    """Of three calls after a first one; of fewer where they take long, so that a busy machine is not waited for."""
    import torch

    times: list[float] = []
    while len(times) < 4 and sum(times) < 1e3 * ENOUGH:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:] or times)


def _model(device: str) -> "PreTrainedModel":
    """A small model with one converted layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sse_convert.mixers import BUILT_IN, mixer_to_dict
    from sse_convert.modeling.configuration import build_config
    from sse_convert.modeling.hybrid import model_class_for

    teacher = Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    sse = {"layers": ["sse"], "mixers": {"sse": mixer_to_dict(BUILT_IN["sse"])}, "base_model": "none"}
    made: PreTrainedModel = model_class_for(Qwen3ForCausalLM)(build_config(teacher, sse)).to(device)
    return made


def _training(model: "PreTrainedModel") -> Call:
    """Forward and backward passes."""
    import torch

    ids = torch.randint(1024, (1, TOKENS), device=model.device)
    return lambda: model(ids, labels=ids).loss.backward()


def _decoding(model: "PreTrainedModel") -> Call:
    """Greedy steps after a short prompt."""
    import torch

    ids = torch.randint(1024, (1, 8), device=model.device)
    options = {"max_new_tokens": DECODED, "min_new_tokens": DECODED, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(ids, **options)  # type: ignore[operator]


def _operator(device: str, *, backward: bool) -> Call:
    """A call of the operator as the recommended mixer makes it."""
    import torch

    from sse_convert.kernels.dispatch import sse_attention
    from sse_convert.mixers import BUILT_IN, SSEMixer

    mixer, (T, H, D) = BUILT_IN["sse"], (TOKENS, 4, 64)
    assert isinstance(mixer, SSEMixer)
    q, k, v = torch.randn(3, T, H, D, device=device).requires_grad_(backward)
    decay, logits = -torch.rand(T, H, D, device=device) / 16, torch.randn(T, mixer.num_partitions, device=device)

    def call() -> None:
        o, _ = sse_attention(q, k, v, decay, logits, top_k=mixer.top_k)
        if backward:
            torch.autograd.backward(o.sum())

    return call
