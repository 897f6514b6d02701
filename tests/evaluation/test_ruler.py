"""The texts of RULER against the published wording and settings."""

import random
import re
import sys
import uuid

import pytest

from sse_convert.errors import DataError, DependencyError
from sse_convert.evaluation.ruler import (
    DEPTHS,
    NOISE,
    RULER_TASKS,
    Material,
    RulerTask,
    load_material,
    make_text,
    more_values,
)
from tests.evaluation.cases import MATERIAL

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")


def text_of(name, size=60, seed=0):
    return make_text(random.Random(seed), RULER_TASKS[name], size, MATERIAL)


def test_one_answer_is_asked_for_in_the_published_singular():
    text = text_of("niah_single_1")
    key = NEEDLE.search(text.question)[2]
    first, *lines, last = text.question.split("\n")
    assert first == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert last == f"What is the special magic number for {key} mentioned in the provided text?"
    assert text.lead == f" The special magic number for {key} mentioned in the provided text is"
    assert len(lines) == 61
    assert lines.count(NOISE) == 60
    place = next(i for i, line in enumerate(lines) if line != NOISE)
    assert lines[place] == f"One of the special magic numbers for {key} is: {text.answers[0]}."
    assert text.depth == place / 60


def test_several_answers_are_asked_for_in_the_published_plural():
    text = text_of("niah_multiquery", 400)
    keys = dict(NEEDLE.findall(text.question)[i][1:] for i in range(4))
    assert text.question.startswith("Some special magic numbers are hidden within the following text.")
    asked = text.question.rsplit("\n", 1)[1]
    query = re.fullmatch(r"What are all the special magic numbers for (.*) mentioned in the provided text\?", asked)[1]
    assert text.lead == f" The special magic numbers for {query} mentioned in the provided text are"
    a, b, c, d = re.fullmatch(r"(\S+), (\S+), (\S+), and (\S+)", query).groups()
    assert text.answers == tuple(keys[key] for key in (a, b, c, d))
    assert text.depth is None


@pytest.mark.parametrize(
    ("name", "keys", "values", "answers", "kind"),
    [
        ("niah_single_2", 1, 1, 1, "numbers"),
        ("niah_single_3", 1, 1, 1, "uuids"),
        ("niah_multikey_1", 4, 1, 1, "numbers"),
        ("niah_multivalue", 1, 4, 4, "numbers"),
        ("niah_multiquery", 4, 1, 4, "numbers"),
    ],
)
def test_needles_in_running_text(name, keys, values, answers, kind):
    text = text_of(name, 900)
    found = NEEDLE.findall(text.question)
    assert len(found) == keys * values
    assert {entry[0] for entry in found} == {kind}
    assert len({entry[1] for entry in found}) == keys
    assert len(text.answers) == answers
    assert sorted([*text.answers, *text.others]) == sorted(entry[2] for entry in found)
    context = text.question.split("\n")[1]
    plain = " ".join(NEEDLE.sub("", context).split())
    assert plain == " ".join((MATERIAL.essay * 10)[:900])
    if answers == 1:
        sentences = re.split(r"(?<=[.!?])\s+", plain)
        assert text.depth in {int(len(sentences) * depth / 100) / len(sentences) for depth in DEPTHS}


@pytest.mark.parametrize(("name", "kind"), [("niah_multikey_2", "numbers"), ("niah_multikey_3", "uuids")])
def test_haystacks_of_needles(name, kind):
    text = text_of(name)
    context = text.question.split("\n")[1:-1]
    found = [NEEDLE.fullmatch(line).groups() for line in context]
    assert len(found) == 61
    assert {entry[0] for entry in found} == {kind}
    assert sorted([*text.answers, *text.others]) == sorted(entry[2] for entry in found)
    asked = next(entry for entry in found if entry[2] == text.answers[0])
    assert f" for {asked[1]} mentioned" in text.lead
    if kind == "uuids":
        assert all(uuid.UUID(part).version == 4 for entry in found for part in entry[1:])
    else:
        assert all(10**6 <= int(entry[2]) < 10**7 for entry in found)


def test_the_settings_are_the_published_ones():
    rows = [(t.haystack, t.key, t.value, t.keys, t.values, t.queries) for t in RULER_TASKS.values()]
    assert rows == [
        ("noise", "words", "numbers", 1, 1, 1),
        ("essay", "words", "numbers", 1, 1, 1),
        ("essay", "words", "uuids", 1, 1, 1),
        ("essay", "words", "numbers", 4, 1, 1),
        ("needle", "words", "numbers", 1, 1, 1),
        ("needle", "uuids", "uuids", 1, 1, 1),
        ("essay", "words", "numbers", 1, 4, 1),
        ("essay", "words", "numbers", 4, 1, 4),
    ]
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1], len(set(DEPTHS))) == (0, 3, 100, 40)


def test_equal_seeds_give_equal_texts():
    assert text_of("niah_multikey_1", 200) == text_of("niah_multikey_1", 200)
    assert text_of("niah_multikey_1", 200) != text_of("niah_multikey_1", 200, seed=1)


def test_wrong_values_come_from_the_text_first():
    rng = random.Random(0)
    text = text_of("niah_multikey_1", 200)
    wrong = more_values(rng, RULER_TASKS["niah_multikey_1"], text, 9, MATERIAL)
    assert len(set(wrong)) == 9
    assert set(wrong[:3]) == set(text.others)
    assert text.answers[0] not in wrong
    assert set(more_values(rng, RULER_TASKS["niah_multikey_2"], text_of("niah_multikey_2"), 9, MATERIAL)) <= set(
        text_of("niah_multikey_2").others
    )


def test_more_needles_than_lines_cannot_be():
    with pytest.raises(ValueError, match="larger than population"):
        make_text(random.Random(0), RulerTask(haystack="noise", keys=4), 3, MATERIAL)


def test_the_published_word_lists():
    pytest.importorskip("wonderwords")
    material = load_material(None)
    assert (len(material.adjectives), len(material.nouns)) == (910, 6782)
    assert material.essay == ()


def test_essays_are_the_users_text(tmp_path):
    pytest.importorskip("wonderwords")
    (tmp_path / "a.txt").write_text("One  two.\nThree")
    (tmp_path / "b.txt").write_text("four!")
    assert load_material(str(tmp_path)).essay == ("One", "two.", "Three", "four!")
    with pytest.raises(DataError, match="does not exist"):
        load_material(str(tmp_path / "absent"))


def test_without_word_lists_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(DependencyError, match="wonderwords") as caught:
        load_material(None)
    assert caught.value.fix == "pip install 'sse-convert[eval]'"


def test_material_of_tests_is_long_enough():
    assert isinstance(MATERIAL, Material)
    assert len(MATERIAL.essay) * 10 > 900
