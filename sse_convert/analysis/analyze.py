"""Run a converted model over a text and say what its layers do with it."""

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from sse_convert.analysis.analysis_report import FILE, AnalysisReport, LayerAnalysis, LeftOut
from sse_convert.analysis.branches import BranchNorms
from sse_convert.analysis.capture import Seen, Sizes, watching
from sse_convert.analysis.decay import HalfLife
from sse_convert.analysis.plot import draw
from sse_convert.analysis.quantity import Quantity
from sse_convert.analysis.router_health import RouterHealth
from sse_convert.analysis.teacher import attention_distances, check_pair, output_errors
from sse_convert.analysis.tokens import TopTokens
from sse_convert.checkpoints.load_model import context_limit, device_name, load_model, load_tokenizer, pick_device
from sse_convert.checkpoints.open import CheckpointFiles, open_checkpoint
from sse_convert.checkpoints.output_folder import check_output, new_folder
from sse_convert.checkpoints.teacher import open_teacher, source_view
from sse_convert.console import Bar, progress
from sse_convert.data.sample_text import Text, check_file, read_text
from sse_convert.errors import CheckpointError
from sse_convert.files import write_json
from sse_convert.mixers import FULL
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.configuration import layer_mixers
from sse_convert.modeling.layer import SSEAttention
from sse_convert.report import found_before

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_PER_PASS = 8192
"""tokens of one forward pass, at least one row"""
QUANTITIES: tuple[type[Quantity], ...] = (HalfLife, RouterHealth, TopTokens, BranchNorms)
"""what is asked of recurrent layers"""
TEACHER_QUANTITIES = ("output_error", "attention")
"""what needs the teacher"""


