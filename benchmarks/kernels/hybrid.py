"""A hybrid against its softmax teacher, end to end on a GPU: training step, prefill and decoding.

    python -m benchmarks.kernels.hybrid --out benchmarks/kernels/hybrid_h200.json

Models have true shapes and random weights; one layer in five keeps softmax attention, the others are SSE with recipe
defaults. Everything is compared first; nothing is timed if a comparison fails. The JSON is rewritten after each figure;
--resume goes on with one, also with one of another commit (see `hybrid_report.py`).

Training: rows of one document each, as many as make --step-tokens (at least one); next-token loss in chunks, gradient
checkpointing of every layer, AdamW over all weights, bfloat16 throughout; teacher and hybrid alike. Softmax layers get
torch's flash and cuDNN kernels in turn; the hybrid gets the one that was faster for the teacher at that context.
Decoding: after one prefill, greedy steps, each a replayed CUDA graph, for one row and for --decode-tokens of context in
all; the package's attention kernel for one token, for the teacher torch's too.
COMMIT names the commit where the checkout has no git.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.kernels.hybrid_checks import attention_kernels, backends_agree, decoding_agrees
from benchmarks.kernels.hybrid_decoding import OWN, Generation, step_choices
from benchmarks.kernels.hybrid_measure import attention, attention_choices
from benchmarks.kernels.hybrid_models import MODELS, TEACHER, Subject, subject, subject_of_folder
from benchmarks.kernels.hybrid_profile import profile
from benchmarks.kernels.hybrid_report import Run
from benchmarks.kernels.hybrid_training import Trainer, random_ids
from sse_convert.training.compiling import compile_layers

MOST_ROWS = 64
BOTH_KERNELS_UP_TO = 2**15
"""tokens of context; beyond it a slow step is measured with the kernel that was faster before"""
LONG = 2**15
"""tokens of context of the compiled and the profiled training step"""


def check(run: Run, case: Subject) -> None:
    """Refuse to time what is wrong."""
    checks = [check for compare in (backends_agree, decoding_agrees) for check in
              compare(case, run.device, run.options.backend)]  # fmt: skip
    found = [{**check.to_dict(), "commit": run.commit} for check in checks]
    run.report.setdefault("checks", {})[case.name] = found
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
        choice = run.best_kernel(case, context)
        _training_row(run, case, trainer, name, context, batch, choice, compiled=True)
        if run.options.profile_steps:
            _profile_training(run, case, trainer, name, context, choice, compiled=True)
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
    if "error" in run.attempt("prefill", {**shared, "attention": choice}, read, needed=True):
        return
    many = min(MOST_ROWS, run.options.decode_tokens // context) if case.full and not compiled else 1
    for batch in sorted({1, max(1, many)}):
        for choice in step_choices(run.device) if name == TEACHER and not compiled else [OWN]:
            row = {**shared, "batch": batch, "attention": choice, "compiled": compiled}
            run.attempt("decoding", row, functools.partial(generation.decode, batch, choice, compiled=compiled))
    if run.options.profile_steps:
        row = _profile_row(case, name, "decoding", context, OWN, compiled=compiled)
        run.attempt("profiles", row, functools.partial(generation.profile, compiled=compiled))


def profile_training(run: Run, case: Subject) -> None:
    """Profiles of a training step at one long context."""
    context = _long_context(run, case)
    for name, model in run.models(case):
        trainer = Trainer(model)
        _profile_training(run, case, trainer, name, context, run.best_kernel(case, context), compiled=False)
        del model, trainer


def _profile_training(run: Run, case: Subject, trainer: Trainer, name: str, context: int, choice: str,
                      *, compiled: bool) -> None:  # fmt: skip
    ids = random_ids(trainer.model, max(1, run.options.step_tokens // context), context)
    with attention(choice):
        row = _profile_row(case, name, "training", context, choice, compiled=compiled)
        run.attempt("profiles", row, functools.partial(profile, functools.partial(trainer.step, ids)))


def _profile_row(case: Subject, name: str, work: str, context: int, choice: str, *, compiled: bool) -> dict[str, Any]:
    return {"shape": case.name, "model": name, "work": work, "context": context, "attention": choice,
            "compiled": compiled}  # fmt: skip


GROUPS = {
    "check": check,
    "train": train,
    "decode": decode,
    "compile": compiled_train,
    "compile-decode": compiled_decode,
    "profile": profile_training,
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
    parser.add_argument("--profile-steps", action="store_true", help="also profile decoding and compiled training")
    parser.add_argument("--resume", action="store_true", help="go on with the JSON at --out, which may be of others")
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
