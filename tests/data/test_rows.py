"""Sources, packing, order and resumption of training rows."""

import itertools
import json
import re
import shutil
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.data import RowReader, SamplingTeacher, stack
from sse_convert.data.documents import Document, Encoder
from sse_convert.data.hub_datasets import HubTable
from sse_convert.data.packing import IGNORED, Cursor, Packer
from sse_convert.data.rows import check_sources
from sse_convert.data.teacher_samples import CACHE_VARIABLE, cache_folder
from sse_convert.data.text_files import TextFiles, find_files, passed_over
from sse_convert.errors import DataError, HubError
from sse_convert.recipe.schema import Needles, Source
from tests.fake_hub import FakeHub


def rows(*given, **settings):
    """The rows of a reader."""
    return RowReader(*given, **settings).rows()


T = 64
SHORT = 130
"""tokens that hold most facts about uuids, but not all"""


class Listed:
    """A corpus held in a list."""

    def __init__(self, *texts, ids=None):
        self.documents = [Document(text=text) for text in texts] if ids is None else [Document(ids=i) for i in ids]

    @property
    def units(self):
        return len(self.documents)

    def read(self, unit):
        return [self.documents[unit]]

    def fingerprint(self):
        return {}


def take(source, tokenizer, count, start=None, *, length=T, seed=0, **settings):
    reader = RowReader(source if isinstance(source, list) else [source], tokenizer, length, seed, **settings)
    return list(itertools.islice(reader.rows(start), count))


def same(a, b):
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("input_ids", "position_ids", "labels"))


def test_packing_keeps_boundaries(tokenizer):
    ids = [np.arange(10, 10 + n, dtype=np.int32) for n in (3, 9, 1, 5)]
    packer = Packer(Listed(ids=ids), Encoder(tokenizer), 8, seed=None, passes=1, cursor=Cursor())
    first, second, third = packer.row(), packer.row(), packer.row()
    assert first.ids.tolist() == [10, 11, 12, 10, 11, 12, 13, 14]
    assert first.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert second.ids.tolist() == [15, 16, 17, 18, 10, 10, 11, 12]
    assert second.positions.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert third is None


def test_labels_leave_out_first_tokens(tokenizer, text_folder):
    for row in take(Source(path=str(text_folder)), tokenizer, 40):
        assert row.input_ids.shape == (T,)
        assert np.array_equal(row.labels == -100, row.position_ids == 0)
        kept = row.labels != -100
        assert np.array_equal(row.labels[kept], row.input_ids[kept])
        assert row.position_ids[0] == 0


