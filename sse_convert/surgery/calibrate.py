"""Set the new tensors of a converted checkpoint from what the teacher does on a few rows: decay, output scale, router.

Only `sse_*` tensors change: the folder gets a new version of the added shard, and the teacher's shards linked again.
Follows Taylor-Calibrate in setting decays by the mean attention distance; scales are set where no norm undoes them.
"""

import dataclasses as dc
import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.console import progress
from sse_convert.errors import CheckpointError, RecipeError
from sse_convert.mixers import GLAMixer, Mixer, SSEMixer, mixer_from_dict
from sse_convert.modeling.architectures import SSE_PREFIX
from sse_convert.modeling.hybrid import source_class
from sse_convert.modeling.layer import SSEAttention
from sse_convert.modeling.tensors import as_sse, new_tensors
from sse_convert.recipe import Recipe, recipe_hash, resolve
from sse_convert.report import table
from sse_convert.surgery.checkpoint import CheckpointFiles, open_checkpoint
from sse_convert.surgery.convert import NEW_SHARD
from sse_convert.surgery.formulas import CalibratedLayer, calibrated_tensors
from sse_convert.surgery.output import check_output, new_folder, place
from sse_convert.surgery.provenance import UNTRAINED, read_provenance
from sse_convert.surgery.safetensors_io import read_header, write_shard
from sse_convert.surgery.statistics import Collector
from sse_convert.surgery.teacher import Teacher, source_view
from sse_convert.surgery.weights import TORCH_DTYPES, read_tensor, tensor_bytes


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateReport:
    """The result of a calibration."""

    out: Path
    rows: int
    tokens: int
    layers: list[CalibratedLayer]

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {**dc.asdict(self), "out": str(self.out)}

    def lines(self) -> list[str]:
        """The result for a person."""
        rows = [
            (str(layer.index), _range(layer.half_life), _range(layer.output_scale), layer.router)
            for layer in self.layers
        ]
        return [
            f"wrote {self.out}: {len(self.layers)} layers set from {self.rows} rows ({self.tokens:,} tokens)",
            *table(("layer", "half-life (tokens)", "output scale", "router"), rows),
        ]


def _range(bounds: tuple[float, float] | None) -> str:
    return "unchanged" if bounds is None else f"{bounds[0]:.3g} to {bounds[1]:.3g}"


def calibrate(
    recipe: Recipe, checkpoint: Path, out: Path, *, rows: Iterable[dict[str, Tensor]] | None = None
) -> CalibrateReport:
    """Calibrate a converted checkpoint into a new folder.

    Args:
        recipe: `calibrate`, layers, mixers and data are read.
        checkpoint: what `convert` wrote.
        out: the folder to make.
        rows: batches with `input_ids` and `position_ids` [B, T]; unset takes `calibrate.rows` rows of the recipe's
            training text.

    Raises:
        CheckpointError: the folder is not a converted, untrained checkpoint.
        RecipeError: the recipe gives the model other layers than the checkpoint has.
        DataError: the training text cannot be used.
        OutputError: `out` exists or cannot be written, or the disk is full; nothing is left behind.
    """
    out = Path(out)
    check_output(out)
    files = open_checkpoint(checkpoint)
    mixers = _check_input(recipe, files)
    teacher = source_view(files)
    settings = recipe.calibrate
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = load_source(teacher)
    model.to(device)  # type: ignore[arg-type]
    batches = _batches(recipe, files.folder, model) if rows is None else iter(rows)
    students = {
        layer: _student(model, teacher, files, layer, mixer)
        for layer, mixer in mixers.items()
        if settings.output_scale and mixer.output_norm == "none"
    }
    collector = Collector(model, teacher.spec, list(mixers), students=students, keep_inputs=settings.router == "kmeans")
    count, tokens = 0, 0
    with progress("calibrating", settings.rows) as bar:
        for batch in itertools.islice(batches, settings.rows):
            collector.run({name: batch[name].to(device) for name in ("input_ids", "position_ids")})
            count, tokens = count + len(batch["input_ids"]), tokens + batch["input_ids"].numel()
            bar.update()
    changed: dict[str, Tensor] = {}
    layers = []
    for layer, mixer in mixers.items():
        values, summary = calibrated_tensors(recipe, layer, mixer, teacher.dims, collector.statistics[layer])
        changed |= {teacher.attention_tensor(layer, name): value for name, value in values.items()}
        layers.append(summary)
    _write(files, out, changed, recipe)
    return CalibrateReport(out=out, rows=count, tokens=tokens, layers=layers)


