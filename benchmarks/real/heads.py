"""Which heads hold a teacher's retrieval: needles and KL while all KV heads but some see a window alone. No training.

    python -m benchmarks.real.heads MODEL BOOKS OUT.json [--lengths 1024 2048 4096 8192] [--samples 50] [--counts 3 6 9 12 18 24]

BOOKS is a folder of text files. Choices of heads are made on their own wordings and on other passages than those that
judge them:

    attention   mass of attention from the tokens of an answer to those of its fact, beyond the window
    far         mass of attention beyond the window, on running text
    greedy      one head at a time, the one that lowers KL on running text most
    refined     the best by attention, then swaps that lower KL on running text and on answers to facts
    layers      whole layers, by the attention of all their heads

A needle counts where every token of the answer is the likeliest one.
"""

import argparse
import dataclasses as dc
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from sse_convert.files import write_json

WINDOW, SINKS = 128, 4
Head = tuple[int, int]
"""layer, KV head"""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
WORDS = (
    "amber anchor basket beacon bishop blossom bridge candle canyon carpet castle cherry circle copper corner cotton "
    "cradle dragon emerald falcon feather fiddle forest garden ginger guitar hammer harbor helmet island jacket jungle "
    "kettle ladder lantern lemon lizard magnet marble meadow mirror monkey needle oyster palace parrot pepper pillow"
).split()
TASKS = {"noise": 1, "book": 1, "one of four": 4}
"""kind of text -> needles in a row"""


@dc.dataclass(frozen=True, slots=True)
class Wording:
    """How facts are planted and asked for."""

    head: str
    fact: str
    question: str


JUDGED = Wording(
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you about "
    "the numbers afterwards.\n",
    " One of the special magic numbers for {key} is: {value}.",
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is",
)
"""RULER's"""
CHOSEN_BY = (
    Wording("", " The locker of the {key} opens with {value}.", "\nQuestion: what opens the locker of the {key}?\nAnswer:"),
    Wording("", " Note: {key} -> {value}.", "\nFrom the note above: {key} ->"),
    Wording("", " Call {key} at extension {value}.", "\nThe extension at which to call {key} is"),
)
"""of the rows that choose"""


@dc.dataclass(frozen=True, slots=True)
class Row:
    """A row with facts, one of which is asked for at its end."""

    ids: list[int]
    answer: int
    """tokens of the answer, the last ones"""
    fact: range
    """where the asked fact stands"""


class Heads:
    """Attention in which some KV heads see the whole row, the others a window and sinks."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.model, self.layers, self.kv_heads = model, config.num_hidden_layers, config.num_key_value_heads
        self.keep: Tensor | None = None
        self.look: dict[str, Any] | None = None
        self._masks: dict[int, Tensor] = {}
        AttentionInterface.register("kept_heads", self._attend)
        model.set_attn_implementation("kept_heads")

    @contextmanager
    def only(self, kept: Sequence[Head] | None) -> Iterator[None]:
        """Let these heads alone see the whole row; None for all."""
        self.keep = None
        if kept is not None:
            self.keep = torch.zeros(self.layers, self.kv_heads, dtype=torch.bool)
            for head in kept:
                self.keep[head] = True
        try:
            yield
        finally:
            self.keep = None

    def mask(self, length: int, device: torch.device) -> Tensor:
        """bool [T, T], what windowed heads see."""
        if length not in self._masks:
            at = torch.arange(length, device=device)
            far = at[:, None] - at[None]
            self._masks = {length: (far >= 0) & ((far < WINDOW) | (at[None] < SINKS))}
        return self._masks[length]

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        groups, index = q.shape[1] // k.shape[1], module.layer_idx
        if self.look is not None:
            self._watch(q, k, index, groups, scaling)
        full = [True] * k.shape[1] if self.keep is None else self.keep[index].tolist()
        parts = []
        for head, whole in enumerate(full):
            own = q[:, head * groups : (head + 1) * groups]
            key, value = (x[:, head : head + 1].expand(-1, groups, -1, -1) for x in (k, v))
            seen: dict[str, Any] = {"is_causal": True} if whole else {"attn_mask": self.mask(q.shape[2], q.device)}
            parts.append(F.scaled_dot_product_attention(own, key, value, scale=scaling, **seen))
        return torch.cat(parts, 1).transpose(1, 2).contiguous(), None

    def _watch(self, q: Tensor, k: Tensor, index: int, groups: int, scaling: float | None) -> None:
        """Add each KV head's attention from some rows to some columns: the largest of its query heads."""
        assert self.look is not None
        for row, (queries, columns) in enumerate(zip(self.look["queries"], self.look["columns"], strict=True)):
            own = q[row, :, queries].unflatten(0, (-1, groups)).float()
            scores = torch.einsum("hgtd,hsd->hgts", own, k[row].float()) * (scaling or q.shape[-1] ** -0.5)
            at = torch.arange(k.shape[2], device=q.device)
            weights = scores.masked_fill(at > queries[:, None], float("-inf")).softmax(-1)
            mass = (weights * columns(queries, at)).sum(-1).mean(-1).amax(1)
            self.look["mass"][index] += mass.cpu()


