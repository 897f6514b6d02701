"""Trains the demo teacher: a Qwen3 model of 2.6M parameters that reads English and finds needles in 2,048 tokens.

`--family llama` makes one of that shape (no norms on queries and keys), to try conversions on a second family.

    python demo/teacher_data.py --books BOOKS --data DATA
    python demo/train_teacher.py --data DATA --out demo/teacher --seconds 300 --seed 0

Next-token loss on every token of the rows of `teacher_data.Rows`; short rows first, because retrieval is learned on
them sooner. Time decides when a phase and the learning-rate schedule end. Needs one GPU; `--tiny` tries the script on
a CPU. Writes a Hugging Face folder (bfloat16) and `train_log.json`.
"""

import argparse
import json
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from teacher_data import EOS, PAD, Rows, load
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CONTEXT = 2048
WIDTH = 192
NEEDLE_SHARE = 0.45
WORKERS = max(1, (os.cpu_count() or 2) - 2)


@dataclass(frozen=True)
class Phase:
    """Rows of one length, until a share of the whole time has passed."""

    length: int
    rows: int
    until: float


PHASES = (Phase(512, 256, 0.35), Phase(1024, 128, 0.5), Phase(2048, 64, 1.0))
TINY_PHASES = (Phase(128, 8, 0.5), Phase(256, 4, 1.0))


def build(family: str, vocab_size: int, width: int = WIDTH) -> PreTrainedModel:
    """The untrained model, with heads of 32 whatever its width."""
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width * 7 // 3 // 64 * 64,
        num_hidden_layers=6,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The Hugging Face form of the tokenizer; it puts no token before a text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=PAD, model_max_length=CONTEXT
    )


def draw_rows(
    tokens: NDArray[np.uint16],
    tokenizer: Tokenizer,
    phase: Phase,
    seed: int,
    queue: "multiprocessing.Queue[NDArray[np.uint16]]",
) -> None:
    """Worker process: put batches [rows, length] into the queue for ever."""
    source = Rows(tokens, tokenizer, seed)
    while True:
        rows = [source.row(phase.length, NEEDLE_SHARE) for _ in range(phase.rows)]
        queue.put(np.array(rows, dtype=np.uint16))


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Warm-up over 200 steps, constant until half of the time, then linear to 1%."""
    return peak * min(1.0, (step + 1) / 200, max(0.01, 2 * (1 - progress)))


def make_optimizer(model: PreTrainedModel, peak: float) -> torch.optim.AdamW:
    """AdamW, weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


def train(model: PreTrainedModel, args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Run all phases; returns the log."""
    tokenizer, tokens, _ = load(args.data)
    optimizer = make_optimizer(model, args.lr)
    if not args.tiny:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    started = time.monotonic()
    log: list[dict[str, float]] = []
    step = seen = 0
    for phase in TINY_PHASES if args.tiny else PHASES:
        queue: multiprocessing.Queue[NDArray[np.uint16]] = multiprocessing.Queue(maxsize=16)
        workers = [
            multiprocessing.Process(
                target=draw_rows,
                args=(tokens, tokenizer, phase, args.seed * 10_000 + phase.length + i, queue),
                daemon=True,
            )
            for i in range(WORKERS)
        ]
        for worker in workers:
            worker.start()
        while (progress := (time.monotonic() - started) / args.seconds) < phase.until:
            rows = torch.from_numpy(queue.get(timeout=120).astype(np.int64)).to(device, non_blocking=True)
            rate = learning_rate(args.lr, step, progress)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device.type, torch.bfloat16):
                hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, seen = step + 1, seen + rows.numel()
            if step % 100 == 0 or args.tiny:
                row = {"step": step, "length": phase.length, "tokens": seen, "loss": round(loss.item(), 4), "lr": rate}
                log.append(row | {"seconds": round(time.monotonic() - started, 1)})
                print(log[-1], flush=True)
        for worker in workers:
            worker.terminate()
    seconds = round(time.monotonic() - started, 1)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"tokens": seen, "steps": step, "seconds": seconds, "device": name, "torch": torch.__version__, "log": log}


def save(model: PreTrainedModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer."""
    model.to(torch.bfloat16).save_pretrained(out)
    wrap_tokenizer(tokenizer).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder written by teacher_data.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seconds", type=float, default=300, help="training time")
    parser.add_argument("--family", choices=("qwen3", "llama"), default="qwen3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=WIDTH, help="hidden size, a multiple of 64")
    parser.add_argument("--lr", type=float, help=f"peak learning rate; unset: 4e-3 at width {WIDTH}, by 1 / width")
    parser.add_argument("--resume", type=Path, help="start from these weights (a folder written earlier)")
    parser.add_argument("--tiny", action="store_true", help="short rows on a CPU, to try the script")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cpu" if args.tiny else "cuda")
    tokenizer, _, _ = load(args.data)
    args.lr = args.lr or 4e-3 * WIDTH / args.width
    model = build(args.family, tokenizer.get_vocab_size(), args.width)
    if args.resume:
        model = AutoModelForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    model.to(device).train()
    print(f"{model.num_parameters() / 1e6:.3f}M parameters", flush=True)
    log = train(model, args, device)
    save(model, tokenizer, args.out)
    (args.out / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
