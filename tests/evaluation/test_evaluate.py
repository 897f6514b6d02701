import dataclasses as dc
import json
from pathlib import Path

import pytest
import torch

from sse_convert.checkpoints.load_model import context_limit, load_model, load_tokenizer, tokenizer_of
from sse_convert.checkpoints.open import CheckpointFiles
from sse_convert.checkpoints.teacher import open_teacher
from sse_convert.errors import CheckpointError, DataError, HardwareError, OutputError, RecipeError
from sse_convert.evaluation import evaluate as evaluation
from sse_convert.evaluation.evaluate import evaluate_checkpoint, model_mixers
from sse_convert.evaluation.figures import LossGap
from sse_convert.evaluation.tasks import make_tasks
from sse_convert.evaluation.throughput import throughput
from sse_convert.recipe.schema import Eval, NeedleEval, Rope, Stage
from sse_convert.report import found_by
from sse_convert.surgery.budget import cache_bytes
from sse_convert.surgery.geometry import geometry_of
from sse_convert.surgery.job import Job


def change(recipe, **settings):
    return dc.replace(recipe, eval=dc.replace(recipe.eval, **settings))


def test_report_of_a_converted_model(recipe, student_folder, tmp_path):
    report = evaluate_checkpoint(Job.of(recipe), student_folder, out=tmp_path / "deep" / "e.json", device="cpu")
    data = json.loads((tmp_path / "deep" / "e.json").read_text())
    assert data == report.to_dict()
    assert set(data) == {
        "verdict",
        *("schema", "conditions", "teacher", "student", "loss_gaps", "retention", "cache"),
    }
    (agreement,) = data["student"]["agreement"]
    assert (agreement["length"], agreement["tokens"]) == (128, loss_of(data, "student")["tokens"])
    assert agreement["kl"] > 0 < agreement["top1"] < 1
    assert data["teacher"]["agreement"] == data["student"]["tasks"] == []
    loss = data["student"]["held_out"][0]
    assert (loss["length"], loss["windows"]) == (128, 8)
    assert 8 * 120 < loss["tokens"] <= 8 * 127
    assert loss["loss_low"] < loss["loss"] < loss["loss_high"]
    assert data["loss_gaps"][0]["gap"] == pytest.approx(loss["loss"] - data["teacher"]["held_out"][0]["loss"])
    assert [(n["keys"], n["samples"]) for n in data["student"]["needles"]] == [(1, 5), (2, 5)]
    assert data["retention"][0]["share"] is None
    assert data["student"]["parameters"] > data["teacher"]["parameters"]
    assert data["conditions"]["dtype"] == "float32"
    text = "\n".join(report.lines())
    for heading in ("held-out loss", "needle retrieval", "tokens/s and measured cache", "cache of one sequence"):
        assert heading in text


def loss_of(data, model):
    return data[model]["held_out"][0]


def test_measured_cache_equals_the_formula(recipe, teacher_folder, student_folder):
    sizes = dc.replace(geometry_of(open_teacher(teacher_folder)), cache_element_bytes=4)
    for folder in (teacher_folder, student_folder):
        model = load_model(folder, device="cpu", dtype=torch.float32)
        mixers = model_mixers(model)
        assert [mixer is not None for mixer in mixers] == [False, folder == student_folder]
        for speed in throughput(model, [32, 64], repeats=1, decode_tokens=2):
            assert speed.cache_bytes == cache_bytes(sizes, mixers, speed.length)


def test_cache_table(recipe, student_folder):
    report = evaluate_checkpoint(Job.of(change(recipe, tokens=0, needle=None)), student_folder, device="cpu")
    last, *_, first = report.cache
    assert [row.length for row in report.cache] == [2048, 512, 64]
    assert last.teacher_bytes == 32 * first.teacher_bytes
    assert first.student_state_bytes == last.student_state_bytes == 3 * 2 * 8 * 8 * 4
    assert last.student_bytes == last.teacher_bytes // 2 + last.student_state_bytes
    (teacher,), (student,) = report.teacher.speed, report.student.speed
    assert teacher.formula_bytes == teacher.cache_bytes == first.teacher_bytes
    assert student.formula_bytes == student.cache_bytes == first.student_bytes


def test_a_model_beside_itself_has_no_gap(recipe, teacher_folder):
    report = evaluate_checkpoint(Job.of(change(recipe, throughput=[])), teacher_folder, device="cpu")
    assert report.loss_gaps == (LossGap(128, 0.0, 0.0),)


def test_a_report_that_cannot_be_written_is_told(recipe, student_folder, tmp_path, monkeypatch):
    def full(*_):
        raise OutputError("the disk is full")

    monkeypatch.setattr(evaluation, "write_json", full)
    with pytest.raises(OutputError) as caught:
        evaluate_checkpoint(Job.of(recipe), student_folder, out=tmp_path / "e.json", device="cpu")
    assert found_by(caught.value).to_dict()["student"]["held_out"]


