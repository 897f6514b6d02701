"""Scores of the demo teacher on text it never saw, beside an n-gram model of the same training tokens.

    python demo/score_teacher.py --data DATA --out demo/scores.json

DATA is the folder `teacher_data.py` wrote. `books`: held-out loss on windows spread evenly over 14 unseen
books, and needles planted in them, asked for by keys the training never asked for. `own_text`: the same on text sampled
from the teacher, which needs no books.
"""

import argparse
import dataclasses as dc
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from teacher_data import load
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sse_convert.checkpoints.open import open_checkpoint
from sse_convert.console import progress
from sse_convert.data.needle import load_words
from sse_convert.data.rows import RowReader
from sse_convert.data.teacher_samples import SamplingTeacher
from sse_convert.evaluation.intervals import ratio_standard_error
from sse_convert.evaluation.perplexity import Windows, held_out_loss, make_windows
from sse_convert.evaluation.retrieval import needle_samples, needle_score
from sse_convert.recipe.schema import NeedleEval, Source

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
ORDER = 5


@dc.dataclass(frozen=True)
class Order:
    """Counts of the n-grams of one length, packed into integers with the last token in the lowest digits."""

    grams: Ints
    """distinct n-grams, ascending"""
    counts: Ints
    """occurrences (highest order) or distinct predecessors (lower orders)"""
    contexts: Ints
    """distinct contexts (n-grams without their last token), ascending"""
    totals: Ints
    """summed counts of each context"""
    kinds: Ints
    """distinct continuations of each context"""


class KneserNey:
    """Interpolated Kneser-Ney with one discount per order (Kneser and Ney, 1995; Chen and Goodman, 1998)."""

    def __init__(self, tokens: NDArray[np.uint16], vocab_size: int, order: int) -> None:
        self.vocab_size, self.orders = vocab_size, []
        ids = tokens.astype(np.int64)
        packed = ids[order - 1 :].copy()
        for back in range(1, order):
            packed += ids[order - 1 - back : len(ids) - back] * vocab_size**back
        grams, counts = np.unique(packed, return_counts=True)
        for size in range(order, 0, -1):
            contexts, first = np.unique(grams // vocab_size, return_index=True)
            kinds = np.diff(np.append(first, len(grams)))
            self.orders.append(Order(grams, counts, contexts, np.add.reduceat(counts, first), kinds))
            if size > 1:
                grams, counts = np.unique(grams % vocab_size ** (size - 1), return_counts=True)
        self.orders.reverse()

    def losses(self, window: Ints) -> Floats:
        """Nats for every token of a window after its first, looking back within the window."""
        target = np.arange(1, len(window))
        probability = np.full(len(target), 1.0 / self.vocab_size)
        packed = np.zeros(len(target), dtype=np.int64)
        for back, level in enumerate(self.orders):
            known = target >= back
            packed[known] += window[target[known] - back] * self.vocab_size**back
            discount = (level.counts == 1).sum() / ((level.counts == 1).sum() + 2 * (level.counts == 2).sum())
            count = _look_up(level.grams, level.counts, packed)
            total = _look_up(level.contexts, level.totals, packed // self.vocab_size)
            kinds = _look_up(level.contexts, level.kinds, packed // self.vocab_size)
            seen = known & (total > 0)
            safe = np.maximum(total, 1)
            mixed = (np.maximum(count - discount, 0) + discount * kinds * probability) / safe
            probability = np.where(seen, mixed, probability)
        losses: Floats = -np.log(probability)
        return losses


def _look_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Ints = np.where(keys[index] == wanted, values[index], 0)
    return found


def spread_windows(tokens: NDArray[np.uint16], length: int, count: int) -> torch.Tensor:
    """`count` windows [count, length] at even distances over the held-out tokens."""
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return torch.from_numpy(np.stack([tokens[s : s + length] for s in starts]).astype(np.int64))


def ngram_scores(train: NDArray[np.uint16], vocab_size: int, windows: Windows) -> dict[str, Any]:
    """Loss and bits per byte of the n-gram model on the windows."""
    model = KneserNey(train, vocab_size, ORDER)
    sums = [float(model.losses(window).sum()) for window in windows.input_ids.numpy()]
    tokens = windows.input_ids.shape[1] - 1
    loss = sum(sums) / (tokens * len(sums))
    return {
        "model": f"interpolated Kneser-Ney, order {ORDER}, on all training tokens",
        "loss": loss,
        "loss_se": ratio_standard_error(sums, [tokens] * len(sums)),
        "bits_per_byte": sum(sums) / math.log(2) / int(windows.byte_counts.sum()),
    }


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: Windows,
    haystack: list[int],
    settings: NeedleEval,
) -> dict[str, Any]:
    """Held-out loss on the windows, and needle accuracy in the haystack, each with its interval."""
    with progress("held-out loss", len(windows.input_ids)) as bar:
        loss = held_out_loss(model, windows, bar=bar)
    print(f"loss {loss.loss:.4f} +- {loss.loss_se:.4f}, {loss.bits_per_byte:.4f} bits per byte", flush=True)
    groups = needle_samples(settings, haystack, tokenizer, load_words())
    scores = []
    with progress("needles", sum(map(len, groups))) as bar:
        for group in groups:
            score = needle_score(model, group, bar=bar)
            print(
                f"{score.kind} x{score.keys} at {score.length}: {score.total.correct}/{score.total.samples}", flush=True
            )
            scores.append(score.to_dict())
    return {"held_out": loss.to_dict(), "needles": scores}


def own_text(teacher: Path, tokenizer: PreTrainedTokenizerBase, rows: int, length: int) -> torch.Tensor:
    """Text [rows, length] sampled from the teacher, the same the demo's `kind: teacher` source gives."""
    source = Source(kind="teacher", rows=rows, length=length)
    own = SamplingTeacher(str(teacher), None, lambda: open_checkpoint(teacher))
    reader = RowReader([source], tokenizer, length, 0, role="valid", teacher=own)
    return torch.from_numpy(np.stack([row.input_ids for row in reader.rows()])).long()


def main() -> None:
    """Command line."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder written by teacher_data.py")
    parser.add_argument("--teacher", type=Path, default=here / "teacher")
    parser.add_argument("--out", type=Path, default=here / "scores.json")
    parser.add_argument("--windows", type=int, default=100, help="held-out windows")
    parser.add_argument("--samples", type=int, default=200, help="needle samples per setting")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    _, train, valid = load(args.data)
    tokenizer = AutoTokenizer.from_pretrained(args.teacher)
    model = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.float32).to(args.device).eval()
    context: int = model.config.max_position_embeddings
    lengths = [context // 4, context // 2, context]
    everything = NeedleEval(lengths=lengths, samples=args.samples, kinds=["number", "word", "code"], keys=[1, 4, 8])
    numbers = NeedleEval(lengths=lengths[:2], samples=args.samples, kinds=["number"], keys=[1, 4])
    books = make_windows(spread_windows(valid, context, args.windows), tokenizer)
    own = own_text(args.teacher, tokenizer, rows=64, length=256)
    result = {
        "parameters": model.num_parameters(),
        "data": json.loads((args.data / "data.json").read_text()),
        "own_text": measure(model, tokenizer, make_windows(own, tokenizer), own.flatten().tolist(), numbers),
        "books": measure(model, tokenizer, books, valid.tolist(), everything),
        "books_ngrams": ngram_scores(train, model.config.vocab_size, books),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
