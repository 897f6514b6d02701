"""The loss in a call: that of the stage, whatever the padding, and one that transformers' Trainer minimises."""

import ast
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

import sse_convert
from docs.examples import PAGES, blocks
from sse_convert import kl_loss
from sse_convert.data import RowReader, stack
from sse_convert.errors import ShapeError, UsageError
from sse_convert.modeling.auto import load_pretrained
from sse_convert.training.setup import converted_attention
from tests.modeling.tiny import prompts, tiny_source
from tests.training.conftest import losses

MIXER = {"kind": "sse+sliding", "window": 4, "sinks": 2, "num_partitions": 4, "top_k": 1}


def pair(**options: Any) -> tuple[Any, Any]:
    """A teacher and its hybrid."""
    teacher = tiny_source("llama", **options)
    return teacher, sse_convert.convert_model(teacher, keep=[0, 3], mixer=MIXER).train()


def rows(count: int = 4, length: int = 24, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 90, (count, length), generator=torch.Generator().manual_seed(seed))


def test_it_is_the_loss_of_the_stage(train, make, converted, teacher_folder, tokenizer):
    """On the rows of the stage's first step, packed documents among them."""
    folder, _ = train("distill", tokens=128, micro_batch=4)
    reader = RowReader(make("distill").data.train, tokenizer, 32, seed=0)
    batch = stack([row for row, _ in zip(reader.rows(), range(4), strict=False)])
    del batch["labels"]
    student, teacher = (load_pretrained(f, dtype=torch.float32) for f in (converted, teacher_folder))
    (loss,), (balance,) = losses(folder), losses(folder, "balance")
    assert kl_loss(student.train(), teacher, batch).item() == pytest.approx(loss + balance, rel=1e-6)


def test_gradients_reach_every_mixer_and_not_the_teacher():
    teacher, student = pair()
    kl_loss(student, teacher, {"input_ids": rows()}).backward()
    for path in converted_attention(student).values():
        names = [name for name, p in student.named_parameters() if name.startswith(path) and not p.grad.any()]
        assert [name for name in names if "delta" not in name and "decay" not in name] == []
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side):
    """The divergence; the balance loss is one of the batch as a whole."""
    teacher, student = pair(dtype=torch.float64)
    ids, mask = prompts((11, 7), side)
    found = kl_loss(student, teacher, {"input_ids": ids, "attention_mask": mask}) - student.sse_balance_loss()
    alone = []
    for row, seen in zip(ids, mask.bool(), strict=True):
        alone.append(kl_loss(student, teacher, {"input_ids": row[None, seen]}) - student.sse_balance_loss())
    assert found.item() == pytest.approx((11 * alone[0] + 7 * alone[1]).item() / 18, rel=1e-6)


def test_with_labels_the_tokens_before_them_count():
    teacher, student = pair(dtype=torch.float64)
    ids = rows(1, 12)
    labels = torch.where(torch.arange(12) < 9, -100, ids)
    found = kl_loss(student, teacher, {"input_ids": ids, "labels": labels}) - student.sse_balance_loss()
    with torch.no_grad():
        log_p, log_q = (model(ids).logits.log_softmax(-1)[0, 8:11] for model in (teacher, student))
    assert found.item() == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).mean().item(), rel=1e-6)


def test_micro_batches_add_up():
    teacher, student = pair(dtype=torch.float64)
    ids = rows()
    whole = kl_loss(student, teacher, {"input_ids": ids}) - student.sse_balance_loss()
    parts = sum(
        kl_loss(student, teacher, {"input_ids": part}, ids.numel()) - student.sse_balance_loss() * part.numel() / 96
        for part in ids.split(2)
    )
    assert parts.item() == pytest.approx(whole.item(), rel=1e-9)


@pytest.mark.parametrize(
    ("wrap", "fix"),
    [
        (nn.DataParallel, "CUDA_VISIBLE_DEVICES=0"),
        (lambda m: get_peft_model(m, LoraConfig(r=2, target_modules=["q_proj"])), "get_base_model"),
    ],
)
def test_wrapped_models_are_refused(wrap, fix):
    teacher, student = pair()
    with pytest.raises(UsageError, match="student is a") as found:
        kl_loss(wrap(student), teacher, {"input_ids": rows()})
    assert fix in found.value.fix


def test_what_does_not_fit_is_refused():
    teacher, student = pair()
    with pytest.raises(UsageError, match="LlamaForCausalLM, which is not converted"):
        kl_loss(teacher, student, {"input_ids": rows()})
    with pytest.raises(UsageError, match="a batch of text"):
        kl_loss(student, teacher, {"text": rows()})
    with pytest.raises(ShapeError, match=r"labels has shape \(4, 3\)"):
        kl_loss(student, teacher, {"input_ids": rows(), "labels": rows(4, 3)})
    with pytest.raises(ShapeError, match="one vocabulary"):
        kl_loss(student, tiny_source("llama", vocab_size=120), {"input_ids": rows()})


def shown_trainer(teacher: Any) -> Any:
    """That of the page *Train on*."""
    page = (PAGES / "guide" / "train-on.md").read_text()
    (body,) = [block.body for block in blocks(page) if "class Distiller" in block.body]
    (shown,) = [node for node in ast.parse(body).body if isinstance(node, ast.ClassDef)]
    names = {"Trainer": Trainer, "sse_convert": sse_convert, "teacher": teacher}
    exec(ast.unparse(shown), names)
    return names["Distiller"]


def test_trainer_lowers_the_loss_in_ten_steps(tmp_path):
    """With gradients accumulated, and evaluated at both ends."""
    teacher, student = pair()
    data = [{"input_ids": row, "labels": row} for row in rows(16)]
    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=10, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-4, report_to=[], logging_steps=1, use_cpu=True, prediction_loss_only=True,
    )  # fmt: skip
    trainer = shown_trainer(teacher)(student, settings, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 10
    assert logged[0] == pytest.approx(before, rel=0.2)
