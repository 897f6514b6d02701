"""The layers that the vLLM plugin runs, on a GPU without vLLM: hand-made batches and pages in the place of an engine's.

    python3 benchmarks/serving/layer.py --out benchmarks/serving/layer_h200.json --seconds 480

Shapes are those of Qwen3-0.6B, weights random. Four parts, each with a share of the time, written as its figures come:
equal (served layers beside the package's own, float32 and bfloat16), decode (a recorded step of one layer at 32k of
context, beside a softmax layer of the same model), prefill (128k through one layer), and requests (through the
package's own generation, the largest batch of 32k requests that fits, teacher and hybrids).
What the file has of other parts stays. COMMIT names the commit where the checkout has no git.
"""

import argparse
import copy
import functools
import gc
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import StaticLayer

from benchmarks.kernels.hybrid_decoding import OWN, prefill, step_choices
from benchmarks.kernels.hybrid_measure import GIB, attention, attention_choices, environment, measure, release, timed
from benchmarks.kernels.hybrid_models import subject
from benchmarks.kernels.hybrid_training import random_ids
from benchmarks.serving.pages import Served, TableRotary, layer_io, run_steps, served_layer
from sse_convert.evaluation.throughput import allocated_cache_bytes
from sse_convert.files import write_text
from sse_convert.inference.cuda_graphs import TokenStep
from sse_convert.inference.fused_norms import fused_norms
from sse_convert.kernels.triton_backend import has_kernels
from sse_convert.mixers import FULL, Mixer, SlidingMixer, SSEMixer, SSESlidingMixer, mixer_to_dict
from sse_convert.modeling.architectures import spec_for
from sse_convert.modeling.attention_dims import attention_dims
from sse_convert.modeling.configuration import build_config, stored_mixers
from sse_convert.modeling.hybrid import model_class_for, source_class
from sse_convert.modeling.projections import projections
from sse_convert.serving.batch import batch_of
from sse_convert.serving.layer_state import state_shapes

CONTEXT, LONG = 2**15, 2**17
CHUNK = 8192
"""tokens of a step of chunked prefill"""
BATCHES = (1, 16, 64)
STATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
"""largest relative difference of a served layer's outputs from the package's own"""
SHARES = {"equal": 0.2, "decode": 0.25, "prefill": 0.2, "requests": 0.35}
"""of the seconds; what a part leaves goes to the next"""
LARGE = "large"
MIXERS: dict[str, Mixer] = {
    LARGE: SSESlidingMixer(
        num_partitions=60, top_k=4, update="delta", k_feature_map="l2", state_heads="query", decay_params="separate"
    ),
    "recipe": SSESlidingMixer(
        num_partitions=16, top_k=2, update="gla", k_feature_map="relu", state_heads="kv", decay_params="shared"
    ),
    "sliding": SlidingMixer(),
}
"""60 partitions, as up to 0.2.0 recipes had them that said nothing; 16, as recipe qwen3-0.6b had; a window alone"""
BLOCKS, STEPS = 5, 8
"""timed blocks of steps; the median block counts"""
UNFILLED = 2 + BLOCKS * STEPS
"""slots that a prefill leaves empty"""


def layouts(layers: int) -> dict[str, list[str]]:
    """Mixer of each layer: the shipped recipe's, and one softmax layer in five beside the large mixer."""
    pattern = ("recipe", "sliding", "recipe", "sliding", FULL)
    recipe = [FULL if i in (0, layers - 1) else pattern[i % 5] for i in range(layers)]
    return {"recipe": recipe, LARGE: [FULL if i % 5 == 4 else LARGE for i in range(layers)]}


