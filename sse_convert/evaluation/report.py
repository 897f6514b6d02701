"""The evaluation report: teacher beside student, as JSON and as tables.

JSON (schema 1), all losses in nats per token, all intervals 95%:

    schema, conditions {device, dtype, threads, versions, text, seed ...}
    teacher, student   {name, parameters, dtype, held_out: [...], needles: [...], agreement: [...],
                        tasks: [...], speed: [...]}
                       held_out: length, windows, tokens, loss, loss_se, loss_low, loss_high, bits_per_byte,
                                 buckets: [{start, stop, tokens, loss, loss_se, bits_per_byte}]  by tokens of context
                       needles:  kind, keys, length, samples, correct, accuracy, low, high,
                                 depths: [{start, stop, samples, correct, accuracy, low, high}]
                       agreement (student): length, windows, tokens, kl, kl_se, kl_low, kl_high, top1, top1_se ...,
                                 buckets: [{start, stop, tokens, kl, kl_se, top1, top1_se}]    KL(teacher || student)
                       tasks:    task, metric, value, stderr, samples, higher_is_better       lm-evaluation-harness
                       speed:    length, prefill_tokens_per_s, decode_tokens_per_s, cache_bytes, decoded, repeats
    loss_gaps          [{length, gap, gap_se}]                            student minus teacher, paired windows
    retention          [{kind, keys, length, teacher, student, share}]    share = student / teacher, null where 0 / 0
    cache              [{length, teacher_bytes, student_bytes, student_state_bytes}]   by formula, one sequence
    verdict            {grade, text, notes}                               what the figures come to, see `verdict`
"""

import dataclasses as dc
from typing import Any

from sse_convert.evaluation.figures import Figures
from sse_convert.evaluation.tables import (
    agreement_lines,
    interval,
    percent,
    spread,
    task_lines,
)
from sse_convert.evaluation.verdict import ModelVerdict, model_verdict
from sse_convert.report import format_bytes, json_ready, table

SCHEMA = 1
EVALUATION_FILE = "evaluation.json"
"""report of the eval step of a run"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport(Figures):
    """Teacher beside student: what terminal, verdict, model card and `compare` read, just measured or from its JSON."""

    def verdict(self) -> ModelVerdict:
        """What the figures come to, in words."""
        return model_verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, described at the top of this module."""
        data: dict[str, Any] = json_ready(
            {
                "schema": SCHEMA,
                "conditions": self.conditions,
                "teacher": self.teacher.to_dict(),
                "student": self.student.to_dict(),
                "loss_gaps": self.loss_gaps,
                "retention": self.retention(),
                "cache": self.cache,
                "verdict": self.verdict(),
            }
        )
        return data

    def lines(self) -> list[str]:
        """Tables for a person."""
        verdict = self.verdict()
        blocks = [
            self._loss_lines(),
            agreement_lines(self.student.agreement),
            self._needle_lines(),
            [f"note: {note}" for note in verdict.notes],
            task_lines(self.teacher.tasks, self.student.tasks),
            self._speed_lines(),
            self._cache_lines(),
            [verdict.line()],
        ]
        return [line for block in blocks if block for line in (*block, "")][:-1]

    def _loss_lines(self) -> list[str]:
        rows = [
            (t.length, t.windows, t.loss, s.loss, gap.gap, spread(gap.gap_se), t.bits_per_byte, s.bits_per_byte)
            for t, s, gap in zip(self.teacher.held_out, self.student.held_out, self.loss_gaps, strict=True)
        ]
        header = ("length", "windows", "teacher loss", "student loss", "gap", "+-95%", "teacher bpb", "student bpb")
        return ["held-out loss (nats/token) and bits per byte", *table(header, rows)] if rows else []

    def _needle_lines(self) -> list[str]:
        rows = [
            (t.length, t.kind, t.keys, t.total.samples, interval(t.total), interval(s.total), percent(row.share))
            for t, s, row in zip(self.teacher.needles, self.student.needles, self.retention(), strict=True)
        ]
        header = ("length", "kind", "keys", "samples", "teacher", "student", "retention")
        return ["needle retrieval, exact answers (95% interval)", *table(header, rows)] if rows else []

    def _speed_lines(self) -> list[str]:
        rows = [
            (
                t.length,
                *(_rate(speed) for speed in (t.prefill_tokens_per_s, s.prefill_tokens_per_s)),
                *(_rate(speed) for speed in (t.decode_tokens_per_s, s.decode_tokens_per_s)),
                *(format_bytes(size) for size in (t.cache_bytes, s.cache_bytes)),
            )
            for t, s in zip(self.teacher.speed, self.student.speed, strict=True)
        ]
        header = ("length", "prefill teacher", "student", "decode teacher", "student", "cache teacher", "student")
        title = f"tokens/s and measured cache, one sequence, {self.conditions.get('device')}"
        return [title, *table(header, rows)] if rows else []

    def _cache_lines(self) -> list[str]:
        rows = [
            (
                size.length,
                format_bytes(size.teacher_bytes),
                format_bytes(size.student_bytes),
                format_bytes(size.student_state_bytes),
                percent(size.student_bytes / size.teacher_bytes),
            )
            for size in self.cache
        ]
        header = ("context", "teacher cache", "student cache", "of it state", "ratio")
        return ["cache of one sequence, by formula", *table(header, rows)] if rows else []


def _rate(tokens_per_s: float) -> float | int:
    return round(tokens_per_s) if tokens_per_s >= 100 else tokens_per_s
