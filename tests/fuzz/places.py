"""Folders that cases spoil: a small teacher of each kind, its conversion, text and a recipe, copied for every case."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants

from sse_convert.recipe import recipe_from_dict
from sse_convert.surgery.convert import convert_checkpoint
from sse_convert.surgery.job import Job
from tests.fuzz.values import yaml_text
from tests.surgery.models import recipe_data, save_source

FAMILIES = ("qwen3", "gpt2", "gemma3_text", "phi3")
TEXT = " ".join(f"w{i % 90 + 3}" for i in range(400))


def recipe(model: str = "qwen3") -> dict[str, Any]:
    """A recipe in which most settings are given, for a model of the folder; all of its paths are relative."""
    lengths = {"tokens": 64, "seq_len": 32, "batch_tokens": 64, "micro_batch": 2}
    sources = [{"path": "train.txt", "kind": "text", "field": "text", "weight": 1.0}]
    return recipe_data(
        model,
        layers={"pattern": ["sse", "full"], "keep": [-1]},
        mixers={"sse": {"qk_rank": 4}, "sliding": {"window": 4, "sinks": 2}},
        calibrate={"rows": 1, "seq_len": 64},
        stages=[
            {"name": "align", "loss": "layer_mse", "lr": 0.001, **lengths},
            {
                "name": "distill",
                "loss": "kl",
                "lr": {"mixers": 0.001, "rest": 1e-05},
                **lengths,
            },
            {"name": "uptrain", "loss": "ce", "lr": 0.001, "rope": {"rope_theta": 1e6}, **lengths},
        ],
        data={"train": sources, "valid": sources, "needles": {"share": 0.1, "keys": [1, 2]}, "seed": 1},
        train={"mixed_precision": "no", "lora_rank": 4, "seed": 1},
        eval={"lengths": [32], "tokens": 64, "throughput": [16], "needle": {"lengths": [64], "samples": 2}},
        export={"dir": "out/x", "license": "mit"},
    )


def build(root: Path) -> None:
    """Fill a folder with all that cases start from."""
    for family in FAMILIES:
        save_source(root / family, family, num_hidden_layers=2, **_layer_types(family))
    (root / "train.txt").write_text(TEXT)
    (root / "recipe.yaml").write_text(yaml_text(recipe()))
    bare = {key: value for key, value in recipe().items() if key in ("recipe_version", "model", "layers", "export")}
    (root / "bare.yaml").write_text(yaml_text({**bare, "calibrate": {"enabled": False}}))
    with _inside(root):
        convert_checkpoint(Job.of(recipe_from_dict(recipe())), Path("hybrid"))


def _layer_types(family: str) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}


@contextlib.contextmanager
def copied(root: Path, *names: str) -> Iterator[Path]:
    """A new working folder with copies of some of what `build` made, and the text; gone afterwards.

    It stands alone in its parent: a case that names `..` as its text must not read the machine's temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="case-", ignore_cleanup_errors=True) as made:
        folder = Path(made) / "work"
        folder.mkdir()
        for name in ("train.txt", *names):
            (shutil.copytree if (root / name).is_dir() else shutil.copyfile)(root / name, folder / name)
        with _inside(folder):
            yield folder


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, which is the user's home as well; nothing outside of it is asked for or written."""
    before, variables, offline = Path.cwd(), dict(os.environ), constants.HF_HUB_OFFLINE
    os.environ |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
