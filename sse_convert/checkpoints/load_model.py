"""Open a model and its tokenizer for measuring and generating, with errors a user can act on."""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sse_convert.checkpoints.foreign import refusing
from sse_convert.checkpoints.open import CheckpointFiles, download, open_checkpoint
from sse_convert.console import progress
from sse_convert.errors import CheckpointError, HardwareError
from sse_convert.mixers import SSEMixer
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.recipe.problems import shortened
from sse_convert.trust import trusts_code

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


GENERATION = "generation_config.json"
DOWNLOAD_AGAIN = "correct generation_config.json and config.json, or download them again"
MPS_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
"""with 1, torch computes on the CPU what Apple's GPUs cannot"""


def pick_device(name: str | None = None) -> "torch.device":
    """The named device, or the accelerator of this machine, or the CPU. Apple's GPUs (mps), on which nobody has tried
    converted models and which lack float64, are taken by name alone, and where `MPS_FALLBACK` is 1.

    Raises:
        HardwareError: the named device does not exist here, or is mps without `MPS_FALLBACK`.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return torch.device("cpu") if accelerator is None or accelerator.type == "mps" else accelerator
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise HardwareError(f"device {name!r} is unknown", expected="cpu, cuda, cuda:1 ...") from error
    if device.type != "cpu" and (accelerator is None or device.type != accelerator.type):
        raise HardwareError(
            f"device {name!r} is not on this machine", expected=f"cpu or {accelerator or 'nothing else'}"
        )
    if device.type == "mps" and os.environ.get(MPS_FALLBACK) != "1":
        raise HardwareError(
            f"device {name!r}: converted models have not been tried on Apple's GPUs, which lack some operators",
            expected="cpu, which is also what is taken where no device is named",
            fix=f"leave the device out; or set {MPS_FALLBACK}=1, by which the CPU computes what is lacking, and "
            "compare its text with that of the CPU",
        )
    return device


def device_name(device: "torch.device") -> str:
    """The kind of a device and what it is, for reports."""
    import torch

    machine = platform.processor() or platform.machine()
    return f"{device.type} ({torch.cuda.get_device_name(device) if device.type == 'cuda' else machine})"


def load_model(
    source: str | Path | CheckpointFiles, *, device: str | None = None, dtype: "torch.dtype | None" = None
) -> "PreTrainedModel":
    """A teacher or a converted model in evaluation mode.

    Args:
        source: folder or hub id, or the opened checkpoint.
        device: unset picks the accelerator, or the CPU.
        dtype: type of the weights; unset keeps the stored one.

    Raises:
        CheckpointError: not a checkpoint, or a damaged one.
        HubError: the hub refused or cannot be reached.
        HardwareError: the device does not exist here.
    """
    place = pick_device(device)
    files = download(source if isinstance(source, CheckpointFiles) else open_checkpoint(source))
    from transformers import GenerationConfig

    from sse_convert.modeling.auto import load_pretrained

    settings = files.folder / GENERATION
    if settings.is_file():
        with refusing(f"{settings} cannot be used", expected="settings of generate", fix=DOWNLOAD_AGAIN):
            GenerationConfig.from_pretrained(files.folder)
    with progress(f"loading {files.folder.name}", 1):
        model = load_pretrained(files.folder, dtype=dtype, device=place)
    _check_token_ids(model, files.name)
    return model


def _check_token_ids(model: Any, source: str) -> None:
    """Make sure that the tokens at which generation begins, ends and pads are numbers.

    Raises:
        CheckpointError: generation_config.json or config.json gives something else.
    """
    for holder in (model.generation_config, model.config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(holder, name, None)
            ids = value if isinstance(value, list) else [-1 if value is None else value]
            if not ids or not all(type(number) is int and -1 <= number < 2**31 for number in ids):
                raise CheckpointError(
                    f"{name} of {source} is {shortened(repr(value))}",
                    expected="a token id, or a list of them",
                    fix=DOWNLOAD_AGAIN,
                )


def load_tokenizer(source: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer stored with a checkpoint.

    Raises:
        CheckpointError: there is none.
        HubError: the hub refused or cannot be reached.
    """
    return tokenizer_of(open_checkpoint(source))


def tokenizer_of(files: CheckpointFiles) -> "PreTrainedTokenizerBase":
    """The tokenizer stored with an opened checkpoint. Errors as of `load_tokenizer`."""
    return stored_tokenizer(download(files))


def has_tokenizer(files: CheckpointFiles) -> bool:
    """Whether a tokenizer lies beside the config; a hub's small files have it before the weights are there."""
    return any((files.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def stored_tokenizer(files: CheckpointFiles) -> "PreTrainedTokenizerBase":
    """The tokenizer among the files that are here already; no weights are downloaded for it. Errors as of
    `load_tokenizer`."""
    from transformers import AutoTokenizer

    wanted = {
        "expected": "tokenizer.json and tokenizer_config.json beside config.json",
        "fix": "copy them from the original model",
    }
    with refusing(f"{files.name} has no tokenizer that loads", **wanted):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            files.folder, trust_remote_code=trusts_code()
        )
        ordinary = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    if not ordinary:  # transformers makes an empty one where the files are missing
        raise CheckpointError(f"{files.name} has no tokenizer: it knows no word", **wanted)
    return tokenizer


def context_limit(config: Any) -> int | None:
    """The longest context a model may be given, in tokens; None where no layer and no embedding knows positions.

    Args:
        config: a transformers config, converted or not.
    """
    limit: int | None = getattr(decoder_config(config), "max_position_embeddings", None)
    if limit is None or not hasattr(config, "sse") or config.model_type.endswith("gpt2"):
        return limit
    from sse_convert.modeling.configuration import layer_mixers

    free = all(isinstance(mixer, SSEMixer) for mixer in layer_mixers(config))
    return None if free else limit
