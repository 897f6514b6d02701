"""Candidates for `finish_kernel` beside the kernel before them, on one GPU, then the rows of `models` that are missing.

    python -m benchmarks.kernels.finish_trial --out FOLDER

Kernels are compiled first, by many processes without a device; then candidates are compared and timed in turn; the
rows are measured with the fastest. Each part has its own time and may fail. JSON is written as parts finish.
"""

import argparse
import dataclasses as dc
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROUNDS, CALLS = 5, 3
SECONDS = 110.0
COMPILING, TRIAL, LAYERS = 45.0, 40.0, 30.0
ROWS = Path("benchmarks/kernels/operator_models_h200.json")
FIELDS = ("block_d", "block_v", "warps", "stages", "heads", "registers")
BEFORE = "before"
Tile = tuple[int, int, int, int, int, int | None]
ALONE: dict[str, Tile] = {
    "64 channels": (64, 32, 4, 3, 1, None),
    "64 channels, steps of 64": (64, 64, 4, 2, 1, None),
    "32 channels, steps of 64": (32, 64, 4, 2, 1, 128),
}
PAIRS: dict[str, Tile] = {
    "64 channels": (64, 32, 4, 3, 2, None),
    "32 channels, 255 registers": (32, 32, 4, 3, 2, None),
    "32 channels": (32, 32, 4, 3, 2, 168),
    "32 channels, steps of 64": (32, 64, 4, 2, 2, 168),
}
SHAPES: dict[str, dict[str, Any]] = {
    "recipe": {"heads": 8, "k_map": "relu", "partitions": 16, "top_k": 2},
    "recommended": {"heads": 16, "k_map": "l2", "partitions": 60, "top_k": 4, "delta": True},
    "figure": {"heads": 8, "query_heads": 8, "k_map": "identity", "partitions": 4, "top_k": 1, "plain": True},
    "paper": {"heads": 8, "k_map": "softmax", "partitions": 4, "top_k": 1},
}
"""eight rows of 4K, 16 query heads of 128 channels, gate logits"""


def candidates(shape: str) -> dict[str, Tile | None]:
    return {BEFORE: None, **(ALONE if shape in ("recommended", "figure") else PAIRS)}


def arguments(shape: str, rows: int, device: str) -> tuple[list[Any], dict[str, Any]]:
    settings, T, D = SHAPES[shape], rows * 4096, 128
    Hq, plain = settings.get("query_heads", 16), settings.get("plain", False)
    generator, H, N = torch.Generator(device).manual_seed(0), settings["heads"], settings["partitions"]

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def of(heads: int) -> Tensor:
        return random(T, heads, D).bfloat16().requires_grad_()

    def gates() -> Tensor:
        logits = random(T, H, D) + 3
        return (torch.nn.functional.logsigmoid(logits) / 16 if plain else logits.bfloat16()).requires_grad_()

    values = [of(Hq), of(H), of(H), gates(), random(T, N).requires_grad_(), (of(Hq), of(H), gates())]
    strength = random(T, H).sigmoid().requires_grad_() if settings.get("delta") else None
    return values, {
        "top_k": settings["top_k"], "k_map": settings["k_map"], "decay_normalizer": None if plain else 16.0,
        "write_strength": strength,
        "cu_seqlens": torch.arange(rows + 1, device=device, dtype=torch.int32) * 4096, "backend": "triton",
    }  # fmt: skip


@contextmanager
def using(tile: Tile | None) -> Iterator[None]:
    """Launch this candidate."""
    from sse_convert.kernels.triton import chunk, delta_rule, problem

    config_for, finish = problem.config_for, chunk.finish
    if tile is None:
        chunk.finish = delta_rule.finish = finish_before  # type: ignore[attr-defined]
    else:
        changed = dict(zip(FIELDS, tile, strict=True))
        problem.config_for = lambda *a: with_finish(config_for(*a), changed)  # type: ignore[assignment]
    try:
        yield
    finally:
        problem.config_for, chunk.finish, delta_rule.finish = config_for, finish, finish  # type: ignore[attr-defined]


def with_finish(config: Any, changed: dict[str, Any]) -> Any:
    return dc.replace(config, finish=dc.replace(config.finish, **changed))


