"""Write the measured speeds that `plan` reckons GPU hours by into the package, from the benchmark's JSON.

    python -m tools.measured_speed

A test holds the two together.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.training.estimates import Row, beside, real_rows, rows

ROOT = Path(__file__).resolve().parent.parent
PACKAGED = ROOT / "sse_convert/surgery/measured_speed.json"
SOURCES = {
    "kl": (
        "smollm2-layers",
        "smollm2-heads",
        "0.6b-kl",
        "qwen3-0.6b-distill",
        "qwen3-1.7b-distill",
        "30b-quarter-kl",
        "gpt-oss-third-kl",
        "8b-kl",
        "qwen3-8b-distill-fsdp",
    ),
    "ce": ("qwen3-0.6b-uptrain", "qwen3-0.6b-uptrain-128k", "qwen3-8b-uptrain-context"),
}
"""loss -> rows of benchmarks/training/estimates.py whose speed counts"""


def packaged() -> dict[str, Any]:
    """What the package is to hold."""
    found = {row.name: row for row in [*rows(), *real_rows()]}
    speeds = {loss: [_entry(found[name]) for name in names] for loss, names in SOURCES.items()}
    return {**speeds, "beside": beside()}


def _entry(row: Row) -> dict[str, Any]:
    return {
        "shape": row.record["recipe"],
        "hidden_size": row.hidden_size,
        "seq_len": row.seq_len,
        "layers": row.layers,
        "all_layers": row.all_layers,
        "experts": row.has_experts,
        "whole": row.train == "all",
        "gpus": row.record["chosen"]["processes"],
        "gpu": row.gpu,
        "tokens_per_second": row.tokens_per_second,
        "flops_per_token": row.flops_per_token,
        "commit": row.record["commit"],
    }


if __name__ == "__main__":
    PACKAGED.write_text(json.dumps(packaged(), indent=1) + "\n", encoding="utf-8")
