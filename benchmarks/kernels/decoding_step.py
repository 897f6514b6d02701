"""A decoding step before and after its layers are fused: the same tokens, the time, and where the time goes.

    python -m benchmarks.kernels.decoding_step --out decoding_step.json

`agree` compares tokens and logits of models in true widths, `speed` times one row at --context, plainly and fused, and
lists the kernels of a step with the bytes that they must read and the share of a copy's speed that they reach. The JSON
is rewritten after each figure. COMMIT names the commit where the checkout has no git.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from benchmarks.kernels.hybrid_checks import error
from benchmarks.kernels.hybrid_decoding import OWN, UNFILLED, Generation, prefill
from benchmarks.kernels.hybrid_measure import environment, release, timed
from benchmarks.kernels.hybrid_models import HYBRIDS, TEACHER, Subject, build, subject
from benchmarks.kernels.hybrid_training import random_ids
from sse_convert.files import write_json
from sse_convert.inference import fused_layers
from sse_convert.inference.cuda_graphs import TokenStep, graphed

LENGTH, NEW_TOKENS = 330, 24
EXACT = 1e-3
"""relative error of float32 logits"""
ROUNDING_FACTOR = 1.5
"""a fused step's bfloat16 error may be this many times that of plain layers"""
READ_BY = {
    "row_products_kernel": r"[qkv]_proj|sse_\w+_down|sse_router|sse_\w*write_strength",
    "token_heads_kernel": r"sse_\w+_up|[qk]_norm",
    "added_product_kernel": r"o_proj|down_proj",
    "gated_product_kernel": r"gate_proj|[^_]up_proj",
}
"""kernel -> parameters it reads"""
COPIED = 2**30
"""bytes of the copy whose speed is the measure"""


@contextlib.contextmanager
def plain_layers() -> Iterator[None]:
    """Steps in this block run a call of each module, as for many rows."""
    most, fused_layers.MOST_ROWS = fused_layers.MOST_ROWS, 0
    try:
        yield
    finally:
        fused_layers.MOST_ROWS = most


