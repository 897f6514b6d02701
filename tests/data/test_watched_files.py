"""Text must stay what it was when it was opened; what the files hold decides, not their dates."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sse_convert.data import watched_files
from sse_convert.data.parquet_files import ParquetFiles
from sse_convert.data.teacher_samples import CACHE_VARIABLE
from sse_convert.data.text_files import TextFiles
from sse_convert.data.watched_files import FileBytes, WatchedFiles
from sse_convert.errors import DataError
from sse_convert.files import digest

WORDS = "one two three four\n" * 1000


def written(path, text=WORDS):
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.table({"text": [text]}), path)
        case ".jsonl":
            path.write_text(json.dumps({"text": text}) + "\n")
        case _:
            path.write_text(text)


@pytest.fixture(params=["txt", "jsonl", "parquet"])
def corpus(request, tmp_path):
    """A file and its documents."""
    path = tmp_path / f"text.{request.param}"
    written(path)
    return path, opened(path)


def opened(path):
    if path.suffix == ".parquet":
        return ParquetFiles([path], field="text", chat=False)
    return TextFiles([path], field="text", chat=False, size=4096)


DAMAGES = {
    "changed": lambda path: written(path, WORDS.replace("two", "TWO")),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 10),
    "empty": lambda path: os.truncate(path, 0),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_text_that_changes_while_it_is_read_is_an_error(corpus, damage):
    path, corpus = corpus
    corpus.read(0)
    DAMAGES[damage](path)
    with pytest.raises(DataError, match="deleted while" if damage == "deleted" else "changed while") as caught:
        corpus.read(0)
    assert str(path) in caught.value.what


def test_new_dates_alone_do_not_matter(corpus):
    path, corpus = corpus
    before = corpus.read(0)
    os.utime(path, (1, 1))
    assert corpus.read(0) == before


def test_an_edit_of_the_same_size_changes_the_fingerprint(corpus):
    path, corpus = corpus
    before = corpus.fingerprint()
    assert opened(path).fingerprint() == before
    size = path.stat().st_size
    DAMAGES["changed"](path)
    after = opened(path).fingerprint()
    assert path.stat().st_size == size
    assert {key for key in after if after[key] != before[key]} == {"sha256"}


def test_a_file_that_is_cut_while_it_is_searched_is_an_error(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    with path.open("rb") as file:
        data = FileBytes(file, path)
        os.truncate(path, 100)
        with pytest.raises(DataError, match="changed while it was read"):
            data.find(b"nowhere", 0)


def test_a_file_is_hashed_once(tmp_path, monkeypatch):
    path, read = tmp_path / "text.txt", []
    path.write_text(WORDS)
    monkeypatch.setattr(watched_files, "digest", lambda path: read.append(path) or "digest")
    for _ in range(3):
        WatchedFiles([path]).check(0)
    assert read == [path]


@given(st.binary(max_size=60), st.sampled_from([b"\n", b"ab", b"aab"]), st.integers(0, 60), st.integers(0, 70))
def test_searching_finds_what_bytes_find(tmp_path_factory, content, mark, start, end):
    path = tmp_path_factory.getbasetemp() / "searched"
    path.write_bytes(content)
    with path.open("rb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(watched_files, "_FIRST_BLOCK", 4)
        patch.setattr(watched_files, "_LARGEST_BLOCK", 9)
        data = FileBytes(file, path)
        start = min(start, len(content))
        assert len(data) == len(content)
        assert data.find(mark, start, end) == content.find(mark, start, end)
        assert data.find(mark, start) == content.find(mark, start)
        assert data.rfind(mark, start, end) == content.rfind(mark, start, end)


def test_one_of_the_processes_that_were_launched_together_hashes(tmp_path, monkeypatch):
    """A new cache of the process stands for another process."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    path, hashed = tmp_path / "text.txt", []
    monkeypatch.setattr(watched_files, "digest", lambda path: hashed.append(path) or digest(path))

    def process(processes):
        monkeypatch.setenv("WORLD_SIZE", processes)
        watched_files._digest.cache_clear()
        return WatchedFiles([path]).digest()

    path.write_text("one text")
    alone = process("1")
    assert [process("8") for _ in range(3)] == [alone] * 3
    assert len(hashed) == 2
    path.write_text("the other")
    assert process("8") != alone
    assert len(hashed) == 3
    (kept,) = (
        found
        for found in (tmp_path / "cache" / "text-digests").glob("*")
        if found.stat().st_size == 64
        if found.read_text() == digest(path)
    )
    kept.write_text("damaged")
    assert process("8") == process("1")
    assert len(hashed) == 5


def test_each_process_hashes_where_the_cache_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("one text")
    monkeypatch.setenv(CACHE_VARIABLE, str(path / "cache"))
    monkeypatch.setenv("WORLD_SIZE", "8")
    watched_files._digest.cache_clear()
    (found,) = WatchedFiles([path])._digests
    assert found == digest(path)
