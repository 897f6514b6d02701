"""What leaves the machine names files, and never says where they lie."""

import pytest

from sse_convert.export.published import is_absolute, is_path, paths_in, published


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "books.txt").touch()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/data/clients/contracts.jsonl", "./contracts.jsonl"),
        ("../clients/contracts.jsonl", "./contracts.jsonl"),
        ("texts/books.txt", "./books.txt"),
        ("/data/two words/a b.txt", "./a b.txt"),
        ("/data/a/one.txt, /data/a/two.txt", "./one.txt, ./two.txt"),
        ("run of /home/ada/x/recipe.yaml, again", "run of ./recipe.yaml, again"),
        ("(/home/ada)", "(~)"),
        ("file:/home/ada/a.txt", "file:./a.txt"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("984 tokens/s, /no_think", "984 tokens/s, /no_think"),
        ("as in /mnt/other/notes.txt: and/or more", "as in ./notes.txt: and/or more"),
        (r"C:\Users\ada\contracts.jsonl", "./contracts.jsonl"),
        ("C:/Users/ada/contracts.jsonl", "./contracts.jsonl"),
        (r"\\server\share\two words.jsonl", "./two words.jsonl"),
        (r"as in D:\runs\notes.txt: again", "as in ./notes.txt: again"),
        (r"\\ \frac{a}{b}: \alpha", r"\\ \frac{a}{b}: \alpha"),
    ],
)
def test_texts(text, told):
    assert published(text) == told
    assert published(told) == told


def test_plain_data_keeps_its_form():
    data = {"/data/a/q.jsonl": "boxed", 3: ["/data/a", None, True, 1.5], "deep": {"path": "texts/books.txt"}}
    assert published(data) == {"./q.jsonl": "boxed", 3: ["./a", None, True, 1.5], "deep": {"path": "./books.txt"}}


def test_places_are_found_in_sentences():
    assert published("from out of way/model at last", ["out of way/model"]) == "from ./model at last"


def test_what_is_a_path():
    assert paths_in({"a": ["/x/y", "b"], "./c": 1}) == {"/x/y", "./c"}
    assert not is_path("two\nlines /a/b")
    assert not is_path("owner/name")
    assert [path for path in ("/x", "C:\\x", "x/y", "./x") if is_absolute(path)] == ["/x", "C:\\x"]
