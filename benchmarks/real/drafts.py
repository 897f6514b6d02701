"""Greedy decoding with and without drafts: python -m benchmarks.real.drafts PROBLEMS OUT.json --models NAME=FOLDER

Each model writes functions to MBPP's descriptions, and writes a file again with comments. Ways: transformers' own
`generate`, the package's with recorded steps, prompt lookup, another model's drafts. The first way's tokens count.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.kernels.hybrid_measure import environment
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.files import write_json
from sse_convert.inference.cuda_graphs import graphed

PLAIN, GRAPHS, COPY, DRAFT = "plain", "recorded steps", "prompt lookup", "another model's drafts"
LOOKUP = 10
"""tokens of a draft that prompt lookup copies"""


def requests(problems: list[dict[str, Any]], count: int, functions: int) -> dict[str, list[str]]:
    """Kind of request -> what is asked."""
    code = [problem["prompt"].strip() + "\n" + problem["answers"][0].rstrip() for problem in problems]
    write = [
        f"Write this Python function. Answer with code alone.\n```python\n{p['prompt'].strip()}\n```"
        for p in problems[:count]
    ]
    files = ["\n\n\n".join(code[i * functions : (i + 1) * functions]) for i in range(count)]
    edit = [
        f"Write this file again with a comment above each function, all else unchanged.\n```python\n{file}\n```"
        for file in files
    ]
    return {"write a function": write, "edit a file": edit}


def ids_of(tokenizer: Any, request: str, device: str) -> Tensor:
    """Tokens [1, T] of a request in the model's chat template."""
    turns = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ].to(device)


def answered(model: Any, way: str, ids: Tensor, new: int, draft: dict[str, Any]) -> tuple[Tensor, float]:
    """New tokens [N] and seconds."""
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": new,
        "attention_mask": torch.ones_like(ids),
        "num_beams": 1,
    }
    options |= {"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}

    def run() -> Tensor:
        return model.generate(ids, **options)[0, ids.shape[1] :]

    if way == COPY:
        options["prompt_lookup_num_tokens"] = LOOKUP
    elif way == DRAFT:
        options |= draft
    synchronize(ids)
    start = time.perf_counter()
    if way == GRAPHS:
        with graphed(model, ids.shape[1] + new):
            found = run()
    else:
        found = run()
    synchronize(ids)
    return found, time.perf_counter() - start


def synchronize(ids: Tensor) -> None:
    """Wait for the GPU, where there is one."""
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)


def measured(
    model: Any, tokenizer: Any, kinds: dict[str, list[str]], draft: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for each kind of request and way."""
    rows = []
    for kind, asked in kinds.items():
        rows_of_kind = [ids_of(tokenizer, request, options.device) for request in asked]
        first: list[Tensor] = []
        for way in (PLAIN, GRAPHS, COPY, DRAFT)[: 4 if draft else 3]:
            answered(model, way, rows_of_kind[0], options.new, draft)
            found = [answered(model, way, ids, options.new, draft) for ids in rows_of_kind]
            first = first or [tokens for tokens, _ in found]
            tokens, seconds = sum(len(row) for row, _ in found), sum(each for _, each in found)
            equal = sum(torch.equal(row, other) for (row, _), other in zip(found, first, strict=True))
            prompt = sum(ids.shape[1] for ids in rows_of_kind) // len(rows_of_kind)
            rows.append(
                {
                    "request": kind,
                    "way": way,
                    "prompt_tokens": prompt,
                    "tokens": tokens,
                    "tokens_per_s": round(tokens / seconds, 1),
                    "equal": equal,
                    "of": len(found),
                }
            )
    return rows


def run(options: argparse.Namespace) -> None:
    """Measure each model."""
    problems = [json.loads(line) for line in options.problems.read_text(encoding="utf-8").splitlines()]
    kinds = requests(problems, options.count, options.functions)
    report: dict[str, Any] = {
        **environment(torch.device(options.device)),
        "new_tokens": options.new,
        "lookup": LOOKUP,
        "draft": options.draft,
        "dtype": options.dtype,
        "models": {},
    }

    def load(folder: str) -> Any:
        return (
            AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype)).to(options.device).eval()
        )

    draft: dict[str, Any] = {}
    if options.draft:
        draft = {
            "assistant_model": load(options.draft),
            "assistant_tokenizer": AutoTokenizer.from_pretrained(options.draft),
        }
    for name, folder in (named.split("=", 1) for named in options.models):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        report["models"][name] = measured(
            load(folder), tokenizer, kinds, draft and {**draft, "tokenizer": tokenizer}, options
        )
        write_json(options.out, report)
        for row in report["models"][name]:
            say(f"{name}: {row}")


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("problems", type=Path, help="MBPP as JSON lines")
    p.add_argument("out", type=Path, help="JSON file to write")
    p.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER")
    p.add_argument("--draft", metavar="FOLDER", help="of the model that drafts")
    p.add_argument("--count", type=int, default=12, help="requests of each kind")
    p.add_argument("--functions", type=int, default=6, help="in a file to edit")
    p.add_argument("--new", type=int, default=192, help="tokens of an answer at most")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--device", default="cuda")
    options = p.parse_args(arguments)
    hush_libraries()
    run(options)


if __name__ == "__main__":
    sys.exit(main())
