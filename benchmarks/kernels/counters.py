"""What Nsight Compute counted of the operator's kernels (`one_call.py`), as one JSON.

    python -m benchmarks.kernels.counters recipe=out/ncu-recipe.csv figure=out/ncu-figure.csv --tokens 32768 65536 \\
        --commit c4a795f --out counters.json

Of each kernel: launches and milliseconds of the whole call, and the counters of its longest launch: shares of what the
GPU can do at most, how many warps a multiprocessor holds and what keeps it from more, and what a warp waits for.
"""

import argparse
import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SHARES = {
    "dram": "DRAM Throughput",
    "l2": "L2 Cache Throughput",
    "l1": "L1/TEX Cache Throughput",
    "multiprocessor": "Compute (SM) Throughput",
    "occupancy": "Achieved Occupancy",
}
"""name here -> Nsight Compute's, in percent"""
LIMIT = re.compile(r"is limited by (?:the )?(.+?)\.")
WAIT = re.compile(r"spends ([\d.]+) cycles being stalled (.+?)\.")
SCARCE = ("registers", "shared memory", "warps")
"""what may keep a multiprocessor from holding more warps, as Nsight Compute's rule names it"""
Launch = dict[str, Any]


def launches(lines: Iterable[str]) -> Iterator[Launch]:
    """Each launch of a CSV file: kernel, milliseconds, shares, and what the rules say of it."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    found: dict[str, Launch] = {}
    for row in rows:
        launch = found.setdefault(row["ID"], {"kernel": row["Kernel Name"], "metrics": {}, "rules": ""})
        if row["Metric Value"]:
            launch["metrics"][row["Metric Name"]] = (row["Metric Value"].replace(",", ""), row["Metric Unit"])
        launch["rules"] += row["Rule Description"] or ""
    for launch in found.values():
        yield _read(launch)


def _read(launch: Launch) -> Launch:
    metrics, rules = launch["metrics"], launch["rules"]
    time, unit = metrics["Duration"]
    limit, wait = LIMIT.search(rules), WAIT.search(rules)
    return {
        "kernel": launch["kernel"],
        "ms": float(time) / {"ns": 1e6, "us": 1e3, "ms": 1.0}[unit],
        "percent": {name: float(metrics[theirs][0]) for name, theirs in SHARES.items()},
        "held_back_by": [part for part in SCARCE if limit and part in limit[1]],
        "waits": {"cycles": float(wait[1]), "for": wait[2].removeprefix("waiting for a ")} if wait else None,
    }


def kernels(found: Iterable[Launch]) -> dict[str, Launch]:
    """By kernel, the slowest first: launches and milliseconds of all, and the rest of the longest one."""
    by_name: dict[str, list[Launch]] = {}
    for launch in found:
        by_name.setdefault(launch["kernel"], []).append(launch)
    whole = {
        name: {
            "launches": len(every),
            "total_ms": sum(one["ms"] for one in every),
            **max(every, key=lambda one: one["ms"]),
        }
        for name, every in by_name.items()
    }
    return dict(sorted(whole.items(), key=lambda item: -item[1]["total_ms"]))


def main() -> None:
    """Read the files, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="SHAPE=CSV", help="what ncu wrote of a shape of one_call.py")
    parser.add_argument("--tokens", nargs="+", type=int, required=True, help="of each file's call")
    parser.add_argument("--commit", required=True, help="that was measured")
    parser.add_argument("--device", default="NVIDIA H200")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shapes = {}
    for pair, tokens in zip(options.files, options.tokens, strict=True):
        shape, _, file = pair.partition("=")
        with Path(file).open(encoding="utf-8") as lines:
            shapes[shape] = {"tokens": tokens, "kernels": kernels(launches(lines))}
    about = {"command": "ncu, as one_call.py says", "commit": options.commit}
    options.out.write_text(json.dumps({**about, "device": options.device, "shapes": shapes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
