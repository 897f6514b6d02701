"""Grow N and k of a converted checkpoint ("state up-training"): the same weights, more partitions, training to follow.

Source: arXiv:2507.16577, section "Limitations and Future Work"; how partitions are added is in `growth`.
"""

import dataclasses as dc
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sse_convert.checkpoints.auxiliary_files import copy_auxiliary_files
from sse_convert.checkpoints.manifest import inherited_records, write_manifest
from sse_convert.checkpoints.open import CONFIG, SINGLE, CheckpointFiles, download, open_checkpoint
from sse_convert.checkpoints.output_folder import check_output, check_space, new_folder, place
from sse_convert.checkpoints.provenance import read_provenance
from sse_convert.checkpoints.safetensors_io import Layout, read_header, write_shard
from sse_convert.checkpoints.teacher import Teacher, source_view
from sse_convert.checkpoints.tensor_data import TORCH_DTYPES, named_chunks, read_tensor, tensor_bytes
from sse_convert.errors import UsageError
from sse_convert.mixers import BY_LAYER, SSE_KINDS, Mixer, SSEMixer, mixer_from_dict, mixer_to_dict, recipe_entry
from sse_convert.modeling.arch_spec import SSE_PREFIX
from sse_convert.modeling.configuration import FORMAT, entry_points
from sse_convert.modeling.remote_code import write_remote_code
from sse_convert.modeling.tensors import new_tensors
from sse_convert.recipe import Recipe, recipe_hash
from sse_convert.recipe.loader import recipe_from_dict
from sse_convert.recipe.pattern import layer_range
from sse_convert.report import FieldsReport, table
from sse_convert.surgery.compatibility import converted_field
from sse_convert.surgery.convert import layout_bytes, write_index
from sse_convert.surgery.growth import Growth, grown_tensors, kept_share

if TYPE_CHECKING:
    from sse_convert.surgery.logit_change import LogitChange

STAGE = "expand"
TOKENS, LENGTH = 4096, 512
"""of the text on which the change is measured"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class GrownLayer:
    """One layer before and after."""

    index: int
    partitions: tuple[int, int]
    top_k: tuple[int, int]
    kept_share: float | None
    """least share of its gate that an old partition keeps; None where random rows leave it open"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class ExpandReport(FieldsReport):
    """The result of an expansion."""

    out: Path
    layers: list[GrownLayer]
    mixers: dict[str, dict[str, Any]]
    """settings of the grown layers, as the recipe for further training must have them"""
    linked: list[str]
    """shards taken over as they are"""
    written: list[str]
    """shards with changed tensors"""
    change: "LogitChange | None"
    """of the logits at step 0, where a text was given"""

    def lines(self) -> list[str]:
        """The result for a person."""
        rows = [
            (str(g.index), "{} to {}".format(*g.partitions), "{} to {}".format(*g.top_k), g.kept_share)
            for g in self.layers
        ]
        return [
            f"wrote {self.out}: {len(self.layers)} layers grown, {len(self.linked)} shards taken over, "
            f"{len(self.written)} written",
            *table(("layer", "partitions", "top_k", "gate kept, at least"), rows),
            *self._change_lines(),
            *(f"to train on: --set {shlex.quote(f'mixers.{n}={json.dumps(m)}')}" for n, m in self.mixers.items()),
        ]

    def _change_lines(self) -> list[str]:
        if (c := self.change) is None:
            return ["change of the logits: not measured (give --text)"]
        return [
            f"change of the logits over {c.tokens:,} tokens: KL {c.kl:.3g} nats per token, log probabilities by "
            f"{c.mean_abs:.3g} (at most {c.max_abs:.3g}), same first choice at {c.same_choice:.1%}"
        ]


