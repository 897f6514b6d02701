"""Which heads hold a teacher's retrieval: needles and KL while all KV heads but some see a window alone. No training.

    python -m benchmarks.real.heads MODEL BOOKS OUT.json [--samples 50] [--counts 3 6 9 12 18 24] [--select 0 7 8]

BOOKS is a folder of text files. Heads are chosen by wordings and passages that judge nothing:

    attention   attention from the tokens of an answer to those of its fact, beyond the window, at a length of rows
    far         attention beyond the window on running text
    greedy      one head at a time, the one that lowers KL on running text most
    refined     the best by attention, then swaps that lower KL on running text and the loss of answers
    layers      whole layers, by the attention of all their heads
    select      the layers that `sse-convert select` chose, given by --select

`--plans` judges what an earlier report kept, and chooses nothing.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.real.needles import TASKS, Judge, Row, Wording
from sse_convert.files import write_json

WINDOW, SINKS = 128, 4
FACT_WEIGHT = 0.1
"""of the loss of answers, in nats per token, beside KL on text"""
Head = tuple[int, int]
"""layer, KV head"""
Columns = Callable[[Tensor, Tensor], Tensor]
"""(rows [T], columns [S]) -> bool [T, S] or [S], which columns count"""
CHOSEN_BY = (
    Wording(
        "", " The locker of the {key} opens with {value}.", "\nQuestion: what opens the locker of the {key}?\nAnswer:"
    ),
    Wording("", " Note: {key} -> {value}.", "\nFrom the note above: {key} ->"),
    Wording("", " Call {key} at extension {value}.", "\nThe extension at which to call {key} is"),
)
"""wordings of the rows that choose"""


class Heads:
    """Attention of a model in which some KV heads see the whole row, the others a window and sinks."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, model.config.num_hidden_layers
        self.kv_heads = model.config.num_key_value_heads
        self._kept: set[Head] | None = None
        self._look: tuple[Tensor, Tensor, Columns] | None = None
        self._mask = torch.empty(0, 0)
        AttentionInterface.register("kept_heads", self._attend)
        model.set_attn_implementation("kept_heads")

    @contextmanager
    def only(self, kept: Sequence[Head] | None) -> Iterator[None]:
        """Let these heads alone see the whole row; None for all."""
        self._kept = None if kept is None else set(kept)
        try:
            yield
        finally:
            self._kept = None

    def attention(self, ids: Tensor, rows: Tensor, columns: Columns) -> Tensor:
        """Attention [layers, KV heads] of one row ids [T], from some positions to some columns: the mean over positions
        of the largest of a KV head's query heads."""
        mass = torch.zeros(self.layers, self.kv_heads)
        self._look = mass, rows, columns
        self.model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
        self._look = None
        return mass

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        groups, layer, parts = q.shape[1] // k.shape[1], module.layer_idx, []
        if self._look is not None:
            self._watch(q[0].unflatten(0, (-1, groups)), k[0], layer, scaling or q.shape[-1] ** -0.5)
        for head in range(k.shape[1]):
            whole = self._kept is None or (layer, head) in self._kept
            own = q[:, head * groups : (head + 1) * groups]
            key, value = (x[:, head : head + 1].expand(-1, groups, -1, -1) for x in (k, v))
            seen: dict[str, Any] = {"is_causal": True} if whole else {"attn_mask": self._window(q.shape[2], q.device)}
            parts.append(F.scaled_dot_product_attention(own, key, value, scale=scaling, **seen))
        return torch.cat(parts, 1).transpose(1, 2).contiguous(), None

    def _window(self, length: int, device: torch.device) -> Tensor:
        """bool [T, T], what windowed heads see."""
        if len(self._mask) != length:
            at = torch.arange(length, device=device)
            far = at[:, None] - at[None]
            self._mask = (far >= 0) & ((far < WINDOW) | (at[None] < SINKS))
        return self._mask

    def _watch(self, q: Tensor, k: Tensor, layer: int, scaling: float) -> None:
        assert self._look is not None
        mass, rows, columns = self._look
        at = torch.arange(k.shape[1], device=q.device)
        scores = torch.einsum("hgtd,hsd->hgts", q[:, :, rows].float(), k.float()) * scaling
        weights = scores.masked_fill(at > rows[:, None], float("-inf")).softmax(-1)
        mass[layer] += (weights * columns(rows, at)).sum(-1).mean(-1).amax(1).cpu()


