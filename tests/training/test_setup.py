"""What is refused before anything is loaded, and what the recipe decides about precision."""

import pytest
import torch
from accelerate.utils import DistributedType

from sse_convert.errors import HardwareError, TrainingError, UsageError
from sse_convert.recipe.schema import Train
from sse_convert.training.setup import make_accelerator
from sse_convert.training.sharding import is_sharded
from tests.training.launched import fresh_accelerate


@pytest.mark.parametrize(("mode", "word"), [("tp", "tensor"), ("cp", "context"), ("sp", "sequence")])
def test_parallel_modes_are_refused(monkeypatch, tmp_path, mode, word):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{mode.upper()}_SIZE", "2")
    with pytest.raises(HardwareError, match=f"{word} parallelism"):
        make_accelerator(Train())


@pytest.mark.parametrize("engine", ["DEEPSPEED", "MEGATRON_LM"])
def test_other_engines_are_refused(monkeypatch, tmp_path, engine):
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(HardwareError, match=engine.lower()):
        make_accelerator(Train())


@pytest.mark.parametrize(
    ("name", "value", "found", "fix"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "dynamo_backend inductor", "train.compile"),
        ("FSDP_IGNORED_MODULES", ".*lm_head", "fsdp_ignored_modules '.*lm_head'", "FSDP_IGNORED_MODULES"),
    ],
)
def test_settings_that_fsdp_cannot_heed_are_refused(monkeypatch, tmp_path, name, value, found, fix):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    fresh_accelerate()
    assert is_sharded(make_accelerator(Train()))
    monkeypatch.setenv(name, value)
    fresh_accelerate()
    with pytest.raises(UsageError) as refused:
        make_accelerator(Train())
    assert found in refused.value.what
    assert fix in refused.value.fix


def test_the_recipe_decides_on_precision_and_accumulation(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator = make_accelerator(Train(mixed_precision="bf16"))
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.distributed_type == DistributedType.NO
    with pytest.raises(TrainingError, match="AcceleratorState"):
        make_accelerator(Train(mixed_precision="no"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(tmp_path):
    assert make_accelerator(Train()).mixed_precision == "no"


def test_bf16_autocast_keeps_float32_weights(make, train):
    folder, report = train("distill", recipe=make(("distill", {"tokens": 1024}), train={"mixed_precision": "bf16"}))
    from sse_convert.modeling.auto import load_pretrained

    assert load_pretrained(folder).dtype == torch.float32
    assert report.loss_last < report.loss_first
