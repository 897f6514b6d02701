"""Files for other trainers on the page *Train on*, as far as those trainers are installed."""

import importlib.util

import pytest
import yaml

from docs.examples import PAGES, blocks
from sse_convert import peft_targets
from tests.modeling.tiny import HEADS, tiny_model

FILES = {block.title: block.body for block in blocks((PAGES / "guide" / "train-on.md").read_text()) if block.title}


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def test_their_adapters_stand_where_peft_targets_says() -> None:
    expected = peft_targets(tiny_model("qwen3", HEADS))
    assert sorted(yaml.safe_load(FILES["llamafactory/sft.yaml"])["lora_target"].split(",")) == expected
    assert sorted(yaml.safe_load(FILES["axolotl/sft.yaml"])["lora_target_modules"]) == expected


@installed("llamafactory")
def test_llamafactory_reads_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    from llamafactory.hparams import get_train_args

    given = {**yaml.safe_load(FILES["llamafactory/sft.yaml"]), "output_dir": str(tmp_path), "use_cpu": True}
    model, _, _, tuning, _ = get_train_args(given)
    assert model.trust_remote_code is True
    assert model.disable_gradient_checkpointing is True
    assert "q_proj" in tuning.lora_target


@installed("axolotl")
def test_axolotl_reads_its_file() -> None:
    from axolotl.utils.schemas.config import AxolotlInputConfig

    read = AxolotlInputConfig(**yaml.safe_load(FILES["axolotl/sft.yaml"]))
    assert read.trust_remote_code is True
    assert "q_proj" in read.lora_target_modules
