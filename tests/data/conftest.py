"""The tiny models, tokenizers and texts of the training tests, and the text between needles of the evaluation tests."""

from tests.evaluation.conftest import haystack
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
    "haystack",
    "make",
    "teacher_folder",
    "text_folder",
    "tokenizer",
    "train",
]
