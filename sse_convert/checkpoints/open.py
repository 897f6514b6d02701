"""Open a checkpoint, local or on the hub, by its config and safetensors headers. No tensor is loaded."""

import dataclasses as dc
import shlex
from pathlib import Path
from typing import Any

from sse_convert.checkpoints import hub
from sse_convert.checkpoints.foreign import read_object
from sse_convert.checkpoints.safetensors_io import TensorInfo, read_header
from sse_convert.errors import CheckpointError, HubError
from sse_convert.modeling.arch_spec import DELTA
from sse_convert.recipe.problems import shortened
from sse_convert.recipe.ranges import PlainText
from sse_convert.report import counted

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STAGES = ".stages"
"""what the folder of a run's steps has after the name of what the run makes"""
_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_PICKLE_PATTERNS = ("pytorch_model*.bin", *hub.PICKLE_PATTERNS)


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFiles:
    """A checkpoint as its small files describe it."""

    name: str
    """hub id or folder, as the user wrote it"""
    folder: Path
    """where the files are; for a hub checkpoint that was not downloaded, the small files only"""
    remote: bool = False
    """the weights are still on the hub"""
    revision: str | None = None
    """hub commit, None for a local folder"""
    config: dict[str, Any]
    """config.json"""
    tensors: dict[str, TensorInfo]
    """every tensor by name"""
    shard_bytes: dict[str, int]
    """size of each shard"""

    @property
    def index(self) -> dict[str, str]:
        """Tensor name -> shard."""
        return {name: info.shard for name, info in self.tensors.items()}

    @property
    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor name -> (safetensors dtype, shape)."""
        return {name: (info.dtype, info.shape) for name, info in self.tensors.items()}

    @property
    def model_type(self) -> str:
        """`model_type` of config.json."""
        return str(self.config["model_type"])

    @property
    def small(self) -> bool:
        """Whether the teacher has the rest of the tensors."""
        sse = self.config.get("sse")
        return isinstance(sse, dict) and DELTA in sse

    @property
    def parameters(self) -> int:
        """Elements of all stored tensors (tied weights are stored once)."""
        return sum(info.numel for info in self.tensors.values())


def open_checkpoint(source: str | Path, revision: str | None = None, *, config_enough: bool = False) -> CheckpointFiles:
    """Read the small files and headers of a checkpoint.

    Args:
        source: local folder, or hub id. A path that exists is a folder.
        revision: hub branch, tag or commit.
        config_enough: also open what has a config.json and no weights; the result has no tensors then.

    Raises:
        CheckpointError: missing folder, config or shard; a run's result before its end; damaged shard or index; weights
            that are pickles.
        HubError: the hub refused or cannot be reached.
    """
    folder = source_path(source)
    if folder.is_dir():
        return _open_folder(str(source), folder, None, config_enough)
    if folder.exists():
        raise CheckpointError(
            f"{source} is a file",
            expected="a checkpoint folder or a hub id",
            fix="give the folder that holds config.json",
        )
    if (steps := stages_folder(folder)).is_dir():
        raise CheckpointError(
            f"{source} does not exist yet: the run that makes it has not come to its end",
            expected="a finished run",
            fix=f"run its recipe again, which goes on; its finished steps lie in {steps}",
        )
    if not hub.looks_like_id(str(source)):
        raise CheckpointError(
            f"checkpoint folder {source} does not exist",
            expected="a folder with config.json and safetensors, or a hub id such as Qwen/Qwen3-0.6B",
            fix="correct the path (model: or teacher: of a recipe); it starts at the folder that the command runs in",
        )
    return _open_hub(str(source), revision, config_enough)


def whole_checkpoint(source: str | Path, revision: str | None = None) -> CheckpointFiles:
    """Open a checkpoint that holds all of its tensors.

    Raises:
        CheckpointError: it is a small one; or see `open_checkpoint`.
        HubError: see `open_checkpoint`.
    """
    files = open_checkpoint(source, revision)
    if files.small:
        raise CheckpointError(
            f"{source} is a small checkpoint, which leaves to its teacher what it shares with it",
            expected="one that holds all of its tensors",
            fix=f"make it whole: sse-convert join {shlex.quote(str(source))} --out WHOLE",
        )
    return files


def stages_folder(out: Path) -> Path:
    """Where the steps of a run are whose result goes to `out`."""
    return out.with_name(f"{out.name}{STAGES}")


def source_path(source: str | Path) -> Path:
    """A folder, a file or a hub id as a path; it need not exist.

    Raises:
        CheckpointError: no path can be so.
    """
    try:
        return Path(PlainText(path=True).read(str(source)))
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {shortened(str(source))}: {error}", expected="a folder, or a hub id such as Qwen/Qwen3-0.6B"
        ) from error


def download(files: CheckpointFiles) -> CheckpointFiles:
    """The checkpoint with all of its files on this machine; a local one is returned as it is.

    Raises:
        CheckpointError, HubError: see `open_checkpoint`.
    """
    if not files.remote:
        return files
    folder = hub.download_snapshot(files.name, files.revision)
    return _open_folder(files.name, folder, files.revision)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        CheckpointError: it is missing, not a JSON object, or has no model_type.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG}",
            expected="a Hugging Face checkpoint folder",
            fix="give the folder that holds config.json and the weights",
        )
    config = read_object(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path} has no model_type", expected='for example "model_type": "qwen3"', fix="add it")
    if (flag := _flag_for_number(config)) is not None:
        raise CheckpointError(
            f"{path}: {flag} is true or false", expected="a number", fix="correct it, or download the file again"
        )
    return config


def _flag_for_number(data: dict[str, Any]) -> str | None:
    """A number of positions, at any depth, that is true or false: transformers looks at types in the first level alone,
    and computes with 1 or 0."""
    inner = [value for value in data.values() if isinstance(value, dict)]
    own = (name for name in _NUMBERS if isinstance(data.get(name), bool))
    return next(own, None) or next(filter(None, map(_flag_for_number, inner)), None)


def _open_folder(name: str, folder: Path, revision: str | None, config_enough: bool = False) -> CheckpointFiles:
    config = read_config(folder)
    for beside in ("generation_config.json", "tokenizer_config.json"):
        if (folder / beside).is_file():
            read_object(folder / beside)
    if config_enough and _has_no_weights(folder):
        return CheckpointFiles(name=name, folder=folder, revision=revision, config=config, tensors={}, shard_bytes={})
    shards = _shards(folder)
    if not shards:
        raise _no_weights(folder)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for tensor, info in read_header(folder / shard).items():
            if tensor in tensors:
                raise CheckpointError(
                    f"tensor {tensor} is in two shards of {folder}: {tensors[tensor].shard} and {shard}",
                    expected="each tensor once",
                    fix="remove the shard that does not belong to the checkpoint",
                )
            tensors[tensor] = info
    if (folder / INDEX).is_file() and shards != [SINGLE]:
        _check_index(folder / INDEX, _weight_map(folder / INDEX), tensors)
    sizes = {shard: (folder / shard).stat().st_size for shard in shards}
    return CheckpointFiles(
        name=name, folder=folder, revision=revision, config=config, tensors=tensors, shard_bytes=sizes
    )


def _has_no_weights(folder: Path) -> bool:
    """Whether a folder has neither safetensors nor pickles; an index of shards that are elsewhere is none."""
    return not any(path.is_file() for pattern in ("*.safetensors", *_PICKLE_PATTERNS) for path in folder.glob(pattern))


def _shards(folder: Path) -> list[str]:
    """The shards transformers would load: `model.safetensors` when it is there, otherwise those the index names."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if not (folder / INDEX).is_file():
        return []
    shards = sorted(set(_weight_map(folder / INDEX).values()))
    if not shards:
        raise CheckpointError(
            f"{folder / INDEX} names no tensors", expected="a filled weight_map", fix="download it again"
        )
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {counted(len(shards), 'shard')}: {', '.join(missing[:3])}",
            expected=f"every shard that {INDEX} names",
            fix="download the checkpoint again, or correct the index",
        )
    return shards


