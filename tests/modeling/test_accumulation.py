"""The balance loss is the same share of a step however trainers cut it, as the model's own loss is."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from tests.modeling.tiny import prompts, tiny_model

ROWS, LENGTH = 8, 12


def rows(*, equal: bool) -> list[dict[str, Tensor]]:
    """Rows of one length; the last have fewer labels, unless all are equal."""
    made = []
    for i in range(ROWS):
        torch.manual_seed(0 if equal else i)
        ids = torch.randint(2, 90, (LENGTH,))
        made.append({"input_ids": ids, "labels": ids.clone()})
        if not equal:
            made[-1]["labels"][: i + LENGTH - ROWS] = -100
    return made


def trained(folder: Path, size: int, data: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Loss of one optimizer step of HF Trainer over all rows, and the routers after it."""
    model = tiny_model("llama", ("sse", "sse+sliding") * 2, dtype=torch.float64)
    settings = TrainingArguments(
        folder, per_device_train_batch_size=size, gradient_accumulation_steps=len(data) // size, max_steps=1,
        optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=1e9, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=data)
    loss = trainer.train().training_loss
    routers = {name: value for name, value in model.state_dict().items() if "sse_router" in name}
    return loss, routers


def test_a_step_is_the_same_in_any_number_of_micro_batches(tmp_path: Path) -> None:
    data = rows(equal=True)
    expected, routers = trained(tmp_path, ROWS, data)
    for size in (1, 2, 4):
        loss, others = trained(tmp_path, size, data)
        assert loss == pytest.approx(expected, abs=1e-5)  # transformers computes it in float32
        for name, value in routers.items():
            torch.testing.assert_close(others[name], value, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_micro_batch_counts_as_its_share_of_the_labels() -> None:
    model, data = tiny_model("llama", ("sse",) * 4, dtype=torch.float64).train(), rows(equal=False)
    counts = [int((row["labels"][1:] != -100).sum()) for row in data]
    for row, own in zip(data, counts, strict=True):
        given = {name: value[None] for name, value in row.items()}
        loss = model(**given, num_items_in_batch=torch.tensor(sum(counts))).loss
        balance = model.sse_balance_loss() * own / sum(counts)
        torch.testing.assert_close(loss, without_balance(model, given, sum(counts)) + balance, atol=1e-6, rtol=0)


def without_balance(model: PreTrainedModel, given: dict[str, Tensor], items: int) -> Tensor:
    """The model's own loss, after which its balance loss is that of the same tokens."""
    logits, labels = model(given["input_ids"]).logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / items


@torch.no_grad()
def test_a_micro_batch_without_labels_adds_nothing() -> None:
    model, (ids,) = tiny_model("llama", dtype=torch.float64).train(), prompts()[:1]
    given = {"labels": torch.full_like(ids, -100), "num_items_in_batch": 40}
    assert model(ids, **given).loss == 0
    assert model(ids, **given, shift_labels=given["labels"]).loss == 0


@torch.no_grad()
def test_labels_by_position_and_shifted_labels_count_alike() -> None:
    model, (ids,) = tiny_model("llama", dtype=torch.float64).train(), prompts()[:1]
    expected = model(ids, labels=ids, num_items_in_batch=30).loss
    assert model(ids, None, None, None, None, ids, num_items_in_batch=30).loss == expected
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    assert model(ids, labels=ids, shift_labels=shifted, num_items_in_batch=30).loss == expected
    assert expected < model(ids, labels=ids).loss
