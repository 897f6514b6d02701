"""The one format of question files takes the columns of the published sets; a bad line is named with its field."""

import json

import pytest

from sse_convert.errors import DataError
from sse_convert.evaluation.questions import file_digests, read_questions
from sse_convert.evaluation.scorers import SCORERS
from sse_convert.recipe.schema import GenerationEval

CHAT = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def asked(tmp_path, record, scorer, **settings):
    path = tmp_path / "set.jsonl"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return GenerationEval(questions={str(path): scorer}, **settings)


def read(tmp_path, tokenizer, record, scorer="boxed", limit=None, **settings):
    """Prompt and question of a file of one line."""
    (found,) = read_questions(asked(tmp_path, record, scorer, **settings), tokenizer, limit)
    (question,) = found.questions
    assert (found.name, found.scorer) == ("set", scorer)
    return tokenizer.decode(question.token_ids), question


@pytest.mark.parametrize(
    ("scorer", "record", "prompt", "answers"),
    [
        ("boxed", {"ID": "2024-I-4", "Problem": "Find x.", "Solution": "so", "Answer": 204}, "Find x.", [("204",)]),
        ("boxed", {"problem": "1 + 1?", "solution": "s", "answer": r"\frac{4}{2}", "level": 1}, "1 + 1?",
         [(r"\frac{4}{2}",)]),
        ("boxed", {"id": 0, "problem": "How?", "answer": 142.0}, "How?", [("142.0",)]),
        ("number", {"question": "How many?", "answer": "9\n#### 9"}, "How many?", [("9\n#### 9",)]),
        ("choice", {"context": "A text.", "question": "Who?", "choice_A": "he", "choice_B": "she", "answer": "B"},
         "A text.\n\nWho?\n\n(A) he\n(B) she", [("B",)]),
        ("choice", {"question": "Who?", "choices": ["he", "she"], "answer": 1}, "Who?\n\n(A) he\n(B) she", [("B",)]),
        ("choice", {"question": "Who?", "options": ["he", "she"], "answer": "he"}, "Who?\n\n(A) he\n(B) she", [("A",)]),
        ("contains", {"question": "Which?", "answers": [["NYC", "New York"], ["Rome"]]}, "Which?",
         [("NYC", "New York"), ("Rome",)]),
        ("contains", {"prompt": "All of it:", "answer": "Yuki"}, "All of it:", [("Yuki",)]),
    ],
)  # fmt: skip
def test_published_columns(tmp_path, tokenizer, scorer, record, prompt, answers):
    text, question = read(tmp_path, tokenizer, record, scorer)
    ask = "" if "prompt" in record else SCORERS[scorer].ask
    assert text == (f"{prompt}\n\n{ask}" if ask else prompt)
    assert list(question.answers) == answers


def test_conversations(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a poem"},
        {"role": "user", "content": "again"},
    ]
    record = {"prompt": json.dumps(messages), "answer": "a poem"}
    text, question = read(tmp_path, tokenizer, record, "contains", template="chat")
    assert text == "[user: hi][assistant: a poem][user: again]>"
    assert question.answers == (("a poem",),)
    with pytest.raises(DataError, match="line 1: field 'prompt' is a list of messages, and the template is base"):
        read(tmp_path, tokenizer, record, "contains")


def test_templates_and_special_tokens(tmp_path, tokenizer, bos_tokenizer, monkeypatch):
    record = {"question": "He saw it.", "answer": "1"}
    assert read(tmp_path, bos_tokenizer, record, "exact")[1].token_ids[0] == bos_tokenizer.bos_token_id
    with pytest.raises(DataError, match="no chat template"):
        read(tmp_path, tokenizer, record, template="chat")
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    assert read(tmp_path, tokenizer, record, "exact", template="chat")[0] == "[user: He saw it.]>"


def test_what_changes_with_a_file(tmp_path, tokenizer):
    settings = asked(tmp_path, {"question": "Which?", "answer": "d3"}, "exact")
    before = file_digests(settings)
    asked(tmp_path, {"question": "Which?", "answer": "d4"}, "exact")
    assert file_digests(settings) != before