def test_documents_end_with_eos_and_start_with_bos(bos_tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the keeper")
    (tmp_path / "b.txt").write_text("his ledger")
    encoder = Encoder(bos_tokenizer)
    files = TextFiles(find_files(tmp_path), field="text", chat=False, size=4096)
    for unit in range(2):
        ids = encoder.encode(files.read(unit))[0].ids
        assert ids[0] == 1
        assert ids[-1] == 0
        assert 0 not in ids[1:-1]


def test_a_folder_of_source_code_is_read_without_what_is_hidden_or_empty(tmp_path):
    names = [
        "README.md",
        "main.py",
        "src/Main.java",
        "src/__init__.py",
        ".venv/lib.py",
        "src/.git/hook.sh",
        "table.csv",
        "LICENSE",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else "text")
    assert [str(file.relative_to(tmp_path)) for file in find_files(tmp_path)] == [
        "README.md",
        "main.py",
        "src/Main.java",
    ]
    assert passed_over(tmp_path) == [f"not read of {tmp_path}: 1 LICENSE, 1 .csv"]
    assert passed_over(tmp_path / "src") == passed_over(tmp_path / "main.py") == []


def test_long_documents_are_cut_into_pieces_that_join_up(tokenizer, text_folder):
    files = TextFiles(find_files(text_folder), field="text", chat=False, size=2048)
    assert files.units > 6
    pieces = [files.read(unit)[0] for unit in range(files.units)]
    assert "".join(p.text for p in pieces) == "".join(f.read_text() for f in sorted(text_folder.iterdir()))
    assert sum(p.begins for p in pieces) == sum(p.ends for p in pieces) == 6


def test_order_depends_on_the_seed_alone(tokenizer, text_folder):
    source = Source(path=str(text_folder))
    first, again, other = (take(source, tokenizer, 30, seed=seed) for seed in (1, 1, 2))
    assert all(map(same, first, again))
    assert not all(map(same, first, other))


def test_every_pass_reads_everything_in_a_new_order(tokenizer, tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(make_document(i))
    found = take(Source(path=str(tmp_path)), tokenizer, 60)
    text = tokenizer.decode(np.concatenate([row.input_ids for row in found]))
    order = [part.split()[0] for part in text.split("<eos>")[:16]]
    assert sorted(order[:8]) == sorted(order[8:])
    assert order[:8] != order[8:]


def make_document(i):
    return f"document{i} " + "the harbor " * (5 + i)


@pytest.mark.parametrize("stop", [0, 1, 7, 29])
def test_resuming_gives_the_rest(tokenizer, text_folder, stop):
    sources = [Source(path=str(text_folder)), Source(path=str(text_folder / "0.txt"), weight=0.5)]
    settings = {"needles": Needles(share=0.3, keys=[1]), "length": 256}
    whole = take(sources, tokenizer, 40, **settings)
    position = json.loads(json.dumps(whole[stop].position))
    rest = take(sources, tokenizer, 39 - stop, start=position, **settings)
    assert all(map(same, whole[stop + 1 :], rest))


def test_weights_decide_the_share_of_rows(tokenizer, tmp_path):
    for name, word in (("a", "harbor "), ("b", "ledger ")):
        (tmp_path / f"{name}.txt").write_text(word * 3000)
    sources = [Source(path=str(tmp_path / "a.txt"), weight=3.0), Source(path=str(tmp_path / "b.txt"), weight=1.0)]
    found = take(sources, tokenizer, 400)
    share = np.mean(["harbor harbor" in tokenizer.decode(row.input_ids) for row in found])
    assert abs(share - 0.75) < 0.06


def test_needle_rows_are_one_document(tokenizer, text_folder):
    needles = Needles(share=0.5, keys=[1], kinds=["number"], forms={"facts": 1.0})
    plain = take(Source(path=str(text_folder)), tokenizer, 40, length=256)
    found = take(Source(path=str(text_folder)), tokenizer, 40, needles=needles, length=256)
    planted = [
        row for row, before in zip(found, plain, strict=True) if not np.array_equal(row.input_ids, before.input_ids)
    ]
    assert 10 <= len(planted) <= 30
    assert all(row.position_ids.tolist() == list(range(256)) for row in planted)
    assert all(re.search(r"(\d{2,}).*\1", tokenizer.decode(row.input_ids), re.DOTALL) for row in planted)


def test_rows_tell_answers_where_needles_say_so(tokenizer, text_folder):
    source = Source(path=str(text_folder))
    settings = {"kinds": ["number"], "keys": [1], "forms": {"numbered": 1.0}}
    plain = take(source, tokenizer, 30, needles=Needles(share=0.5, **settings), length=256)
    assert all(row.answers is None for row in plain)
    rows = take(source, tokenizer, 30, needles=Needles(share=0.5, answers="row", **settings), length=256)
    assert all(np.array_equal(row.input_ids, before.input_ids) for row, before in zip(rows, plain, strict=True))
    told = [row.answers != IGNORED for row in rows]
    assert 8 < sum(map(np.any, told)) < 22  # of 30 rows
    for row, where in zip(rows, told, strict=True):
        assert np.array_equal(row.answers[where], row.input_ids[where])
        assert not where.any() or re.search(r"\d\d", tokenizer.decode(row.input_ids[where]))


def test_rows_too_short_for_needles_are_refused_at_once(tokenizer, text_folder):
    with pytest.raises(DataError, match="the row has 64"):
        RowReader([Source(path=str(text_folder))], tokenizer, T, 0, needles=Needles(share=0.1))


def test_rows_too_short_for_one_draw_among_others_stay_text(tokenizer, text_folder):
    source = Source(path=str(text_folder))
    planted = Needles(share=1.0, keys=[1], kinds=["uuid"], forms={"facts": 1.0}, answers="row")
    found = take(source, tokenizer, 60, needles=planted, length=SHORT)
    told = [bool((row.answers != IGNORED).any()) for row in found]
    assert 0 < sum(told) < 60
    text = {row.input_ids.tobytes() for row in take(source, tokenizer, 60, length=SHORT)}
    assert all(row.input_ids.tobytes() in text for row, one in zip(found, told, strict=True) if not one)


def test_held_out_text_is_read_once_in_order_without_needles(tokenizer, text_folder):
    source = Source(path=str(text_folder))
    found = take(source, tokenizer, 10**6, role="valid", needles=Needles(share=1.0))
    text = tokenizer.decode(np.concatenate([row.input_ids for row in found]))
    assert text.startswith((text_folder / "0.txt").read_text()[:500])
    total = sum(len(tokenizer(f.read_text())["input_ids"]) + 1 for f in text_folder.iterdir())
    assert len(found) == total // T


def test_jsonl_and_parquet_give_the_same_documents(tokenizer, tmp_path):
    texts = [make_document(i) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"id": i, "body": t}) for i, t in enumerate(texts)) + "\n\n")
    pq.write_table(pa.table({"body": texts}), tmp_path / "a.parquet", row_group_size=7)
    found = [
        take(Source(path=str(tmp_path / name), field="body"), tokenizer, 999, role="valid")
        for name in ("a.jsonl", "a.parquet")
    ]
    assert len(found[0]) == len(found[1]) > 3
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_chat_loss_mask(tokenizer, tmp_path):
    talk = [
        {"role": "user", "content": "who walked?"},
        {"role": "assistant", "content": "the keeper"},
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "before dawn"},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    row = take(Source(path=str(path), kind="chat"), tokenizer, 1, loss_mask="assistant", length=80)[0]
    text = tokenizer.decode(row.labels[row.labels != -100])
    assert text.startswith("the keeper[end]before dawn[end]")
    everything = take(Source(path=str(path), kind="chat"), tokenizer, 1, length=80)[0]
    assert (everything.labels != -100).sum() > (row.labels != -100).sum()


