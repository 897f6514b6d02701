"""The tiny models, tokenizers and texts of the training tests."""

from tests.training.conftest import (
    _own_cache,
    bos_tokenizer,
    converted,
    make,
    teacher_folder,
    text_folder,
    tokenizer,
    train,
)

__all__ = [
    "_own_cache",
    "bos_tokenizer",
    "converted",
    "make",
    "teacher_folder",
    "text_folder",
    "tokenizer",
    "train",
]
