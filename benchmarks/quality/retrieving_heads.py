"""Which heads of a teacher look back: the weight on what is to be recalled, and how far its keys stand from others.

    python -m benchmarks.quality.retrieving_heads ../shared/checkpoints/teacher-qwen3-32m \\
        ../shared/checkpoints/teacher-llama-30m --text out/classic-books/valid \\
        --out benchmarks/quality/retrieving_heads.json

Rows: one of four needles in either wording, and passages of the text that come again at the end. A head's weight is its
attention from the token before each recalled token to that token's earlier place, the mean of all. For the head with
most weight in the wording that the teacher knows, keys are mapped as SSE maps them, before any rotation: how many
standard deviations does the product of query and key stand above that of other keys of the row?
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.quality.convert import commit
from sse_convert.data.needle import encode, load_words
from sse_convert.files import write_json
from sse_convert.kernels.feature_maps import KeyFeatureMap, key_feature_map
from sse_convert.selection.recall_probes import RecallMaterial, Rows, needle_rows, ruler_rows

PASSAGE = 64
"""tokens that come again"""
CUE = 8
"""of these, that tell which passage it is"""
MAPS: tuple[KeyFeatureMap, ...] = ("l2", "relu", "softmax")
"""key maps of recipes"""
Pairs = list[list[tuple[int, int]]]
"""of each row: a position that predicts a recalled token, and where that token stood before"""


def repeated_rows(material: RecallMaterial) -> Rows:
    """Rows that end with a passage of their own first half."""
    rng, size, rows = material.rng("repeated"), min(PASSAGE, material.length // 4), []
    for _ in range(material.samples):
        start = rng.randint(0, len(material.haystack) - material.length)
        text = material.haystack[start : start + material.length - size]
        cut = rng.randint(0, material.length // 2 - size)
        rows.append(text + text[cut : cut + size])
    asked = torch.zeros(len(rows), material.length - 1, dtype=torch.bool)
    asked[:, CUE - size :] = True
    return Rows(torch.tensor(rows), asked)


def earlier_places(rows: Rows) -> Pairs:
    """For each recalled token of each row the position before it, and the place of its answer's last earlier copy."""
    found: Pairs = []
    for ids, asked in zip(rows.ids.tolist(), rows.asked, strict=True):
        positions = asked.nonzero()[:, 0].tolist()
        first, answer = positions[0], [ids[p + 1] for p in positions]
        before = next((i for i in range(first - len(answer), -1, -1) if ids[i : i + len(answer)] == answer), None)
        found.append([] if before is None else [(p, before + j) for j, p in enumerate(positions)])
    return found


def weights(model: Any, rows: Rows, pairs: Pairs) -> Tensor:
    """[layers, heads] mean attention weight of the pairs."""
    total = torch.zeros(model.config.num_hidden_layers, model.config.num_attention_heads)
    count = 0
    for ids, own in zip(rows.ids, pairs, strict=True):
        if own:
            at, to = torch.tensor(own).T
            attentions = model(ids[None], output_attentions=True).attentions
            total += torch.stack([layer[0][:, at, to].sum(-1) for layer in attentions])
            count += len(own)
    return total / max(1, count)


def heads_of(model: Any, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Queries [Hq, T, D] and keys [Hkv, T, D] of one layer, before rotation."""
    attention, seen = model.model.layers[layer].self_attn, {}

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["x"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    model(ids[None])
    handle.remove()

    def split(projection: Any, norm: Any) -> Tensor:
        heads: Tensor = projection(seen["x"])[0].unflatten(-1, (-1, attention.head_dim))
        return (heads if norm is None else norm(heads)).transpose(0, 1)

    queries = split(attention.q_proj, getattr(attention, "q_norm", None))
    return queries, split(attention.k_proj, getattr(attention, "k_norm", None))


def deviations(model: Any, rows: Rows, pairs: Pairs, layer: int, head: int) -> dict[str, float]:
    """Key map -> standard deviations between the recalled key and the row's others, the median over all pairs."""
    found: dict[str, list[float]] = {name: [] for name in MAPS}
    for ids, own in zip(rows.ids, pairs, strict=True):
        queries, keys = heads_of(model, ids, layer)
        key_head = head * keys.shape[0] // queries.shape[0]
        for name in MAPS:
            products = queries[head] @ key_feature_map(keys[key_head], name).T
            for at, to in own:
                others = torch.cat([products[at, :to], products[at, to + 1 : at + 1]])
                found[name].append(float((products[at, to] - others.mean()) / others.std()))
    return {name: float(torch.tensor(values).median()) for name, values in found.items()}


def strongest(table: Tensor) -> Iterator[dict[str, Any]]:
    """The four heads with most weight."""
    for place in table.flatten().topk(4).indices.tolist():
        layer, head = divmod(place, table.shape[1])
        yield {"layer": layer, "head": head, "weight": float(table[layer, head])}


def measure(folder: Path, text: str, samples: int, length: int) -> dict[str, Any]:
    """What a teacher's heads do with rows of each kind."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    words = folder / "needle_words.json"
    material = RecallMaterial(
        encode(tokenizer, text), tokenizer, load_words(words if words.is_file() else None), samples, length, 0
    )
    kinds = {"needle": needle_rows(material), "ruler": ruler_rows(material), "repeated": repeated_rows(material)}
    places = {kind: earlier_places(rows) for kind, rows in kinds.items()}
    tables = {kind: weights(model, rows, places[kind]) for kind, rows in kinds.items()}
    known = max(("needle", "ruler"), key=lambda kind: float(tables[kind].max()))
    layer, head = divmod(int(tables[known].argmax()), tables[known].shape[1])
    return {
        "heads": {kind: list(strongest(table)) for kind, table in tables.items()},
        "known": known,
        "deviations": deviations(model, kinds[known], places[known], layer, head),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teachers", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="folder of held-out text")
    parser.add_argument("--samples", type=int, default=20, help="rows of each kind")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = [path.read_text(encoding="utf-8") for path in sorted(options.text.glob("*.txt"))]
    text = "\n".join(
        part[len(part) // 4 : len(part) // 2] for part in random.Random(0).sample(texts, min(4, len(texts)))
    )
    command = f"python -m benchmarks.quality.retrieving_heads --samples {options.samples} --length {options.length}"
    found = {path.name: measure(path, text, options.samples, options.length) for path in options.teachers}
    about = {"command": command, "commit": commit(), "date": time.strftime("%Y-%m-%d"), "hardware": "CPU"}
    write_json(options.out, {**about, "teachers": found})


if __name__ == "__main__":
    main()
