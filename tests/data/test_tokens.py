"""Token ids asked of a tokenizer's Rust part are those that transformers gives."""

import pytest

from sse_convert.data import tokens
from sse_convert.data.tokens import token_ids

TEXTS = ["The keeper of the lighthouse.", "", " 48213\n", "Straße, naïve — 東京 \t end", "x" * 5000]


def as_transformers_gives(tokenizer, texts):
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]


@pytest.fixture(params=["tokenizer", "bos_tokenizer"])
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def test_plain_texts_have_the_ids_of_transformers(any_tokenizer):
    assert tokens._is_plain(type(any_tokenizer))
    found = token_ids(any_tokenizer, TEXTS)
    assert found == as_transformers_gives(any_tokenizer, TEXTS)
    assert any(map(len, found))
    assert [token_ids(any_tokenizer, [text])[0] for text in TEXTS] == found


def test_no_text_has_no_ids(tokenizer):
    assert token_ids(tokenizer, []) == []


def test_what_the_rust_part_was_told_before_does_not_count(any_tokenizer):
    expected = as_transformers_gives(any_tokenizer, TEXTS)
    any_tokenizer.backend_tokenizer.enable_truncation(3)
    any_tokenizer.backend_tokenizer.enable_padding(length=16)
    assert token_ids(any_tokenizer, TEXTS) == expected


@pytest.mark.parametrize("split", [False, True])
def test_special_tokens_in_a_text_are_whole_or_split_as_the_tokenizer_says(tokenizer, monkeypatch, split):
    special = tokenizer.eos_token
    monkeypatch.setattr(tokenizer, "split_special_tokens", split)
    texts = [f"one{special}two"]
    found = token_ids(tokenizer, texts)
    assert found == as_transformers_gives(tokenizer, texts)
    assert (tokenizer.eos_token_id in found[0]) is not split


def test_a_tokenizer_with_an_encoding_of_its_own_is_asked(tokenizer, monkeypatch):
    class Own(type(tokenizer)):
        def _encode_plus(self, *args, **kwargs):
            found = super()._encode_plus(*args, **kwargs)
            found["input_ids"] = [[*ids, 7] for ids in found["input_ids"]]
            return found

    expected = [[*ids, 7] for ids in token_ids(tokenizer, TEXTS)]
    monkeypatch.setattr(tokenizer, "__class__", Own)
    assert not tokens._is_plain(Own)
    assert token_ids(tokenizer, TEXTS) == expected