def expand_checkpoint(
    checkpoint: str | Path, out: Path, growth: Growth, *, layers: Sequence[str] = (), text: Path | None = None
) -> ExpandReport:
    """Write a converted checkpoint again with more partitions; shards without changed tensors are linked.

    Other arguments and errors as of `api.expand`.

    Args:
        growth: to what, and how.
    """
    check_output(out)
    files = download(open_checkpoint(checkpoint))
    sse = converted_field(files)
    mixers = {name: mixer_from_dict(data) for name, data in sse["mixers"].items()}
    chosen = _chosen(sse["layers"], mixers, layers)
    rows = None if text is None else _rows(files, text)
    names, grown = _renamed(sse["layers"], mixers, chosen, growth)
    view = source_view(files)
    changed: dict[str, Tensor] = {}
    for i in chosen:
        old, new = mixers[sse["layers"][i]], grown[names[i]]
        assert isinstance(old, SSEMixer)
        changed |= _layer_tensors(files, view, i, old, new, growth)
    recipe = _recipe(sse, names, grown, chosen)
    with new_folder(out) as folder:
        linked, written = _write_shards(files, folder, out, changed)
        _write_config(files, folder, names, {**mixers, **grown}, recipe)
        write_remote_code(folder)
        copy_auxiliary_files(files.folder, folder)
        if (provenance := read_provenance(files.folder)) is not None:
            shards = {name: shard for name, shard in provenance.shards.items() if name in linked}
            digest = provenance.recipe_hash if recipe is None else recipe_hash(recipe)
            dc.replace(provenance, stage=STAGE, recipe_hash=digest, shards=shards).write(folder)
        write_manifest(folder, inherited_records(files.folder, linked))
    return ExpandReport(
        out=out,
        layers=[_summary(i, mixers[sse["layers"][i]], grown[names[i]], growth) for i in chosen],
        mixers={name: recipe_entry(mixer_to_dict(mixer)) for name, mixer in grown.items()},
        linked=linked,
        written=written,
        change=None if rows is None else _change(files.folder, out, rows),
    )


def _chosen(names: list[str], mixers: dict[str, Mixer], layers: Sequence[str]) -> list[int]:
    """Indices of the layers to grow, ascending."""
    able = [i for i, name in enumerate(names) if name in mixers and mixers[name].kind in SSE_KINDS]
    if of_heads := [i for i in able if getattr(mixers[names[i]], BY_LAYER, ())]:
        raise UsageError(
            f"layers {of_heads} have heads that see the whole row",
            expected="layers all of whose heads have SSE",
            fix="convert the model anew with more partitions",
        )
    if not able:
        raise UsageError("the checkpoint has no SSE layer", expected="at least one layer with partitions")
    if not layers:
        return able
    chosen: set[int] = set()
    for key in layers:
        bounds = layer_range(key)
        if bounds is None or not all(-len(names) <= i < len(names) for i in bounds):
            raise UsageError(
                f"layer {key} does not exist", expected=f"0 to {len(names) - 1}, or a range", fix="correct --layers"
            )
        first, last = (i % len(names) for i in bounds)
        chosen |= set(range(first, last + 1))
    if unable := sorted(chosen - set(able)):
        raise UsageError(
            f"layer {unable[0]} is {names[unable[0]]!r}, not an SSE layer",
            expected=f"some of the SSE layers {able}",
            fix="correct --layers",
        )
    return sorted(chosen)


def _renamed(
    names: list[str], mixers: dict[str, Mixer], chosen: list[int], growth: Growth
) -> tuple[list[str], dict[str, SSEMixer]]:
    """The mixer name of each layer, and the grown mixers. A mixer keeps its name where all of its layers grow."""
    renamed = list(names)
    grown: dict[str, SSEMixer] = {}
    for i in chosen:
        old = mixers[names[i]]
        assert isinstance(old, SSEMixer)
        new = growth.mixer(old, f"layer {i}")
        alone = all(j in chosen for j, name in enumerate(names) if name == names[i])
        renamed[i] = names[i] if alone else f"{names[i]}-n{new.num_partitions}k{new.top_k}"
        if not alone and mixers.get(renamed[i], new) != new:
            raise UsageError(f"the checkpoint has another mixer {renamed[i]!r}", expected="that name to be free")
        grown[renamed[i]] = new
    return renamed, grown


def _layer_tensors(
    files: CheckpointFiles, view: Teacher, layer: int, old: SSEMixer, new: SSEMixer, growth: Growth
) -> dict[str, Tensor]:
    """Stored name -> changed or added tensor of one layer, in the dtype its tensors are stored in."""
    stored = {spec.name: view.attention_tensor(layer, spec.name) for spec in new_tensors(view.dims_of(layer), old)}
    tensors = {name: read_tensor(files.folder, files.tensors[path]) for name, path in stored.items()}
    dtype = tensors["sse_out_scale"].dtype
    grown = grown_tensors(tensors, old, new, view.dims_of(layer), growth, layer)
    return {view.attention_tensor(layer, name): tensor.to(dtype) for name, tensor in grown.items()}


