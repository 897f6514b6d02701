"""A hybrid against its softmax teacher, end to end on a GPU: training step, prefill and decoding.

    python -m benchmarks.kernels.hybrid --out benchmarks/kernels/hybrid_h200.json

Models have true shapes and random weights; one layer in five keeps softmax attention, the others are SSE with recipe
defaults. Everything is compared first; nothing is timed if a comparison fails. The JSON is rewritten after each figure.

Training: rows of one document each, as many as make --step-tokens (at least one); next-token loss in chunks, gradient
checkpointing of every layer, AdamW over all weights, bfloat16 throughout; teacher and hybrid alike. Softmax layers get
torch's flash and cuDNN kernels in turn; the hybrid gets the one that was faster for the teacher at that context.
Decoding: after one prefill, greedy steps, each a replayed CUDA graph, for one row and for --decode-tokens of context in
all; the package's attention kernel for one token, for the teacher torch's too.
COMMIT names the commit where the checkout has no git.
"""

import argparse
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.kernels.hybrid_checks import attention_kernels, backends_agree, decoding_agrees
from benchmarks.kernels.hybrid_decoding import OWN, Generation, step_choices
from benchmarks.kernels.hybrid_measure import attention, attention_choices, environment, release
from benchmarks.kernels.hybrid_models import MODELS, TEACHER, Subject, build, subject, subject_of_folder
from benchmarks.kernels.hybrid_profile import profile
from benchmarks.kernels.hybrid_training import Trainer, compile_layers, random_ids

MOST_ROWS = 64
BOTH_KERNELS_UP_TO = 2**15
"""tokens of context; beyond it a slow step is measured with the kernel that was faster before"""
LONG = 2**15
"""tokens of context of the compiled and the profiled training step"""


