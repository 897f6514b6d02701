"""The YAML head of a model card: what a hub sorts and shows models by."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.evaluation.figures import ModelScores
from sse_convert.evaluation.report import EvalReport
from sse_convert.export.published import is_path

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TAGS = ["sse-convert", "linear-attention", "sparse-state-expansion", "custom_code"]
FROM_TEACHER = ("language", "license", "license_name", "license_link")
"""what a model has of its teacher, where the recipe does not say otherwise"""


def card_metadata(
    name: str, recipe: dict[str, Any], report: EvalReport | None, teacher_card: Path | None, *, images: bool
) -> str:
    """The metadata as YAML, with every measured figure as a result of the `model-index`.

    Args:
        name: of the model.
        recipe: the resolved recipe.
        report: what was measured, None for nothing.
        teacher_card: the teacher's README.md, None where it is not at hand.
        images: whether the model sees images.
    """
    from huggingface_hub import ModelCardData

    base, own = base_model(recipe), recipe["export"]
    told = {"license": own["license"]} if own.get("license") else {}
    task = "image-text-to-text" if images else "text-generation"
    data = ModelCardData(
        **{**_of_teacher(teacher_card, keep_license="license" not in told), **told},
        base_model=base,
        base_model_relation="finetune" if base else None,
        datasets=_datasets(recipe["data"]["train"]) or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=list(TAGS),
        model_name=name,
        eval_results=[] if report is None else list(_results(report, recipe, task)),
    )
    return str(data.to_yaml())


def base_model(recipe: dict[str, Any]) -> str | None:
    """The hub id of the teacher, None for a local folder."""
    model = str(recipe["model"])
    return None if is_path(model) or Path(model).exists() else model


def _datasets(sources: list[dict[str, Any]]) -> list[str]:
    """The sources that are hub datasets, each once."""
    paths = dict.fromkeys(source["path"] for source in sources if source["path"])
    return [path for path in paths if not Path(path).exists() and not is_path(path) and _may_be_on_hub(path)]


def _may_be_on_hub(path: str) -> bool:
    return path.count("/") <= 1 and not Path(path).suffix


def _of_teacher(card: Path | None, *, keep_license: bool) -> dict[str, Any]:
    """What the teacher's card says of its languages and its licence."""
    from huggingface_hub import ModelCard

    if card is None or not card.is_file():
        return {}
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except ValueError:
        return {}  # a card that cannot be read says nothing
    return {key: data[key] for key in FROM_TEACHER if key in data and (keep_license or key == "language")}


def _results(report: EvalReport, recipe: dict[str, Any], task: str) -> Iterator["EvalResult"]:
    """The figures of the converted model. What is not a number is left out."""
    from huggingface_hub import EvalResult

    for dataset, kind, metric, name, value in _figures(report.student, recipe):
        if math.isfinite(value):
            yield EvalResult(
                task_type=task,
                dataset_type=kind,
                dataset_name=dataset,
                metric_type=metric,
                metric_name=name,
                metric_value=value,
            )


def _figures(student: ModelScores, recipe: dict[str, Any]) -> Iterator[tuple[str, str, str, str, float]]:
    """Dataset's name and identifier, metric's identifier and name, value."""
    sources = recipe["data"]["valid"]
    text = ", ".join(Path(source["path"]).name if source["path"] else "text of the teacher" for source in sources)
    kind = next(iter(_datasets(sources)), "text")
    for loss in student.held_out:
        dataset = f"{text}, windows of {loss.length} tokens"
        yield dataset, kind, "loss", "held-out loss in nats per token", loss.loss
        yield dataset, kind, "bits_per_byte", "bits per byte", loss.bits_per_byte
    for needle in student.needles:
        dataset = f"needles: {needle.kind}, {needle.keys} in {needle.length} tokens"
        yield dataset, "needles", "accuracy", "exact answers", needle.total.value
    for task in student.tasks:
        yield task.task, task.task, task.metric, task.metric, task.value
