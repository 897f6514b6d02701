import json
import random
import re

import pytest

from sse_convert.data import needle
from sse_convert.errors import DataError
from sse_convert.recipe.schema import Needles

WORDS = needle.load_words()


def test_no_word_is_both_a_training_and_an_evaluation_key():
    assert not set(WORDS.train) & set(WORDS.held_out)
    assert len(WORDS.train) > 500
    assert len(WORDS.held_out) > 50


def test_split_depends_on_the_word_alone(tmp_path):
    file = tmp_path / "words.json"
    some = [*WORDS.train[5:20], *WORDS.held_out[3:9], "zymurgy"]
    file.write_text(json.dumps(some))
    split = needle.load_words(file)
    assert set(split.held_out) - {"zymurgy"} == set(WORDS.held_out[3:9])
    assert set(split.train) - {"zymurgy"} == set(WORDS.train[5:20])


@pytest.mark.parametrize("seq_len", [120, 121, 333, 1024])
@pytest.mark.parametrize("kind", ["number", "word", "code"])
@pytest.mark.parametrize("keys", [1, 4, 8])
def test_rows_have_exactly_the_asked_length(tokenizer, bos_tokenizer, haystack, seq_len, kind, keys):
    for tok in (tokenizer, bos_tokenizer):
        row = needle.training_row(
            random.Random(seq_len), haystack, seq_len, Needles(keys=[keys], kinds=[kind]), tok, WORDS
        )
        assert len(row) == seq_len
        if seq_len == 1024:
            sample = needle.evaluation_sample(
                random.Random(1), haystack, seq_len, kind=kind, keys=keys, tokenizer=tok, words=WORDS
            )
            assert len(sample.token_ids) == seq_len


def test_training_row_asks_every_needle_and_answers_rightly(tokenizer, haystack):
    row = needle.training_row(random.Random(3), haystack, 1500, Needles(keys=[8], kinds=["code"]), tokenizer, WORDS)
    text = tokenizer.decode(row)
    facts = dict(re.findall(r"magic codes for (\w+) is: ([0-9a-f]{12})\.", text))
    asked = re.findall(r"\nWhat is the special magic code for (\w+)\? The special magic code for \1 is: (\w+)\.", text)
    assert len(facts) == len(asked) == 8
    assert facts == dict(asked)
    assert set(facts) <= set(WORDS.train)
    assert text.endswith(f"{asked[-1][0]} is: {asked[-1][1]}.")


def test_early_questions_stand_in_the_text_after_their_needle(tokenizer, haystack):
    early = total = 0
    for seed in range(20):
        settings = Needles(keys=[6], kinds=["number"], early=0.5)
        row = needle.training_row(random.Random(seed), haystack, 1500, settings, tokenizer, WORDS)
        assert len(row) == 1500
        text = tokenizer.decode(row)
        planted = {m[1]: (m.end(), m[2]) for m in re.finditer(r"numbers for (\w+) is: (\d+)\.", text)}
        asked = list(
            re.finditer(
                r"\nWhat is the special magic number for (\w+)\? The special magic number for \1 is: (\d+)\.", text
            )
        )
        assert len(planted) == len(asked) == 6
        assert all(planted[m[1]][0] <= m.start() and planted[m[1]][1] == m[2] for m in asked)
        tail = re.search(r"(\nWhat is the special magic [^\n]*\.)*$", text)
        early += sum(m.start() < tail.start() for m in asked)
        total += len(asked)
    assert 0.3 < early / total < 0.7


def test_a_share_of_early_questions_disturbs_no_other_draw(tokenizer, haystack):
    rows = [
        needle.training_row(random.Random(9), haystack, 700, Needles(keys=[4], early=early), tokenizer, WORDS)
        for early in (0.0, 1e-12)
    ]
    assert rows[0] == rows[1]


def test_short_training_row_keeps_one_needle_with_its_question(tokenizer, haystack):
    row = needle.training_row(random.Random(3), haystack, 130, Needles(keys=[8], kinds=["number"]), tokenizer, WORDS)
    text = tokenizer.decode(row)
    (key, value), *others = re.findall(r"magic number for (\w+) is: (\d+)", text)
    assert not others
    assert f"numbers for {key} is: {value}." in text


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (700, None),
        (350, None),
        (330, "a row of 330 tokens with 8 needles (number) has room to ask for 3 of them"),
        (130, "a row of 130 tokens with 8 needles (number) has room to ask for 1 of them"),
    ],
)
def test_rows_that_are_short_for_their_needles(tokenizer, length, expected):
    assert needle.crowding(length, Needles(keys=[1, 8], kinds=["number"]), tokenizer, WORDS) == expected


