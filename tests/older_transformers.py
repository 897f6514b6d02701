"""What fails with transformers 5.17 for reasons of its own, each seen on a plain model of that version."""

from collections.abc import Iterable

import pytest
import transformers

VERSION = "5.17."
ABSENT = "transformers 5.17 has no such family"
FAULTS = {
    "[flint": ABSENT,
    "[kolibri1": ABSENT,
    "[apertus1p5_text": ABSENT,
    "[cohere_compass_text": "its plain model cannot be built: rope settings of the wrong length",
    "_left_out_is_refused[bart": "it refuses null in configurations of this group, text_encoder among them",
    "test_bounded_scores_are_written_out_for_all_pairs": "plain Gemma 2 takes sdpa, which leaves its soft cap out",
    "where_that_is_built[gemma2-eager": "plain Gemma 2 takes sdpa, which leaves its soft cap out",
    "says_so[granitemoe": "plain Granite MoE with labels and router logits ends in 'int' object has no attribute 'to'",
    "packed_equals_separate[llama4_text": "chunks of plain Llama 4 begin with the row, not with each document",
    "test_the_copy_converts": "experts of 16 columns in bfloat16 are multiplied by torch's grouped product alone",
    "test_gguf.py::test_a_gguf_file_becomes": "it gives merges of GGUF files to tokenizers as one text",
    "test_gguf.py::test_a_file_without_one": "it gives merges of GGUF files to tokenizers as one text",
    "as_under_masks[gemma4_text": "get_per_layer_inputs takes embeddings beside ids",
    "from_its_cache[llama4]": "get_image_features takes a strategy beside images",
}
"""part of a test's name -> what is the library's own"""


def skip_faults(items: Iterable[pytest.Item]) -> None:
    """Skip tests of what this version of transformers has wrong."""
    if transformers.__version__.startswith(VERSION):
        for item in items:
            if reason := next((why for part, why in FAULTS.items() if part in item.nodeid), None):
                item.add_marker(pytest.mark.skip(reason=f"transformers 5.17: {reason}"))
