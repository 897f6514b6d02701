"""Tasks of the lm-evaluation-harness on teacher and student: names, offline data of one's own, results with errors."""

import contextlib
import dataclasses as dc
import functools
import importlib.util
import io
import logging
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.checkpoints.load_model import context_limit
from sse_convert.console import Bar
from sse_convert.errors import DataError, DependencyError, RecipeError
from sse_convert.recipe.schema import LMEval
from sse_convert.report import FieldsReport
from sse_convert.trust import OPTION, trusts_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NIAH = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery"),
)
PAPER = (
    *("wikitext", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa"),
    *("fda", "swde", "squad_completion"),
    *NIAH,
    "gsm8k",
    *("mmlu", "mmlu_pro", "ceval-valid", "agieval", "triviaqa", "bbh", "drop"),
)
"""what the paper's tables report, under the harness's names"""
ALIASES = {"paper": PAPER, "niah": NIAH, "arc": ("arc_easy", "arc_challenge"), "siqa": ("social_iqa",)}
BOOTSTRAP = 1000
"""resamplings for the standard errors of metrics that are no means"""
NOT_MEASURED = -1.0
"""what the harness's RULER tasks, whose metrics are lengths, give for lengths that were not asked for"""


@dc.dataclass(frozen=True, slots=True)
class TaskScore(FieldsReport):
    """One metric of one task."""

    task: str
    """task name"""
    metric: str
    """metric, and its filter where that is not `none`: `exact_match,strict-match`"""
    value: float
    """in the harness's unit: shares from 0 to 1, perplexities, bits per byte"""
    stderr: float | None
    """standard error over documents, None where the harness has none"""
    samples: int
    """documents"""
    higher_is_better: bool | None
    """None where the harness does not say"""


class Harness:
    """The tasks of a recipe, found and loaded before any model is.

    Args:
        settings: `eval.lm_eval`.
        tokenizer: folder or hub id of the models' tokenizer, which RULER tasks count tokens with.

    Raises:
        DependencyError: lm-eval is not installed.
        RecipeError: a task is unknown, with suggestions.
        DataError: `include_path` does not exist, the data of a task cannot be loaded, or a task runs what the model
            writes, which nobody allowed.
    """

    def __init__(self, settings: LMEval, tokenizer: str) -> None:
        _require_package()
        self._settings = settings
        self._metadata = {"max_seq_lengths": settings.lengths, "tokenizer": tokenizer}
        with _quiet():
            self._manager = self._find_tasks()
            self._tasks = [task for name in self.names for task in self._load(name)]

    @functools.cached_property
    def names(self) -> list[str]:
        """The tasks and groups asked for, aliases resolved, each once."""
        return list(dict.fromkeys(name for task in self._settings.tasks for name in ALIASES.get(task, (task,))))

    def score(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", bar: Bar | None = None
    ) -> tuple[TaskScore, ...]:
        """Run the tasks on a model.

        Args:
            model: in evaluation mode.
            tokenizer: the model's.
            bar: advanced by one per task or group.
        """
        from lm_eval import simple_evaluate

        with _quiet():
            wrapped = _generator()(
                pretrained=model,
                tokenizer=tokenizer,
                batch_size=self._settings.batch_size,
                max_length=context_limit(model.config),
            )
            results = simple_evaluate(
                model=wrapped,
                tasks=self._tasks,
                task_manager=self._manager,
                num_fewshot=self._settings.num_fewshot,
                limit=self._settings.limit,
                apply_chat_template=self._settings.chat_template,
                gen_kwargs=dict(self._settings.gen_kwargs) or None,
                bootstrap_iters=BOOTSTRAP,
                confirm_run_unsafe_code=trusts_code(),
                log_samples=False,
            )
        if bar is not None:
            bar.update(len(self.names))
        return tuple(_scores(results))

    def _find_tasks(self) -> Any:
        """A task manager that knows all names; the harness's own 14,000 are indexed only where one is asked for."""
        from lm_eval.tasks import TaskManager

        check_task_files(self._settings)
        include = self._settings.include_path
        for defaults in (False, True) if include else (True,):
            manager = TaskManager(include_path=include, include_defaults=defaults, metadata=self._metadata)
            unknown = [name for name in self.names if name not in manager.all_tasks]
            if not unknown:
                return manager
        near = {name: get_close_matches(name, [*ALIASES, *manager.all_tasks], 3) for name in unknown}
        raise RecipeError(
            f"lm-eval has no task {', '.join(map(repr, unknown))}",
            expected="; ".join(f"instead of {name!r} {' or '.join(found)}" for name, found in near.items() if found)
            or "a name that `lm-eval ls tasks` lists",
            fix="correct eval.lm_eval.tasks, or name the folder of your own tasks in eval.lm_eval.include_path",
        )

    def _load(self, name: str) -> list[Any]:
        """A group, a task, or the tasks that share a tag, with their data."""
        try:
            loaded = self._manager.load([name])
        except ImportError as error:
            raise DependencyError(
                f"task {name!r} needs a package that is not installed: {error}", fix="pip install 'lm-eval[ruler]'"
            ) from error
        except (OSError, ValueError, AssertionError) as error:
            if "HF_ALLOW_CODE_EVAL" in str(error):
                raise _runs_code(name) from error
            raise DataError(
                f"the data of task {name!r} cannot be loaded: {_first_line(error)}",
                expected="a network connection, or the data in the cache of Hugging Face datasets",
                fix="or write a task over a local file and name its folder in eval.lm_eval.include_path",
            ) from error
        if not trusts_code() and any(getattr(task, "UNSAFE_CODE", False) for task in loaded["tasks"].values()):
            raise _runs_code(name)
        return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())


