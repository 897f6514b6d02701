"""Training rows that plant something to be recalled: every form, and none in the wording of an evaluation."""

import random
import re

import pytest

from sse_convert.data import recall_templates
from sse_convert.data.needle import KeyWords, load_words, needle_text, question_text
from sse_convert.data.recall_forms import FORMS, Draw
from sse_convert.data.recall_rows import crowding, recall_row
from sse_convert.errors import DataError
from sse_convert.recipe.schema import FORM_WEIGHTS, Needles
from sse_convert.selection.recall_probes import NEEDLE, QUESTION

WORDS = load_words()
KINDS = ["number", "word", "code", "uuid"]


@pytest.fixture(scope="module")
def haystack(tokenizer):
    sentence = "The keeper of the lighthouse walked down to the harbor, and wrote down each ship that passed. "
    return tokenizer(sentence * 400, add_special_tokens=False)["input_ids"]


@pytest.fixture
def row(tokenizer, haystack):
    def make(seed=0, length=1500, words=WORDS, text=haystack, tok=tokenizer, **settings):
        return recall_row(random.Random(seed), text, length, Needles(**settings), tok, words)

    return make


def answers_of(row):
    """Position and tokens of each answer."""
    found, start = [], None
    for i, answer in enumerate([*row.answers, False]):
        if answer and start is None:
            start = i
        if not answer and start is not None:
            found.append((start, row.token_ids[start:i]))
            start = None
    return found


def test_the_recipe_names_every_form():
    assert set(FORM_WEIGHTS) == set(FORMS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [300, 301, 1024])
