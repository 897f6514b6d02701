"""What `from_pretrained` of a converted model does beyond its source's: it joins small checkpoints with their teacher,
and refuses tensor, context and sequence parallelism of libraries, which would compute something else.

Such libraries exchange no recurrent states between ranks, and a tensor-parallel plan would shard the teacher's
projections but not the new tensors. Their own guards look at `layer_types` and stay silent. What a training stage's
`context_parallel` does instead is in `context.py`.
"""

import contextlib
import dataclasses as dc
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import cached_file, has_file

from sse_convert.errors import CheckpointError, HardwareError, TeacherError
from sse_convert.modeling.arch_spec import LENT_FILE, TEACHER_VARIABLE

_MODES = {"tp": "tensor", "cp": "context", "sp": "sequence"}


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Lent:
    """What a small checkpoint takes from its teacher."""

    teacher: str
    """hub id, or the name of a folder as `./NAME`"""
    revision: str | None
    """commit on the hub"""
    files: dict[str, dict[str, str]]
    """file of the teacher -> its tensors that are needed -> `stored_digest`"""

    @property
    def named(self) -> str:
        """The teacher, with its revision."""
        return f"{self.teacher} at revision {self.revision}" if self.revision else self.teacher


def stored_digest(dtype: str, shape: Iterable[int], pieces: Iterable[Any]) -> str:
    """SHA-256 of a stored tensor.

    Args:
        dtype: as safetensors calls it.
        shape: dimensions.
        pieces: its data, row-major and little-endian, as buffers.
    """
    sha = hashlib.sha256(f"{dtype} {list(shape)} ".encode())
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()


def read_lent(path: Path | str) -> Lent:
    """What `sse_delta.json` says.

    Raises:
        CheckpointError: it cannot be read, or is not as it was written.
    """
    try:
        lent = Lent(**json.loads(Path(path).read_text(encoding="utf-8")))
        texts = [lent.teacher, lent.revision or "", *lent.files, *(v for f in lent.files.values() for v in f.values())]
        if not all(isinstance(text, str) for text in texts) or any(Path(name).name != name for name in lent.files):
            raise ValueError("a name or a digest is none")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", expected="what `sse-convert export` wrote", fix="get the file again"
        ) from error
    return lent


def teacher_files(lent: Lent, checkpoint: str, place: str | None, options: dict[str, Any]) -> dict[str, str]:
    """Where the teacher's files are on this machine, by name; those that are not yet are downloaded.

    Args:
        lent: what is needed.
        checkpoint: folder or hub id of the small checkpoint; a teacher that is no hub's is looked for beside it.
        place: folder of the teacher; None: that of the environment, or what `lent` names.
        options: how to download, as `transformers.utils.cached_file` takes it.

    Raises:
        TeacherError: they are neither here nor can be had; or tensors are not those that were lent.
    """
    named = [str(Path(checkpoint).parent / lent.teacher), lent.teacher] if lent.teacher.startswith("./") else []
    given = place or os.environ.get(TEACHER_VARIABLE)
    folders = [given] if given else named
    source = next((folder for folder in folders if os.path.isdir(folder)), lent.teacher)
    try:
        if folders and not os.path.isdir(source):
            raise FileNotFoundError(f"there is no folder {' or '.join(folders)}")
        found = {name: _file(source, name, {**options, "revision": lent.revision}) for name in lent.files}
    except OSError as error:
        download = f"`hf download {lent.teacher} --revision {lent.revision}` where there is a network, or "
        raise TeacherError(
            f"{checkpoint} is small, and its teacher {lent.named} is not at hand: {str(error).splitlines()[0]}",
            expected=f"the teacher's {', '.join(lent.files)}",
            fix=f"{'' if named else download}set {TEACHER_VARIABLE} to a folder with the teacher's files",
        ) from error
    _check_lent(lent, found, checkpoint, source)
    return found


def _file(source: str, name: str, options: dict[str, Any]) -> str:
    """Where a file of a folder or of a hub is, downloaded if need be.

    Raises:
        OSError: it cannot be had. A hub that does not answer is asked once, which the library would six times.
    """
    if not os.path.isdir(source):
        with contextlib.suppress(OSError):
            return str(cached_file(source, name, **{**options, "local_files_only": True}))
        asked = {key: options[key] for key in ("revision", "token", "local_files_only") if key in options}
        if not has_file(source, name, **asked):
            raise FileNotFoundError(f"{name} is not in the cache, nor on a hub that answers")
    return str(cached_file(source, name, **options))


