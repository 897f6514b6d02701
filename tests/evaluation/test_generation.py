"""Questions answered by generation: exact pass@k, answers that belong to their question, restarts, the report."""

import dataclasses as dc
import json
from itertools import combinations
from math import comb
from statistics import mean

import pytest
import torch

from sse_convert.checkpoints.load_model import load_model
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import DataError, OutputError
from sse_convert.evaluation import generation
from sse_convert.evaluation.evaluate import Evaluator, evaluate_checkpoint
from sse_convert.evaluation.generation import AnswerFile, generation_score, sampling_of
from sse_convert.evaluation.intervals import best_of, wilson
from sse_convert.evaluation.questions import read_questions
from sse_convert.evaluation.scorers import score
from sse_convert.evaluation.tasks import check_texts
from sse_convert.export.card import model_card
from sse_convert.recipe.schema import Eval, GenerationEval, SamplingEval
from tests.modeling.tiny import tiny_source
from tests.modeling.tiny_images import IMAGE_MODELS, tiny_image_source
from tests.surgery.models import recipe, save_teacher


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (32, 3), (32, 31)])
def test_pass_at_k_of_hits_is_the_closed_form(n, c):
    for k in {1, 2, n} - ({2} if n == 1 else set()):
        assert best_of([1.0] * c + [0.0] * (n - c), k) == pytest.approx(1 - comb(n - c, k) / comb(n, k), abs=1e-12)


def test_pass_at_k_of_parts_is_the_mean_over_all_choices():
    scores = [0.2, 1.0, 0.5, 0.5, 0.0]
    for k in range(1, 6):
        assert best_of(scores, k) == pytest.approx(mean(max(chosen) for chosen in combinations(scores, k)))
    for k in (0, 6):
        with pytest.raises(ValueError, match="is not defined"):
            best_of(scores, k)


@pytest.mark.parametrize("name", ["gpt2", "qwen2_5_vl"])
def test_a_question_too_long_for_the_teacher_is_named_before_training(name, tmp_path):
    """Whatever config.json calls the context, or wherever it has it."""
    made = tiny_image_source(name) if name in IMAGE_MODELS else tiny_source(name)
    source = save_teacher(made, tmp_path / "teacher")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "w3 " * 300, "answer": "w3"}) + "\n")
    asked = GenerationEval(questions={str(tmp_path / "q.jsonl"): "exact"}, max_new_tokens=8)
    settings = dc.replace(recipe(source), eval=Eval(perplexity=False, generation=asked))
    with pytest.raises(DataError, match=r"line 1: the prompt has \d+ tokens"):
        check_texts(settings, open_teacher(source))


WORDS = ["He saw", "down to the harbor", "What did", "The keeper of"]


@pytest.fixture
def files(tmp_path):
    """Two sets; some answers are short words, which a random model writes now and then."""
    for name, words in (("first", WORDS), ("second", WORDS[:2])):
        lines = [json.dumps({"prompt": word, "answer": ["e", "t"]}) for word in words]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def settings(files, **changes):
    asked = {"questions": {str(files / "first.jsonl"): "contains"}, "max_new_tokens": 3}
    return GenerationEval(**{**asked, "sampling": SamplingEval(samples=4, temperature=2.0, top_p=0.95), **changes})


@pytest.fixture(scope="module")
def student(student_folder):
    return load_model(student_folder, device="cpu", dtype=torch.float64)


def scored(model, tokenizer, asked, *, seed=0, batch_slots=10**6, path=None):
    """Scores of all sets, and the texts by set, question and answer."""
    kept = AnswerFile(path, "student")
    sets = read_questions(asked, tokenizer)
    found = [
        generation_score(model, tokenizer, each, asked, seed=seed, batch_slots=batch_slots, answers=kept)
        for each in sets
    ]
    return found, kept


def texts(path):
    stored = map(json.loads, filter(None, path.read_text().splitlines()))
    return {(line["task"], line["question"], line["answer"]): line["text"] for line in stored}


def test_answers_do_not_depend_on_batches_or_on_what_else_is_asked(student, tokenizer, files):
    both = settings(files, questions={str(files / f"{name}.jsonl"): "contains" for name in ("first", "second")})
    together, _ = scored(student, tokenizer, both, path=files / "together")
    alone, _ = scored(student, tokenizer, settings(files), batch_slots=1, path=files / "alone")
    assert together[0] == alone[0]
    known = texts(files / "alone")
    assert known == {key: text for key, text in texts(files / "together").items() if key[0] == "first"}
    assert len(known) == 4 * 4
    assert len({known["first", 0, j] for j in range(4)}) > 1
    _, _ = scored(student, tokenizer, settings(files), seed=1, path=files / "other")
    assert texts(files / "other") != known