def test_plain_text_counts_in_full_beside_chat(tokenizer, text_folder):
    for row in take(Source(path=str(text_folder)), tokenizer, 5, loss_mask="assistant"):
        assert (row.labels != -100).sum() == (row.position_ids != 0).sum()


def test_a_template_that_rewrites_turns_is_refused(tokenizer):
    import copy

    odd = copy.deepcopy(tokenizer)
    odd.chat_template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    talk = [
        {"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "d"))
    ]
    with pytest.raises(DataError, match="rewrites earlier turns"):
        Encoder(odd).encode([Document(messages=talk, where="x")])


def test_stack_makes_tensors(tokenizer, text_folder):
    batch = stack(take(Source(path=str(text_folder)), tokenizer, 3))
    assert {name: tuple(t.shape) for name, t in batch.items()} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), (3, T)
    )


def sampling(folder):
    return SamplingTeacher(str(folder), None, lambda: open_checkpoint(folder))


def test_teacher_text_is_sampled_once_and_cached(tokenizer, teacher_folder, monkeypatch):
    source = Source(kind="teacher", rows=5, length=24)
    teacher = sampling(teacher_folder)
    first = take(source, tokenizer, 6, teacher=teacher)
    with monkeypatch.context() as patch:
        patch.setattr(SamplingTeacher, "load", lambda self: pytest.fail("sampled again"))
        assert all(map(same, first, take(source, tokenizer, 6, teacher=teacher)))
        assert not all(map(same, first, take(source, tokenizer, 6, teacher=teacher, order=1)))
    (cache,) = (cache_folder() / "teacher-samples").glob("*.npz")
    cache.write_bytes(cache.read_bytes()[:-30])
    assert all(map(same, first, take(source, tokenizer, 6, teacher=teacher)))  # sampled anew


def test_teacher_text_is_what_the_model_says_whatever_it_would_forbid(tokenizer, teacher_folder, tmp_path, monkeypatch):
    """Tokens that its own settings keep out are part of its distribution; settings that make no sense cost nothing."""
    source, texts = Source(kind="teacher", rows=5, length=24), []
    for settings in ({}, {"suppress_tokens": list(range(2, 90))}, {"max_new_tokens": "x"}):
        folder = shutil.copytree(teacher_folder, tmp_path / str(len(texts)))
        (folder / "generation_config.json").write_text(json.dumps(settings))
        monkeypatch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        texts.append(take(source, tokenizer, 6, teacher=sampling(folder)))
    assert all(map(same, texts[0], texts[1]))
    assert all(map(same, texts[0], texts[2]))


def test_teacher_text_differs_between_training_and_held_out(tokenizer, teacher_folder):
    source = Source(kind="teacher", rows=6, length=40)
    train, valid = (
        RowReader([source], tokenizer, 16, 0, role=role, teacher=sampling(teacher_folder))._corpora[0].read(0)[0].ids
        for role in ("train", "valid")
    )
    assert not np.array_equal(train, valid)
    assert train[0] == 1
    assert len(train) <= 40
    assert 0 not in train[1:-1]


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """A hub that cannot be reached, and an empty cache; waiting fails."""
    import datasets

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    return tmp_path / "cache"