class Choices:
    """Ways to choose heads, on what judges nothing."""

    def __init__(self, judge: Judge, heads: Heads, facts: int) -> None:
        self.judge, self.heads, self.facts = judge, heads, facts

    def rows(self, length: int, count: int) -> list[Row]:
        """Rows of all tasks and wordings in turn."""
        rng, tasks = random.Random(f"{self.judge.seed} choose {length}"), list(TASKS)
        asked = [(tasks[i % len(tasks)], CHOSEN_BY[i % len(CHOSEN_BY)]) for i in range(count)]
        return [self.judge.row(task, length, rng, wording, self.judge.choosing) for task, wording in asked]

    def by_attention(self, length: int) -> Tensor:
        """Attention of answers to their facts beyond the window, mean [layers, KV heads]."""
        found = []
        for row in self.rows(length, self.facts):
            rows = torch.arange(length - row.answer - 1, length - 1, device=self.judge.device)
            fact = row.fact
            columns = lambda q, at, fact=fact: (at >= fact.start) & (at < fact.stop) & (q[:, None] - at >= WINDOW)  # noqa: E731
            found.append(self.heads.attention(torch.tensor(row.ids, device=self.judge.device), rows, columns))
        return torch.stack(found).mean(0)

    def by_distance(self, length: int) -> Tensor:
        """Attention beyond the window and the sinks on running text, mean [layers, KV heads]."""
        rows = torch.arange(length // 2, length, 16, device=self.judge.device)
        columns: Columns = lambda q, at: (q[:, None] - at >= WINDOW) & (at >= SINKS)  # noqa: E731
        passages = self.judge.passages(self.judge.choosing, length, 6)
        return torch.stack([self.heads.attention(ids, rows, columns) for ids in passages]).mean(0)

    def loss(self, facts: Sequence[Row]) -> Callable[[Sequence[Head]], float]:
        """What keeping some heads costs: KL on running text, and the loss of answers times `FACT_WEIGHT`."""
        ids = self.judge.passages(self.judge.choosing, 2048, 4)
        expected = self.judge.expected(ids)

        def cost(kept: Sequence[Head]) -> float:
            with self.heads.only(kept):
                text = self.judge.kl(ids, expected)
                return text + (FACT_WEIGHT * self.judge.answers(facts)[1] if facts else 0.0)

        return cost


def ranked(mass: Tensor) -> list[Head]:
    """Heads in the order of their mass [layers, KV heads]."""
    return [divmod(int(i), mass.shape[1]) for i in mass.flatten().argsort(descending=True)]


def whole_layers(mass: Tensor) -> list[Head]:
    """Heads of whole layers, in the order of the layers' mass."""
    return [(layer, head) for layer in mass.sum(1).argsort(descending=True).tolist() for head in range(mass.shape[1])]


def greedy(cost: Callable[[Sequence[Head]], float], candidates: Sequence[Head], count: int) -> list[Head]:
    """One head at a time, the one with which the cost is least."""
    kept: list[Head] = []
    while len(kept) < count:
        kept.append(min((head for head in candidates if head not in kept), key=lambda head: cost([*kept, head])))
    return kept


def refined(cost: Callable[[Sequence[Head]], float], order: Sequence[Head], count: int, tries: int = 10) -> list[Head]:
    """The first heads of an order; each of the next ones may take the place of one of their later half."""
    kept = list(order[:count])
    best = cost(kept)
    for head in order[count : count + tries]:
        swaps = [[*(own for own in kept if own != out), head] for out in kept[count // 2 :]]
        least, swap = min((cost(swap), swap) for swap in swaps)
        if least < best:
            kept, best = swap, least
    return kept


def plans(
    options: argparse.Namespace, choices: Choices, report: dict[str, Any]
) -> Iterator[tuple[str, Sequence[Head] | None]]:
    """What is kept, by what chose it."""
    shortest, longest, size = min(options.lengths), max(options.lengths), choices.heads.kv_heads
    mass = {length: choices.by_attention(length) for length in sorted({shortest, longest})}
    report["attention"] = {
        length: [[round(x, 4) for x in row] for row in each.tolist()] for length, each in mass.items()
    }
    far = choices.by_distance(longest)
    orders: dict[str, Sequence[Head]] = {f"attention at {length:,}": ranked(each) for length, each in mass.items()}
    orders |= {"far": ranked(far), "layers": whole_layers(mass[longest])}
    orders["greedy"] = greedy(choices.loss([]), ranked(mass[longest] + far)[:45], max(options.counts[:4]))
    yield "all", None
    yield "none", []
    for count in options.counts:
        for name, order in orders.items():
            if len(order) >= count and (name != "layers" or count % size == 0):
                yield name, order[:count]
    if options.select:
        yield "select", [(layer, head) for layer in options.select for head in range(size)]
    cost = choices.loss(choices.rows(longest // 2, 12))
    for count in options.counts[1:4]:
        yield "refined", refined(cost, orders[f"attention at {longest:,}"], count)


def earlier(report: Path) -> Iterator[tuple[str, Sequence[Head] | None]]:
    """What an earlier run kept, by what chose it."""
    for plan in json.loads(report.read_text(encoding="utf-8"))["plans"]:
        yield plan["choice"], None if plan["kept"] is None else [(layer, head) for layer, head in plan["kept"]]


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    """Choose, judge and write; the report is written anew after each plan."""
    start = time.monotonic()
    judge = Judge(options.model, options.books, options.device, options.seed)
    heads = Heads(judge.model)
    report: dict[str, Any] = {
        **{"model": options.model, "window": WINDOW, "sinks": SINKS, "kv_heads": heads.layers * heads.kv_heads},
        **{"samples": options.samples, "plans": []},
    }
    texts = []
    for length in sorted({min(options.lengths), min(2048, max(options.lengths)), max(options.lengths)}):
        ids = judge.passages(judge.judging, length, options.rows if length <= 2048 else options.rows // 2)
        texts.append((length, ids, judge.expected(ids)))
    choices = Choices(judge, heads, options.facts)
    for name, kept in earlier(options.plans) if options.plans else plans(options, choices, report):
        with heads.only(kept):
            kl = {length: round(judge.kl(ids, expected), 4) for length, ids, expected in texts}
            needles = judge.needles(options.lengths, options.samples)
        report["plans"].append({"choice": name, "kept": kept, "kl": kl, "needles": needles})
        report["seconds"] = round(time.monotonic() - start, 1)
        found = "  ".join(f"{key} {value['right']}" for key, value in needles.items())
        print(f"{name:20} {'all' if kept is None else len(kept):>4}  KL {kl}  {found}", flush=True)
        write_json(options.out, report)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="folder or hub id of a plain model")
    p.add_argument("books", type=Path, help="folder of text files")
    p.add_argument("out", type=Path, help="JSON file to write")
    p.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192], help="tokens of a row")
    p.add_argument("--counts", nargs="+", type=int, default=[3, 6, 9, 12, 18, 24], help="heads to keep")
    p.add_argument("--samples", type=int, default=50, help="needles of each kind and length")
    p.add_argument("--facts", type=int, default=24, help="rows that rank heads")
    p.add_argument("--rows", type=int, default=8, help="passages for KL")
    p.add_argument("--select", nargs="*", type=int, default=[], help="layers that `select` chose")
    p.add_argument("--plans", type=Path, help="JSON file of an earlier run, whose plans are judged")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p


if __name__ == "__main__":
    run(parser().parse_args())