def finish_before(x: Any, saved: Any, do: Tensor, given: Any, grads: Any, first: int, count: int) -> None:
    from benchmarks.kernels.finish_trial.before import finish_kernel, finish_strong_kernel
    from sse_convert.kernels.triton.chunk import SEARCHERS
    from sse_convert.kernels.triton.launching import launch

    (T, _, _, D), H, s, config = x.q.shape, x.k.shape[2], x.settings, x.config
    places, dots = count * s.group_chunks, given[-1]
    results = (grads.dq, grads.dk, grads.dg, grads.dgate, grads.dk_scale)
    usual = dc.replace(config.finish, block_d=64, block_v=32, warps=4, stages=3)
    for kernel, tile in ((finish_kernel, usual), (finish_strong_kernel, config.finish_strong)):
        strong = kernel is finish_strong_kernel
        grid = min(places * H, SEARCHERS) if strong else places * H * -(-D // tile.block_d)
        launch(
            kernel, (grid,),
            x.sources, do, x.slots, saved.qt, saved.kt, saved.falls, saved.decay, saved.full, saved.norms, saved.strong,
            *given, results, s.scale, s.normalizer, T, s.num_sequences, s.num_shared_chunks,
            x.ranks * T, first, s.group_chunks, *([places] if strong else []), shape=x.shape, mapping=x.mapping,
            BD=tile.block_d, BV=tile.block_v, DOTS=1 if dots is None else dots.shape[0],
            PARTS=1 if grads.dk_scale is None else grads.dk_scale.shape[2],
            BY_SLOT=s.by_slot, STRICT=s.corrects, STAGES=tile.stages, warps=tile.warps,
        )  # fmt: skip


def both_ways(values: list[Any], options: dict[str, Any], do: Tensor | None) -> list[Tensor]:
    from sse_convert.kernels.dispatch import sse_attention

    o, _ = sse_attention(*values, **options)
    leaves = [*values[:5], *values[5]]
    if options["write_strength"] is not None:
        leaves.append(options["write_strength"])
    return [o, *torch.autograd.grad(o, leaves, torch.ones_like(o) if do is None else do)]


def compile_one(job: str) -> None:
    """In a process without a device: fill Triton's cache."""
    from sse_convert.kernels.triton import availability
    from tests.kernels.triton import compiling

    availability.untrusted_reason = lambda *a, **k: None  # type: ignore[assignment]
    compiling.usage = lambda kernel: {}  # type: ignore[assignment]
    compiling.Compiler(90)
    kind, _, name = job.partition(":")
    if kind == "check":
        from sse_convert.kernels.triton.selfcheck import self_check

        self_check(torch.device("cpu"), delta=name == "delta")
    elif kind == "row":
        from benchmarks.kernels.operator_candidates import problem
        from benchmarks.kernels.operator_cases import GROUPS
        from benchmarks.kernels.operator_check import outcome
        from benchmarks.kernels.operator_inputs import make

        case = next(c for c in reversed(GROUPS["models"]()) if c.note == name)
        if case.tokens > 2**15:
            case = dc.replace(case, lengths=(4096, 4096))
        outcome(problem("ours", make(case, torch.device("cpu"))), backward=True)
    else:
        shape, _, candidate = name.partition(":")
        with using(candidates(shape)[candidate]):
            both_ways(*arguments(shape, 2, "cpu"), None)


def jobs() -> list[str]:
    trials = [f"trial:{shape}:{name}" for shape in SHAPES for name in candidates(shape)]
    return ["check:", "check:delta", *trials]


def trial(out: Path) -> None:
    """Compare and time the candidates."""
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": {}}
    for shape in SHAPES:
        report["shapes"][shape] = row = {"errors": {}, "ms": {}, "failed": {}}
        values, options = arguments(shape, 8, "cuda")
        exact: list[Tensor] | None = None
        do = torch.randn(values[0].shape, device="cuda").bfloat16()
        names = list(candidates(shape))
        for name in list(names):
            try:
                with using(candidates(shape)[name]):
                    found = both_ways(values, options, do)
                exact = exact or found
                row["errors"][name] = [relative(a, b) for a, b in zip(found, exact, strict=True)]
            except Exception as problem:
                row["failed"][name] = f"{type(problem).__name__}: {problem}"[:300]
                names.remove(name)
        del exact, found
        row["ms"] = times(names, shape, values, options, do)
        print(shape, json.dumps(row["ms"]), {n: max(e) for n, e in row["errors"].items()}, flush=True)
        (out / "finish_trial.json").write_text(json.dumps(report, indent=1) + "\n")
        torch.cuda.empty_cache()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def times(names: list[str], shape: str, values: Any, options: Any, do: Tensor) -> dict[str, dict[str, float]]:
    """Median ms of a call both ways, and of what the finishing kernels take of it."""
    from sse_convert.kernels.triton import chunk, delta_rule

    whole: dict[str, list[float]] = {name: [] for name in names}
    ending: dict[str, list[float]] = {name: [] for name in names}
    for _, name in itertools.product(range(ROUNDS), names):
        with using(candidates(shape)[name]):
            inner, events = chunk.finish, list[tuple[Any, Any]]()
            chunk.finish = delta_rule.finish = timed(inner, events)  # type: ignore[attr-defined]
            for _ in range(CALLS):
                start, end = event(), event()
                start.record()
                both_ways(values, options, do)
                end.record()
                end.synchronize()
                whole[name].append(start.elapsed_time(end))
            ending[name].append(sum(a.elapsed_time(b) for a, b in events) / CALLS)
    return {n: {"both_ways": statistics.median(whole[n]), "finish": statistics.median(ending[n])} for n in names}


def timed(function: Callable[..., None], events: list[tuple[Any, Any]]) -> Callable[..., None]:
    def run(*given: Any) -> None:
        start, end = event(), event()
        start.record()
        function(*given)
        end.record()
        events.append((start, end))

    return run


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)