@torch.no_grad()
def steps(model: PreTrainedModel, ids: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens [1, steps] and logits [steps, vocab] of greedy steps after ids, or of steps with given tokens."""
    first = model(input_ids=ids, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    step = TokenStep(model, prefill(model, ids), first, ids.shape[1] + NEW_TOKENS)
    tokens, logits = [], []
    for i in range(NEW_TOKENS):
        if given is not None:
            step.tokens.copy_(given[:, i : i + 1])
        tokens.append(step.tokens.clone())
        logits.append(step().clone())
    return torch.cat(tokens, 1), torch.cat(logits)


@torch.no_grad()
def eager(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same by the model alone, over a growing cache."""
    cache = DynamicCache(config=model.config)
    token = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    tokens, logits = [], []
    for _ in range(NEW_TOKENS):
        tokens.append(token)
        logits.append(model(input_ids=token, past_key_values=cache).logits[:, -1])
        token = logits[-1].argmax(-1, keepdim=True)
    return torch.cat(tokens, 1), torch.cat(logits)


def agreement(case: Subject, name: str, device: torch.device, backend: str) -> dict[str, Any]:
    """Greedy tokens in float32, and errors of logits in float32 and bfloat16, the latter against eager float32."""
    model = build(case.short(), name, device=device, dtype=torch.float32, backend=backend)
    ids = random_ids(model, 1, LENGTH)
    tokens, truth = eager(model, ids)
    found, logits = steps(model, ids)
    with graphed(model, LENGTH + NEW_TOKENS):
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    figures = {"same_tokens": torch.equal(found, tokens), "same_answer": torch.equal(answer[:, LENGTH:], tokens),
               "float32_error": error(logits, truth)}  # fmt: skip
    model = model.to(torch.bfloat16)
    figures["bfloat16_error"] = error(steps(model, ids, tokens)[1], truth)
    with plain_layers():
        figures["plain_bfloat16_error"] = error(steps(model, ids, tokens)[1], truth)
    precise = figures["float32_error"] <= EXACT
    rounded = figures["bfloat16_error"] <= ROUNDING_FACTOR * figures["plain_bfloat16_error"]
    return {**figures, "ok": bool(figures["same_tokens"] and figures["same_answer"] and precise and rounded)}


def copy_speed(device: torch.device) -> float:
    """Bytes per second, read and written, of the fastest of several large copies."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / min(timed(lambda: target.copy_(source), device) for _ in range(5))


def least_bytes(model: Any, cache: Any) -> dict[str, int]:
    """Bytes that the kernels of a step of one row must move, by kernel."""
    parameters = dict(model.base_model.layers.named_parameters())
    found = {
        kernel: sum(p.numel() * p.element_size() for name, p in parameters.items() if re.search(pattern, name))
        for kernel, pattern in READ_BY.items()
    }
    head = model.get_output_embeddings().weight
    softmax = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    found["head"] = head.numel() * head.element_size()
    found["attend_kernel"] = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in softmax)
    sse = model.sse_layers() if hasattr(model, "sse_layers") else {}
    found["decode_kernel"] = sum(_state_bytes(layer, cache.layers[i].state) for i, layer in sse.items())
    return found


def _state_bytes(layer: Any, state: Tensor) -> int:
    """Read and written: the partitions that a token uses, and the shared one."""
    used = layer.mixer.top_k + layer.mixer.shared_partition
    return 2 * used * state.numel() * state.element_size() // state.shape[1]


def table(profile: dict[str, Any], moved: dict[str, int], speed: float) -> list[dict[str, Any]]:
    """The kernels of a step, each with its bytes and its share of a copy's speed where they are known."""
    rows = []
    for kernel in profile["kernels"]:
        is_head = kernel["count"] == 1 and any(word in kernel["name"] for word in ("nvjet", "gemv", "gemm"))
        size = moved.get("head" if is_head else kernel["name"])
        share = None if not size or not kernel["ms"] else size / (1e-3 * kernel["ms"]) / speed
        rows.append({**kernel, "bytes": size, "copy_share": share})
    return rows


def measure(model: Any, context: int, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of one row, of plain and of fused layers, after one prefill."""
    device = model.device
    generation = Generation(model, context, "cudnn" if device.type == "cuda" else "default")
    yield "prefill", generation.prefill(budget=seconds, compiles=True)
    step, cache = generation._step(1, compiled=False)
    moved, speed = least_bytes(model, cache), copy_speed(device)
    del step, cache
    for name in ("plain", "fused"):
        with plain_layers() if name == "plain" else contextlib.nullcontext():
            yield name, generation.decode(1, OWN)
            if device.type == "cuda":
                found = generation.profile()
                rows = table(found, moved, speed)
                yield f"{name}_profile", {**found, "copy_bytes_per_s": speed, "kernels": rows}


def show(name: str, figures: dict[str, Any]) -> None:
    """Print a figure, or the lines of a profile."""
    print(name, {k: v for k, v in figures.items() if k != "kernels"}, file=sys.stderr)
    for row in figures.get("kernels", ()):
        share = "" if row["copy_share"] is None else f"{row['bytes'] / 1e6:9.1f} MB {row['copy_share']:5.0%}"
        print(f"  {row['name'][:60]:60} {row['count']:4} {1e3 * row['ms']:8.1f} us {share}", file=sys.stderr)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--parts", nargs="+", default=["agree", "speed"], choices=("agree", "speed"))
    parser.add_argument("--shape", default="0.6b", choices=("0.6b", "8b", "tiny"))
    parser.add_argument("--models", nargs="+", default=["hybrid-kv"], choices=(TEACHER, *HYBRIDS), help="to time")
    parser.add_argument("--context", type=int, default=2**17, help="tokens")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="triton", help="of the SSE operator")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the repeats of the prefill")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the parts; an exit status of 1 if models disagree."""
    options = parse(arguments)
    logging.set_verbosity_error()
    device, case = torch.device(options.device), subject(options.shape)
    assert options.context > UNFILLED
    report: dict[str, Any] = {"schema": 1, "environment": environment(device), "shape": options.shape}

    def add(section: str, model: str, name: str, figures: dict[str, Any]) -> None:
        report.setdefault(section, {}).setdefault(model, {})[name] = figures
        write_json(options.out, report)
        show(f"{section} {model} {name}", figures)

    for name in (TEACHER, *HYBRIDS) if "agree" in options.parts else ():
        add("agreement", name, "short", agreement(case, name, device, options.backend))
        release(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in options.models if "speed" in options.parts else ():
        model = build(case, name, device=device, dtype=dtype, backend=options.backend)
        for part, figures in measure(model, options.context, options.seconds):
            add("steps", name, part, {"context": options.context, **figures})
        del model
        release(device)
    if not all(found["short"]["ok"] for found in report.get("agreement", {}).values()):
        sys.exit("fused steps disagree with plain ones")


if __name__ == "__main__":
    main()