def _weight_map(path: Path) -> dict[str, str]:
    index = read_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(shard) for shard in weight_map.values()):
        raise CheckpointError(
            f"{path} has no usable weight_map",
            expected='"weight_map": {tensor name: file name in the same folder}',
            fix="download it again",
        )
    if not isinstance(metadata := index.get("metadata", {}), dict):  # transformers looks into it
        raise CheckpointError(
            f"{path}: metadata is {shortened(repr(metadata))}", expected="a JSON object", fix="download it again"
        )
    return dict(weight_map)


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and Path(value).name == value


def _check_index(path: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for tensor, shard in weight_map.items():
        if tensor not in tensors or tensors[tensor].shard != shard:
            raise CheckpointError(
                f"{path} says tensor {tensor} is in {shard}, which does not hold it",
                expected="an index that agrees with the shards' headers",
                fix="download index and shards again, from the same revision",
            )
    if extra := sorted(tensors.keys() - weight_map.keys()):
        raise CheckpointError(
            f"{path} lacks {counted(len(extra), 'tensor')} that the shards hold: {', '.join(extra[:3])}",
            expected="an index that agrees with the shards' headers",
            fix="download index and shards again, from the same revision",
        )


def _no_weights(folder: Path) -> CheckpointError:
    """The error of a folder without safetensors."""
    if found := sorted({path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern) if path.is_file()}):
        return _no_pickle(str(folder), found)
    return CheckpointError(
        f"{folder} holds no weights",
        expected=f"{SINGLE}, or {INDEX} and its shards",
        fix="download the checkpoint again",
    )


