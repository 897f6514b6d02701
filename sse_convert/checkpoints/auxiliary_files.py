"""The small files that follow a checkpoint: tokenizer, processor, chat template, licence. Data, never code."""

import json
import shutil
from pathlib import Path
from typing import Any

from sse_convert.checkpoints.foreign import parse_json, read_object
from sse_convert.checkpoints.hub import cached_blob

PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""all that travels from a teacher, beside its weights and its config.json"""
CODE = (".py", ".pyc", ".so", ".sh", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt")
"""endings that never travel, whatever the name before them"""
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_generate")
"""keys of configuration files that name code"""


def auxiliary_files(source: Path) -> list[str]:
    """Names, below a checkpoint folder, of the files that follow it, sorted. Links that leave the folder do not count;
    those of a hub cache, into its own blobs, do."""
    found = {path for pattern in PATTERNS for path in source.glob(pattern) if path.suffix.lower() not in CODE}
    kept = (path for path in found if path.is_file() and stays_inside(path, source))
    return sorted(path.relative_to(source).as_posix() for path in kept)


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a checkpoint has a chat template."""
    settings = folder / "tokenizer_config.json"
    return any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")) or (
        settings.is_file() and bool(read_object(settings).get("chat_template"))
    )


def copy_auxiliary_files(source: Path, target: Path) -> list[str]:
    """Copy the files that follow a checkpoint to another folder, JSON without the keys that name code; their names."""
    names = auxiliary_files(source)
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
        if name.endswith("_config.json"):
            _drop_code_keys(target / name)
    return names


def without_code_keys(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that name code."""
    return {key: value for key, value in config.items() if key not in CODE_KEYS}


def stays_inside(path: Path, folder: Path) -> bool:
    """Whether a file, links followed, lies in `folder`, or is a blob of the hub cache that `folder` belongs to.

    Such a blob may be a link itself, into what the cache keeps once for all its repositories.
    """
    snapshot, blob = folder.absolute(), cached_blob(path.absolute())
    if blob is not None and snapshot.parent == blob.parent.parent / "snapshots":
        return True
    return path.resolve().is_relative_to(folder.resolve())


def _drop_code_keys(path: Path) -> None:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError:
        return  # what cannot be read names no code
    if isinstance(data, dict) and without_code_keys(data) != data:
        path.write_text(json.dumps(without_code_keys(data), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
