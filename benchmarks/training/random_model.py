"""A model of random weights to train from scratch: the shape of a config.json, and a tokenizer beside it.

    python -m benchmarks.training.random_model tests/fixtures/configs/paper-600m.json --tokenizer Qwen/Qwen3-0.6B \\
        --out models/transformer-600m

A recipe that names the folder as its `model` and has stages of loss ce alone trains whatever layers it asks for from
there: there is no teacher in such a recipe.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sse_convert.checkpoints.load_model import load_tokenizer
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.errors import CheckpointError, OutputError


def save_random(config: Path, tokenizer: str, out: Path, *, seed: int = 0, heads: int | None = None) -> int:
    """Write a folder with random weights, as transformers draws them, and return how many there are.

    Args:
        config: config.json, or a folder that has one.
        tokenizer: folder or hub id that the tokenizer is taken from.
        out: the folder to make.
        seed: of the weights.
        heads: key-value heads, where they are not to be the config's.

    Raises:
        CheckpointError: there is no config.json, or the tokenizer knows more tokens than the model.
        OutputError: `out` exists.
    """
    if out.exists():
        raise OutputError(f"{out} exists", expected="a folder to make", fix="give another --out")
    if not (config / "config.json" if config.is_dir() else config).is_file():
        raise CheckpointError(f"{config} is no config.json", expected="the file, or a folder that has it")
    shape = AutoConfig.from_pretrained(config, **({} if heads is None else {"num_key_value_heads": heads}))
    words = load_tokenizer(tokenizer)
    if len(words) > shape.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {tokenizer} knows {len(words):,} tokens and {config} has {shape.vocab_size:,}",
            expected="a vocabulary at least as large",
            fix="take another tokenizer, or a larger vocab_size",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    model.to(shape.dtype or torch.float32).save_pretrained(out)
    words.save_pretrained(out)
    return int(model.num_parameters())


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("config", type=Path, help="config.json of the shape")
    p.add_argument("--tokenizer", required=True, help="folder or hub id")
    p.add_argument("--out", type=Path, required=True, help="folder to make")
    p.add_argument("--seed", type=int, default=0)
    options = p.parse_args(arguments)
    hush_libraries()
    count = save_random(options.config, options.tokenizer, options.out, seed=options.seed)
    say(f"{options.out}: {count:,} random parameters")


if __name__ == "__main__":
    sys.exit(main())
