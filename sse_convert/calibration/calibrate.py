"""Set the new tensors of a converted checkpoint from what the teacher does on a few rows: decay and output scale.

Only `sse_*` tensors change: the folder gets new versions of shards that hold any, and the others linked again.
Follows Taylor-Calibrate in setting decays by the mean attention distance; output scales are set last, by what the
layers with these decays give.
"""

import contextlib
import dataclasses as dc
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.calibration.attention_statistics import Collector, LayerStatistics
from sse_convert.calibration.initial_values import branch_windows, decay_values, output_scale, state_half_lives
from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files
from sse_convert.checkpoints.load_model import pick_device, tokenizer_of
from sse_convert.checkpoints.manifest import inherited_records, write_manifest
from sse_convert.checkpoints.open import CONFIG, INDEX, CheckpointFiles, whole_checkpoint
from sse_convert.checkpoints.output_folder import check_output, new_folder, place
from sse_convert.checkpoints.provenance import UNTRAINED, read_provenance
from sse_convert.checkpoints.safetensors_io import read_header, write_shard
from sse_convert.checkpoints.teacher import SourceModel, Teacher, source_view
from sse_convert.checkpoints.tensor_data import TORCH_DTYPES, read_tensor, tensor_bytes
from sse_convert.checkpoints.weights import require_finite
from sse_convert.console import Bar, progress, say
from sse_convert.errors import CheckpointError, DataError, RecipeError
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.arch_spec import SSE_PREFIX, ArchSpec, decoder_config
from sse_convert.modeling.architectures import further_tokens
from sse_convert.modeling.attention_dims import AttentionDims
from sse_convert.modeling.configuration import entry_points
from sse_convert.modeling.hybrid import source_class
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.remote_code import write_remote_code
from sse_convert.modeling.tensors import new_tensors
from sse_convert.modeling.window.window_branch import attention_layer
from sse_convert.recipe import Recipe, recipe_hash
from sse_convert.report import FieldsReport, counted, table
from sse_convert.surgery.compatibility import calibration_problems, match_recipe
from sse_convert.surgery.cpu_speed import fast_in_bfloat16
from sse_convert.surgery.guessing_teacher import guesses_of
from sse_convert.surgery.job import Job