def _no_pickle(where: str, files: list[str]) -> CheckpointError:
    """The refusal of a checkpoint whose weights are pickled; transformers reads tensors alone from them."""
    return CheckpointError(
        f"{where} holds its weights as pickles ({', '.join(files[:3])})",
        expected="safetensors: a pickle can run code when it is loaded",
        fix="use a safetensors version, or make one with transformers: from_pretrained(...).save_pretrained(FOLDER)",
    )


def _open_hub(repo_id: str, revision: str | None, config_enough: bool) -> CheckpointFiles:
    """The hub at its current commit; the local cache alone when the hub cannot be reached."""
    try:
        listing = hub.listing(repo_id, revision)
    except HubError:
        cached = hub.cached(repo_id, revision)
        enough = cached is not None and (_is_complete(cached) or (config_enough and (cached / CONFIG).is_file()))
        if cached is None or not enough:
            raise
        return _open_folder(repo_id, cached, cached.name, config_enough)
    cached = hub.cached(repo_id, listing.commit)
    if cached is not None and _is_complete(cached):
        return _open_folder(repo_id, cached, listing.commit)
    if not listing.has_safetensors:
        if pickles := listing.pickles():
            raise _no_pickle(repo_id, pickles)
        folder = hub.download_snapshot(repo_id, revision)
        return _open_folder(repo_id, folder, folder.name, config_enough)
    folder = hub.download_small(listing)
    config = read_config(folder)
    weight_map = _weight_map(folder / INDEX) if (folder / INDEX).is_file() and SINGLE not in listing.sizes else {}
    shards = sorted(set(weight_map.values())) or [SINGLE]
    tensors = hub.headers(listing, shards)
    if weight_map:
        _check_index(folder / INDEX, weight_map, tensors)
    return CheckpointFiles(
        name=repo_id,
        folder=folder,
        remote=True,
        revision=listing.commit,
        config=config,
        tensors=tensors,
        shard_bytes={shard: listing.sizes[shard] or 0 for shard in shards},
    )


def _is_complete(folder: Path) -> bool:
    """Whether a cached hub snapshot holds its config and every shard."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / SINGLE).is_file():
        return True
    if not (folder / INDEX).is_file():
        return False
    return all((folder / shard).is_file() for shard in set(_weight_map(folder / INDEX).values()))