def test_scores_are_those_of_the_texts(student, tokenizer, files):
    asked = settings(files)
    (found,), _ = scored(student, tokenizer, asked, path=files / "kept")
    earned = [[score("contains", text, [("e",), ("t",)]) for (_, i, _), text in sorted(texts(files / "kept").items())
               if i == question] for question in range(4)]  # fmt: skip
    assert found.mean.value == pytest.approx(mean(map(mean, earned)))
    assert 0 < found.mean.value < 1
    assert [k for k, _ in found.passes] == [1, 2, 4]
    for k, share in found.passes:
        expected = mean(1 - comb(4 - sum(map(int, hits)), k) / comb(4, k) for hits in earned)
        assert share.value == pytest.approx(expected)
    data = found.to_dict()
    assert (data["low"], data["high"]) == wilson(found.mean.correct, 4)
    assert (data["samples"], data["repeats"]) == (4, 4)
    assert data["tokens"] <= 3


def test_a_killed_evaluation_goes_on_where_it_was(student, tokenizer, files, monkeypatch):
    asked, path = settings(files), files / "kept"
    expected, _ = scored(student, tokenizer, asked)
    real, calls = generation.continue_rows, []

    def killed(model, prompts, *args):
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(model, prompts, *args)

    monkeypatch.setattr(generation, "continue_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        scored(student, tokenizer, asked, batch_slots=50, path=path)
    done = sum(calls[:2])
    with path.open("a") as file:
        file.write('\n{"task": "first", "question": 2, "ans')  # what a killed process may leave
    calls.append(0)
    again, _ = scored(student, tokenizer, asked, batch_slots=50, path=path)
    assert again == expected
    assert sum(calls[4:]) == 16 - done
    assert scored(None, tokenizer, asked, path=path)[0] == expected  # all is known: no model is asked


def test_greedy_answers_once_and_the_papers_setting(files, tokenizer, student):
    sampling, repeats = sampling_of(settings(files, sampling="greedy"))
    assert (sampling.temperature, repeats) == (0, 1)
    sampling, repeats = sampling_of(settings(files, sampling="paper"))
    assert (sampling.temperature, sampling.top_p, repeats) == (1.0, 0.7, 32)
    (found,), _ = scored(student, tokenizer, settings(files, sampling="greedy"), path=files / "kept")
    row = torch.tensor([tokenizer(WORDS[0]).input_ids])
    out = student.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=3, pad_token_id=0)
    assert texts(files / "kept")["first", 0, 0] == tokenizer.decode(out[0, row.shape[1] :], skip_special_tokens=True)
    assert [k for k, _ in found.passes] == [1]


def test_an_answer_file_that_cannot_be_written(student, tokenizer, files):
    with pytest.raises(OutputError, match="cannot be written"):
        scored(student, tokenizer, settings(files), path=files / "first.jsonl" / "kept")


def test_questions_of_a_recipe_end_to_end(recipe, student_folder, files, tmp_path, monkeypatch):
    asked = dc.replace(
        recipe, eval=Eval(perplexity=False, generation=settings(files)), data=dc.replace(recipe.data, valid=[])
    )
    out = tmp_path / "report.json"
    report = evaluate_checkpoint(asked, student_folder, out=out, device="cpu")
    data = json.loads(out.read_text())
    for model in ("teacher", "student"):
        (entry,) = data[model]["generation"]
        assert (entry["task"], entry["scorer"], entry["repeats"], entry["samples"]) == ("first", "contains", 4, 4)
    assert list(data["conditions"]["generation"]["files"]) == [str(files / "first.jsonl")]
    lines = report.lines()
    start = lines.index("questions answered by generation (95% interval over questions)")
    assert lines[start + 1].split("  ")[0] == "questions"
    assert lines[start + 3].startswith("first      contains")
    kept = (tmp_path / "report.answers.jsonl").read_text()
    assert kept.count('"task": "first"') == 2 * 16
    monkeypatch.setattr(generation, "continue_rows", lambda *args: pytest.fail("answers are on disk"))
    again = evaluate_checkpoint(asked, student_folder, out=out, device="cpu")
    assert again.student.generation == report.student.generation
    card = model_card("m", json.loads((student_folder / "config.json").read_text()), asked.to_dict(), data, 1)
    assert "| first | 4 | 4 |" in card


def test_questions_are_read_before_a_model_is_loaded(recipe, student_folder, files):
    (files / "first.jsonl").write_text('{"question": "a"}')
    asked = dc.replace(recipe, eval=Eval(perplexity=False, generation=settings(files)))
    with pytest.raises(DataError, match="line 1: field 'answer' is missing"):
        Evaluator(asked, "cpu").report(student_folder)
    (files / "first.jsonl").write_text(json.dumps({"prompt": "The keeper " * 2000, "answer": "a"}))
    with pytest.raises(DataError, match="line 1: the prompt has"):
        Evaluator(asked, "cpu").report(student_folder)
