"""Tiny converted checkpoints, made by the code of the commit that is first on PYTHONPATH, and what they compute.

    PYTHONPATH=CHECKOUT python tools/tiny_checkpoints.py make FOLDER        # one checkpoint for each case
    PYTHONPATH=CHECKOUT python tools/tiny_checkpoints.py compute FOLDER OUT # its logits, tokens, loss and gradients

Making uses `sse_convert.api.convert` and the tests' tiny models; computing uses transformers' Auto classes alone.
"""

import dataclasses as dc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from model_outputs import compute
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, logging

from sse_convert import api
from sse_convert.errors import RecipeError
from sse_convert.mixers import recipe_entry

CASES = Path(__file__).with_name("compared_checkpoints.yaml")


@dc.dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint."""

    name: str
    family: str
    layers: list[str]
    mixers: dict[str, dict[str, Any]]
    options: dict[str, Any] = dc.field(default_factory=dict)
    """fields of the tiny teacher's configuration"""
    recipe: dict[str, Any] = dc.field(default_factory=dict)
    """other sections of the recipe"""


def read_cases() -> list[Case]:
    """Every case of the table, families first."""
    from tests.modeling.tiny import FAMILIES

    table = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    cases = [
        Case(
            name=f"{family}-{name}",
            family=family,
            layers=group["layers"],
            mixers={kind: _whole({"kind": kind, **values}, table) for kind, values in group["mixers"].items()},
        )
        for name, group in table["families"].items()
        for family in FAMILIES
    ]
    for name, mixer in table["mixers"].items():
        options = {"num_hidden_layers": 2}
        mixers = {"it": _whole(mixer, table)}
        cases.append(Case(name=name, family="qwen3", layers=["it", "full"], mixers=mixers, options=options))
    return cases


def _whole(mixer: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Settings that say all that matters, so that built-in mixers may change."""
    return {**(table["partitions"] if mixer["kind"] in ("sse", "sse+sliding") else {}), **mixer}


def convert(case: Case, folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Convert a tiny random teacher with `api.convert`, and give the new tensors values that are not 0 or 1.

    Args:
        case: family, layers and mixers.
        folder: a new folder; works there, so that paths in the checkpoint are relative.
        seed: of all random values.

    Returns:
        The recipe's file and the converted checkpoint, in float32.
    """
    from tests.modeling.tiny import tiny_source

    folder.mkdir(parents=True)
    os.chdir(folder)
    tiny_source(case.family, seed=seed, **case.options).save_pretrained("teacher")
    recipe = Path("recipe.yaml")
    data = {
        "recipe_version": 1, "model": "teacher", "layers": {"pattern": case.layers},
        "mixers": {kind: recipe_entry(settings) for kind, settings in case.mixers.items()},
        "calibrate": {"seq_len": 64}, "export": {"dir": "exported"}, **case.recipe,
    }  # fmt: skip
    recipe.write_text(yaml.safe_dump(data), encoding="utf-8")
    api.convert(recipe, "converted", link="copy")
    for shard in Path("converted").glob("*.safetensors"):
        save_file(_loud(load_file(shard), seed), shard, metadata={"format": "pt"})
    return recipe.resolve(), Path("converted").resolve()


def _loud(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The new tensors with noise: fresh ones hold zeros, which would hide a side path, an offset or a gate."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(name for name in tensors if "sse_" in name):
        tensors[name] = tensors[name] + 0.3 * torch.randn(tensors[name].shape, generator=generator)
    return tensors


def _compute_all(folder: Path, out: Path) -> None:
    out.mkdir(parents=True)
    for checkpoint in sorted(path for path in folder.iterdir() if (path / "converted").is_dir()):
        try:
            model = AutoModelForCausalLM.from_pretrained(checkpoint / "converted")
            results = compute(model.eval())
        except Exception as error:  # the other cases are compared all the same
            (out / f"{checkpoint.name}.json").write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
            continue
        if broken := [name for name, tensor in results.items() if not tensor.isfinite().all()]:
            raise SystemExit(f"{checkpoint.name}: {broken} are not finite, so equal bits would say nothing")
        results = {name: tensor.contiguous() for name, tensor in results.items()}
        save_file(results, out / f"{checkpoint.name}.safetensors")


def main() -> None:
    """Make the checkpoints of all cases, or compute with those of a folder."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"{sys.argv[1]} with {Path(api.__file__).parent}", file=sys.stderr)
    match sys.argv[1:]:
        case ["make", folder]:
            root = Path(folder).resolve()
            retired = yaml.safe_load(CASES.read_text(encoding="utf-8"))["retired"]
            for case in read_cases():
                try:
                    convert(case, root / case.name)
                except RecipeError:
                    if case.name not in retired:
                        raise
                    shutil.rmtree(root / case.name)  # this commit is as new as its retirement
        case ["compute", folder, out]:
            _compute_all(Path(folder).resolve(), Path(out).resolve())
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