def load_source(view: Teacher) -> PreTrainedModel:
    """The source model of a converted, untrained checkpoint: its teacher, loaded from the same shards.

    Args:
        view: the checkpoint seen as its source (`source_view`).
    """
    source = source_class(view.spec)
    # name and module stay the source's: transformers looks up by them what it renames on loading
    members = {"__module__": source.__module__, "_keys_to_ignore_on_load_unexpected": [SSE_PREFIX]}
    cls: Any = type(source.__name__, (source,), members)
    model: PreTrainedModel = cls.from_pretrained(view.files.folder, config=view.config, dtype="auto")
    return model.requires_grad_(False)


def _check_input(recipe: Recipe, files: CheckpointFiles) -> dict[int, SSEMixer]:
    """The SSE mixers of the checkpoint by layer, after making sure that it fits the recipe and is not trained yet."""
    sse = files.config.get("sse")
    if not isinstance(sse, dict):
        raise CheckpointError(
            f"{files.name} is a plain {files.model_type} checkpoint",
            expected="a converted checkpoint",
            fix="run `sse-convert convert` first and give its folder",
        )
    provenance = read_provenance(files.folder)
    if provenance is not None and provenance.stage not in UNTRAINED:
        raise CheckpointError(
            f"{files.name} was written by stage {provenance.stage}: its weights are no longer the teacher's",
            expected="the folder that `sse-convert convert` wrote",
            fix="calibrate before training",
        )
    names, mixers = resolve(recipe, len(sse["layers"]))
    stored: dict[str, Mixer] = {name: mixer_from_dict(data) for name, data in sse["mixers"].items()}
    if names != sse["layers"] or mixers != stored:
        raise RecipeError(
            f"{files.name} was converted with other layers or mixers than this recipe's",
            expected="the recipe that made the checkpoint",
            fix="use that recipe, or convert again",
        )
    by_layer = ((layer, mixers[name]) for layer, name in enumerate(names) if name in mixers)
    return {layer: as_sse(mixer) for layer, mixer in by_layer if isinstance(mixer, SSEMixer | GLAMixer)}


def _student(
    model: PreTrainedModel, teacher: Teacher, files: CheckpointFiles, layer: int, mixer: SSEMixer
) -> SSEAttention:
    """The new layer on top of the teacher's modules, with the checkpoint's new tensors."""
    spec = teacher.spec
    source = model.get_submodule(spec.attention_path(layer))
    student = SSEAttention(source, model.config, layer, spec=spec, mixer=mixer)
    stored = {
        new.name: read_tensor(files.folder, files.tensors[teacher.attention_tensor(layer, new.name)])
        for new in new_tensors(teacher.dims, mixer)
    }
    student.load_state_dict(stored, strict=False)
    return student.to(next(source.parameters()).device)


def _batches(recipe: Recipe, folder: Path, model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Rows of the recipe's training text, one per batch."""
    from sse_convert.evaluation.loading import load_tokenizer
    from sse_convert.training.data import RowReader, Teacher, stack

    reader = RowReader(
        recipe.data.train,
        load_tokenizer(folder),
        recipe.calibrate.seq_len,
        recipe.data.seed,
        needles=recipe.data.needles,
        teacher=Teacher(recipe.model, recipe.revision),
        vocab_size=model.config.vocab_size,
    )
    return (stack([row]) for row in reader.rows())


def _write(files: CheckpointFiles, out: Path, changed: dict[str, Tensor], recipe: Recipe) -> None:
    """The checkpoint again with some new tensors replaced; other shards are linked, small files copied."""
    with new_folder(out) as folder:
        for path in sorted(files.folder.rglob("*")):
            target = folder / path.relative_to(files.folder)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            elif path.name in files.shard_bytes and path.name != NEW_SHARD:
                place(path, target, "hard")
            elif path.name != NEW_SHARD:
                shutil.copyfile(path, target)
        if NEW_SHARD in files.shard_bytes:
            header = read_header(files.folder / NEW_SHARD)
            layout = {name: (info.dtype, info.shape) for name, info in header.items()}
            tensors = ((name, changed.get(name, read_tensor(files.folder, info))) for name, info in header.items())
            data = ((name, tensor_bytes(tensor.to(TORCH_DTYPES[layout[name][0]]))) for name, tensor in tensors)
            write_shard(folder / NEW_SHARD, layout, data)
        if (provenance := read_provenance(files.folder)) is not None:
            dc.replace(provenance, stage="calibrate", recipe_hash=recipe_hash(recipe)).write(folder)
