"""Text in both train and valid is found, and other text is not."""

import json

import pytest

from sse_convert.data.overlap import overlap
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Source

DOCUMENTS = [
    f"Document {i} tells of ship {i * 37} and of the keeper who wrote it down, line by line." for i in range(40)
]


@pytest.fixture
def write(tmp_path):
    def write(name, documents):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps({"text": document}) for document in documents]
        path.write_text("\n".join(lines) + "\n")
        return Source(path=str(path))

    return write


def test_other_text_is_no_overlap(write):
    assert overlap([write("train.jsonl", DOCUMENTS[:30])], [write("valid.jsonl", DOCUMENTS[30:])]) == []
    assert overlap([Source(kind="teacher", rows=4)], [Source(kind="teacher", rows=4)]) == []


def test_the_same_file_is_found_under_another_name_and_in_a_folder(write, tmp_path):
    train, valid = write("text/a.jsonl", DOCUMENTS[:30]), write("copy.jsonl", DOCUMENTS[:30])
    (found,) = overlap([Source(path=str(tmp_path / "text"))], [valid, write("other.jsonl", DOCUMENTS[30:])])
    assert found == f"data.train has 1 file of data.valid as well, such as {valid.path}"
    assert len(overlap([train], [train])) == 1


def test_shared_documents_are_counted(write):
    valid = write("valid.jsonl", [*DOCUMENTS[30:], DOCUMENTS[3], DOCUMENTS[7]])
    (found,) = overlap([write("train.jsonl", DOCUMENTS[:30])], [valid])
    assert found == f"data.train has 2 of the first documents of {valid.path} in data.valid as well"


def test_short_documents_are_coincidences(write):
    assert overlap([write("train.jsonl", ["The end.", DOCUMENTS[0]])], [write("valid.jsonl", ["The end."])]) == []


def test_datasets_of_a_hub_are_compared_by_split():
    train = Source(path="owner/books", split="train")
    assert overlap([train], [Source(path="owner/books", split="test")]) == []
    (found,) = overlap([train], [train])
    assert found == "data.valid has owner/books, split train, which data.train has as well"


def test_text_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        overlap([], [Source(path=str(tmp_path / "absent.txt"))])