def test_hub_datasets(tokenizer, monkeypatch, unreachable):
    import datasets

    texts = [make_document(i) for i in range(200)]

    def fake(path, name, *, split, streaming):
        assert (path, name) == ("owner/corpus", "config")
        data = datasets.Dataset.from_dict({"text": texts})
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr(datasets, "load_dataset", fake)
    table, stream = (
        take(Source(path="owner/corpus", name="config", streaming=streaming), tokenizer, 60)
        for streaming in (False, True)
    )
    for found, streaming in ((table, False), (stream, True)):
        again = take(Source(path="owner/corpus", name="config", streaming=streaming), tokenizer, 60)
        assert all(map(same, found, again))
        source = Source(path="owner/corpus", name="config", streaming=streaming)
        rest = take(source, tokenizer, 20, start=found[39].position)
        assert all(map(same, found[40:], rest))
    with pytest.raises(DataError, match="no column 'body'"):
        take(Source(path="owner/corpus", name="config", field="body"), tokenizer, 1)


def test_a_dataset_that_the_hub_does_not_have_is_found_before_anything_is_read(monkeypatch):
    """The hub tells of a dataset once. Where it cannot be asked, the cache must have it."""
    right, wrong = Source(path="owner/corpus"), Source(path="owner/corups")
    with FakeHub() as hub:
        hub.datasets.add("owner/corpus")
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
        check_sources([right])
        with pytest.raises(DataError, match="owner/corups is neither a file, a folder nor a dataset on the hub"):
            check_sources([right, wrong])
        check_sources([right, right])
        asked = [request for request in hub.requests if "datasets" in request]
        assert asked == [f"GET /api/datasets/owner/{name}" for name in ("corpus", "corups")]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    check_sources([right])
    with pytest.raises(HubError, match=r"the hub cannot be reached for owner/corups at http://127.0.0.1:9"):
        check_sources([right, wrong])


def test_a_hub_that_cannot_be_reached_is_asked_once(tokenizer, unreachable):
    import datasets

    with pytest.raises(HubError, match="the hub cannot be reached for owner/elsewhere at"):
        take(Source(path="owner/elsewhere"), tokenizer, 1)
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_dataset_of_the_cache_is_read_where_the_hub_cannot_be_reached(tokenizer, unreachable, tmp_path):
    import datasets

    (tmp_path / "kept.jsonl").write_text("".join(json.dumps({"text": make_document(i)}) + "\n" for i in range(200)))
    made = datasets.load_dataset("json", data_files=str(tmp_path / "kept.jsonl"), cache_dir=str(tmp_path / "made"))
    (table,) = (Path(file["filename"]) for file in made["train"].cache_files)
    folder = shutil.copytree(table.parent, unreachable / "owner___kept" / "default" / "0.0.0" / "made")
    (folder / table.name).rename(folder / "kept-train.arrow")
    source = Source(path="owner/kept")
    check_sources([source])
    assert len(take(source, tokenizer, 20)) == 20


def test_a_hub_dataset_is_told_by_its_content(tmp_path):
    import datasets

    def digest(*parts, **more):
        pieces = [datasets.Dataset.from_dict({"text": part, **more}) for part in parts]
        table = HubTable(Source(path="owner/corpus"), datasets.concatenate_datasets(pieces), "text", None)
        return table.fingerprint()

    assert digest(["one", "two"]) == digest(["one"], ["two"])
    assert digest(["one", "two"]) == digest(["one", "two"], other=[1, 2])
    assert digest(["one", "two"]) != digest(["one", "tow"])
    assert digest(["one", "two"]) != digest(["onet", "wo"])
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    assert saved.cache_files
    assert HubTable(Source(path="owner/corpus"), saved, "text", None).fingerprint() == digest(["one", "two"])


def test_rows_is_the_short_form(tokenizer, text_folder):
    sources = [Source(path=str(text_folder))]
    assert same(next(rows(sources, tokenizer, T, 3)), take(sources, tokenizer, 1, seed=3)[0])


