"""A GGUF file as a Hugging Face folder in bfloat16, by transformers' own reading of such files."""

import importlib.util
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.output_folder import check_space, new_folder
from sse_convert.errors import CheckpointError
from sse_convert.files import digest
from sse_convert.report import counted
from sse_convert.trust import trusts_code

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, NotImplementedError, OSError)
"""what readers raise of a file that is cut off, or that they do not know"""


def is_gguf(model: Path) -> bool:
    """Whether a path means a GGUF file; it need not exist."""
    return model.suffix.lower() == SUFFIX and not model.is_dir()


def write_gguf(path: Path, out: Path) -> tuple[str, int, int]:
    """Write what a GGUF file holds as config, bfloat16 safetensors and tokenizer.

    Args:
        path: the file.
        out: the folder to make.

    Returns:
        sha256 of the file, quantised tensors in it, and bytes of the new weights.

    Raises:
        CheckpointError: the file is missing, damaged or no GGUF; or transformers or this environment cannot read it.
        OutputError: see `new_folder`.
    """
    quantised, needed = _contents(path)
    with new_folder(out) as folder:
        check_space(out, needed)
        try:
            model, tokenizer = _loaded(path)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"transformers cannot read {path}: {error}",
                expected="a language model of an architecture whose GGUF files transformers reads",
                fix="convert the original model, in safetensors",
            ) from error
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        written = sum(shard.stat().st_size for shard in folder.glob("*.safetensors"))
    return digest(path), quantised, written


def _contents(path: Path) -> tuple[int, int]:
    """Quantised tensors of a file, and bytes of all as bfloat16. Reads its header alone."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", expected="a GGUF file", fix="correct the path")
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise CheckpointError(
            f"{path} is no GGUF file: it begins with {magic!r}", expected=f"{_MAGIC!r}", fix="download it again"
        )
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"{path} needs the package gguf", expected="gguf 0.10 or newer", fix="pip install gguf, and run it again"
        )
    from gguf import GGUFReader

    try:
        tensors = GGUFReader(path).tensors
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path} is damaged or cut off after {path.stat().st_size:,} bytes: {error}",
            expected="a whole GGUF file",
            fix="download it again",
        ) from error
    quantised = sum(tensor.tensor_type.name not in _FLOATS for tensor in tensors)
    return quantised, sum(2 * int(tensor.n_elements) for tensor in tensors)


def _loaded(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer. transformers refuses to save a model that it loaded so; a fresh one takes the weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=trusts_code())
    loaded, info = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=trusts_code(),
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"it lacks {counted(len(missing), 'tensor')}: {', '.join(missing[:3])}")
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model, tokenizer