_LEFT = "their decays and scales stay as convert set them"


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedLayer:
    """What one layer was set to."""

    index: int
    half_life: tuple[float, float] | None
    """tokens, shortest and longest over the state heads; None where decay was left alone"""
    output_scale: tuple[float, float] | None
    """smallest and largest over the query heads; None where scales were left alone"""
    measured: bool = True
    """false where no document of the rows is longer than the layer's window: decay and scales are left alone"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateReport(FieldsReport):
    """The result of a calibration."""

    out: Path
    rows: int
    tokens: int
    layers: list[CalibratedLayer]

    def lines(self) -> list[str]:
        """The result for a person."""
        rows = [(str(layer.index), *map(_range, (layer.half_life, layer.output_scale))) for layer in self.layers]
        short = [str(layer.index) for layer in self.layers if not layer.measured]
        return [
            f"wrote {self.out}: {counted(len(self.layers), 'layer')} set from {counted(self.rows, 'row')} "
            f"({self.tokens:,} tokens)",
            *table(("layer", "half-life (tokens)", "output scale"), rows),
            *([f"note: no document reaches beyond the window of layers {', '.join(short)}; {_LEFT}"] if short else []),
        ]


def _range(bounds: tuple[float, float] | None) -> str:
    return "unchanged" if bounds is None else f"{bounds[0]:.3g} to {bounds[1]:.3g}"


def calibrate_checkpoint(
    job: Job,
    checkpoint: Path,
    out: Path,
    *,
    rows: Iterable[dict[str, Tensor]] | None = None,
    try_teacher: bool = False,
) -> CalibrateReport:
    """Calibrate a converted checkpoint into a new folder. Other arguments and errors as of `api.calibrate`.

    Args:
        job: recipe and model.
        rows: batches with `input_ids` and `position_ids` [B, T]; unset takes `calibrate.rows` rows of the recipe's
            training text.
        try_teacher: warn first of a teacher that guesses.
    """
    recipe, out = job.recipe, Path(out)
    check_output(out)
    files = whole_checkpoint(checkpoint)
    teacher = source_view(files)
    mixers = _check_input(recipe, files, limit=teacher.text.max_position_embeddings if rows is None else None)
    device = pick_device()
    model = load_as_teacher(teacher)
    model.to(device)
    batches = _taken(_batches(job, files, model) if rows is None else rows, recipe.calibrate.rows, device)
    if try_teacher:
        for warning in guesses_of(model, batches[0]):
            say(f"warning: {warning}")

    def fresh(layer: int, mixer: SSEMixer) -> dict[str, Tensor]:
        names = [new.name for new in new_tensors(teacher.dims_of(layer), mixer)]
        return {name: read_tensor(files.folder, files.tensors[teacher.attention_tensor(layer, name)]) for name in names}

    values, statistics = calibrated_values(model, teacher, mixers, fresh, batches, recipe.calibrate.output_scale)
    changed = {teacher.attention_tensor(i, name): new for i, layer in values.items() for name, new in layer.items()}
    _write(files, out, changed, recipe)
    return CalibrateReport(
        out=out,
        rows=sum(len(batch["input_ids"]) for batch in batches),
        tokens=sum(batch["input_ids"].numel() for batch in batches),
        layers=[_summary(i, mixer, teacher.dims_of(i), statistics[i], values[i]) for i, mixer in mixers.items()],
    )


def calibrated_values(
    model: PreTrainedModel,
    source: SourceModel,
    mixers: dict[int, SSEMixer],
    fresh: Callable[[int, SSEMixer], dict[str, Tensor]],
    batches: list[dict[str, Tensor]],
    kind: Literal["fit", "size", "none"],
) -> tuple[dict[int, dict[str, Tensor]], dict[int, LayerStatistics]]:
    """What calibration gives new tensors of each layer, by name below its attention, and what the teacher did.

    Args:
        model: the teacher, which is set to eager attention.
        source: what is known of it.
        mixers: settings of the new layers.
        fresh: gives a layer's new tensors as conversion made them.
        batches: `input_ids` and `position_ids` [B, T], on the model's device.
        kind: of output scale.
    """
    statistics = _measured(model, source, mixers, batches, "the teacher")
    values = {i: decay_values(mixer, source.dims_of(i), statistics[i]) for i, mixer in mixers.items()}
    if kind != "none":
        students = {
            i: _student(model, source.spec, i, mixer, {**fresh(i, mixer), **values[i]}) for i, mixer in mixers.items()
        }
        found = _measured(model, source, mixers, batches, "the new layers", students=students)
        for i, mixer in mixers.items():
            if found[i].measured:
                values[i] |= output_scale(kind, mixer, source.dims_of(i), found[i])
    return values, statistics


def _taken(source: Iterable[dict[str, Tensor]], count: int, device: torch.device | None) -> list[dict[str, Tensor]]:
    """The first batches of a source, on the device."""
    names = ("input_ids", "position_ids")
    batches = [{name: batch[name].to(device) for name in names} for batch in itertools.islice(source, count)]
    if not batches:
        raise DataError(
            "there are no calibration rows", expected="at least one row of text", fix="raise calibrate.rows"
        )
    return batches


def _measured(
    model: PreTrainedModel,
    source: SourceModel,
    mixers: dict[int, SSEMixer],
    batches: list[dict[str, Tensor]],
    what: str,
    *,
    students: dict[int, SSEAttention] | None = None,
) -> dict[int, LayerStatistics]:
    """Statistics of the layers over the batches; for `students` see `Collector`."""
    collector = Collector(model, source.spec, list(mixers), windows=branch_windows(mixers), students=students)
    with progress(f"measuring {what}", len(batches) * len(mixers)) as bar, _layers_counted(model, source, mixers, bar):
        for batch in batches:
            collector.run(batch)
    return collector.statistics


@contextlib.contextmanager
def _layers_counted(model: PreTrainedModel, source: SourceModel, layers: Iterable[int], bar: Bar) -> Iterator[None]:
    """Advance a bar by every pass of a layer's attention."""
    with contextlib.ExitStack() as hooks:
        for layer in layers:
            attention = model.get_submodule(source.spec.attention_path(layer))
            hooks.callback(attention.register_forward_hook(lambda *_: bar.update()).remove)
        yield


def _summary(
    layer: int, mixer: SSEMixer, dims: AttentionDims, statistics: LayerStatistics, values: dict[str, Tensor]
) -> CalibratedLayer:
    half_life = state_half_lives(mixer, dims, statistics)
    scale = values.get("sse_out_scale")
    return CalibratedLayer(
        index=layer,
        half_life=_bounds(half_life) if "sse_decay_up.bias" in values else None,
        output_scale=None if scale is None else _bounds(scale),
        measured=statistics.measured,
    )


