import dataclasses as dc

import pytest

from sse_convert.errors import DataError
from sse_convert.evaluation.ruler import NOISE
from sse_convert.evaluation.ruler_rows import NEW_TOKENS, ruler_samples
from sse_convert.recipe.schema import RulerEval
from tests.evaluation.cases import MATERIAL

LINES = ["niah_single_1", "niah_multikey_2"]


def settings(**changes):
    return RulerEval(**{"tasks": ["niah_single_1"], "lengths": [1600], "samples": 4, **changes})


@pytest.mark.parametrize("name", RulerEval().tasks)
def test_prompt_and_answer_fill_the_context_and_no_more(tokenizer, name):
    for group in ruler_samples(settings(tasks=[name], lengths=[1600, 2000]), tokenizer, MATERIAL):
        sizes = [len(sample.token_ids) + NEW_TOKENS for sample in group]
        assert max(sizes) <= group[0].length
        assert min(sizes) > group[0].length - 600  # 5 lines of two uuids with this tokenizer


def test_a_haystack_is_as_large_as_fits(tokenizer):
    (group,) = ruler_samples(settings(lengths=[2000], samples=8), tokenizer, MATERIAL)
    line = len(tokenizer(f"\n{NOISE}").input_ids)
    fullest = max(len(sample.token_ids) for sample in group) + NEW_TOKENS
    assert fullest > 2000 - line - 20  # keys of other lengths


def test_the_beginning_of_a_sequence_is_not_counted(tokenizer, bos_tokenizer):
    (plain,), (with_bos,) = (ruler_samples(settings(), t, MATERIAL) for t in (tokenizer, bos_tokenizer))
    for a, b in zip(plain, with_bos, strict=True):
        assert b.token_ids == (bos_tokenizer.bos_token_id, *a.token_ids)


def test_a_chat_template_stands_around_the_question_and_before_the_lead(tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}<s>[{{ m.role }}]{{ m.content }}[end]{% endfor %}[bot]"
    )
    (group,) = ruler_samples(settings(template="chat", samples=1), tokenizer, MATERIAL)
    text = tokenizer.decode(group[0].token_ids)
    assert text.startswith("<s>[user]A special magic number is hidden")
    question, lead = text.split("[end][bot]")
    assert question.endswith("mentioned in the provided text?")
    assert lead.startswith(" The special magic number for ")
    assert lead.endswith(" mentioned in the provided text is")


def test_a_tokenizer_without_chat_template_is_refused(tokenizer):
    with pytest.raises(DataError, match="no chat template"):
        ruler_samples(settings(template="chat"), tokenizer, MATERIAL)


def test_values_continue_the_prompt(tokenizer):
    for group in ruler_samples(settings(tasks=["niah_multivalue", "niah_multikey_2"]), tokenizer, MATERIAL):
        for sample in group:
            assert [tokenizer.decode(ids) for ids in sample.right] == [f" {answer}" for answer in sample.answers]
            wrong = [tokenizer.decode(ids) for ids in sample.wrong]
            assert len(set(wrong)) == 9
            assert not set(wrong) & {f" {answer}" for answer in sample.answers}


def test_groups_depend_on_their_own_setting_alone(tokenizer):
    (alone,) = ruler_samples(settings(), tokenizer, MATERIAL, seed=3)
    more = ruler_samples(settings(tasks=LINES, lengths=[1000, 1600]), tokenizer, MATERIAL, seed=3)
    assert [(g[0].length, g[0].task) for g in more] == [(n, task) for n in (1000, 1600) for task in LINES]
    assert more[2] == alone
    assert ruler_samples(settings(), tokenizer, MATERIAL, seed=4)[0] != alone
    assert dc.asdict(alone[0])["length"] == 1600


def test_a_context_that_is_too_short_says_what_is_needed(tokenizer):
    with pytest.raises(DataError, match="niah_single_1 does not fit 200 tokens") as caught:
        ruler_samples(settings(lengths=[200]), tokenizer, MATERIAL)
    assert "or more" in caught.value.expected
