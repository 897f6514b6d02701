"""How many token ids a tokenizer's files have, read without the tokenizer."""

from pathlib import Path
from typing import Any

from sse_convert.checkpoints.foreign import parse_json, refusing


def tokenizer_size(folder: Path) -> int | None:
    """One more than the largest id of ordinary tokens in tokenizer.json (or vocab.json); None where neither is there.

    Special tokens that were added do not count: Gemma 3's text models ship one for images that they cannot embed.

    Raises:
        CheckpointError: the file is not a tokenizer's.
    """
    for name in ("tokenizer.json", "vocab.json"):
        path = folder / name
        if not path.is_file():
            continue
        with refusing(
            f"{path} is not a tokenizer file", expected="what the tokenizers library writes", fix="download it again"
        ):
            data = parse_json(path.read_text(encoding="utf-8"))
            ids = set(data.values()) if name == "vocab.json" else _ordinary_ids(data)
            if not all(type(number) is int and number >= 0 for number in ids):
                raise ValueError("token ids are whole numbers from 0")
            return max(ids, default=-1) + 1
    return None


def _ordinary_ids(tokenizer: dict[str, Any]) -> set[int]:
    vocabulary, added = tokenizer["model"].get("vocab", {}), tokenizer.get("added_tokens", ())
    ids = set(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
    ids |= {token["id"] for token in added}
    return ids - {token["id"] for token in added if token.get("special")}
