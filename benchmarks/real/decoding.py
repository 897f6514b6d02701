"""Decoding steps of a real model by what stays softmax: python -m benchmarks.real.decoding TEACHER OUT.json

Models are converted, not trained, which changes no speed. A step is a CUDA graph at the end of the context, of as many
equal rows as --batches says. The JSON is rewritten after each model.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.kernels.hybrid_decoding import OWN, Generation
from benchmarks.kernels.hybrid_measure import environment, release
from benchmarks.real.levers import LEVERS
from sse_convert import api
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.files import write_json
from sse_convert.recipe import load_recipe

TEACHER = "the teacher"
PREFILL_SECONDS = 1.0


def measured(model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each context and batch that the memory holds."""
    rows = []
    for context in options.contexts:
        generation = Generation(model, context, "default")
        figures = generation.prefill(budget=PREFILL_SECONDS, compiles=False)
        rows.append({"context": context, **figures})
        for batch in options.batches:
            try:
                rows.append({"context": context, "batch": batch, **generation.decode(batch, OWN)})
            except torch.OutOfMemoryError:
                rows.append({"context": context, "batch": batch, "out_of_memory": True})
                break
        del generation
        release(model.device)
    return rows


def run(options: argparse.Namespace) -> None:
    """Convert and measure each."""
    report: dict[str, Any] = {**environment(torch.device(options.device)), "models": {}}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            source = options.teacher
            if name != TEACHER:
                recipe = load_recipe(options.recipe, [f"model={options.teacher}", *LEVERS[name]])
                source = Path(folder) / "converted"
                api.convert(recipe, out=source)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(options.device).eval()
        report["models"][name] = measured(model, options)
        write_json(options.out, report)
        for row in report["models"][name]:
            say(f"{name}: { ({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}) }")
        del model


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("teacher", type=Path, help="folder of the teacher")
    p.add_argument("out", type=Path, help="JSON file to write")
    p.add_argument("--models", nargs="+", choices=[TEACHER, *LEVERS], default=[TEACHER], metavar="NAME", help="levers")
    p.add_argument("--recipe", default="benchmarks/real/none_kept.yaml")
    p.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768], help="tokens")
    p.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128], help="rows of a step, ascending")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = p.parse_args(arguments)
    hush_libraries()
    run(options)


if __name__ == "__main__":
    sys.exit(main())