def test_no_more_needles_than_words_are_looked_for(tokenizer):
    assert needle.crowding(10**6, Needles(keys=[10**4], kinds=["number"]), tokenizer, WORDS) is None


def test_evaluation_sample_asks_a_held_out_key_and_ends_with_the_answer(tokenizer, haystack):
    sample = needle.evaluation_sample(
        random.Random(5), haystack, 900, kind="number", keys=4, tokenizer=tokenizer, words=WORDS
    )
    text = tokenizer.decode(sample.token_ids)
    key = re.search(r"\nWhat is the special magic number for (\w+)\?", text)[1]
    value = re.search(rf" One of the special magic numbers for {key} is: (\d+)\.", text)[1]
    assert key in WORDS.held_out
    assert tokenizer.decode(sample.token_ids[-sample.answer_len :]) == f" {value}."
    assert text.endswith(f"The special magic number for {key} is: {value}.")


def test_depth_is_the_share_of_text_before_the_needle(tokenizer, haystack):
    for low in (0.0, 0.4, 0.8):
        sample = needle.evaluation_sample(
            random.Random(7),
            haystack,
            1000,
            kind="number",
            keys=1,
            tokenizer=tokenizer,
            words=WORDS,
            depths=(low, low + 0.2),
        )
        text = tokenizer.decode(sample.token_ids)
        planted = tokenizer(re.search(r" One of the special magic numbers for \w+ is: \d+\.", text)[0]).input_ids
        tail = tokenizer(text[text.index("\nWhat is the special") :]).input_ids
        row = list(sample.token_ids)
        cut = next(i for i in range(len(row)) if row[i : i + len(planted)] == planted)
        assert sample.depth == cut / (len(row) - len(planted) - len(tail))
        assert low <= sample.depth <= low + 0.2


def test_equal_seeds_give_equal_rows(tokenizer, haystack):
    rows = [needle.training_row(random.Random(9), haystack, 300, Needles(), tokenizer, WORDS) for _ in range(2)]
    assert rows[0] == rows[1]


def test_bos_stands_first_where_the_tokenizer_adds_one(bos_tokenizer, tokenizer, haystack):
    row = needle.training_row(random.Random(0), haystack, 300, Needles(keys=[1]), bos_tokenizer, WORDS)
    assert row[0] == bos_tokenizer.bos_token_id
    assert row.count(bos_tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in needle.training_row(
        random.Random(0), haystack, 300, Needles(keys=[1]), tokenizer, WORDS
    )


def test_rows_too_short_or_text_too_short_say_what_is_needed(tokenizer, haystack):
    with pytest.raises(DataError, match=r"need \d+ tokens, the row has 20"):
        needle.training_row(random.Random(0), haystack, 20, Needles(), tokenizer, WORDS)
    with pytest.raises(DataError, match="text for needle rows has 30 tokens"):
        needle.evaluation_sample(
            random.Random(0), haystack[:30], 500, kind="number", keys=1, tokenizer=tokenizer, words=WORDS
        )
    with pytest.raises(DataError, match="5000 needle keys"):
        needle.evaluation_sample(
            random.Random(0), haystack, 500, kind="number", keys=5000, tokenizer=tokenizer, words=WORDS
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not JSON"),
        ('{"a": 1}', "not a list of words"),
        ('["apple", ""]', "not a list of words"),
        ('["apple", "apple"]', "duplicates"),
        ('["apple"]', "1 words split into"),
    ],
)
def test_bad_word_files_are_named(tmp_path, content, message):
    file = tmp_path / "words.json"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        needle.load_words(file)
    with pytest.raises(DataError, match="cannot be read"):
        needle.load_words(tmp_path / "absent.json")


def test_sentencepiece_style_tokenizers_splice_question_and_answer_as_one_text(haystack):
    class Prefixing:
        """Adds a word mark before any text, as SentencePiece does: encoding an answer alone adds a stray token."""

        bos_token_id = None

        def __call__(self, text, add_special_tokens=True):
            if isinstance(text, list):
                return {"input_ids": [self(one)["input_ids"] for one in text]}
            return {"input_ids": [1 + ord(c) for c in "_" + text] if text else []}

    sample = needle.evaluation_sample(
        random.Random(0), haystack, 1000, kind="number", keys=1, tokenizer=Prefixing(), words=WORDS
    )
    tail = "".join(chr(i - 1) for i in sample.token_ids[-60:])
    assert re.search(r" is: \d{7}\.$", tail)
    assert sample.answer_len == 9
