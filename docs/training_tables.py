"""Tables of training speed, from the JSON of `benchmarks/training`."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.training.estimates import rows
from docs.examples import ROOT
from docs.markdown import table

SHAPES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")
STAGES = {
    "distill": "KL, all weights trained",
    "plain": "KL, all layers softmax, plain transformers compiled",
    "uptrain": "cross entropy, all weights trained",
    "plain-uptrain": "cross entropy, all layers softmax, plain transformers compiled",
    "trl-uptrain": "cross entropy, all layers softmax, SFTTrainer of TRL",
}
"""stages of the throughput benchmark, for people"""
PACKAGED = {
    "0.6b-kl": "",
    "8b-kl": "",
    "8b-kl-fsdp": ", FSDP2 on two GPUs",
    "8b-kl-fsdp-h200": ", FSDP2 on two GPUs",
    "30b-quarter-kl": ", 12 of 48 layers, steps of 32K tokens, not compiled",
    "gpt-oss-third-kl": ", 8 of 24 layers, steps of 32K tokens, not compiled",
}
"""packaged recipes as they were timed: name of the record, and what is to be said of it"""
BESIDE_TRL = "throughput_trl"
"""the run with TRL's step"""
STEP = ("shape, step", "tokens/s", "GPU", "memory, GiB", "share of the dense peak", "commit")
"""columns of a table of steps"""
WAYS = {
    "": "",
    "ddp": ", DDP on two GPUs",
    "fsdp": ", FSDP2 on two GPUs",
    "fsdp-eager": ", FSDP2 on two GPUs, not compiled",
    "context": ", each row on two",
    "128k": "",
}
SHARED = (("qwen3-0.6b", "ddp"), ("qwen3-0.6b", "fsdp"), ("qwen3-1.7b", "ddp"), ("qwen3-1.7b", "fsdp"))
"""shapes, and ways, whose KL stage ran on one and on two GPUs, each with the passes that it chose"""
SPREAD = (
    (
        "0.6B, KL, rows of 4K, FSDP2, not compiled",
        "distill-one",
        "distill-resumed",
        "distill: one GPU, two killed and continued",
    ),
    ("0.6B, cross entropy, rows of 32K, FSDP2, not compiled", "uptrain-one", "uptrain-fsdp", "uptrain: one GPU, two"),
    ("0.6B, layer_mse, rows of 4K, FSDP2", "align-one", "align-fsdp", "align: one GPU, two"),
)
"""what ran on one and on two GPUs: words, part on one, part on two, difference of their curves"""


def load(name: str) -> Any:
    """A JSON file of `benchmarks/training`."""
    return json.loads((ROOT / f"benchmarks/training/{name}.json").read_text(encoding="utf-8"))


def steps() -> str:
    """Training steps of packaged recipes, of those of the throughput benchmark, and of plain transformers."""
    every = [*_packaged(), *(row for shape in SHAPES for row in _steps(shape, f"throughput_{shape}"))]
    return "\n".join(table(STEP, every))


def beside_trl() -> str:
    """A step of text beside TRL's, in one run."""
    return "\n".join(table(STEP, _steps(SHAPES[0], BESIDE_TRL)))


def _packaged() -> Iterator[tuple[str, ...]]:
    found = {row.name: row for row in rows()}
    for name, said in PACKAGED.items():
        row = found[name]
        measured = {"seq_len": row.seq_len, "tokens_per_second": row.tokens_per_second}
        words = "KL, the packaged recipe: converted layers trained"
        part = {**row.record, **measured, "share_of_peak": row.share_of_peak}
        yield _step(row.record["recipe"], words + said, row.gpu, part)


def _steps(shape: str, name: str) -> Iterator[tuple[str, ...]]:
    """Those of a run of the throughput benchmark."""
    record = load(name)
    for key, part in record["parts"].items():
        stage, _, way = key.partition("-")
        if part["tokens_per_second"] is not None:
            yield _step(shape, STAGES.get(key) or STAGES[stage] + WAYS[way], record["gpus"][0], part)


def _step(shape: str, words: str, gpu: str, part: dict[str, Any]) -> tuple[str, ...]:
    kind = gpu.removeprefix("NVIDIA ").split()[0]
    return (
        f"{shape}: {words}, rows of {part['seq_len']:,}", f"{part['tokens_per_second']:,.0f}", kind,
        f"{max(part['peak_mib']) / 1024:.0f}", f"{part['share_of_peak']:.0%}", part["commit"],
    )  # fmt: skip