def analyze_model(
    model: str | Path,
    text: Path,
    *,
    teacher: str | Path | None = None,
    tokens: int = 16384,
    length: int | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> AnalysisReport:
    """Analyse a converted model.

    The model runs in float32 on a CPU and in its stored type elsewhere; what is measured is summed in float64.
    Arguments and errors as of `api.analyze`.
    """
    check_file(text)
    files = _converted(model)
    if teacher is not None:
        check_pair(open_teacher(teacher), source_view(files))
    place = pick_device(device)
    if out is not None:
        check_output(out)
    student = _load(model, place)
    config = decoder_config(student.config)
    tokenizer = load_tokenizer(model)
    limit = context_limit(config)
    rows = read_text(text, tokenizer, tokens=tokens, length=length, limit=limit, vocab_size=config.vocab_size)
    passes = 1 if teacher is None else 3
    with progress("analysing", passes * len(rows.ids)) as bar:
        layers = measure_layers(student, rows, bar=bar)
        found = {i: {quantity.name: quantity.result() for quantity in layer} for i, layer in layers.items()}
        conditions = _conditions(place, student.dtype, text, rows)
        if teacher is not None:
            conditions["attention_length"] = _compare(found, student, _load(teacher, place), rows, bar)
    report = AnalysisReport(
        model=str(model),
        teacher=None if teacher is None else str(teacher),
        conditions=conditions,
        layers=tuple(_layer(student, i, found.get(i, {})) for i in range(config.num_hidden_layers)),
        left_out=inapplicable(student, with_teacher=teacher is not None),
    )
    if out is None:
        return report
    with found_before(report):
        return write(report, out)


@torch.no_grad()
def measure_layers(
    student: "PreTrainedModel", text: Text, *, bar: Bar, kinds: Sequence[type[Quantity]] = QUANTITIES
) -> dict[int, list[Quantity]]:
    """The quantities of every recurrent layer, summed over the text.

    Args:
        student: converted model in evaluation mode.
        text: what it sees.
        bar: advanced by one per row.
        kinds: what is asked.

    Returns:
        Index of each recurrent layer -> what applies to it.
    """
    layers: dict[int, SSEAttention] = student.sse_layers()
    found = {
        i: [kind(Sizes.of(layer), text) for kind in kinds if kind.absent(layer.mixer) is None]
        for i, layer in layers.items()
    }

    def add(index: int, seen: Seen) -> None:
        for quantity in found[index]:
            quantity.add(seen)

    for ids, index in text.batches(_rows_per_pass(text)):
        with watching({i: layers[i] for i, applies in found.items() if applies}, index, add):
            backbone_of(student)(input_ids=ids.to(student.device), use_cache=False)
        bar.update(len(ids))
    return found


def inapplicable(student: "PreTrainedModel", *, with_teacher: bool) -> tuple[LeftOut, ...]:
    """What does not apply to which layers, and why.

    Args:
        student: converted model.
        with_teacher: whether a teacher was given.
    """
    reasons: dict[tuple[int, str], list[str]] = {}
    recurrent: dict[int, SSEAttention] = student.sse_layers()
    for i, mixer in enumerate(layer_mixers(student.config)):
        for kind in QUANTITIES:
            reason = kind.absent(recurrent[i].mixer) if i in recurrent else "softmax attention: no recurrent state"
            if reason is not None:
                reasons.setdefault((i, reason), []).append(kind.name)
        if not with_teacher:
            reasons[i, "no teacher was given (--teacher)"] = list(TEACHER_QUANTITIES)
        elif mixer is None:
            reasons[i, "not converted: the output is its teacher's"] = list(TEACHER_QUANTITIES[:1])
    layers: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for (i, reason), names in reasons.items():
        layers.setdefault((reason, tuple(names)), []).append(i)
    return tuple(LeftOut(layers=tuple(i), quantities=names, reason=reason) for (reason, names), i in layers.items())


def write(report: AnalysisReport, out: Path) -> AnalysisReport:
    """Write the report and its figures into a new folder.

    Args:
        report: what was found.
        out: the folder to make.

    Returns:
        The report with the names of its files.

    Raises:
        OutputError: `out` exists or cannot be written; nothing is left behind.
    """
    with new_folder(out) as folder:
        report = dc.replace(report, folder=out, files=tuple(draw(report.to_dict(), folder)))
        write_json(folder / FILE, report.to_dict())
    return report


def _converted(model: str | Path) -> CheckpointFiles:
    files = open_checkpoint(model)
    if not isinstance(files.config.get("sse"), dict):
        raise CheckpointError(
            f"{model} is a plain {files.model_type} checkpoint",
            expected="a converted checkpoint",
            fix="run `sse-convert convert` first and give its folder",
        )
    return files


def _load(source: str | Path, place: torch.device) -> "PreTrainedModel":
    return load_model(source, device=str(place), dtype=torch.float32 if place.type == "cpu" else None)


def _compare(
    found: dict[int, dict[str, dict[str, Any]]],
    student: "PreTrainedModel",
    teacher: "PreTrainedModel",
    text: Text,
    bar: Bar,
) -> int:
    """Add what needs the teacher; returns the tokens of each row that its attention distances are from."""
    error, attention = TEACHER_QUANTITIES
    for i, values in output_errors(student, teacher, text, rows=_rows_per_pass(text), bar=bar).items():
        found.setdefault(i, {})[error] = values
    distances, length = attention_distances(teacher, text, bar=bar)
    for i, distance in distances.items():
        found.setdefault(i, {})[attention] = {"distance": distance}
    return length


def _layer(student: "PreTrainedModel", index: int, quantities: dict[str, dict[str, Any]]) -> LayerAnalysis:
    mixer = layer_mixers(student.config)[index]
    data: dict[str, Any] = {"kind": FULL if mixer is None else mixer.kind}
    if (layer := student.sse_layers().get(index)) is not None:
        sizes = Sizes.of(layer)
        data |= {name: getattr(sizes, name) for name in ("partitions", "shared", "heads", "query_heads", "head_dim")}
    return LayerAnalysis(index=index, mixer=student.config.sse["layers"][index], sizes=data, quantities=quantities)


def _rows_per_pass(text: Text) -> int:
    return max(1, TOKENS_PER_PASS // text.length)


def _conditions(place: torch.device, dtype: torch.dtype, text: Path, rows: Text) -> dict[str, Any]:
    return {
        "device": device_name(place),
        "threads": torch.get_num_threads() if place.type == "cpu" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "text": str(text),
        "tokens": rows.tokens,
        "rows": len(rows.ids),
        "length": rows.length,
    }