def test_packed_stories_and_needle_text_without_special_tokens(recipe, tokenizer, tmp_path):
    stories = tmp_path / "stories.jsonl"
    stories.write_text("\n".join(['{"text": "The keeper walked down to the harbor before dawn. "}'] * 60))
    source = dc.replace(recipe.data.valid[0], path=str(stories))
    settings = dc.replace(recipe, data=dc.replace(recipe.data, valid=[source]))
    tasks = make_tasks(Job.of(settings), tokenizer)
    (windows,) = tasks.windows
    assert (windows.position_ids == 0).sum() > len(windows.input_ids)
    assert (windows.bucket == -1).sum() == (windows.position_ids[:, 1:] == 0).sum()
    assert all(tokenizer.eos_token_id not in s.token_ids for group in tasks.needles for s in group)


def test_lengths_beyond_the_context_are_refused(recipe, student_folder):
    for key, settings in {
        "eval.lengths": {"lengths": [4096]},
        "eval.throughput": {"throughput": [4096]},
        "eval.needle.lengths": {"needle": NeedleEval(lengths=[4096])},
    }.items():
        with pytest.raises(RecipeError, match=f"{key} asks for 4096 tokens"):
            evaluate_checkpoint(Job.of(change(recipe, **settings)), student_folder)


def test_lengths_of_a_stretched_student(recipe, student_folder):
    """The teacher is measured there too, and the report says that it was not trained for it."""
    stage = Stage(name="long", loss="ce", tokens=8192, seq_len=4096, lr=1e-4, rope=Rope(rope_theta=1e6))
    stretched = dc.replace(recipe, stages=[stage])
    with pytest.raises(RecipeError, match=r"asks for 8192 tokens.*context of 2048") as error:
        evaluate_checkpoint(Job.of(change(stretched, lengths=[8192])), student_folder)
    assert error.value.expected == "at most 4096, after the stages' rope"
    text = Path(recipe.data.valid[0].path)
    text.write_text(8 * text.read_text())
    report = evaluate_checkpoint(Job.of(change(stretched, lengths=[4096], tokens=4096)), student_folder, device="cpu")
    assert [loss.length for loss in report.teacher.held_out] == [4096]
    assert "note: the teacher was trained for 2,048 positions; figures beyond them are of it as it is" in report.lines()
    assert not any(
        "trained for" in line for line in evaluate_checkpoint(Job.of(recipe), student_folder, device="cpu").lines()
    )


def test_bad_inputs_are_named(recipe, student_folder, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        evaluate_checkpoint(Job.of(recipe), tmp_path / "absent")
    with pytest.raises(HardwareError, match="'nonsense' is unknown"):
        evaluate_checkpoint(Job.of(recipe), student_folder, device="nonsense")
    with pytest.raises(DataError, match="no held-out text"):
        evaluate_checkpoint(Job.of(dc.replace(recipe, data=dc.replace(recipe.data, valid=[]))), student_folder)
    Path(recipe.data.valid[0].path).write_text("too little text")
    with pytest.raises(DataError, match="shorter than one row"):
        evaluate_checkpoint(Job.of(recipe), student_folder)


def test_a_checkpoint_without_tokenizer_is_named(student_folder, tmp_path):
    for file in student_folder.iterdir():
        if file.is_file() and not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="has no tokenizer that loads"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3"])
def test_an_empty_tokenizer_is_none(model_type, tmp_path):
    """For some families transformers makes a tokenizer without words where the files are missing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    files = CheckpointFiles(name="mine", folder=tmp_path, config={}, tensors={}, shard_bytes={})
    with pytest.raises(CheckpointError, match="mine has no tokenizer"):
        tokenizer_of(files)


def test_context_limit(student_folder, teacher_folder):
    config = load_model(student_folder).config
    assert context_limit(config) == 2048
    config.sse = {**config.sse, "layers": ["sse", "sse"]}
    assert context_limit(config) is None
    assert context_limit(load_model(teacher_folder).config) == 2048


def test_nothing_asked_still_gives_the_cache_table(recipe, student_folder):
    report = evaluate_checkpoint(Job.of(dc.replace(recipe, eval=Eval(tokens=0))), student_folder, device="cpu")
    assert report.lines()[0] == "cache of one sequence, by formula"


@pytest.mark.parametrize(
    ("fast", "large", "dtype"),
    [(True, True, torch.bfloat16), (True, False, torch.float32), (False, True, torch.float32)],
)
def test_a_cpu_measures_large_models_in_bfloat16_where_that_is_faster(recipe, monkeypatch, fast, large, dtype):
    monkeypatch.setattr(evaluation, "fast_in_bfloat16", lambda: fast)
    monkeypatch.setattr(evaluation, "SMALL", 0 if large else 1 << 40)
    evaluator = evaluation.Evaluator(Job.of(recipe), "cpu")
    evaluator._config.dtype = torch.bfloat16
    assert evaluator._dtype == dtype