class Judge:
    """Rows, text and figures of one model."""

    def __init__(self, folder: str, books: Path, device: str, seed: int) -> None:
        self.device, self.seed = device, seed
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.model, self.heads = model, Heads(model)
        texts = [self.ids(path.read_text(encoding="utf-8")[:600_000]) for path in sorted(books.glob("*.txt"))]
        self.own, self.others = texts[::2], texts[1::2]
        """books that judge, and those that choose"""

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def row(self, task: str, length: int, rng: random.Random, wording: Wording, texts: list[list[int]]) -> Row:
        """One row of exactly `length` tokens."""
        keys = rng.sample(WORDS, TASKS[task])
        values = [str(rng.randint(10**6, 10**7 - 1)) for _ in keys]
        facts = [self.ids(wording.fact.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
        asked = rng.randrange(len(keys))
        head, answer = self.ids(wording.head), self.ids(" " + values[asked])
        tail = self.ids(wording.question.format(key=keys[asked]))
        room = length - len(head) - len(tail) - len(answer) - sum(map(len, facts))
        body = self._body(task, room, rng, texts)
        cuts = sorted(rng.randrange(room) for _ in facts)
        out, last, at = list(head), 0, 0
        for i, (cut, fact) in enumerate(zip(cuts, facts, strict=True)):
            out += body[last:cut]
            at, last = (len(out), cut) if i == asked else (at, cut)
            out += fact
        return Row([*out, *body[last:], *tail, *answer], len(answer), range(at, at + len(facts[asked])))

    def _body(self, task: str, room: int, rng: random.Random, texts: list[list[int]]) -> list[int]:
        if task == "noise":
            noise = self.ids(NOISE)
            return (noise * (room // len(noise) + 1))[:room]
        text = rng.choice([text for text in texts if len(text) > room + 1])
        start = rng.randrange(len(text) - room)
        return text[start : start + room]

    def rows(self, task: str, length: int, count: int) -> list[Row]:
        """The rows that judge."""
        rng = random.Random(f"{self.seed} {task} {length}")
        return [self.row(task, length, rng, JUDGED, self.own) for _ in range(count)]

    def choosing_rows(self, length: int, count: int) -> list[Row]:
        """The rows that choose: all tasks and wordings in turn."""
        rng = random.Random(f"{self.seed} choose {length}")
        tasks = list(TASKS)
        wordings = [CHOSEN_BY[i % len(CHOSEN_BY)] for i in range(count)]
        return [self.row(tasks[i % 3], length, rng, wording, self.others) for i, wording in enumerate(wordings)]

    def passages(self, texts: list[list[int]], length: int, count: int) -> Tensor:
        """[count, length] of running text."""
        rng = random.Random(f"{self.seed} text {length}")
        long = [text for text in texts if len(text) > length + 1]
        starts = [(text := rng.choice(long), rng.randrange(len(text) - length)) for _ in range(count)]
        return torch.tensor([text[at : at + length] for text, at in starts], device=self.device)

    def logits(self, ids: Tensor, last: int = 0) -> Tensor:
        """Log probabilities [B, T or last, V]."""
        made = self.model(input_ids=ids, use_cache=False, logits_to_keep=last).logits
        return made.float().log_softmax(-1)

    def answers(self, rows: list[Row]) -> tuple[int, float]:
        """How many answers are wholly right, and the mean loss of their tokens in nats."""
        right, loss = 0, 0.0
        for part in _parts(rows, len(rows[0].ids)):
            ids = torch.tensor([row.ids for row in part], device=self.device)
            longest = max(row.answer for row in part)
            logs = self.logits(ids, longest + 1)[:, :-1]
            for log, row in zip(logs, part, strict=True):
                target = torch.tensor(row.ids[-row.answer :], device=self.device)
                own = log[-row.answer :]
                right += bool((own.argmax(-1) == target).all())
                loss -= float(own.gather(-1, target[:, None]).mean())
        return right, loss / len(rows)

    def kl(self, ids: Tensor, expected: list[Tensor]) -> float:
        """Mean KL of the teacher's predictions from those of today's heads, nats per token."""
        total, size = 0.0, max(1, 8192 // ids.shape[1])
        for i in range(0, len(ids), size):
            for logs, own in zip(expected[i : i + size], self.logits(ids[i : i + size]), strict=True):
                total += float((logs.exp() * (logs - own)).sum(-1).mean())
        return total / len(ids)

    def teacher(self, ids: Tensor) -> list[Tensor]:
        """The teacher's log probabilities [T, V] of each row."""
        return [self.logits(row[None])[0] for row in ids]

    def looked(self, ids: Tensor, queries: list[Tensor], columns: list[Any]) -> Tensor:
        """[layers, KV heads] of attention mass, see `Heads._watch`."""
        mass = torch.zeros(self.heads.layers, self.heads.kv_heads)
        for i, row in enumerate(ids):
            self.heads.look = {"mass": mass, "queries": [queries[i]], "columns": [columns[i]]}
            self.model(input_ids=row[None], use_cache=False, logits_to_keep=1)
        self.heads.look = None
        return mass / len(ids)


def _parts(rows: list[Row], length: int) -> Iterator[list[Row]]:
    size = max(1, 32768 // length)
    for i in range(0, len(rows), size):
        yield rows[i : i + size]


def by_attention(judge: Judge, length: int, count: int) -> Tensor:
    """Attention of the answers' tokens to their facts, [layers, KV heads]."""
    rows = judge.choosing_rows(length, count)
    ids = torch.tensor([row.ids for row in rows], device=judge.device)
    queries = [torch.arange(length - row.answer - 1, length - 1, device=judge.device) for row in rows]
    columns = [lambda q, at, r=row.fact: (at >= r.start) & (at < r.stop) & (q[:, None] - at >= WINDOW) for row in rows]
    return judge.looked(ids, queries, columns)


def by_distance(judge: Judge, length: int, count: int) -> Tensor:
    """Attention beyond the window and the sinks on running text, [layers, KV heads]."""
    ids = judge.passages(judge.others, length, count)
    queries = [torch.arange(length // 2, length, 16, device=judge.device)] * count
    columns = [lambda q, at: (q[:, None] - at >= WINDOW) & (at >= SINKS)] * count
    return judge.looked(ids, queries, columns)


def ranked(mass: Tensor) -> list[Head]:
    """Heads in the order of their mass."""
    heads = mass.shape[1]
    return [(int(i) // heads, int(i) % heads) for i in mass.flatten().argsort(descending=True)]


def whole_layers(mass: Tensor) -> list[Head]:
    """Heads of whole layers, in the order of the layers' mass."""
    order = mass.sum(1).argsort(descending=True).tolist()
    return [(layer, head) for layer in order for head in range(mass.shape[1])]


class Loss:
    """What a choice costs: KL on running text, and beside it the loss of answers to facts."""

    def __init__(self, judge: Judge, length: int, rows: int, facts: int, far: int) -> None:
        self.judge = judge
        self.ids = judge.passages(judge.others, length, rows)
        self.facts = judge.choosing_rows(far, facts) if facts else []
        self.expected = judge.teacher(self.ids)

    def __call__(self, kept: Sequence[Head]) -> float:
        """Nats per token of text, plus nats per token of an answer times a tenth."""
        with self.judge.heads.only(kept):
            text = self.judge.kl(self.ids, self.expected)
            return text + (0.1 * self.judge.answers(self.facts)[1] if self.facts else 0.0)


def greedy(loss: Loss, candidates: list[Head], count: int) -> list[Head]:
    """One head at a time, the one with which the loss is least."""
    kept: list[Head] = []
    while len(kept) < count:
        rest = [head for head in candidates if head not in kept]
        kept.append(min(rest, key=lambda head: loss([*kept, head])))
    return kept


def refined(loss: Loss, order: list[Head], count: int, tries: int) -> list[Head]:
    """The first of an order; then each of the next ones takes the place of whichever lowers the loss."""
    kept, best = order[:count], loss(order[:count])
    for head in order[count : count + tries]:
        swaps = [[*(own for own in kept if own != out), head] for out in kept[count // 2 :]]
        costs = [loss(swap) for swap in swaps]
        if (least := min(costs)) < best:
            kept, best = swaps[costs.index(least)], least
    return kept


def measure(judge: Judge, kept: Sequence[Head] | None, lengths: list[int], samples: int, texts: dict[int, Any]) -> dict[str, Any]:
    """KL by length, and needles found by task and length."""
    entry: dict[str, Any] = {"kl": {}, "needles": {}}
    with judge.heads.only(kept):
        for length, (ids, expected) in texts.items():
            entry["kl"][length] = round(judge.kl(ids, expected), 4)
        for task in TASKS:
            for length in lengths:
                right, loss = judge.answers(judge.rows(task, length, samples))
                entry["needles"][f"{task} {length}"] = {"right": right, "of": samples, "loss": round(loss, 3)}
    return entry


@torch.inference_mode()
def run(options: argparse.Namespace) -> None:
    """Choose, judge and write."""
    start = time.monotonic()
    judge = Judge(options.model, options.books, options.device, options.seed)
    lengths, longest = options.lengths, max(options.lengths)
    texts = {}
    for length in sorted({min(lengths), min(2048, longest), longest}):
        ids = judge.passages(judge.own, length, options.rows if length <= 2048 else 4)
        texts[length] = ids, judge.teacher(ids)
    mass = {length: by_attention(judge, length, options.facts) for length in sorted({min(lengths), longest})}
    far = by_distance(judge, longest, 6)
    report: dict[str, Any] = {
        "model": options.model, "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "window": WINDOW, "sinks": SINKS, "kv_heads": judge.heads.layers * judge.heads.kv_heads, "samples": options.samples,
        "attention": {length: [[round(float(x), 4) for x in row] for row in each] for length, each in mass.items()},
        "plans": [],
    }  # fmt: skip
    counts, orders = options.counts, {f"attention at {n:,}": ranked(each) for n, each in mass.items()}
    orders |= {"far": ranked(far), "layers": whole_layers(mass[longest])}
    if options.greedy:
        loss = Loss(judge, 2048, 4, 0, 0)
        orders["greedy"] = greedy(loss, ranked(mass[longest] + far)[:45], max(counts[:4]))
        print("greedy", orders["greedy"], round(time.monotonic() - start), flush=True)
    plans: list[tuple[str, list[Head] | None]] = [("all", None), ("none", [])]
    size = judge.heads.kv_heads
    for count in counts:
        for name, order in orders.items():
            if len(order) >= count and (name != "layers" or count % size == 0):
                plans.append((name, order[:count]))
    if options.select:
        plans.append(("select", [(layer, head) for layer in options.select for head in range(size)]))
    if options.refine:
        both = Loss(judge, 2048, 4, 12, longest // 2)
        for count in counts[1:4]:
            plans.append(("refined", refined(both, orders[f"attention at {longest:,}"], count, 10)))
    for name, kept in plans:
        entry = {"choice": name, "kept": kept, **measure(judge, kept, lengths, options.samples, texts)}
        report["plans"].append(entry)
        found = "  ".join(f"{key} {value['right']}" for key, value in entry["needles"].items())
        count = "all" if kept is None else len(kept)
        print(f"{name:20} {count:>4}  KL {entry['kl']}  {found}  {time.monotonic() - start:.0f} s", flush=True)
        report["seconds"] = round(time.monotonic() - start, 1)
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
    p.add_argument("--greedy", action="store_true", help="choose by KL as well")
    p.add_argument("--refine", action="store_true", help="refine the choice by attention")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p


if __name__ == "__main__":
    run(parser().parse_args())
