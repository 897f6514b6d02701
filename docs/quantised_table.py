"""The table of the page *Quantise*, from `benchmarks/quality/quantised.json`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from docs.examples import ROOT
from docs.markdown import table

NAMES = {"llmcompressor": "llm-compressor"}
Z95 = 1.96


def quantised() -> str:
    """Loss above the same model without quantisation, and what the figures come from."""
    data = json.loads((ROOT / "benchmarks/quality/quantised.json").read_text("utf-8"))
    header = ("library", "weights", "teacher", "converted", "converted, new projections rounded too")
    cells = [
        (
            NAMES.get(row["library"], row["library"]),
            row["method"],
            *(_rise(row.get(who)) for who in ("teacher", "converted", "everything")),
        )
        for row in data["rows"]
    ]
    return "\n".join([*table(header, cells), "", *_conditions(data)])


def _rise(figure: Mapping[str, Any] | str | None) -> str:
    if isinstance(figure, str):
        return f"weights become {figure}"
    return "not measured" if figure is None else f"{figure['rise']:+.4f} ± {Z95 * figure['se']:.4f}"


def _conditions(data: Mapping[str, Any]) -> list[str]:
    teacher, converted = data["teacher"], data["converted"]
    versions = ", ".join(f"{NAMES.get(name, name)} {version}" for name, version in data["versions"].items())
    return [
        f"Rise of the held-out loss in nats per token, with 95% intervals over {data['rows_of_text']} rows of "
        f"{data['length']:,} tokens, one from each book.",
        f"Without quantisation, in {data['dtype']}, the teacher has {teacher['loss']:.4f} and the converted model "
        f"{converted['loss']:.4f}; in float32 {teacher['float32']:.4f} and {converted['float32']:.4f}.",
        "The converted model is the 32M teacher after `recipes/teacher-qwen3-32m.yaml`, "
        f"{data['training']}: too little for its full quality, enough to see what rounding adds.",
        f"{data['hardware']}, torch {data['torch']}, transformers {data['transformers']}, {versions}; "
        f"commit {data['commit']}; `benchmarks/quality/quantised.json`.",
    ]


BLOCKS: Mapping[str, Callable[[], str]] = {"quantised": quantised}
