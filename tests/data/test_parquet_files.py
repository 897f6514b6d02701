"""Parquet files are read within bounds, whatever a row group holds."""

import json
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sse_convert.data import documents, packing, parquet_files, text_files
from sse_convert.data.parquet_files import ParquetFiles
from sse_convert.data.rows import RowReader
from sse_convert.data.text_files import TextFiles
from sse_convert.errors import DataError, HardwareError
from sse_convert.recipe.schema import Source
from tests.training.conftest import make_text

LARGE = "all is well " * 90_000
"""1 MB"""


def stored(path, values, rows_of_a_group=1 << 20):
    settings = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "row_group_size": rows_of_a_group}
    pq.write_table(pa.table(values), path, **settings)
    return path


def opened(path, *, chat=False):
    return ParquetFiles([path], field="messages" if chat else "text", chat=chat)


def read(corpus):
    return [document for unit in range(corpus.units) for document in corpus.read(unit)]


def test_a_value_of_many_rows_is_held_once(tokenizer, tmp_path):
    codes = pa.array([0] * 20_000, pa.int32())  # 20 GB of text
    path = stored(tmp_path / "a.parquet", {"text": pa.DictionaryArray.from_arrays(codes, pa.array([LARGE]))})
    assert path.stat().st_size < 2000
    found = read(opened(path))
    assert len(found) == 20_000
    assert all(document.text is found[0].text for document in found)
    reader = RowReader([Source(path=str(path))], tokenizer, 64, 0)
    assert len(list(islice(reader.rows(), 5))) == 5


def test_a_value_of_many_conversations_is_held_once(tmp_path):
    turns = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 5_000, pa.int32()), pa.array([LARGE, "ok"]))
    roles = pa.array(["user", "assistant"] * 5_000).dictionary_encode()
    messages = pa.StructArray.from_arrays([roles, turns], ["role", "content"])
    path = stored(tmp_path / "a.parquet", {"messages": pa.ListArray.from_arrays(range(0, 10_001, 2), messages)})
    found = read(opened(path, chat=True))
    assert len(found) == 5_000
    assert [message["role"] for message in found[-1].messages] == ["user", "assistant"]
    assert all(document.messages[0]["content"] is found[0].messages[0]["content"] for document in found)


@pytest.mark.parametrize("chat", [False, True])
def test_a_large_row_group_is_several_units(tmp_path, monkeypatch, chat):
    texts = [make_text(20, seed=i % 90) for i in range(200)]
    talks = [[{"role": "user", "content": text}] * (i % 3 + 1) for i, text in enumerate(texts)]
    path = stored(tmp_path / "a.parquet", {"text": texts, "messages": talks}, 150)
    assert opened(path, chat=chat).units == 2
    monkeypatch.setattr(parquet_files, "UNIT_BYTES", 3000)
    monkeypatch.setattr(parquet_files, "_BATCH_BYTES", 700)
    corpus = opened(path, chat=chat)
    assert corpus.units > 4
    assert [found.messages if chat else found.text for found in read(corpus)] == (talks if chat else texts)
    assert read(corpus)[-1].where.endswith("row group 1, row 49")


def test_of_a_large_unit_no_more_is_tokenized_than_is_needed(tokenizer, tmp_path, monkeypatch):
    path = stored(tmp_path / "a.parquet", {"text": [make_text(20, seed=i) for i in range(2000)]})
    real, asked = documents.token_ids, []
    monkeypatch.setattr(packing, "ENCODED_AT_ONCE", 1000)
    monkeypatch.setattr(documents, "token_ids", lambda made, texts: (asked.extend(texts), real(made, texts))[1])
    next(RowReader([Source(path=str(path))], tokenizer, 64, 0).rows())
    assert 1000 <= sum(map(len, asked)) < 1300


def test_a_long_text_is_tokenized_in_pieces(tokenizer, monkeypatch):
    encoder, document = documents.Encoder(tokenizer), documents.Document(text=make_text(3000))
    whole = encoder.encode([document])[0].ids
    monkeypatch.setattr(documents, "LONGEST_PIECE", 500)
    assert encoder.encode([document])[0].ids.tolist() == whole.tolist()
    solid = documents.Document(text="x" * 1234)
    assert tokenizer.decode(encoder.encode([solid])[0].ids[:-1]) == solid.text


def test_a_record_that_is_too_large_is_named(tmp_path, monkeypatch):
    for module in (parquet_files, text_files):
        monkeypatch.setattr(module, "LARGEST_RECORD", 3000)
    texts = ["short", "long " * 1000]
    path = stored(tmp_path / "a.parquet", {"text": texts})
    with pytest.raises(DataError, match=r"a\.parquet, row group 0, row 1: the value has 5 kB"):
        read(opened(path))
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(DataError, match=r"a\.jsonl at byte 18: a line has 5\.01 kB") as caught:
        TextFiles([lines], field="text", chat=False, size=2048)
    assert caught.value.expected == "3 kB at most"


def test_memory_that_is_lacking_is_said_with_the_file(tmp_path, monkeypatch):
    def fails(*_):
        raise pa.ArrowMemoryError("malloc of size 2147483648 failed")

    corpus = opened(stored(tmp_path / "a.parquet", {"text": ["x"]}))
    monkeypatch.setattr(parquet_files, "_python", fails)
    with pytest.raises(HardwareError, match=r"out of memory while reading .*a\.parquet, row group 0"):
        corpus.read(0)