@pytest.mark.parametrize("column", ["context_file", "ctxs"])
def test_passages_are_not_left_out_in_silence(tmp_path, tokenizer, column):
    with pytest.raises(DataError, match=f"line 1: field '{column}' is a file or a list of passages"):
        read(tmp_path, tokenizer, {"question": "Which?", "answer": "d3", column: "c.jsonl"}, "exact")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"set.jsonl, line 1: not JSON"),
        ("[1]", r"line 1: a JSON list"),
        ('{"question": "a", "answer": "1"}\n\n{"answer": "1"}', r"line 3: field 'question' is missing"),
        ('{"question": "a"}', r"line 1: field 'answer' is missing"),
        ('{"question": 3, "answer": "1"}', r"line 1: field 'question' is 3"),
        ('{"question": " ", "answer": "1"}', r"line 1: field 'question' is ' '"),
        ('{"question": "a", "answer": {}}', r"line 1: field 'answer' is {}"),
        ('{"question": "a", "answer": []}', r"line 1: field 'answer' is \[\]"),
        ('{"question": "a", "answer": ["", "b"]}', r"line 1: field 'answer' is \['', 'b'\]"),
        ('{"question": "a", "answer": true}', r"line 1: field 'answer' is True"),
        ('{"question": "a", "choices": "b", "answer": "1"}', r"line 1: field 'choices' is 'b'"),
        ('{"prompt": [1], "answer": "1"}', r"line 1: field 'prompt' is \[1\]"),
        ('{"question": "a", "context": 7, "answer": "1"}', r"line 1: field 'context' is 7"),
        ('{"question": "a", "context": [{}], "answer": "1"}', r"line 1: field 'context' is \[{}\]"),
        (r'{"question": "a \ud83d b", "answer": "1"}', r"line 1: column 'prompt' has half a character"),
        ("\n", r"set.jsonl holds no questions"),
    ],
)
def test_bad_lines_are_named_with_their_field(tmp_path, tokenizer, line, message):
    with pytest.raises(DataError, match=message):
        read_questions(asked(tmp_path, line, "boxed"), tokenizer)


def test_lines_end_with_line_feeds_alone(tmp_path, tokenizer):
    line = json.dumps({"prompt": "a\u2028b\x85c", "answer": "1"}, ensure_ascii=False)
    settings = asked(tmp_path, f"{line}\r\n{line}\n", "exact")
    (found,) = read_questions(settings, tokenizer)
    assert [tokenizer.decode(question.token_ids) for question in found.questions] == ["a\u2028b\x85c"] * 2


def test_a_conversation_that_the_template_refuses(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"line 1: the chat template refuses the conversation: roles must alternate"):
        read(tmp_path, tokenizer, {"question": "a", "answer": "1"}, "exact", template="chat")


@pytest.mark.parametrize("answer", ["C", 2, "they", 0.5])
def test_a_choice_that_is_none(tmp_path, tokenizer, answer):
    with pytest.raises(DataError, match="field 'answer' is") as caught:
        read(tmp_path, tokenizer, {"question": "Who?", "choices": ["he", "she"], "answer": answer}, "choice")
    assert caught.value.expected == "a letter from A to B, an index from 0, or the text of a choice"


def test_prompts_must_leave_room_for_the_answer(tmp_path, tokenizer):
    record = {"question": "He saw it. " * 20, "answer": "1"}
    length = len(read(tmp_path, tokenizer, record, "exact")[1].token_ids)
    read(tmp_path, tokenizer, record, "exact", limit=length + 8, max_new_tokens=8)
    with pytest.raises(DataError, match=f"line 1: the prompt has {length} tokens") as caught:
        read(tmp_path, tokenizer, record, "exact", limit=length + 8, max_new_tokens=9)
    assert caught.value.expected == f"at most {length - 1} tokens of prompt in the model's context"


def test_a_file_that_is_not_there(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        read_questions(GenerationEval(questions={str(tmp_path / "nowhere.jsonl"): "exact"}), tokenizer)
