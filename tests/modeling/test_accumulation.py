"""The balance loss is the same share of a step however trainers cut it, as the model's own loss is."""

import ast
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import PartialState, debug_launcher
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from docs.examples import PAGES, blocks
from sse_convert.modeling.configuration import build_config
from sse_convert.modeling.hybrid import classifier_class_for
from tests.modeling.tiny import MIXERS, prompts, randomise, tiny_config, tiny_model
from tests.training.launched import begin_anew, fresh_accelerate

ROWS, LENGTH = 8, 12
LAYERS = ("sse", "sse+sliding") * 2
Make = Callable[[PreTrainedModel, dict[str, Any], list[dict[str, Tensor]]], Trainer]


def rows(*, equal: bool) -> list[dict[str, Tensor]]:
    """Rows of one length, of the same tokens or others; the last have fewer labels."""
    made = []
    for i in range(ROWS):
        torch.manual_seed(0 if equal else i)
        ids = torch.randint(2, 90, (LENGTH,))
        made.append({"input_ids": ids, "labels": ids.clone()})
        made[-1]["labels"][: i + LENGTH - ROWS] = -100
    return made


def hugging_face(model: PreTrainedModel, settings: dict[str, Any], data: list[dict[str, Tensor]]) -> Trainer:
    return Trainer(model, TrainingArguments(**settings), train_dataset=data)


def trl_sft(
    model: PreTrainedModel, settings: dict[str, Any], data: list[dict[str, Tensor]], name: str = "HybridSFTTrainer"
) -> Trainer:
    """The trainer of the page *Train on*, or TRL's own."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    page = (PAGES / "guide" / "train-on.md").read_text()
    (body,) = [block.body for block in blocks(page) if "class HybridSFTTrainer" in block.body]
    (shown,) = [node for node in ast.parse(body).body if isinstance(node, ast.ClassDef)]
    names = {"SFTTrainer": trl.SFTTrainer}
    exec(ast.unparse(shown), names)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(97)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", unk_token="0")
    own = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None, "gradient_checkpointing": False}
    made = datasets.Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in data])
    options = {"args": trl.SFTConfig(**settings, **own, bf16=False), "processing_class": tokenizer}
    return names[name](model, train_dataset=made, **options)


def trained(
    folder: Path, size: int, data: list[dict[str, Tensor]], make: Make = hugging_face
) -> tuple[float, dict[str, Tensor]]:
    """Loss of one optimizer step of a trainer over all rows, and the routers after it."""
    model = tiny_model("llama", LAYERS, dtype=torch.float64)
    loss = step(model, folder, size, data, make)
    return loss, {name: value for name, value in model.state_dict().items() if "sse_router" in name}


def step(model: PreTrainedModel, folder: Path, size: int, data: list[dict[str, Tensor]], make: Make) -> float:
    """Loss of one optimizer step over all rows."""
    batches = len(data) // size // int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "output_dir": folder, "per_device_train_batch_size": size, "gradient_accumulation_steps": batches,
        "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True,
        "dataloader_pin_memory": False, "disable_tqdm": True,
    }  # fmt: skip
    loss: float = make(model, settings, data).train().training_loss
    return loss


@pytest.mark.parametrize("make", [hugging_face, trl_sft])
def test_a_step_is_the_same_in_any_number_of_micro_batches(tmp_path: Path, make: Make) -> None:
    data = rows(equal=True)
    expected, routers = trained(tmp_path, ROWS, data)
    for size in (1, 2, 4, ROWS) if make is trl_sft else (1, 2, 4):
        assert_same(*trained(tmp_path, size, data, make), expected, routers)


def test_trl_s_own_trainer_leaves_it_out_and_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="left the routers' balance loss out"):
        trained(tmp_path, 2, rows(equal=True), functools.partial(trl_sft, name="SFTTrainer"))


def assert_same(loss: float, routers: dict[str, Tensor], expected: float, others: dict[str, Tensor]) -> None:
    assert loss == pytest.approx(expected, abs=1e-5)  # transformers computes it in float32
    for name, value in routers.items():
        torch.testing.assert_close(value, others[name], atol=1e-6, rtol=0)


def test_a_step_is_the_same_in_two_processes(tmp_path: Path) -> None:
    debug_launcher(forked, (tmp_path,), num_processes=2)
    assert_same(*torch.load(tmp_path / "two.pt"), *trained(tmp_path, ROWS, rows(equal=True)))


def forked(folder: Path) -> None:
    begin_anew()
    fresh_accelerate()
    found = trained(folder, 2, rows(equal=True))
    if PartialState().is_main_process:
        torch.save(found, folder / "two.pt")
    PartialState().destroy_process_group()


def classifier(*, converted: bool) -> PreTrainedModel:
    source, config = transformers.LlamaForSequenceClassification, tiny_config("llama", num_labels=3)
    if converted:
        sse = {"layers": list(LAYERS), "mixers": MIXERS, "base_model": "tiny"}
        source, config = classifier_class_for(source), build_config(config, sse)
    torch.manual_seed(0)
    return randomise(source(config)).double()


def test_the_loss_of_a_classifier_grows_with_micro_batches_as_its_source_s(tmp_path: Path) -> None:
    """transformers tells no classifier how many labels a step has, and adds up the losses of its micro-batches."""
    data = [{**row, "labels": torch.tensor(1)} for row in rows(equal=True)]
    found = [
        step(classifier(converted=converted), tmp_path, size, data, hugging_face)
        for converted in (False, True)
        for size in (ROWS, 2)
    ]
    assert found[3] / found[2] == pytest.approx(found[1] / found[0], abs=1e-5)


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


def test_a_batch_without_labels_has_no_nan_in_its_gradient() -> None:
    model, (ids,) = tiny_model("llama", dtype=torch.float64).train(), prompts()[:1]
    model(ids, labels=torch.full_like(ids, -100)).loss.backward()  # it is NaN itself, as the source's is
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@torch.no_grad()
def test_labels_by_position_and_shifted_labels_count_alike() -> None:
    model, (ids,) = tiny_model("llama", dtype=torch.float64).train(), prompts()[:1]
    expected = model(ids, labels=ids, num_items_in_batch=30).loss
    assert model(ids, None, None, None, None, ids, num_items_in_batch=30).loss == expected
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    assert model(ids, labels=ids, shift_labels=shifted, num_items_in_batch=30).loss == expected
    assert expected < model(ids, labels=ids).loss
