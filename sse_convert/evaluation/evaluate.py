"""Measure a converted model beside its teacher: the same windows, the same needles, the same machine."""

import dataclasses as dc
import gc
import hashlib
import itertools
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from sse_convert.checkpoints.load_model import (
    context_limit,
    device_name,
    load_model,
    pick_device,
    tokenizer_of,
)
from sse_convert.checkpoints.open import CheckpointFiles, open_checkpoint
from sse_convert.console import Bar, progress
from sse_convert.evaluation.agreement import Comparison, TeacherStates
from sse_convert.evaluation.figures import CacheSize, ModelScores, paired_gaps
from sse_convert.evaluation.long_rows import LongRows, found_by_all, meet_others
from sse_convert.evaluation.perplexity import held_out_loss
from sse_convert.evaluation.report import EvalReport
from sse_convert.evaluation.retrieval import needle_score
from sse_convert.evaluation.tasks import Tasks, check_lengths, make_tasks
from sse_convert.evaluation.throughput import throughput
from sse_convert.files import write_json
from sse_convert.modeling.arch_spec import SSE_PREFIX, decoder_config
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.process_memory import memory_for
from sse_convert.recipe.schema import Recipe
from sse_convert.report import found_before
from sse_convert.surgery.budget import Geometry, Mixers, cache_bytes, state_bytes, table_lengths
from sse_convert.surgery.compatibility import match_recipe
from sse_convert.surgery.cpu_speed import fast_in_bfloat16
from sse_convert.surgery.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_PASS = {"cpu": 8192}
"""tokens of one forward pass by device type"""
TOKENS_PER_PASS_ELSEWHERE = 65536


def evaluate_checkpoint(
    job: Job,
    checkpoint: str | Path,
    *,
    out: Path | None = None,
    device: str | None = None,
) -> EvalReport:
    """Measure a checkpoint and the recipe's model as the recipe's `eval` says.

    Under a launcher, processes read windows of stages with `context_parallel` together; the first does all else alone.
    Both models run one after the other, in the teacher's stored type; in float32 on a CPU, unless the model is large
    and the CPU has units for products in bfloat16.
    Arguments and errors as of `api.evaluate`.
    """
    if (files := open_checkpoint(checkpoint)).model_type.startswith(SSE_PREFIX):
        match_recipe(job.recipe, files)
    main = meet_others(job.recipe)
    evaluator = Evaluator(job, device)
    report = found_by_all(job.recipe, main, lambda: evaluator.report(files))
    if out is not None and main:
        with found_before(report):
            write_json(out, report.to_dict())
    return report


def measures(recipe: Recipe) -> bool:
    """Whether the recipe asks for any measurement."""
    asked = recipe.eval
    return bool(asked.tokens or asked.throughput or asked.needle or asked.lm_eval)


SMALL = 64_000_000
"""parameters of a model that a CPU measures in float32"""


class Evaluator:
    """Measures a checkpoint beside its teacher, one after the other.

    Args:
        job: recipe and teacher.
        device: as for `evaluate`.

    Raises:
        RecipeError, CheckpointError, HubError, HardwareError: see `evaluate`.
    """

    def __init__(self, job: Job, device: str | None = None) -> None:
        self._job = job
        self._place = pick_device(device)
        self._config = job.teacher().config
        self._context = context_limit(self._config)
        check_lengths(job.recipe, self._context)
        self._together = LongRows.of(job.recipe)

    def report(self, checkpoint: CheckpointFiles) -> EvalReport:
        """Teacher and checkpoint.

        Args:
            checkpoint: the opened converted model.

        Raises:
            CheckpointError, HubError, DataError: see `evaluate`.
        """
        with memory_for(f"measuring {checkpoint.name}"):
            tasks = make_tasks(self._job, tokenizer_of(checkpoint))
            states = [TeacherStates() for _ in tasks.windows]
            teacher, mixers = self._measure(tasks, self._job.files(), states)
            watchers = [Comparison(windows, known) for windows, known in zip(tasks.windows, states, strict=True)]
            student, own = self._measure(tasks, checkpoint, watchers)
        return EvalReport(
            teacher=teacher,
            student=dc.replace(student, agreement=tuple(watcher.result() for watcher in watchers)),
            loss_gaps=paired_gaps(teacher, student),
            cache=cache_table(self._job.geometry(), mixers, own, tasks, self._context),
            conditions=_conditions(self._job.recipe, self._context, self._place, self._dtype, tasks)
            | {"vocab_size": self._job.teacher().text.vocab_size},
        )

    @property
    def _dtype(self) -> torch.dtype:
        """The teacher's stored one, but float32 on a CPU that is no faster in it, and for a model that is soon read."""
        small = self._job.geometry().active_parameters < SMALL or not fast_in_bfloat16()
        stored: torch.dtype = self._config.dtype or torch.float32
        return torch.float32 if self._place.type == "cpu" and small else stored

    def _measure(
        self, tasks: Tasks, files: CheckpointFiles, watchers: Sequence[TeacherStates | Comparison]
    ) -> tuple[ModelScores, Mixers]:
        with progress(f"evaluating {Path(files.name).name}", tasks.steps) as bar:
            model = load_model(files, device=str(self._place), dtype=self._dtype)
            scores = measure_model(
                model,
                tasks,
                name=files.name,
                sizes=self._job.geometry(),
                bar=bar,
                watchers=watchers,
                together=self._together,
            )
        mixers = model_mixers(model)
        del model
        gc.collect()
        return scores, mixers


