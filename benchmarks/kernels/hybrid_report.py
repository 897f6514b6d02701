"""The JSON of the end-to-end benchmark as it grows, over one run or several.

Each figure names the commit that it is of. A run that goes on with a JSON keeps the figures of its own commit, replaces
those of other commits that it measures again, and leaves the rest; the surroundings of earlier runs stay in `earlier`.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.kernels.hybrid_measure import attention_choices, environment, release
from benchmarks.kernels.hybrid_models import TEACHER, Subject, build
from sse_convert.files import write_json

Row = dict[str, Any]
SECTIONS = ("training", "prefill", "decoding", "profiles")


class Run:
    """The report, and what all groups need."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.started = time.monotonic()
        settings = {"backend": options.backend, "dtype": str(self.dtype).removeprefix("torch."),
                    "step_tokens": options.step_tokens, "decode_tokens": options.decode_tokens}  # fmt: skip
        self.report: Row = {"schema": 1, "environment": environment(self.device), "settings": settings}
        self.commit: str = self.report["environment"]["commit"]
        if options.resume and options.out.is_file():
            self.report |= continued(json.loads(options.out.read_text(encoding="utf-8")))

    def save(self) -> None:
        """Write the report."""
        self.report["seconds"] = round(time.monotonic() - self.started, 1)
        write_json(self.options.out, self.report)

    def late(self) -> bool:
        """Whether nothing new should start."""
        return bool(time.monotonic() - self.started > self.options.deadline)

    def attempt(self, section: str, row: Row, figures: Callable[[], Row], *, needed: bool = False) -> Row:
        """Add a row with its figures to a section; one that fails says why, and the others go on.

        Args:
            section: one of SECTIONS.
            row: what tells it from the others of its section.
            figures: measures.
            needed: measure again even what this commit has measured already, since others need what it leaves behind.
        """
        rows = self.report.setdefault(section, [])
        same = [old for old in rows if row.items() <= old.items()]
        done = [old for old in same if old["commit"] == self.commit and "error" not in old]
        if done and not needed:
            return done[0]
        row = {**row, "commit": self.commit}
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
        self.report[section] = [old for old in rows if old not in same or ("error" in row and "error" not in old)]
        self.report[section].append(row)
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


def continued(report: Row) -> Row:
    """What a run takes over from the JSON of an earlier one: rows with their commits, checks, surroundings."""
    before = {**report["environment"], "seconds": report["seconds"]}
    rows = {section: [{"commit": before["commit"], **row} for row in report[section]]
            for section in SECTIONS if section in report}  # fmt: skip
    kept = {name: report[name] for name in ("checks", "attention_kernels") if name in report}
    return {**kept, **rows, "earlier": [*report.get("earlier", []), before]}