def _check_lent(lent: Lent, found: dict[str, str], checkpoint: str, source: str) -> None:
    wrong = [
        name
        for file, digests in lent.files.items()
        for name, now in zip(digests, _digests(found[file], list(digests)), strict=True)
        if now != digests[name]
    ]
    if wrong:
        raise TeacherError(
            f"{len(wrong)} tensors that {checkpoint} takes from its teacher are others in {source}: "
            + ", ".join(wrong[:3]),
            expected=f"the teacher that it was made from, unchanged: {lent.named}",
            fix=f"get that one again, or set {TEACHER_VARIABLE} to a folder with its files",
        )


def _digests(path: str, names: list[str]) -> list[str | None]:
    """Digests of tensors of a file, on all cores; None for those that it lacks."""
    with safe_open(path, "pt") as file, ThreadPoolExecutor() as pool:
        there = set(file.keys())

        def digest(name: str) -> str | None:
            if name not in there:
                return None
            part, data = file.get_slice(name), file.get_tensor(name).reshape(-1).view(torch.uint8)
            return stored_digest(part.get_dtype(), part.get_shape(), [data.numpy()])

        return list(pool.map(digest, names))


def with_teacher(files: list[str], load: Any) -> tuple[dict[str, Any], Any]:
    """What a small checkpoint and its teacher hold together, to be read when it is needed, and how to load that.

    Args:
        files: of the small checkpoint.
        load: transformers' `LoadStateDictConfig`.

    Raises:
        CheckpointError: a file is missing or damaged; or see `teacher_files`.
    """
    checkpoint, options = str(load.pretrained_model_name_or_path), dict(load.download_kwargs or {})
    try:
        lent = read_lent(str(cached_file(checkpoint, LENT_FILE, **options)))
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} is small, and lacks {LENT_FILE}", expected="all of its files", fix="download it again"
        ) from error
    options = {name: value for name, value in options.items() if name not in ("revision", "subfolder")}
    theirs = teacher_files(lent, checkpoint, None, options)
    state, places = {}, {}
    for path, names in [*((theirs[name], list(lent.files[name])) for name in theirs), *((own, None) for own in files)]:
        file: Any = safe_open(path, "pt")
        read = file.get_tensor if is_deepspeed_zero3_enabled() else file.get_slice
        for name in file.keys() if names is None else names:
            state[name], places[name] = read(name), os.path.abspath(path)
    return state, dc.replace(load, sharded_metadata={"weight_map": places})


def refuse(mode: str, how: str) -> HardwareError:
    """The error for a parallel mode that is not offered.

    Args:
        mode: tp, cp or sp.
        how: what asked for it.
    """
    return HardwareError(
        f"{_MODES[mode]} parallelism of a model with converted layers ({how})",
        expected="data parallelism or fully sharded data parallelism: recurrent states are not exchanged between ranks",
        fix=f"drop {how}; use FSDP if the model does not fit one GPU, context_parallel in a stage if rows do not",
    )


def refuse_parallel_load(arguments: dict[str, Any]) -> None:
    """Check the keyword arguments of `from_pretrained`.

    Raises:
        HardwareError: they ask for tensor, context or sequence parallelism.
    """
    if arguments.get("tp_plan") is not None:
        raise refuse("tp", f"tp_plan={arguments['tp_plan']!r}")
    if (arguments.get("tp_size") or 1) > 1:
        raise refuse("tp", f"tp_size={arguments['tp_size']}")
    plan = arguments.get("distributed_config")
    if plan is not None:
        refuse_parallel_plan(plan)
    if (mesh := arguments.get("device_mesh")) is not None:
        names = getattr(mesh, "mesh_dim_names", None) or ("tp",)  # an unnamed mesh is a tensor-parallel one
        for mode in _MODES:
            if mode in names:
                raise refuse(mode, f"device_mesh with dimension {mode!r}")


def refuse_parallel_plan(plan: Any) -> None:
    """Check a parallelism configuration, Accelerate's `ParallelismConfig` or transformers' `DistributedConfig`.

    Raises:
        HardwareError: it asks for tensor, context or sequence parallelism.
    """
    for mode in _MODES:
        if (getattr(plan, f"{mode}_size", None) or 1) > 1:
            raise refuse(mode, f"{mode}_size={getattr(plan, f'{mode}_size')}")
    if getattr(plan, "tp_plan", None):
        raise refuse("tp", f"tp_plan={plan.tp_plan!r}")


def refuse_sharded(parameter: Tensor, attention_kind: str | None) -> None:
    """Check, at run time and by one of its parameters, how a converted layer's weights are spread over devices.

    Raises:
        HardwareError: a device mesh has a tensor, context or sequence dimension, or attention runs Ulysses style.
    """
    if attention_kind == "ulysses":
        raise refuse("sp", "attention implementation 'ulysses'")
    names = getattr(getattr(parameter, "device_mesh", None), "mesh_dim_names", None) or ()
    for mode in _MODES:
        if any(mode in name.split("_") for name in names):
            raise refuse(mode, f"device mesh {tuple(names)}")
