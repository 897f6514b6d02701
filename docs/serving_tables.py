"""The tables of the page *Serve*, from `benchmarks/serving/layer_h200.json`."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from docs.examples import ROOT
from docs.markdown import table

LAYERS = {
    "large": "`sse+sliding` with 60 partitions, delta rule",
    "recipe": "`sse+sliding` with 16 partitions, gated update",
    "sliding": "`sliding`",
}
STATES = {"sliding": "bfloat16"}
"""of the row that is shown, where they are not float32"""


def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/serving/layer_h200.json").read_text("utf-8"))
    return found


def layers() -> str:
    """Time of one layer: a step of one token per request, and a prompt of 128K tokens."""
    record = _record()
    decode, prefill = record["parts"]["decode"], record["parts"]["prefill"]
    batches = sorted({row["batch"] for row in decode})
    softmax = [min(row["us"] for row in decode if row["batch"] == batch and "context" in row) for batch in batches]
    whole = min(row["ms"] for row in prefill if "states" not in row)
    lines = [["softmax, its fastest kernel", *(f"{us / 1000:.2f}" for us in softmax), f"{whole:.0f}"]]
    for layer, name in LAYERS.items():
        states = STATES.get(layer, "float32")
        steps = {row["batch"]: row["us"] for row in decode if (row["layer"], row.get("states")) == (layer, states)}
        times = [_beside(steps[batch], least) for batch, least in zip(batches, softmax, strict=True)]
        rows = [row for row in prefill if (row["layer"], row.get("states")) == (layer, states)]
        most = max(rows, key=lambda row: row["chunk"])["ms"]
        lines.append([name, *times, f"{most:.0f} ({whole / most:.1f}x)"])
    heads = [f"step of {batch} request{'s' * (batch > 1)} at 32K, ms" for batch in batches]
    commits = sorted({record["commits"][part] for part in ("decode", "prefill")})
    return "\n".join([
        *table(("a layer of Qwen3-0.6B", *heads, "prompt of 128K at once, ms"), lines),
        "",
        "In brackets how many times as fast as softmax. States in float32, random weights; steps are CUDA graphs.",
        f"{record['device']}, torch {record['torch']}, commits {', '.join(commits)}.",
    ])  # fmt: skip


def _beside(us: float, softmax: float) -> str:
    return f"{us / 1000:.2f} ({softmax / us:.1f}x)"


def requests() -> str:
    """What one request of 32K keeps, by the sizes of its tensors, and tokens a second of a full GPU."""
    record = _record()
    rows = record["parts"]["requests"]
    lines = [
        (
            "teacher" if row["model"] == "teacher" else f"hybrid, {LAYERS[row['model']]}",
            f"{row['request_mib_float32']:,.0f} MiB ({row['times_held_float32']:.1f}x as many requests)",
            f"{row['requests']}",
            f"{row['tokens_per_s']:,.0f} ({row['times_tokens_per_s']:.1f}x)",
        )
        for row in rows
        if "tokens_per_s" in row
    ]
    head = ("Qwen3-0.6B shape", "one request of 32K, by calculation", "requests that fitted", "tokens/s with them")
    return "\n".join([*table(head, lines), "", f"{record['device']}, commit {record['commits']['requests']}."])


def drafts(machine: str) -> str:
    """Tokens a second of the coder and of its conversion, plain and with drafts."""
    record = json.loads((ROOT / f"benchmarks/real/drafts_{machine}.json").read_text("utf-8"))
    lines, ways = [], list(dict.fromkeys(row["way"] for row in record["models"]["the teacher"]))
    for name, rows in record["models"].items():
        speeds = {(row["request"], row["way"]): f"{row['tokens_per_s']:.1f}" for row in rows}
        for request in dict.fromkeys(row["request"] for row in rows):
            lines.append((f"{name}, {request}", *(speeds[request, way] for way in ways)))
    equal, whole = (sum(row[key] for rows in record["models"].values() for row in rows) for key in ("equal", "of"))
    device = f"{record['cores']} CPU cores" if record["device"] == "cpu" else record["device"]
    return "\n".join([
        *table(("tokens/s", *ways), lines),
        "",
        f"{equal} of {whole} answers are those of the plain way, token by token. {device}, "
        f"{record['dtype']}, torch {record['torch']}, commit {record['commit'][:7]}.",
    ])  # fmt: skip


BLOCKS: Mapping[str, Callable[[], str]] = {
    "serving-layers": layers,
    "serving-requests": requests,
    "serving-drafts": partial(drafts, "cpu"),
    "serving-drafts-gpu": partial(drafts, "h200"),
}
