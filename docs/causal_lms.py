"""Which causal language models of transformers convert, and why the others do not: entries and `causal_lms.yaml`."""

import dataclasses as dc
from pathlib import Path
from typing import Any

import yaml

from sse_convert.modeling.architectures import ARCHITECTURES, IMAGE_TEXT

DATA = Path(__file__).with_name("causal_lms.yaml")


@dc.dataclass(frozen=True, slots=True)
class Group:
    """Model types that are left out for one reason."""

    reason: str
    """what they have that an entry cannot say"""
    families: tuple[str, ...]
    """their model types"""
    sign: str
    """part of what the guard says of a plain entry for them"""


def left_out() -> dict[str, list[Group]]:
    """`refused` and `not_softmax_decoder` -> their groups."""
    return {kind: [_group(row) for row in _data()[kind]] for kind in ("refused", "not_softmax_decoder")}


def supported() -> dict[str, str]:
    """Model type -> that of the entry which serves it."""
    same: dict[str, str] = _data()["same"]
    return {name: name for name in ARCHITECTURES | IMAGE_TEXT} | same


def _group(row: dict[str, Any]) -> Group:
    return Group(reason=row["reason"], families=tuple(row["families"]), sign=row.get("sign", ""))


def _data() -> Any:
    return yaml.safe_load(DATA.read_text(encoding="utf-8"))