def model_mixers(model: "PreTrainedModel") -> Mixers:
    """The mixer of each layer, None for softmax attention; all None for a model that is not converted."""
    if hasattr(model.config, "sse"):
        return layer_mixers(model.config)
    return [None] * decoder_config(model.config).num_hidden_layers


def measure_model(
    model: "PreTrainedModel",
    tasks: Tasks,
    *,
    name: str,
    sizes: Geometry,
    bar: Bar | None = None,
    watchers: Sequence[TeacherStates | Comparison] = (),
    together: LongRows | None = None,
) -> ModelScores:
    """Everything `tasks` asks of one model.

    Args:
        model: in evaluation mode.
        tasks: from `make_tasks`.
        name: for the report.
        sizes: of the teacher, for the cache formula.
        bar: advanced by one per window, sample, timed length and task of the harness.
        watchers: see the hidden states of `tasks.windows`; one each, or none.
        together: windows that several processes read together, each of which calls this.
    """
    batch = TOKENS_PER_PASS.get(model.device.type, TOKENS_PER_PASS_ELSEWHERE)
    sizes = dc.replace(sizes, cache_element_bytes=model.dtype.itemsize)
    mixers = model_mixers(model)
    speed = throughput(model, tasks.speed_lengths, bar=bar)
    watched = itertools.zip_longest(tasks.windows, watchers)
    tokenizer: Any = tasks.tokenizer
    return ModelScores(
        name=name,
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        held_out=tuple(
            held_out_loss(model, windows, batch_tokens=batch, bar=bar, watch=watch, together=together)
            for windows, watch in watched
        ),
        needles=tuple(needle_score(model, samples, batch_tokens=batch, bar=bar) for samples in tasks.needles),
        tasks=tasks.harness.score(model, tokenizer, bar) if tasks.harness else (),
        speed=tuple(dc.replace(s, formula_bytes=cache_bytes(sizes, mixers, s.length)) for s in speed),
    )


def cache_table(
    sizes: Geometry, teacher: Mixers, student: Mixers, tasks: Tasks, context: int | None
) -> tuple[CacheSize, ...]:
    """Bytes by length, longest first, from the formulas of `surgery.budget`, keys and values in the stored type."""
    lengths = {windows.input_ids.shape[1] for windows in tasks.windows} | set(table_lengths(context))
    lengths |= {len(samples[0].token_ids) for samples in tasks.needles} | set(tasks.speed_lengths)
    return tuple(
        CacheSize(
            length=length,
            teacher_bytes=cache_bytes(sizes, teacher, length),
            student_bytes=cache_bytes(sizes, student, length),
            student_state_bytes=sum(state_bytes(sizes, mixer) for mixer in student),
        )
        for length in sorted(lengths, reverse=True)
    )


def _digest(tasks: Tasks) -> str:
    """What tells held-out text from other text, wherever it lies."""
    found = hashlib.sha256()
    for windows in tasks.windows:
        found.update(windows.input_ids.cpu().numpy().tobytes())
    return found.hexdigest()[:8]


def _conditions(
    recipe: Recipe, context: int | None, device: torch.device, dtype: torch.dtype, tasks: Tasks
) -> dict[str, Any]:
    settings, harness = recipe.eval.needle, recipe.eval.lm_eval
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "cores": os.cpu_count(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "text": ", ".join(source.path or "samples of the teacher" for source in recipe.data.valid),
        "text_digest": _digest(tasks),
        "held_out_tokens": sum(windows.input_ids.numel() for windows in tasks.windows),
        "needle_samples": settings.samples if settings else None,
        "teacher_context": context,
        "seed": recipe.data.seed,
        **({"lm_eval": {"version": version("lm_eval"), **dc.asdict(harness)}} if harness else {}),
    }