@functools.cache
def _generator() -> type[Any]:
    """The harness's class of models, whose generation steps are replayed as graphs where the device has them."""
    from lm_eval.models.huggingface import HFLM

    from sse_convert.inference.cuda_graphs import graphed

    class Generator(HFLM):  # type: ignore[misc]
        def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
            with graphed(self.model, slots=max_length):
                return super()._model_generate(context, max_length, stop, **settings)

    return Generator


def check_task_files(settings: LMEval) -> None:
    """Make sure that a user's own task files are there, and that what they name may run.

    Raises:
        DataError: there is no such folder, or a file names Python functions, which nobody allowed.
    """
    include = settings.include_path
    if include is not None and not Path(include).is_dir():
        raise DataError(f"eval.lm_eval.include_path {include} is no folder", expected="a folder of task YAML files")
    if include is not None and not trusts_code():
        _refuse_functions(Path(include))


def _refuse_functions(folder: Path) -> None:
    """Task files may name Python functions with the tag `!function`; the harness would import and run them."""
    for path in sorted(folder.rglob("*.y*ml")):
        if "!function" in path.read_text(encoding="utf-8", errors="replace"):
            raise DataError(
                f"{path} names Python functions (!function), which the harness would run",
                expected="task files without code",
                fix=f"read them, then allow it: sse-convert {OPTION} eval ...",
            )


def _runs_code(name: str) -> DataError:
    return DataError(
        f"task {name!r} runs the programs that the models write",
        expected="a machine where such programs do no harm, and your permission",
        fix=f"allow it: HF_ALLOW_CODE_EVAL=1 sse-convert {OPTION} eval ...",
    )


def _scores(results: Any) -> Iterator[TaskScore]:
    for task, entry in results["results"].items():
        samples = results["n-samples"].get(task, {}).get("effective", entry.get("sample_len", 0))
        better = results["higher_is_better"].get(task, {})
        for key, value in entry.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            if metric.isdigit() and value == NOT_MEASURED:
                continue
            error = entry.get(f"{metric}_stderr,{kind}")
            yield TaskScore(
                task=task,
                metric=metric if kind == "none" else key,
                value=float(value),
                stderr=float(error) if isinstance(error, int | float) else None,
                samples=int(samples),
                higher_is_better=better.get(metric),
            )


def _require_package() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise DependencyError(
            "eval.lm_eval needs lm-eval, which is not installed", fix="pip install 'sse-convert[eval]'"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness tells of every step; what matters comes back as results. Its bars are for terminals."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
