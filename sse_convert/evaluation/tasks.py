"""What every model is asked, made once: held-out text, needles, tasks; and what is wrong with it."""

import dataclasses as dc
import itertools
from typing import TYPE_CHECKING, Any

from sse_convert.checkpoints.load_model import tokenizer_of
from sse_convert.data.needle import NeedleSample, load_words
from sse_convert.data.rows import RowReader, is_local, stack
from sse_convert.errors import DataError, RecipeError
from sse_convert.evaluation.harness import Harness, check_task_files
from sse_convert.evaluation.perplexity import Windows, make_windows
from sse_convert.evaluation.retrieval import needle_samples
from sse_convert.recipe.schema import Recipe
from sse_convert.surgery.job import Job
from sse_convert.surgery.positions import stretched_context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dc.dataclass(frozen=True, slots=True)
class Tasks:
    """What every model is asked, made once."""

    windows: tuple[Windows, ...]
    """held-out text, one entry per window length"""
    needles: tuple[tuple[NeedleSample, ...], ...]
    """needle samples, one entry per length, kind and number of keys"""
    speed_lengths: tuple[int, ...]
    """context lengths for the timings"""
    tokenizer: "PreTrainedTokenizerBase | None" = None
    """reads what the models generate"""
    harness: Harness | None = None
    """tasks of the lm-evaluation-harness"""

    @property
    def steps(self) -> int:
        """Units of work, for the progress bar."""
        rows = sum(len(windows.input_ids) for windows in self.windows)
        samples = sum(map(len, self.needles))
        return rows + samples + len(self.speed_lengths) + (len(self.harness.names) if self.harness else 0)


def make_tasks(job: Job, tokenizer: "PreTrainedTokenizerBase") -> Tasks:
    """Read the held-out text and plant the needles.

    Args:
        job: `eval` and `data` of the recipe are used.
        tokenizer: the models' tokenizer.

    Raises:
        DataError: there is no usable held-out text, or too little of it; or a task's data cannot be used.
        RecipeError: the lm-evaluation-harness does not know a task.
        DependencyError: a package of the extra `eval` is asked for and not installed.
    """
    recipe, settings = job.recipe, job.recipe.eval
    harness = Harness(settings.lm_eval, recipe.model) if settings.lm_eval else None
    windows = []
    if settings.tokens:
        for length in window_lengths(recipe):
            rows = stack(_rows(job, tokenizer, length, -(-settings.tokens // length)))
            windows.append(make_windows(rows["input_ids"], tokenizer, rows["position_ids"]))
    needles: list[list[NeedleSample]] = []
    if settings.needle is not None:
        longest = max(settings.needle.lengths)
        row = max(window_lengths(recipe)) if settings.tokens else longest
        wanted = max(settings.tokens, 2 * longest)
        text = stack(_rows(job, tokenizer, row, -(-wanted // row)))["input_ids"].flatten().tolist()
        special = set(tokenizer.all_special_ids)
        haystack = [token for token in text if token not in special]
        words = load_words(recipe.data.needles.words)
        needles = needle_samples(settings.needle, haystack, tokenizer, words, recipe.data.seed)
    return Tasks(
        windows=tuple(windows),
        needles=tuple(map(tuple, needles)),
        speed_lengths=tuple(settings.throughput),
        tokenizer=tokenizer,
        harness=harness,
    )


def check_texts(job: Job) -> None:
    """Make sure that held-out text and the files of words will do, before anything is trained.

    Text of a hub or of the teacher is left to the measurement: it is not here yet.

    Args:
        job: `data` and `eval` of the recipe are read, and the text by the model's tokenizer.

    Raises:
        DataError: the held-out text does not fill a row, or a file cannot be used.
        CheckpointError, HubError: the tokenizer cannot be loaded.
    """
    recipe, settings = job.recipe, job.recipe.eval
    if settings.needle is not None or recipe.data.needles.share:
        load_words(recipe.data.needles.words)
    if settings.lm_eval is not None:
        check_task_files(settings.lm_eval)
    lengths = window_lengths(recipe) if settings.tokens else settings.needle.lengths if settings.needle else []
    if not lengths or not all(map(is_local, recipe.data.valid)):
        return
    reader = RowReader(recipe.data.valid, tokenizer_of(job.files()), max(lengths), recipe.data.seed, role="valid")
    next(reader.rows())


def window_lengths(recipe: Recipe) -> list[int]:
    """`eval.lengths`, or the row length of the last stage, or of calibration."""
    if recipe.eval.lengths:
        return recipe.eval.lengths
    return [recipe.stages[-1].seq_len if recipe.stages else recipe.calibrate.seq_len]


def _rows(job: Job, tokenizer: "PreTrainedTokenizerBase", length: int, count: int) -> list[Any]:
    reader = RowReader(
        job.recipe.data.valid,
        tokenizer,
        length,
        job.recipe.data.seed,
        role="valid",
        teacher=job.sampler,
        vocab_size=job.teacher().text.vocab_size,
    )
    return list(itertools.islice(reader.rows(), count))


def check_lengths(recipe: Recipe, teacher_limit: int | None) -> None:
    """Make sure that nothing longer than the context is asked for, and that there is held-out text where it is needed.

    Args:
        recipe: `data` and `eval` are read.
        teacher_limit: positions that the teacher was trained for; None for no limit.

    Raises:
        RecipeError: a length is beyond the context, after the stages' rope.
        DataError: no held-out text is named.
    """
    limit = None if teacher_limit is None else stretched_context(recipe, teacher_limit)
    needed = {
        "eval.lengths": window_lengths(recipe) if recipe.eval.tokens else [],
        "eval.needle.lengths": recipe.eval.needle.lengths if recipe.eval.needle else [],
        "eval.throughput": recipe.eval.throughput,
    }
    for key, lengths in needed.items():
        if limit is not None and lengths and max(lengths) > limit:
            raise RecipeError(
                f"{key} asks for {max(lengths)} tokens, {recipe.model} has a context of {teacher_limit}",
                expected=f"at most {limit}" + ("" if limit == teacher_limit else ", after the stages' rope"),
                fix=f"lower {key}",
            )
    if (recipe.eval.tokens or recipe.eval.needle) and not recipe.data.valid:
        raise DataError("the recipe names no held-out text", expected="at least one source in data.valid")