class Run:
    """The report as it grows, and what all groups need."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.started = time.monotonic()
        settings = {"backend": options.backend, "dtype": str(self.dtype).removeprefix("torch."),
                    "step_tokens": options.step_tokens, "decode_tokens": options.decode_tokens}  # fmt: skip
        self.report: dict[str, Any] = {"schema": 1, "environment": environment(self.device), "settings": settings}

    def save(self) -> None:
        """Write the report under a temporary name, then rename it."""
        self.report["seconds"] = round(time.monotonic() - self.started, 1)
        unfinished = self.options.out.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.options.out)

    def late(self) -> bool:
        """Whether nothing new should start."""
        return bool(time.monotonic() - self.started > self.options.deadline)

    def attempt(self, section: str, row: dict[str, Any], figures: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Add a row with its figures to a section; one that fails says why, and the others go on."""
        if self.late():
            row["error"] = "not run: past the deadline"
        else:
            try:
                row |= figures()
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            except Exception as problem:
                traceback.print_exc()
                row["error"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
        release(self.device)
        self.report.setdefault(section, []).append(row)
        print(section, {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, file=sys.stderr)
        self.save()
        return row

    def models(self, case: Subject) -> Iterator[tuple[str, PreTrainedModel]]:
        """The teacher and the hybrids, one at a time."""
        for name in self.options.models or case.models:
            if self.late():
                return
            yield name, build(case, name, device=self.device, dtype=self.dtype, backend=self.options.backend)
            release(self.device)

    def best_kernel(self, case: Subject, context: int) -> str:
        """The attention kernel with which the teacher trained fastest at a context, or at the longest one before it."""
        wanted = {"shape": case.name, "model": TEACHER, "compiled": False}
        rows = [
            row
            for row in self.report.get("training", [])
            if "tokens_per_s" in row and row["context"] <= context and wanted.items() <= row.items()
        ]
        if not rows:
            return attention_choices(self.device)[0]
        return str(max(rows, key=lambda row: (row["context"], row["tokens_per_s"]))["attention"])


def check(run: Run, case: Subject) -> None:
    """Refuse to time what is wrong."""
    checks = [check for compare in (backends_agree, decoding_agrees) for check in
              compare(case, run.device, run.options.backend)]  # fmt: skip
    run.report.setdefault("checks", {})[case.name] = [check.to_dict() for check in checks]
    if run.device.type == "cuda":
        kernels = {name: attention_kernels(case, run.device, name) for name in attention_choices(run.device)}
        run.report["attention_kernels"] = kernels
    run.save()
    if wrong := [check for check in checks if not check.ok]:
        sys.exit("\n".join(["nothing was timed:", *map(str, wrong)]))


def train(run: Run, case: Subject) -> None:
    """Training steps by context."""
    for name, model in run.models(case):
        trainer = Trainer(model)
        for context in run.options.contexts or case.training:
            batch = max(1, run.options.step_tokens // context)
            both = name == TEACHER and context <= BOTH_KERNELS_UP_TO
            for choice in attention_choices(run.device) if both else [run.best_kernel(case, context)]:
                _training_row(run, case, trainer, name, context, batch, choice, compiled=False)
        del model, trainer


def compiled_train(run: Run, case: Subject) -> None:
    """The training step at one long context with compiled layers."""
    if not case.full:
        return
    context = _long_context(run, case)
    for name, model in run.models(case):
        trainer = Trainer(model)
        compile_layers(model)
        batch = max(1, run.options.step_tokens // context)
        _training_row(run, case, trainer, name, context, batch, run.best_kernel(case, context), compiled=True)
        del model, trainer
        torch.compiler.reset()


def _training_row(run: Run, case: Subject, trainer: Trainer, name: str, context: int, batch: int, choice: str,
                  *, compiled: bool) -> None:  # fmt: skip
    row = {"shape": case.name, "model": name, "context": context, "batch": batch, "attention": choice,
           "compiled": compiled}  # fmt: skip
    compiles = compiled or name != TEACHER
    run.attempt("training", row, lambda: trainer.measure(
        context, batch, choice, budget=run.options.seconds, compiles=compiles))  # fmt: skip


def _long_context(run: Run, case: Subject) -> int:
    contexts = run.options.contexts or case.training
    return max([context for context in contexts if context <= LONG] or [min(contexts)])


def decode(run: Run, case: Subject) -> None:
    """Prefill and decoding by context."""
    for name, model in run.models(case):
        for context in run.options.contexts or case.decoding:
            _decoding_rows(run, case, name, model, context, compiled=False)
        del model


def compiled_decode(run: Run, case: Subject) -> None:
    """Prefill as before, and decoding of one row with the whole model compiled, at the longest context."""
    for name, model in run.models(case):
        _decoding_rows(run, case, name, model, max(run.options.contexts or case.decoding), compiled=True)
        del model
        torch.compiler.reset()


def _decoding_rows(run: Run, case: Subject, name: str, model: PreTrainedModel, context: int,
                   *, compiled: bool) -> None:  # fmt: skip
    """Prefill of one row, then decoding of one row and of many."""
    choice = run.best_kernel(case, context)
    shared = {"shape": case.name, "model": name, "context": context}
    generation = Generation(model, context, choice)
    read = functools.partial(generation.prefill, budget=run.options.seconds, compiles=name != TEACHER)
    if "error" in run.attempt("prefill", {**shared, "attention": choice}, read):
        return
    many = min(MOST_ROWS, run.options.decode_tokens // context) if case.full and not compiled else 1
    for batch in sorted({1, max(1, many)}):
        for choice in step_choices(run.device) if name == TEACHER and not compiled else [OWN]:
            row = {**shared, "batch": batch, "attention": choice, "compiled": compiled}
            run.attempt("decoding", row, functools.partial(generation.decode, batch, choice, compiled=compiled))


def where(run: Run, case: Subject) -> None:
    """Profiles of a training step at one long context."""
    context = _long_context(run, case)
    for name, model in run.models(case):
        trainer, ids = Trainer(model), random_ids(model, max(1, run.options.step_tokens // context), context)
        choice = run.best_kernel(case, context)
        with attention(choice):
            row = {"shape": case.name, "model": name, "context": context, "attention": choice}
            run.attempt("profiles", row, functools.partial(profile, functools.partial(trainer.step, ids)))
        del model, trainer


GROUPS = {
    "check": check,
    "train": train,
    "decode": decode,
    "compile": compiled_train,
    "compile-decode": compiled_decode,
    "profile": where,
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--shapes", nargs="*", default=["0.6b", "8b"], choices=("0.6b", "8b", "tiny"))
    parser.add_argument("--teacher", type=Path, help="folder of a teacher to measure too, weights or not")
    parser.add_argument("--groups", nargs="+", default=["check", "train", "decode", "compile"], choices=GROUPS)
    parser.add_argument("--models", nargs="+", choices=MODELS, help="default: those of each shape")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens; default: those of each shape")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="triton", help="of the SSE operator")
    parser.add_argument("--step-tokens", type=int, default=2**15, help="tokens of a training step, at least one row")
    parser.add_argument("--decode-tokens", type=int, default=2**19, help="context of all rows of the larger batch")
    parser.add_argument("--seconds", type=float, default=2.0, help="for the repeats of a figure")
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no new figure starts")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the groups, group by group over all shapes."""
    options = parse(arguments)
    logging.set_verbosity_error()
    run = Run(options)
    cases = [subject(name) for name in options.shapes]
    if options.teacher is not None:
        cases.append(subject_of_folder(options.teacher))
    for group in options.groups:
        for case in cases:
            GROUPS[group](run, case)
    run.save()


if __name__ == "__main__":
    main()