@torch.no_grad()
def layers(out: Path) -> None:
    """What the kernels of a decoding step of one served layer take, and the step as a graph."""
    from benchmarks.kernels.operator_measure import launches
    from benchmarks.serving import layer as serving
    from sse_convert.inference.fused_norms import fused_norms

    device, found = torch.device("cuda"), dict[str, Any]()
    model = serving.build("0.6b", [*serving.MIXERS, serving.FULL], device)
    rotary = serving.TableRotary(model.model, serving.CONTEXT)
    x = torch.randn(1, model.config.hidden_size, device=device, dtype=model.dtype)
    positions = torch.full((1,), serving.CONTEXT - 1, device=device)
    given = serving.batch_of(1, [1], [1], [serving.CONTEXT - 1], device)
    softmax = serving.SoftmaxLayer(model, len(serving.MIXERS), rotary, 1, "cudnn")
    steps: dict[str, Callable[[], Any]] = {"softmax": lambda: softmax(x, positions)}
    for index, mixer in enumerate(serving.MIXERS):
        served = serving.served_layer(model, index, rotary, 2, torch.float32)
        for page in served.pages:
            page.normal_(std=0.02)
        steps[mixer] = lambda served=served: served(x, positions, given)
    with fused_norms(model):
        for name, step in steps.items():
            try:
                found[name] = {"graph_us": serving._graph_micros(step, device)}
                found[name] |= launches(lambda step=step: (step(),))
                found[name]["all_kernels_us"] = profiled(step)
            except Exception as problem:
                found.setdefault(name, {})["failed"] = f"{type(problem).__name__}: {problem}"[:300]
            print(name, json.dumps(found[name]), flush=True)
            (out / "layers.json").write_text(json.dumps(found, indent=1) + "\n")


def profiled(step: Callable[[], Any]) -> list[tuple[str, float]]:
    """Every kernel of a step in its order, with its microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ordered = sorted(events, key=lambda e: e.time_range.start)
    return [(e.name[:70], round(e.device_time_total, 1)) for e in ordered]


def rows(out: Path, seconds: float) -> None:
    """The rows of `models` that are missing, with the fastest candidate for each number of query heads."""
    from benchmarks.kernels import sse_operator
    from sse_convert.kernels.triton import problem

    best = dict.fromkeys(("recipe", "recommended"))
    if (out / "finish_trial.json").is_file():
        found = json.loads((out / "finish_trial.json").read_text())["shapes"]
        for shape in best.keys() & found.keys():
            ms = {n: t["finish"] for n, t in found[shape]["ms"].items() if n != BEFORE}
            best[shape] = min(ms, key=ms.__getitem__) if ms else None
    config_for = problem.config_for

    def fastest(dim: int, value_dim: int, groups: int, ieee: bool, shared: int) -> Any:
        shape, config = "recipe" if groups % 2 == 0 else "recommended", config_for(dim, value_dim, groups, ieee, shared)
        name = best[shape]
        if name is None or ieee or dim != 128:
            return config
        return with_finish(config, dict(zip(FIELDS, candidates(shape)[name], strict=True)))

    problem.config_for = fastest  # type: ignore[assignment]
    print("rows with", best, flush=True)
    sse_operator.SECONDS["models"] = seconds
    target = out / "operator_models.json"
    shutil.copy(ROWS, target)
    sse_operator.main(["--groups", "models", "--candidates", "ours", "--out", str(target), "--resume"])


def compile_all(seconds: float) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    running = [
        (job, subprocess.Popen([sys.executable, "-m", __spec__.name, "--compile", job], env=environment))
        for job in jobs()
    ]
    end = time.monotonic() + seconds
    for job, process in running:
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = "not done in time"
        if code:
            print("compiling", job, "ended with", code, flush=True)


def part(name: str, out: Path, seconds: float) -> None:
    print(f"{name}: at most {seconds:.0f} s", flush=True)
    command = [sys.executable, "-m", __spec__.name, "--out", str(out), "--part", name, "--seconds", str(seconds)]
    try:
        code = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        code = "its time is over"
    print(f"{name} ended: {code}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=("trial", "layers", "rows"))
    parser.add_argument("--compile")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    if options.compile:
        compile_one(options.compile)
    elif options.part == "trial":
        trial(options.out)
    elif options.part == "layers":
        layers(options.out)
    elif options.part == "rows":
        rows(options.out, options.seconds - 25)
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + options.seconds
        compile_all(COMPILING)
        print(f"compiled; {end - time.monotonic():.0f} s are left", flush=True)
        part("trial", options.out, TRIAL)
        part("layers", options.out, LAYERS)


if __name__ == "__main__":
    main()
