"""Write the measured speeds that `plan` reckons GPU hours by into the package, from the benchmark's JSON.

    python -m tools.measured_speed

A test holds the two together.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK = "benchmarks/training/throughput_qwen3-0.6b.json"
SHAPE = "Qwen3-0.6B"
PACKAGED = ROOT / "sse_convert/surgery/measured_speed.json"
PARTS = {"kl": "distill", "ce": "uptrain"}
"""loss -> part of the benchmark"""


def packaged() -> dict[str, Any]:
    """What the package is to hold."""
    record = json.loads((ROOT / BENCHMARK).read_text(encoding="utf-8"))
    keys = ("tokens_per_second", "flops_per_token", "seq_len", "commit")
    losses = {loss: {key: record["parts"][part][key] for key in keys} for loss, part in PARTS.items()}
    return {"source": BENCHMARK, "shape": SHAPE, "gpu": record["gpus"][0], "losses": losses}


if __name__ == "__main__":
    PACKAGED.write_text(json.dumps(packaged(), indent=1) + "\n", encoding="utf-8")