def _bounds(values: Tensor) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def load_as_teacher(view: Teacher) -> PreTrainedModel:
    """The source model of a converted, untrained checkpoint: its teacher, loaded from the same shards, in float32 on a
    CPU that is slow in bfloat16.

    Args:
        view: the checkpoint seen as its source (`source_view`).
    """
    source = source_class(view.spec)
    # name and module stay the source's: transformers looks up by them what it renames on loading
    ignored = [SSE_PREFIX, further_tokens(view.config)]
    members = {"__module__": source.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    cls: Any = type(source.__name__, (source,), members)
    with progress("loading the teacher", 1):
        dtype = "auto" if fast_in_bfloat16(pick_device()) else torch.float32
        model: PreTrainedModel = cls.from_pretrained(view.files.folder, config=view.config, dtype=dtype)
    require_finite(model, view.files.name)
    return model.requires_grad_(False)


def _check_input(recipe: Recipe, files: CheckpointFiles, limit: int | None) -> dict[int, SSEMixer]:
    """The SSE mixers of the checkpoint by layer, after making sure that it fits the recipe and is not trained yet, and
    that the recipe's rows do for it: `limit` is the model's positions, None for rows that are given."""
    match = match_recipe(recipe, files)
    provenance = read_provenance(files.folder)
    if provenance is not None and provenance.stage not in UNTRAINED:
        raise CheckpointError(
            f"{files.name} was written by stage {provenance.stage}: its weights are no longer the teacher's",
            expected="the folder that `sse-convert convert` wrote",
            fix="calibrate before training",
        )
    if limit is not None and (problems := calibration_problems(recipe, match.mixers, limit)):
        raise RecipeError(
            "\n".join(problems),
            expected="settings that calibration can follow",
            fix="correct these keys, or use --set; for another window convert the model anew",
        )
    by_layer = ((layer, match.mixers[name]) for layer, name in enumerate(match.names) if name in match.mixers)
    return {layer: mixer for layer, mixer in by_layer if isinstance(mixer, SSEMixer)}


def _student(
    model: PreTrainedModel, spec: ArchSpec, layer: int, mixer: SSEMixer, values: dict[str, Tensor]
) -> SSEAttention:
    """The new layer on top of the teacher's modules, with these new tensors and output scales of one."""
    source = model.get_submodule(spec.attention_path(layer))
    student = attention_layer(source, decoder_config(model.config), layer, spec=spec, mixer=mixer)
    ones = torch.ones_like(values["sse_out_scale"])
    student.load_state_dict({**values, "sse_out_scale": ones}, strict=False)
    like = next(source.parameters())
    return student.to(like.device, like.dtype)


def _batches(job: Job, files: CheckpointFiles, model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Rows of the recipe's training text, one per batch."""
    from sse_convert.data import RowReader, stack

    reader = RowReader(
        job.recipe.data.train,
        tokenizer_of(files),
        job.recipe.calibrate.seq_len,
        job.recipe.data.seed,
        needles=job.recipe.data.needles,
        teacher=job.sampler,
        vocab_size=decoder_config(model.config).vocab_size,
    )
    return (stack([row]) for row in reader.rows())


def _write(files: CheckpointFiles, out: Path, changed: dict[str, Tensor], recipe: Recipe) -> None:
    """The checkpoint again with some new tensors replaced; shards without any are linked, small files copied."""
    rewritten = {files.tensors[name].shard for name in changed}
    others = files.shard_bytes.keys() - rewritten
    with new_folder(out) as folder:
        for shard in others:
            place(files.folder / shard, folder / shard, "hard")
        if (index := files.folder / INDEX).is_file():
            shutil.copyfile(index, folder / INDEX)
        config = {**files.config, **entry_points(files.model_type)}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_remote_code(folder)
        copy_auxiliary_files(files.folder, folder)
        for shard in rewritten:
            header = read_header(files.folder / shard)
            layout = {name: (info.dtype, info.shape) for name, info in header.items()}
            tensors = (
                (name, changed[name] if name in changed else read_tensor(files.folder, info))
                for name, info in header.items()
            )
            data = ((name, tensor_bytes(tensor.to(TORCH_DTYPES[header[name].dtype]))) for name, tensor in tensors)
            with progress("writing new tensors", 1):
                write_shard(folder / shard, layout, data)
        if (provenance := read_provenance(files.folder)) is not None:
            dc.replace(provenance, stage="calibrate", recipe_hash=recipe_hash(recipe)).write(folder)
        write_manifest(folder, inherited_records(files.folder, others))
