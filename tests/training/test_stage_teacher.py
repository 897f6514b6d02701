"""`kl` on assistant turns alone, and from a teacher of the stage's own: what is learned, and what is refused."""

import dataclasses as dc
import json
import shutil
from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer

from sse_convert.data import RowReader, stack
from sse_convert.data.packing import IGNORED
from sse_convert.errors import CheckpointError, RecipeError, TrainingError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.pipeline import run_recipe
from sse_convert.recipe.schema import Source
from sse_convert.recipe.stage_teacher import StageTeacher, stage_teacher
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.plan import make_plan
from sse_convert.training import stage
from sse_convert.training.held_out import Looks
from sse_convert.training.prefetch import with_targets
from tests.training.conftest import MIXERS, losses

V = 320
UNBALANCED = {"sse": {**MIXERS["sse"], "balance": "none"}, "sliding": MIXERS["sliding"]}
"""the balance loss is no sum over tokens"""


def first_rows(recipe, tokenizer, mask="all"):
    rows = RowReader(recipe.data.train, tokenizer, 32, 0, loss_mask=mask).rows()
    return with_targets(stack([next(rows) for _ in range(4)]))


def divergence(teacher, student, batch, kept):
    """Mean KL(teacher || student) over the tokens `kept`, by its definition, of the vocabulary that all models have."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        log_p, log_q = (
            load_pretrained(folder, dtype=torch.float32)(**inputs, use_cache=False)
            .logits[kept][:, :V]
            .double()
            .log_softmax(-1)
            for folder in (teacher, student)
        )
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def test_the_divergence_of_assistant_turns_alone(make, train, converted, teacher_folder, tokenizer, chats):
    recipe = make(("distill", {"loss_mask": "assistant", "tokens": 2048}), data={"train": [chats]})
    folder, report = train("distill", recipe=recipe)
    batch = first_rows(recipe, tokenizer, "assistant")
    kept = batch["targets"] != IGNORED
    assert 0 < kept.sum() < 0.6 * kept.numel()
    assert losses(folder, "predicted")[0] == kept.sum()
    assert losses(folder)[0] == pytest.approx(divergence(teacher_folder, converted, batch, kept), rel=2e-3)
    assert report.loss_last < report.loss_first


def test_micro_batches_without_an_answer_change_nothing(make, train, tokenizer, tmp_path, chats):
    """Rows of a question alone among them: one curve, whatever the micro batch."""
    curves = []
    for size in (1, 4):
        own = {"loss_mask": "assistant", "tokens": 512, "micro_batch": size}
        recipe = make(("distill", own), data={"train": [chats]}, mixers=UNBALANCED)
        if not curves:
            convert_checkpoint(recipe, tmp_path / "unbalanced")
            rows = RowReader(recipe.data.train, tokenizer, 32, 0, loss_mask="assistant").rows()
            empty = [(next(rows).labels == IGNORED).all() for _ in range(16)]
            assert any(empty)
            assert not all(empty)
        folder, _ = train("distill", f"{size}", recipe=recipe, checkpoint=tmp_path / "unbalanced")
        curves.append(losses(folder))
    assert curves[0] == pytest.approx(curves[1], rel=2e-5)


def test_looks_at_held_out_text_are_of_assistant_turns(make, train, converted, teacher_folder, tokenizer, chats):
    data = {"train": [chats], "valid": [chats]}
    recipe = make(("distill", {"loss_mask": "assistant", "tokens": 256, "lr": 1e-12}), data=data)
    recipe = dc.replace(recipe, train=dc.replace(recipe.train, validate_every=256))
    _, report = train("distill", recipe=recipe)
    rows = RowReader([Source(**chats)], tokenizer, 32, 0, role="valid", loss_mask="assistant").rows()
    seen = [row for row in islice(rows, Looks.of(recipe, recipe.stages[0]).rows) if (row.labels[1:] != IGNORED).any()]
    batch = with_targets(stack(seen))
    found = divergence(teacher_folder, converted, batch, batch["targets"] != IGNORED)
    assert report.held_out["first"]["value"] == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("padded", ["teacher", "student"])
def test_another_teacher_is_what_the_student_learns(
    make, train, teacher_folder, other_teacher, tokenizer, text_folder, tmp_path, padded
):
    """A model of another width, one embedding larger than the other."""
    model, teacher = (teacher_folder, other_teacher) if padded == "teacher" else (other_teacher, teacher_folder)
    data = {"train": [{"path": str(text_folder)}], "valid": [{"path": str(text_folder / "5.txt")}]}
    own = {"teacher": str(teacher), "tokens": 4096}
    recipe = make(("distill", own), data=data, train={"validate_every": 2048}, model=str(model))
    convert_checkpoint(recipe, tmp_path / "start")
    folder, report = train("distill", recipe=recipe, checkpoint=tmp_path / "start")
    batch = first_rows(recipe, tokenizer)
    every = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    exact = divergence(teacher, tmp_path / "start", batch, every)
    assert losses(folder)[0] == pytest.approx(exact, rel=1e-4)
    assert report.loss_last < 0.9 * report.loss_first
    assert any(line.startswith(f"held-out KL to {teacher}") for line in report.lines())


def test_a_stage_with_another_teacher_goes_by_that_teacher(train, other_teacher, teacher_folder, tmp_path):
    """What was trained with one is not continued with another."""
    train("distill", "first", teacher=str(other_teacher), tokens=128)
    moved = shutil.copytree(other_teacher, tmp_path / "moved")
    assert train("distill", "first", teacher=str(moved), tokens=128)[1].already_done
    for other in ({"teacher": str(teacher_folder)}, {}):
        with pytest.raises(TrainingError, match="teacher was "):
            train("distill", "first", tokens=128, **other)


def test_stages_without_one_have_the_inputs_of_earlier_versions(train):
    folder, _ = train("distill", tokens=128)
    inputs = json.loads((folder / "stage.json").read_text())["inputs"]
    assert "teacher" not in inputs
    assert "teacher" not in inputs["stage"]


def test_a_teacher_with_other_tokens_is_refused(make, train, other_teacher, tokenizer, tmp_path, monkeypatch):
    """By its tokenizer, when planning and before training, with the first token that differs."""
    monkeypatch.setattr(stage, "load_student", lambda *args: pytest.fail("loaded"))
    other = shutil.copytree(other_teacher, tmp_path / "other")
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["model"]["vocab"] = {("zzz" if i == 17 else token): i for token, i in rules["model"]["vocab"].items()}
    rules["model"]["merges"] = []
    Tokenizer.from_str(json.dumps(rules)).save(str(other / "tokenizer.json"))
    own = {"teacher": str(other)}
    refused = rf"stage distill: token 17 is .* for .*, 'zzz' for its teacher {other} \(1 tokens differ"
    with pytest.raises(RecipeError, match=refused):
        train("distill", **own)
    with pytest.raises(RecipeError, match="token 17 is"):
        make_plan(make(("distill", own)))


def test_teachers_that_cannot_be_used(make, train, converted, other_teacher, tmp_path):
    short = shutil.copytree(other_teacher, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    with pytest.raises(RecipeError, match=r"seq_len is 32, its teacher .* has 16 positions"):
        make_plan(make(("distill", {"teacher": str(short)})))
    with pytest.raises(CheckpointError, match="converted"):
        train("distill", teacher=str(converted))
    with pytest.raises(CheckpointError, match="does not exist"):
        make_plan(make(("distill", {"teacher": str(tmp_path / "none")})))


@pytest.mark.parametrize("name", ["align", "uptrain"])
def test_only_kl_learns_from_another_teacher(make, name):
    with pytest.raises(RecipeError, match="teacher: is for loss kl"):
        make((name, {"teacher": "Qwen/Qwen3-8B"}))


@pytest.mark.parametrize("wrong", ["", " ", "@main", "Qwen/Qwen3-8B@"])
def test_a_teacher_needs_a_name(make, wrong):
    with pytest.raises(RecipeError, match=r"teacher: .* expected a folder, or a hub id"):
        make(("distill", {"teacher": wrong}))


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", None),
        ("Qwen/Qwen3-8B@b968826", "Qwen/Qwen3-8B", "b968826"),
        ("./teachers/a@b", "./teachers/a@b", None),
        ("/teachers/a@b", "/teachers/a@b", None),
    ],
)
def test_a_revision_stands_behind_the_name(make, text, name, revision):
    recipe = make(("distill", {"teacher": text}))
    assert stage_teacher(recipe, recipe.stages[0]) == StageTeacher(name, revision)


def test_the_plan_counts_the_teacher(make, other_teacher, teacher_folder):
    """Its weights in memory and download, its passes in the hours; and it says what evaluation compares with."""
    alone, taught = (make_plan(make(("distill", own))) for own in ({}, {"teacher": str(other_teacher)}))
    assert taught.stages[0].memory_bytes > alone.stages[0].memory_bytes
    assert taught.stages[0].flops != alone.stages[0].flops
    size = (other_teacher / "model.safetensors").stat().st_size
    assert taught.costs.weight_bytes == alone.costs.weight_bytes + size
    assert taught.costs.download_bytes == 0
    assert taught.costs.disk_bytes == alone.costs.disk_bytes
    assert taught.stages[0].teacher == str(other_teacher)
    assert f"note: stage distill: learns from {other_teacher}" in "\n".join(taught.lines())
    assert f"evaluation compares with {teacher_folder}" in "\n".join(taught.lines())


def test_a_whole_run_with_another_teacher(make, other_teacher, tmp_path):
    """The result is still the model's; its card names the teacher and its recipe no path of this machine."""
    recipe = make(
        ("distill", {"tokens": 128, "teacher": str(other_teacher)}),
        calibrate={"enabled": False},
        export={"dir": str(tmp_path / "out"), "license": "mit"},
    )
    run_recipe(recipe)
    assert load_pretrained(tmp_path / "out").config.vocab_size == V
    assert (
        f"`distill` learned from the predictions of `{other_teacher.name}`" in (tmp_path / "out/README.md").read_text()
    )
    assert f"teacher: ./{other_teacher.name}" in (tmp_path / "out/recipe.yaml").read_text()
    assert run_recipe(recipe).steps[1]["report"]["teacher"] == str(other_teacher)
