"""The bridge to the lm-evaluation-harness, on tasks over a local file: nothing is downloaded."""

import dataclasses as dc
import importlib.util
import json
from contextvars import copy_context

import pytest
import torch

from sse_convert.checkpoints.load_model import load_model, load_tokenizer
from sse_convert.errors import DataError, DependencyError, RecipeError
from sse_convert.evaluation import evaluate as evaluation
from sse_convert.evaluation import harness
from sse_convert.evaluation.harness import NIAH, PAPER, Harness
from sse_convert.recipe.schema import Eval, LMEval
from sse_convert.surgery.job import Job
from sse_convert.trust import trust_code

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra eval")
CHOICE = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
WRITTEN = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{said}}}}"
generation_kwargs: {{max_gen_toks: {tokens}, do_sample: {sampled}, temperature: {temperature}, until: []}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
WORDS = ["The", "keeper", "of", "the", "lighthouse", "walked", "down", "to", "the", "harbor", "before", "dawn"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with two tasks over a local file, and the documents."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = [
        {"question": f"He saw {WORDS[i]} {i}", "choices": [WORDS[(i + j) % 12] for j in (0, 1, 5)], "label": i % 3}
        for i in range(1, 9)
    ]
    (folder / "documents.json").write_text(json.dumps(documents))
    for name in ("local_choice", "local_other"):
        (folder / f"{name}.yaml").write_text(CHOICE.format(name=name, data=folder / "documents.json"))
    return folder, documents


@pytest.fixture(scope="module")
def managers():
    """Task managers by what they were asked for."""
    return {}


@pytest.fixture
def indexed_once(managers, monkeypatch):
    """The harness reads its own 14,000 names once for all tests that ask with the same folder."""
    from lm_eval import tasks as library

    make = library.TaskManager

    def remembered(**asked):
        key = json.dumps(asked, sort_keys=True)
        if key not in managers:
            managers[key] = make(**asked)
        return managers[key]

    monkeypatch.setattr(library, "TaskManager", remembered)


def settings(local, **changes):
    return LMEval(**{"tasks": ["local_choice"], "include_path": str(local[0]), "batch_size": 4, **changes})


@torch.no_grad()
def accuracy(model, tokenizer, documents):
    """Share of documents whose right choice has the highest summed log probability."""
    hits = 0
    for document in documents:
        scores = []
        for choice in document["choices"]:
            start, whole = (tokenizer(t).input_ids for t in (document["question"], f"{document['question']} {choice}"))
            logs = torch.log_softmax(model(torch.tensor([whole])).logits[0].float(), -1)
            scores.append(sum(logs[i - 1, whole[i]].item() for i in range(len(start), len(whole))))
        hits += max(range(3), key=scores.__getitem__) == document["label"]
    return hits / len(documents)


@needs_lm_eval
def test_a_local_task_end_to_end(recipe, student_folder, teacher_folder, tokenizer, tasks):
    asked = dc.replace(recipe, eval=Eval(tokens=0, lm_eval=settings(tasks, tasks=["local_choice", "local_other"])))
    report = evaluation.evaluate_checkpoint(Job.of(asked), student_folder, device="cpu")
    for folder, scores in ((teacher_folder, report.teacher), (student_folder, report.student)):
        expected = accuracy(load_model(folder, device="cpu", dtype=torch.float32), tokenizer, tasks[1])
        assert [(s.task, s.metric, s.samples) for s in scores.tasks] == [
            ("local_choice", "acc", 8),
            ("local_other", "acc", 8),
        ]
        assert {s.value for s in scores.tasks} == {expected}
        assert scores.tasks[0].stderr == pytest.approx((expected * (1 - expected) / 7) ** 0.5)
    data = report.to_dict()
    assert data["student"]["tasks"][0]["higher_is_better"] is True
    assert data["conditions"]["lm_eval"]["tasks"] == ["local_choice", "local_other"]
    assert any(line.startswith("local_choice  acc") for line in report.lines())


@needs_lm_eval
def test_equal_models_get_equal_scores_one_after_the_other(llama, tokenizer, tasks, teacher_folder):
    found = Harness(settings(tasks, num_fewshot=2, limit=5), str(teacher_folder))
    assert found.score(llama, tokenizer) == found.score(llama, tokenizer)
    assert found.score(llama, tokenizer)[0].samples == 5


@needs_lm_eval
def test_tasks_generate_with_their_own_settings_and_with_ours_over_them(student_folder, tokenizer, tmp_path):
    model = load_model(student_folder, device="cpu", dtype=torch.float64)
    prompts = ["The keeper of", "He saw"]
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    out = model.generate(**batch, do_sample=False, max_new_tokens=4)[:, batch["input_ids"].shape[1] :]
    said = tokenizer.batch_decode(out, skip_special_tokens=True)
    documents = [{"question": question, "said": text} for question, text in zip(prompts, said, strict=True)]
    (tmp_path / "documents.json").write_text(json.dumps(documents))
    task = {"name": "local_written", "data": tmp_path / "documents.json", "tokens": 4}
    asked = LMEval(tasks=["local_written"], include_path=str(tmp_path), batch_size=2)
    found = []
    for sampled, temperature, kwargs in (
        ("false", 0.0, {}),
        ("true", 50.0, {}),
        ("false", 0.0, {"do_sample": True, "temperature": 50.0}),
        ("true", 50.0, {"do_sample": False, "temperature": 0.0}),
    ):
        text = WRITTEN.format(sampled=sampled, temperature=temperature, **task)
        (tmp_path / "local_written.yaml").write_text(text)
        scores = Harness(dc.replace(asked, gen_kwargs=kwargs), str(student_folder)).score(model, tokenizer)
        found.append(scores[0].value)
    assert found == [1.0, 0.0, 0.0, 1.0]


@needs_lm_eval
@pytest.mark.usefixtures("indexed_once")
def test_unknown_tasks_are_refused_before_a_model_is_loaded(recipe, student_folder, tasks, monkeypatch):
    monkeypatch.setattr(evaluation, "load_model", lambda *args, **options: pytest.fail("a model was loaded"))
    asked = dc.replace(recipe, eval=Eval(tokens=0, lm_eval=settings(tasks, tasks=["local_choise", "helaswag"])))
    with pytest.raises(RecipeError, match="no task 'local_choise', 'helaswag'") as caught:
        evaluation.evaluate_checkpoint(Job.of(asked), student_folder, device="cpu")
    assert "instead of 'local_choise' local_choice" in caught.value.expected
    assert "instead of 'helaswag' hellaswag" in caught.value.expected


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.usefixtures("indexed_once")
def test_the_papers_tasks_exist(tasks, monkeypatch, teacher_folder):
    monkeypatch.setattr(Harness, "_load", lambda self, name: [name])
    found = Harness(settings(tasks, tasks=["paper", "arc", "ruler"]), str(teacher_folder))
    assert found.names == [*PAPER, "ruler"]
    assert set(NIAH) < set(found.names)


@needs_lm_eval
def test_without_a_folder_of_tasks_the_harness_s_own_are_indexed(monkeypatch, teacher_folder):
    asked = []

    class Manager:
        all_tasks = ("arc_easy",)

        def __init__(self, **options):
            asked.append((options["include_path"], options["include_defaults"]))

    monkeypatch.setattr("lm_eval.tasks.TaskManager", Manager)
    monkeypatch.setattr(Harness, "_load", lambda self, name: [name])
    assert Harness(LMEval(tasks=["arc_easy"]), str(teacher_folder)).names == ["arc_easy"]
    assert asked == [(None, True)]


@needs_lm_eval
def test_data_that_cannot_be_loaded_is_named(tasks, tmp_path, teacher_folder):
    (tmp_path / "t.yaml").write_text(CHOICE.format(name="local_absent", data=tmp_path / "absent.json"))
    with pytest.raises(DataError, match="the data of task 'local_absent' cannot be loaded"):
        Harness(LMEval(tasks=["local_absent"], include_path=str(tmp_path)), str(teacher_folder))
    with pytest.raises(DataError, match="is no folder"):
        Harness(settings(tasks, include_path=str(tmp_path / "nowhere")), str(teacher_folder))


def test_without_the_package_the_extra_is_named(tasks, monkeypatch, teacher_folder):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="not installed") as caught:
        Harness(settings(tasks), str(teacher_folder))
    assert caught.value.fix == "pip install 'sse-convert[eval]'"


@needs_lm_eval
def test_programs_that_a_model_writes_run_only_if_that_is_allowed(student_folder, tmp_path):
    (tmp_path / "documents.json").write_text(json.dumps([{"question": "def f", "said": "x"}]))
    task = WRITTEN.format(
        name="local_programs", data=tmp_path / "documents.json", tokens=2, sampled="false", temperature=0.0
    )
    (tmp_path / "programs.yaml").write_text(task + "unsafe_code: true\n")
    asked = LMEval(tasks=["local_programs"], include_path=str(tmp_path))
    with pytest.raises(DataError, match=r"local_programs.* runs the programs") as caught:
        Harness(asked, str(student_folder))
    assert "HF_ALLOW_CODE_EVAL=1" in str(caught.value.fix)

    def trusted():
        trust_code()
        found = Harness(asked, str(student_folder))
        model = load_model(student_folder, device="cpu", dtype=torch.float64)
        return found.score(model, load_tokenizer(student_folder))

    assert copy_context().run(trusted)[0].samples == 1
