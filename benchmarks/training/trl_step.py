"""Steps of TRL's SFTTrainer with every layer softmax: cross entropy in a recipe's stage of text.

    python benchmarks/training/trl_step.py RECIPE.yaml ROWS STEPS --work FOLDER     # ROWS of a pass

`throughput.py` runs it beside that stage. It takes bf16, fused AdamW, gradient checkpointing, SDPA, and Liger's fused
loss where that is installed. Rows are full, of random tokens, so nothing is padded or packed. Prints each step's
seconds as JSON.
"""

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from sse_convert.recipe import load_recipe


class Clock(TrainerCallback):
    """Seconds between the ends of optimizer steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.monotonic() - self._began)


def main() -> None:
    """Train a few steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--work", type=Path, required=True, help="folder for the trainer's files")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    stage = next(stage for stage in recipe.stages if stage.loss == "ce")
    rows = stage.batch_tokens // stage.seq_len
    cuda = torch.cuda.is_available()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 4000, (rows * arguments.steps, stage.seq_len), generator=generator)
    config = SFTConfig(
        output_dir=str(arguments.work),
        max_length=stage.seq_len,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.rows,
        gradient_accumulation_steps=rows // arguments.rows,
        gradient_checkpointing=True,
        bf16=cuda,
        use_cpu=not cuda,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        learning_rate=1e-5,
        use_liger_kernel=cuda and importlib.util.find_spec("liger_kernel") is not None,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": tokens.tolist()}),
        processing_class=AutoTokenizer.from_pretrained(recipe.model),
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