def two_gpus() -> str:
    """Stages on two GPUs beside one: tokens per second, memory of the fuller GPU, and how far losses are apart."""
    head = ("stage", "tokens/s: one, two", "gain", "memory of a GPU, GiB: one, two", "losses apart", "commit")
    return "\n".join(table(head, [*_as_packaged(), *_sharded(), *_split(), *_coder()]))


def _as_packaged() -> Iterator[tuple[str, ...]]:
    for shape, way in SHARED:
        parts = load(f"throughput_{shape}")["parts"]
        one, two = parts["distill"], parts[f"distill-{way}"]
        apart = max(abs(b / a - 1) for a, b in zip(one["losses"], two["losses"], strict=False))
        words = f"{shape}, KL, rows of {one['seq_len']:,}, {way.upper().replace('FSDP', 'FSDP2')}, compiled"
        yield _beside(words, one, two, apart, ", ".join(dict.fromkeys((one["commit"], two["commit"]))))


def _sharded() -> Iterator[tuple[str, ...]]:
    record = load("fsdp_qwen3-0.6b")
    for words, alone, shared, pair in SPREAD:
        one, two = (record["parts"][name] for name in (alone, shared))
        apart = record["relative_differences"][pair]["losses"]
        yield _beside(words, one, two.get("before", two), apart, record["commit"])


def _split() -> Iterator[tuple[str, ...]]:
    record = load("context_parallel")
    one, two = (record["parts"][f"layers-{processes}"] for processes in ("one", "two"))
    words, apart = "four layers of 8B, cross entropy, rows of 128K, `context_parallel: 2`", record["two_beside_one"]
    yield _beside(words, one, two, apart["layers"]["losses"], record["commit"])


def _coder() -> Iterator[tuple[str, ...]]:
    record = load("coder_rows")
    one, two = (record["parts"][name] for name in ("uptrain", "uptrain-fsdp"))
    words = "0.5B coder, 4 of 48 heads softmax, cross entropy, rows of 32K of real text, FSDP2, compiled"
    yield _beside(words, one, two, record["losses_apart"]["uptrain-fsdp beside uptrain"], one["commit"])


def _beside(words: str, one: dict[str, Any], two: dict[str, Any], apart: float, commit: str) -> tuple[str, ...]:
    rates = [part["tokens_per_second"] for part in (one, two)]
    memory = [max(part["peak_mib"]) / 1024 for part in (one, two)]
    return (
        words, f"{rates[0]:,.0f}, {rates[1]:,.0f}", f"{rates[1] / rates[0]:.2f}x",
        f"{memory[0]:.0f}, {memory[1]:.0f}", f"{apart:.1e}", commit,
    )  # fmt: skip


def resumed() -> str:
    """What a kill under FSDP2 changed."""
    record = load("fsdp_qwen3-0.6b")
    found = record["relative_differences"]["distill: before the kill, after it"]
    codes = [record["parts"]["distill-resumed"][step]["code"] for step in ("export", "verify")]
    assert codes == [0, 0]
    losses = "the same losses" if found["losses"] == 0 else f"losses {found['losses']:.0e} apart"
    return (
        f"A KL stage that was killed after its second step, with one saved, went on with {losses}, and gradient norms "
        f"within {found['grad_norms']:.0e}. It was exported whole, and verified."
    )


def profile() -> str:
    """What the GPU does in a step of the recipe and in the plain step, in milliseconds."""
    record = load("step_qwen3-0.6b")
    recipe, plain = (record["parts"][name] for name in ("distill", "plain"))

    def row(words: str, ours: float, theirs: float) -> tuple[str, ...]:
        return words, f"{ours:,.0f}", f"{theirs:,.0f}"

    kinds = [
        row(kind, *(part["kinds"].get(kind, {"ms": 0.0})["ms"] for part in (recipe, plain))) for kind in recipe["kinds"]
    ]
    whole = row("the whole step", recipe["step_ms"], plain["step_ms"])
    share = plain["step_ms"] / recipe["step_ms"]
    said = f"Commit {record['commit']}; the plain step takes {share:.2f} of the recipe's time."
    return "\n".join([*table(("kernels", "recipe, ms", "plain step, ms"), [*kinds, whole]), "", said])


BLOCKS: dict[str, Callable[[], str]] = {
    "steps": steps,
    "beside-trl": beside_trl,
    "two-gpus": two_gpus,
    "resumed-gpus": resumed,
    "step-profile": profile,
}