def _recipe(sse: dict[str, Any], names: list[str], grown: dict[str, SSEMixer], chosen: list[int]) -> Recipe | None:
    """The recipe in the config, with the grown mixers; None where there is none."""
    if not sse.get("recipe"):
        return None
    recipe = recipe_from_dict(sse["recipe"], "sse.recipe in config.json")
    own: dict[int | str, str] = {i: names[i] for i in chosen if names[i] != sse["layers"][i]}
    layers = dc.replace(recipe.layers, overrides={**recipe.layers.overrides, **own})
    return dc.replace(recipe, layers=layers, mixers={**recipe.mixers, **grown})


def _write_shards(
    files: CheckpointFiles, folder: Path, out: Path, changed: dict[str, Tensor]
) -> tuple[list[str], list[str]]:
    """Link shards without changed tensors and write the others, tensor by tensor; their names."""
    homes = {name: _home(files, name) for name in changed}
    written = [shard for shard in files.shard_bytes if shard in homes.values()]
    linked = [shard for shard in files.shard_bytes if shard not in written]
    layouts = {shard: _layout(files, shard, changed, homes) for shard in written}
    check_space(out, sum(layout_bytes(layout) for layout in layouts.values()))
    for shard in linked:
        place(files.folder / shard, folder / shard, "hard")
    for shard, layout in layouts.items():
        write_shard(folder / shard, layout, _data(files, changed, layout))
    if list(files.shard_bytes) != [SINGLE]:
        write_index(folder, list(files.shard_bytes))
    return linked, written


def _data(
    files: CheckpointFiles, changed: dict[str, Tensor], names: Iterable[str]
) -> Iterator[tuple[str, bytes | memoryview]]:
    for name in names:
        if name in changed:
            yield name, tensor_bytes(changed[name])
        else:
            yield from named_chunks(files.folder, name, files.tensors[name])


def _home(files: CheckpointFiles, name: str) -> str:
    """The shard of a tensor; of an added one, that of its layer's output scale."""
    attention = name[: name.rindex(f".{SSE_PREFIX}")]
    return files.tensors[name if name in files.tensors else f"{attention}.sse_out_scale"].shard


def _layout(files: CheckpointFiles, shard: str, changed: dict[str, Tensor], homes: dict[str, str]) -> Layout:
    layout: Layout = {name: (info.dtype, info.shape) for name, info in read_header(files.folder / shard).items()}
    dtypes = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}
    own = {name: tensor for name, tensor in changed.items() if homes[name] == shard}
    return layout | {name: (dtypes[tensor.dtype], tuple(tensor.shape)) for name, tensor in own.items()}


def _write_config(
    files: CheckpointFiles, folder: Path, names: list[str], mixers: dict[str, Mixer], recipe: Recipe | None
) -> None:
    """config.json: as it was, but for layers, mixers and the recipe."""
    used = {name: mixer_to_dict(mixer) for name, mixer in mixers.items() if name in names}
    sse = {**files.config["sse"], "format": FORMAT, "layers": names, "mixers": used}
    if recipe is not None:
        sse |= {"recipe": recipe.to_dict(), "recipe_hash": recipe_hash(recipe)}
    config = {**files.config, **entry_points(files.model_type), "sse": sse}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _summary(index: int, old: Mixer, new: SSEMixer, growth: Growth) -> GrownLayer:
    assert isinstance(old, SSEMixer)
    return GrownLayer(
        index=index,
        partitions=(old.num_partitions, new.num_partitions),
        top_k=(old.top_k, new.top_k),
        kept_share=kept_share(old, new, growth),
    )


def _rows(files: CheckpointFiles, text: Path) -> Tensor:
    """Rows of the text, made before anything is written."""
    from sse_convert.checkpoints.load_model import load_tokenizer
    from sse_convert.data.sample_text import check_file, read_text

    check_file(text)
    limit = files.config.get("max_position_embeddings")
    tokenizer = load_tokenizer(files.folder)
    return read_text(text, tokenizer, tokens=TOKENS, length=min(LENGTH, limit or LENGTH), limit=limit).ids


def _change(before: Path, after: Path, rows: Tensor) -> "LogitChange":
    from sse_convert.surgery.logit_change import logit_change

    return logit_change(before, after, rows)
