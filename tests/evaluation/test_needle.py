import json
import random
import re

import pytest

from sse_convert.data import needle
from sse_convert.errors import DataError

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


@pytest.mark.parametrize("kind", ["number", "word", "code"])
@pytest.mark.parametrize("keys", [1, 4, 8])
def test_rows_have_exactly_the_asked_length(tokenizer, bos_tokenizer, haystack, kind, keys):
    for tok in (tokenizer, bos_tokenizer):
        sample = needle.evaluation_sample(
            random.Random(1), haystack, 1024, kind=kind, keys=keys, tokenizer=tok, words=WORDS
        )
        assert len(sample.token_ids) == 1024


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


def test_rows_too_short_or_text_too_short_say_what_is_needed(tokenizer, haystack):
    with pytest.raises(DataError, match=r"need \d+ tokens, the row has 20"):
        needle.evaluation_sample(
            random.Random(0), haystack, 20, kind="number", keys=1, tokenizer=tokenizer, words=WORDS
        )
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

        def __call__(self, text, add_special_tokens=True, verbose=True):
            if isinstance(text, list):
                return {"input_ids": [self(one)["input_ids"] for one in text]}
            return {"input_ids": [1 + ord(c) for c in "_" + text] if text else []}

    sample = needle.evaluation_sample(
        random.Random(0), haystack, 1000, kind="number", keys=1, tokenizer=Prefixing(), words=WORDS
    )
    tail = "".join(chr(i - 1) for i in sample.token_ids[-60:])
    assert re.search(r" is: \d{7}\.$", tail)
    assert sample.answer_len == 9