def bad_inputs(folder):
    (folder / "empty.txt").write_text("")
    (folder / "blank.txt").write_text(" \n\n ")
    (folder / "binary.txt").write_bytes(b"text\0more")
    (folder / "latin.txt").write_bytes("caf\u00e9 au lait".encode("latin1"))
    (folder / "cut.txt").write_bytes("caf\u00e9".encode()[:-1])
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "other.jsonl").write_text('{"body": "fine"}\n')
    (folder / "number.jsonl").write_text('{"text": 3}\n')
    (folder / "broken.parquet").write_bytes(b"PAR1 not really")
    pq.write_table(pa.table({"body": ["x"]}), folder / "other.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "none.parquet")
    (folder / "half.jsonl").write_text('{"text": "a\\ud800"}\n')
    (folder / "huge.jsonl").write_text('{"text": "a", "n": ' + "9" * 5000 + "}\n")
    (folder / "deep.jsonl").write_text("[" * 100_000 + "\n")
    pq.write_table(pa.table({"text": ["x" * 4000]}), folder / "page.parquet", compression="none", use_dictionary=False)
    page = (folder / "page.parquet").read_bytes()
    (folder / "page.parquet").write_bytes(page.replace(b"x" * 4000, b"\xff" * 4000))
    (folder / "table.csv").write_text("text\na\n")
    (folder / "table.json").write_text('[{"text": "a"}]')
    (folder / "nothing").mkdir()
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.txt").write_text("fine")
    pq.write_table(pa.table({"text": ["x"]}), folder / "mixed" / "b.parquet")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.txt", "empty.txt is empty"),
        ("blank.txt", "the text has no documents"),
        ("binary.txt", "binary.txt is binary: zero byte at offset 4"),
        ("latin.txt", "latin.txt is not UTF-8: byte 0xe9 at offset 3"),
        ("cut.txt", "cut.txt is not UTF-8: byte 0xc3 at offset 3"),
        ("bad.jsonl", "bad.jsonl at byte 17: not JSON"),
        ("other.jsonl", "no column 'text'"),
        ("number.jsonl", "is int, not text"),
        ("broken.parquet", "broken.parquet is damaged"),
        ("other.parquet", "no column 'text'"),
        ("none.parquet", "has no rows"),
        ("nothing", "nothing holds no text"),
        ("mixed", "mixes .parquet with other files"),
        ("absent.txt", "absent.txt does not exist"),
        ("half.jsonl", "half.jsonl at byte 0: column 'text' has half a character at position 1"),
        ("huge.jsonl", "huge.jsonl at byte 0: not JSON"),
        ("deep.jsonl", "deep.jsonl at byte 0: not JSON .nested too deeply"),
        ("page.parquet", "page.parquet, row group 0 is damaged"),
        ("table.csv", "table.csv is a .csv file, not running text"),
        ("table.json", "table.json is a .json file, not running text"),
    ],
)
def test_bad_input_is_named(tokenizer, tmp_path, name, message):
    bad_inputs(tmp_path)
    with pytest.raises(DataError, match=message):
        take(Source(path=str(tmp_path / name)), tokenizer, 1)


def test_a_bad_byte_far_into_a_file_is_found_at_its_offset(tokenizer, tmp_path):
    data = bytearray("\u00e9".encode() * 5_000_000)
    data[8_388_609:8_388_609] = b"\xff"
    (tmp_path / "big.txt").write_bytes(data)
    with pytest.raises(DataError, match="byte 0x"):
        take(Source(path=str(tmp_path / "big.txt")), tokenizer, 1)


def test_a_foreign_tokenizer_is_refused(tokenizer, text_folder):
    with pytest.raises(DataError, match="highest token id is 319, the model embeds 100"):
        RowReader([Source(path=str(text_folder))], tokenizer, T, 0, vocab_size=100)


def test_plain_text_as_chat_is_refused(tokenizer, text_folder):
    with pytest.raises(DataError, match="kind: chat"):
        take(Source(path=str(text_folder), kind="chat"), tokenizer, 1)


def test_no_sources_and_short_held_out_text(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"no text in data\.train"):
        RowReader([], tokenizer, T, 0)
    (tmp_path / "a.txt").write_text("the keeper")
    with pytest.raises(DataError, match="shorter than one row of 64"):
        take(Source(path=str(tmp_path / "a.txt")), tokenizer, 1, role="valid")


def test_held_out_sources_are_read_in_turn(tokenizer, tmp_path):
    """So that the first tokens are of all of them; what the shorter lacks comes from the longer."""
    for name, letter, count in (("a.txt", "a", 200), ("b.txt", "b", 500)):
        (tmp_path / name).write_text(f"{letter} " * count)
    sources = [Source(path=str(tmp_path / name)) for name in ("a.txt", "b.txt")]
    alone = [[row.input_ids for row in RowReader([one], tokenizer, T, 0, role="valid").rows()] for one in sources]
    both = [row.input_ids for row in RowReader(sources, tokenizer, T, 0, role="valid").rows()]
    first, second = alone
    assert 1 < len(first) < len(second)
    expected = [ids for pair in zip(first, second, strict=False) for ids in pair] + second[len(first) :]
    assert all(map(np.array_equal, both, expected))
    assert len(both) == len(expected)
