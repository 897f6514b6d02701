"""What a plan says of a recipe's text is what `run` would say."""

from pathlib import Path

import huggingface_hub
import pytest

from sse_convert import api
from sse_convert.data import text_files
from sse_convert.data.overlap import overlap
from sse_convert.data.rows import check_sources
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Data, Source
from sse_convert.surgery import text_notes as module
from sse_convert.surgery.text_notes import text_notes
from tests.fake_hub import FakeHub
from tests.surgery import models

TEACHER = Path(__file__).parents[2] / "demo" / "teacher"
LONG = "A document of more than sixty-four characters, so that it is nothing that stands in two texts by chance."


def data(train, valid=()):
    return Data(train=[Source(path=str(path)) for path in train], valid=[Source(path=str(path)) for path in valid])


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


EMPTY = "{} is empty; remove the file, or put text into it"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty.txt", EMPTY.format("empty.txt")),
        ("empty.parquet", EMPTY.format("empty.parquet")),
        ("texts", EMPTY.format("texts/b.md")),
        ("none", "none holds no text; add text or correct the path"),
    ],
)
def test_empty_text_is_refused_in_the_words_of_run(tmp_path, monkeypatch, name, words):
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "empty.parquet", "")
    write(tmp_path / "texts" / "a.txt", LONG)
    write(tmp_path / "texts" / "b.md", "")
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(text_files, "check_text", lambda path: pytest.fail("read"))
    found = data([tmp_path / name])
    with pytest.raises(DataError) as caught:
        check_sources(found.train)
    (note,) = text_notes(found)
    assert note == f"`run` refuses this recipe: {caught.value.what}; {caught.value.fix}"
    assert note.endswith(f"{tmp_path}/{words}")
    assert text_notes(Data(valid=found.train)) == [note]


def test_text_that_is_not_here_is_for_others_to_note(tmp_path):
    assert text_notes(data([tmp_path / "absent.txt"])) == []
    assert text_notes(Data(train=[Source(kind="teacher")])) == []


@pytest.fixture
def hub(monkeypatch):
    """A hub that has a dataset."""
    with FakeHub() as hub:
        hub.datasets.add("owner/books")
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
        yield hub


@pytest.mark.parametrize("most", [module.MOST_BYTES, 1])
def test_a_folder_that_is_not_here_could_be_a_dataset(tmp_path, monkeypatch, hub, most):
    """Whatever else there is to say."""
    monkeypatch.setattr(module, "MOST_BYTES", most)
    same = write(tmp_path / "same.txt", LONG)
    refused, other = text_notes(data(["owner/books", "texts/train", same], [same]))
    assert refused.startswith("`run` refuses this recipe: texts/train is neither a file, a folder nor a dataset on the")
    assert other.startswith("data.train has 1 file of data.valid" if most > 1 else "208 B of local text are not read")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    (refused,) = text_notes(data(["texts/train"]))
    assert refused.startswith(
        "`run` refuses this recipe: the hub cannot be reached for texts/train at http://127.0.0.1:9"
    )
    assert refused.endswith("if a folder is meant, there is none of that name here")


def test_the_plan_says_it(tmp_path):
    empty = write(tmp_path / "empty.txt", "")
    layers, text = {"pattern": ["sse+sliding"]}, {"train": [{"path": str(empty)}]}
    recipe = models.recipe(TEACHER, layers=layers, mixers={}, data=text, calibrate={"enabled": False})
    assert f"note: `run` refuses this recipe: {empty} is empty; remove" in "\n".join(api.plan(recipe).lines())


@pytest.mark.usefixtures("hub")
def test_text_in_both_is_warned_of_as_run_does(tmp_path):
    same = write(tmp_path / "same.txt", LONG)
    other = write(tmp_path / "other.txt", f"Another text. {LONG}")
    for found in (data([same], [same]), data(["owner/books", same], ["owner/books"])):
        expected = overlap(found.train, found.valid)
        assert len(expected) == 1
        assert text_notes(found) == expected
    assert text_notes(data([same], [other])) == []


def test_text_elsewhere_hides_no_text_in_both(tmp_path):
    same = write(tmp_path / "same.txt", LONG)
    (note,) = text_notes(data([tmp_path / "absent.txt", same], [tmp_path / "missing.txt", same]))
    assert note == f"data.train has 1 file of data.valid as well, such as {same}"


def test_unusable_text_is_refused_as_run_does(tmp_path):
    binary = write(tmp_path / "binary.txt", "a\0")
    (note,) = text_notes(data([binary]))
    assert note.startswith(f"`run` refuses this recipe: {binary} is binary: zero byte at offset 1")


def test_large_text_is_left_to_run(tmp_path, monkeypatch):
    same = write(tmp_path / "same.txt", LONG)
    monkeypatch.setattr(module, "MOST_BYTES", 2 * len(LONG) - 1)
    monkeypatch.setattr(text_files, "check_text", lambda path: pytest.fail("read"))
    (note,) = text_notes(data([same], [same]))
    assert note == "208 B of local text are not read here: `run` looks for mistakes, and for what data.valid shares"


def test_text_in_the_users_own_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "books.txt", f"{LONG}\n\n" * 20)
    own = data(["~/books.txt"], ["~/books.txt"])
    check_sources([*own.train, *own.valid])
    assert text_notes(own) == overlap(own.train, own.valid) != []