def build(name: str, layers: list[str], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of a named shape with these layers, of random weights; all `full` makes the teacher."""
    config: Any = copy.deepcopy(subject(name).config)
    config.num_hidden_layers, config.layer_types = len(layers), [*config.layer_types[:1]] * len(layers)
    cls: Any = source_class(spec_for(config.model_type))
    if kinds := set(layers) - {FULL}:
        mixers = {kind: mixer_to_dict(MIXERS[kind]) for kind in kinds}
        config = build_config(config, {"layers": layers, "mixers": mixers, "base_model": "random"})
        cls = model_class_for(cls)
    torch.manual_seed(0)
    with torch.device(device):
        model = cls._from_config(config, dtype=dtype, attn_implementation="sdpa")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "sse_" in key and key.endswith("_up.weight"):  # zero at first, which would hide what they multiply
                parameter.normal_(std=0.02)
    return model.eval().requires_grad_(False)


class Parts:
    """The figures, written as they come, and the clock."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.end = time.monotonic() + options.seconds
        self.report: dict[str, Any] = {**environment(device), "shape": options.shape}
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
        for entry in ("parts", "seconds", "commits"):
            kept = before.get(entry, {})
            self.report[entry] = {name: found for name, found in kept.items() if name not in options.parts}

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Keep a figure, print it and write the file."""
        self.report["parts"].setdefault(part, []).append(row)
        print(f"{part:9}", "  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
        write_text(self.options.out, json.dumps(self.report, indent=1) + "\n")

    def run(self, name: str, part: Callable[["Parts"], None]) -> None:
        """Run a part within its share of what is left; what stops it is a row of its own."""
        rest = list(SHARES)[list(SHARES).index(name) :]
        left = self.end - time.monotonic()
        limit = int(left * SHARES[name] / sum(SHARES[other] for other in rest))
        began = time.monotonic()
        signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(max(1, limit))
        try:
            part(self)
        except Exception as error:
            self.add(name, {"stopped": f"{type(error).__name__}: {error}"[:500]})
        finally:
            signal.alarm(0)
        gc.collect()
        release(self.device)
        self.report["seconds"][name] = round(time.monotonic() - began, 1)
        self.report["commits"][name] = self.report["commit"]


def _too_late(*_: Any) -> None:
    raise TimeoutError("the part's time is over")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def equal(parts: Parts) -> None:
    """Served layers beside the package's own: chunks, single tokens, both at once, padding; rows of many slots."""
    lengths, slots = (700, 150, 40), (3, 1, 4)
    steps = ({0: 300}, {2: 1, 0: 200, 1: 30}, {0: 1, 2: 1, 1: 70}, {1: 1, 0: 150, 2: 38}, {0: 1, 1: 1, -1: 1})
    for dtype_name, dtype in STATES.items():
        model = build(parts.options.shape, list(MIXERS), parts.device, dtype)
        rotary = TableRotary(model.model, 1024)
        for index, mixer in enumerate(MIXERS):
            for state_name in STATES:
                served = served_layer(model, index, rotary, 6, STATES[state_name])
                rows = [layer_io(model, index, random_ids(model, 1, length)) for length in lengths]
                found = run_steps(served, [x for x, _ in rows], steps, slots)
                seen = [expected[: len(y)] for y, (_, expected) in zip(found, rows, strict=True)]
                error = _difference(torch.cat(found), torch.cat(seen))
                limit = LIMITS["float32" if state_name == dtype_name == "float32" else "bfloat16"]
                apart = {"model": dtype_name, "states": state_name, "mixer": mixer}
                with torch.no_grad():
                    kernels = has_kernels(rows[0][0])
                parts.add("equal", {**apart, "difference": error, "ok": error <= limit, "kernels": kernels})


def _difference(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


class SoftmaxLayer:
    """A softmax layer of the model in a step: projections, norms, rotation, a new column of the cache, attention."""

    def __init__(self, model: Any, index: int, rotary: TableRotary, batch: int, choice: str) -> None:
        self.source, self.rotary, self.choice = model.model.layers[index].self_attn, rotary, choice
        dims = self.dims = attention_dims(model.config)
        shape = (batch, dims.kv_heads, CONTEXT, dims.head_dim)
        like = self.source.o_proj.weight
        self.keys, self.values = (torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        self.mask = torch.ones(batch, CONTEXT, dtype=torch.bool, device=like.device)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = _heads(self.source, self.dims, self.rotary, x, positions)
        self.keys[:, :, -1], self.values[:, :, -1] = k, v
        if self.choice == OWN:
            from sse_convert.kernels.triton.generation.token_attention import token_attention

            o = token_attention(q, self.keys, self.values, self.mask, self.dims.head_dim**-0.5)
        else:
            with attention(self.choice):
                o = F.scaled_dot_product_attention(q[:, :, None], self.keys, self.values, enable_gqa=True)
        projected: Tensor = self.source.o_proj(o.flatten(1))
        return projected


def _heads(source: Any, dims: Any, rotary: TableRotary, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [T, heads, D] of a Qwen3 attention module, rotated."""
    flat = projections(source, spec_for("qwen3"), dims, x)
    q, k, v = (part.view(len(x), -1, dims.head_dim) for part in flat)
    q, k = rotary(positions, source.q_norm(q).flatten(1), source.k_norm(k).flatten(1))
    return q.view(len(x), -1, dims.head_dim), k.view(len(x), -1, dims.head_dim), v


@torch.no_grad()
def decode(parts: Parts) -> None:
    """Microseconds of a layer in a step of one token per request, each a replayed CUDA graph; norms are one kernel."""
    model = build(parts.options.shape, [*MIXERS, FULL], parts.device)
    with fused_norms(model):
        _decode_layers(parts, model, [*MIXERS, FULL])


def _decode_layers(parts: Parts, model: Any, layers: list[str]) -> None:
    rotary = TableRotary(model.model, CONTEXT)
    for batch in BATCHES:
        x = torch.randn(batch, model.config.hidden_size, device=parts.device, dtype=model.dtype)
        positions = torch.full((batch,), CONTEXT - 1, device=parts.device)
        best = float("inf")
        for choice in step_choices(parts.device)[parts.device.type != "cuda" :]:
            layer = SoftmaxLayer(model, layers.index(FULL), rotary, batch, choice)
            micros = _graph_micros(functools.partial(layer, x, positions), parts.device)
            best = min(best, micros)
            parts.add("decode", {"batch": batch, "layer": f"softmax, {choice}", "context": CONTEXT, "us": micros})
            del layer
            release(parts.device)
        given = batch_of(batch, [1] * batch, list(range(1, batch + 1)), [CONTEXT - 1] * batch, parts.device)
        for index, mixer in enumerate(MIXERS):
            for name in STATES if mixer != "sliding" else ["bfloat16"]:
                served = served_layer(model, index, rotary, batch + 1, STATES[name])
                for page in served.pages:
                    page.normal_(std=0.02)
                micros = _graph_micros(functools.partial(served, x, positions, given), parts.device)
                row = {"batch": batch, "layer": mixer, "states": name, "us": micros, "times_faster": best / micros}
                parts.add("decode", row)
                del served
                release(parts.device)


def _graph_micros(run: Callable[[], Any], device: torch.device) -> float:
    """Median microseconds of a call, recorded and replayed; plain where there are no CUDA graphs."""
    for _ in range(3):
        run()
    replay: Callable[[], Any] = run
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    times = [timed(lambda: [replay() for _ in range(20)], device) / 20 for _ in range(7)]
    return 1e6 * statistics.median(times)


@torch.no_grad()
def prefill_layers(parts: Parts) -> None:
    """Milliseconds of 128k tokens through one layer: at once, and in chunks."""
    layers, tokens = [*MIXERS, FULL], LONG if parts.device.type == "cuda" else 256
    chunk = min(CHUNK, tokens // 2)
    model = build(parts.options.shape, layers, parts.device)
    rotary, dims = TableRotary(model.model, tokens), attention_dims(model.config)
    x = torch.randn(tokens, model.config.hidden_size, device=parts.device, dtype=model.dtype)
    positions = torch.arange(tokens, device=parts.device)
    softmax = model.model.layers[layers.index(FULL)].self_attn
    best = float("inf")
    for choice in attention_choices(parts.device):

        def whole(choice: str = choice) -> None:
            q, k, v = (part.transpose(0, 1)[None] for part in _heads(softmax, dims, rotary, x, positions))
            with attention(choice):
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            softmax.o_proj(o[0].transpose(0, 1).flatten(1))

        millis = 1e3 * measure(whole, parts.device, budget=5).seconds
        best = min(best, millis)
        parts.add("prefill", {"tokens": tokens, "layer": f"softmax, {choice}", "ms": millis})
    for index, mixer in enumerate(MIXERS):
        for name in STATES if mixer != "sliding" else ["bfloat16"]:
            served = served_layer(model, index, rotary, 2, STATES[name])
            for size in (tokens, chunk):

                def chunks(served: Served = served, size: int = size) -> None:
                    for first in range(0, tokens, size):
                        batch = batch_of(0, [size], [1], [first], parts.device)
                        served(x[first : first + size], positions[first : first + size], batch)

                millis = 1e3 * measure(chunks, parts.device, budget=5).seconds
                row = {"tokens": tokens, "layer": mixer, "states": name, "chunk": size, "ms": millis}
                parts.add("prefill", {**row, "times_faster": best / millis})


@torch.no_grad()
def requests(parts: Parts) -> None:
    """Requests of 32k that one device holds, by computation and by trying, and tokens a second with all of them."""
    config, device = subject(parts.options.shape).config, parts.device
    count = config.num_hidden_layers
    context = CONTEXT if device.type == "cuda" else UNFILLED + 30
    teacher: dict[str, Any] = {}
    for name, layers in {"teacher": [FULL] * count, **layouts(count)}.items():
        model = build(parts.options.shape, layers, device)
        row = {"model": name, "context": context, **_computed(model.config, layers, context)}
        row |= _largest_batch(model, context, device)
        teacher = teacher or row
        for figure in ("tokens_per_s", "requests"):
            row[f"times_{figure}"] = row[figure] / teacher[figure]
        for state in STATES:
            row[f"times_held_{state}"] = teacher["request_mib_float32"] / row[f"request_mib_{state}"]
        parts.add("requests", row)
        del model
        release(device)


def _computed(config: Any, layers: list[str], context: int) -> dict[str, float]:
    """MiB of one request by the sizes of what it keeps, with states of either type."""
    dims = attention_dims(config)
    mixers = stored_mixers({"layers": layers, "mixers": {k: mixer_to_dict(m) for k, m in MIXERS.items()}})
    found = {}
    for name, dtype in STATES.items():
        total = 0
        for mixer in mixers:
            if mixer is None:
                total += 2 * context * dims.kv_heads * dims.head_dim * 2
                continue
            types = (dtype,) * isinstance(mixer, SSEMixer) + (torch.bfloat16,)
            for shape, kept in zip(state_shapes(dims, mixer), types, strict=False):
                total += math.prod(shape) * kept.itemsize
        found[f"request_mib_{name}"] = total / 2**20
    return found


def _largest_batch(model: Any, context: int, device: torch.device) -> dict[str, Any]:
    """Steps of the package's own generation with as many equal rows as fit."""
    with fused_norms(model):
        first = prefill(model, random_ids(model, 1, context - UNFILLED))
    one = allocated_cache_bytes(first) * context / (context - UNFILLED)
    release(device)
    free = torch.cuda.mem_get_info()[0] - 3 * GIB if device.type == "cuda" else 8 * one
    rows = max(1, int(free / one))
    while True:
        try:
            return {"requests": rows, "cache_mib": one / 2**20, **_steps(model, first, rows, context, device)}
        except torch.OutOfMemoryError:
            rows = int(rows * 0.96)
        release(device)


def _steps(model: Any, first: Any, rows: int, context: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step of so many rows, which all continue one prefill."""
    cache = copy.deepcopy(first)
    step = TokenStep(model, cache, random_ids(model, rows, 1), context)
    for layer in cache.layers:  # grown when it is fixed, so that no layer is there twice
        if isinstance(layer, StaticLayer):
            layer.keys, layer.values = (x.repeat_interleave(rows, 0) for x in (layer.keys, layer.values))
        else:
            layer.batch_repeat_interleave(rows)
    for _ in range(2):
        step()
    times = [timed(lambda: [step() for _ in range(STEPS)], device) / STEPS for _ in range(BLOCKS)]
    seconds = statistics.median(times)
    return {"step_ms": 1e3 * seconds, "tokens_per_s": rows / seconds, "spread": max(times) / min(times)}


def table(report: dict[str, Any]) -> Iterator[str]:
    """The figures in short."""
    yield f"{report['device']}, {report['shape']}, commit {report['commit']}"
    for part, rows in report["parts"].items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = [columns, *([_short(row.get(key, "")) for key in columns] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        yield f"\n{part}"
        for line in cells:
            yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480, help="for everything")
    parser.add_argument("--shape", choices=("0.6b", "tiny"), default="0.6b", help="tiny is for dry runs on a CPU")
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    options = parser.parse_args()
    parts = Parts(options, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    known = {"equal": equal, "decode": decode, "prefill": prefill_layers, "requests": requests}
    for name in options.parts:
        parts.run(name, known[name])
    write_text(options.out, json.dumps(parts.report, indent=1) + "\n")
    print("\n".join(table(parts.report)))


if __name__ == "__main__":
    main()
