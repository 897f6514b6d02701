"""The small files that follow a checkpoint: tokenizer, chat template, generation config, licence."""

import shutil
from pathlib import Path

PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy the companions of a checkpoint folder to another; their names, sorted."""
    found = {path for pattern in PATTERNS for path in source.glob(pattern) if path.is_file()}
    names = sorted(path.relative_to(source).as_posix() for path in found)
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names