def test_rows_have_exactly_the_asked_length(row, bos_tokenizer, form, length):
    for i, kind in enumerate(KINDS):
        made = row(i, length, forms={form: 1.0}, keys=[i + 1], kinds=[kind], early=0.5)
        assert made.form == form
        assert len(made.token_ids) == len(made.answers) == length
        assert 0 < sum(made.answers) < length
        begun = row(i, length, tok=bos_tokenizer, forms={form: 1.0}, keys=[2], kinds=[kind])
        assert begun.token_ids[0] == bos_tokenizer.bos_token_id
        assert begun.token_ids.count(bos_tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("early", [0.0, 0.7])
def test_every_value_asked_for_stands_earlier_in_the_row(row, tokenizer, form, early):
    total = 0
    for seed in range(20):
        made = row(seed, 2000, forms={form: 1.0}, keys=[6], kinds=["number"], early=early)
        for start, answer in answers_of(made):
            value = re.findall(r"\d+", tokenizer.decode(answer))[0]
            assert re.search(rf"(?<!\d){value}(?!\d)", tokenizer.decode(made.token_ids[:start]))
            total += 1
    assert total >= 20 * 3


@pytest.mark.parametrize("form", FORMS)
def test_early_questions_stand_in_the_text(row, form):
    early = total = 0
    for seed in range(12):
        made = row(seed, 3000, forms={form: 1.0}, keys=[6], kinds=["number"], early=0.5)
        found = answers_of(made)
        total += len(found)
        early += sum(start + len(answer) < 2400 for start, answer in found)
    assert 0.05 < early / total < 0.75


@pytest.mark.parametrize("form", ["facts", "table"])
def test_facts_and_rows_of_tables_are_asked_for_up_to_four_times(row, tokenizer, form):
    times = set()
    for seed in range(30):
        made = row(seed, 3000, forms={form: 1.0}, keys=[4], kinds=["number"])
        values = [re.findall(r"\d+", tokenizer.decode(answer))[0] for _, answer in answers_of(made)]
        every = {values.count(value) for value in values}
        assert len(set(values)) == 4
        assert len(every) == 1
        times |= every
    assert times == {1, 2, 3, 4}


def test_most_keys_are_words(tokenizer):
    drawn = [Draw(random.Random(seed), 4, "number", WORDS.train, tokenizer).keys(4) for seed in range(300)]
    assert all(len(set(keys)) == 4 for keys in drawn)
    whole = sum(set(keys) <= set(WORDS.train) for keys in drawn)
    pairs = sum(all(set(key.split("-")) <= set(WORDS.train) for key in keys) for keys in drawn) - whole
    names = sum(all(key == key.upper() for key in keys) for keys in drawn)
    assert whole + pairs + names == 300
    assert (whole / 300, pairs / 300, names / 300) == pytest.approx((6 / 9, 2 / 9, 1 / 9), abs=0.07)


@pytest.mark.parametrize("form", FORMS)
def test_some_rows_repeat_a_passage_for_their_text(row, tokenizer, form):
    words = tokenizer(" ".join(f"n{i}" for i in range(3000)), add_special_tokens=False)["input_ids"]
    fresh = len({tuple(words[i : i + 4]) for i in range(900)})
    repeating = 0
    for seed in range(60):
        ids = row(seed, 900, text=words, forms={form: 1.0}, keys=[1], kinds=["number"]).token_ids
        repeating += len({tuple(ids[i : i + 4]) for i in range(900)}) < 0.5 * fresh
    assert 2 <= repeating <= 20


def test_weights_decide_how_often_a_form_is_drawn(row):
    drawn = [row(seed, 400, forms={"table": 3.0, "numbered": 1.0, "facts": 0.0}, keys=[1]).form for seed in range(200)]
    assert set(drawn) == {"table", "numbered"}
    assert 0.65 < drawn.count("table") / 200 < 0.85


def test_equal_seeds_give_equal_rows(row):
    assert row(9, 700).token_ids == row(9, 700).token_ids != row(8, 700).token_ids


def test_one_word_in_eight_is_for_evaluation_alone():
    assert 0.1 < len(WORDS.held_out) / (len(WORDS.held_out) + len(WORDS.train)) < 0.15
    assert not set(WORDS.held_out) & set(WORDS.train)


def test_only_training_words_are_keys(row, tokenizer, haystack):
    others = tokenizer.decode(haystack) + str(vars(recall_templates))
    held_out = {f" {word} " for word in set(WORDS.held_out) - set(re.findall(r"\w+", others))}
    assert len(held_out) > 40
    for seed in range(30):
        text = tokenizer.decode(row(seed, forms={"facts": 1.0, "table": 1.0}, kinds=["number"]).token_ids)
        assert not any(word in text for word in held_out)


def test_rows_too_short_say_what_is_needed(row, haystack, bos_tokenizer):
    with pytest.raises(DataError, match="need 3 tokens, the row has 1"):
        row(length=1, tok=bos_tokenizer, forms={"facts": 1.0})
    with pytest.raises(DataError, match=r"need \d+ tokens, the row has 20"):
        row(length=20, forms={"facts": 1.0})
    with pytest.raises(DataError, match="text for needle rows has 30 tokens"):
        row(text=haystack[:30])


def test_rows_that_are_short_for_their_needles(tokenizer):
    needles = Needles(keys=[1, 8], kinds=["number"], forms={"numbered": 1.0})
    assert crowding(700, needles, tokenizer, WORDS) is None
    assert (
        crowding(100, needles, tokenizer, WORDS)
        == "a row of 100 tokens with 8 needles (numbered, number) has room for 3 of them"
    )


HIDDEN = r"\{\w\}|\b\w*\d\w*\b|\bzq\w*\b"
"""what stands for a key, a value or a number"""


def trigrams(text):
    """Three words in a row, at least two of them no key or value."""
    words = re.findall(r"[\w*]+", re.sub(HIDDEN, "*", text.lower().replace("-", "")))
    found = {words_[0:3] for words_ in zip(words, words[1:], words[2:], strict=False)}
    return {three for three in found if sum("*" in word for word in three) < 2}


@pytest.fixture(scope="module")
def evaluated():
    """Trigrams of the needle evaluation, and of RULER's wording."""
    texts = [f"{needle_text(kind, 'zqa', '1')} {question_text(kind, 'zqa')} 1" for kind in ("number", "word", "code")]
    texts += [NEEDLE.format(key="zqa", value="1"), *(part.format(query="zqa") for part in QUESTION)]
    return set().union(*map(trigrams, texts))


def wordings(seed):
    said, asked = recall_templates.sentence(random.Random(seed), 4, WORDS.train)
    return [said, *asked]


def test_questions_are_asked_in_words_of_the_statement_and_in_others():
    """From the thing to the value: whoever reads a value must not need the words that stood before it."""
    same = total = 0
    for seed in range(300):
        said, *asked = (part.split("{v}")[0] for part in wordings(seed))
        assert len(asked) == 4
        said = said.replace("{n}s", "{n}")
        same += sum(said.endswith(one[one.rindex("{n}") :]) for one in asked)
        total += len(asked)
    assert 0.35 < same / total < 0.6


def test_statements_often_begin_with_one_but_never_as_evaluations_do():
    said = [wordings(seed)[0].lower() for seed in range(300)]
    one = [text for text in said if re.search(r"\bone (?!of\b)\w+", text)]
    assert 30 < len(one) < 100
    assert not any("one of" in text for text in said)


def test_facts_are_called_by_any_words_but_those_of_evaluations():
    words = [*recall_templates.EVALUATED, "zqany"]
    texts = []
    for seed in range(300):
        rng = random.Random(seed)
        texts += [recall_templates.noun(rng, words), *recall_templates.sentence(rng, 2, words)[1]]
    said = re.findall(r"\w+", " ".join(texts))
    assert said.count("zqany") > 20
    assert not set(said) & {"special", "magic"}


def test_no_template_has_the_wording_of_an_evaluation(evaluated):
    groups = [value for value in vars(recall_templates).values() if isinstance(value, tuple)]
    templates = [t for group in groups for one in group for t in ([one] if isinstance(one, str) else one)]
    templates = [one.replace("{t}", "{n} of {k}") for one in templates]
    templates += [part for seed in range(500) for part in wordings(seed)]
    assert len(templates) > 1000
    assert ("the", "special", "magic") in evaluated
    assert evaluated & set().union(*map(trigrams, templates)) == set()


def test_no_row_has_the_wording_of_an_evaluation(evaluated, row, tokenizer):
    words = KeyWords(tuple(f"zq{a}{b}" for a in "abcdefgh" for b in "klmnop"), ("zqzq",))
    text = tokenizer(" zqtext" * 2000, add_special_tokens=False)["input_ids"]
    seen = set()
    for seed in range(150):
        made = row(seed, 1500, words=words, text=text, keys=[4], early=0.5)
        seen |= trigrams(tokenizer.decode(made.token_ids))
    assert len(seen) > 100
    assert evaluated & seen == set()
