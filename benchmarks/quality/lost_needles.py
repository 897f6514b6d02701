"""Which needles a converted layer loses, and what brings them back.

    python -m benchmarks.quality.lost_needles CHECKPOINT --recipe benchmarks/quality/one_layer.yaml --out out/lost.json

CHECKPOINT is a trained hybrid of the recipe with one recurrent layer (or --layer names one). Each row of `eval.needle`
is read as it is and with each of `CHANGES`, of which one alone would bring back what was lost for its reason:
forgetting, a question that reads other partitions than the fact was written to, or other tokens that were written
beside it. Of lost and of found needles apart: how crowded the partitions of the fact are, and how many of them are
read. The JSON is rewritten after each kind of needle. COMMIT names the commit where the checkout has no git.
"""

import argparse
import contextlib
import dataclasses as dc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.kernels.hybrid_measure import environment
from benchmarks.quality.needle_rows import needle_rows
from benchmarks.quality.wordings.misses import place
from sse_convert.checkpoints.load_model import load_model
from sse_convert.cli.runner import hush_libraries, reporting_errors
from sse_convert.console import say
from sse_convert.data.needle import NeedleSample
from sse_convert.errors import UsageError
from sse_convert.evaluation.intervals import Accuracy
from sse_convert.evaluation.retrieval import by_depth, depth_entries, right_tokens
from sse_convert.files import write_json
from sse_convert.kernels.by_head import NO_DECAY
from sse_convert.kernels.routing import best_partitions
from sse_convert.modeling.architectures import source_spec
from sse_convert.modeling.layer import SSEAttention
from sse_convert.recipe import load_recipe

BEFORE = 48
"""tokens before a value that belong to its fact"""
QUESTION = 64
"""tokens before the answer that belong to the question"""
Inputs = dict[str, Any]
"""as `SSEAttention.operator_inputs` gives them"""


@dc.dataclass(frozen=True, slots=True)
class Places:
    """Where things stand in a row of T tokens."""

    value: slice
    """the asked value, in the text"""
    answer: slice
    """where its tokens are predicted: one before each"""
    tokens: int
    """T"""

    def own(self) -> Tensor:
        """[T], the tokens of fact and question."""
        mask = torch.zeros(self.tokens, dtype=torch.bool)
        mask[max(0, self.value.start - BEFORE) : self.value.stop] = True
        mask[max(0, self.answer.start - QUESTION) :] = True
        return mask


def places(sample: NeedleSample) -> Places:
    """Where a row has its answer.

    Raises:
        ValueError: the text does not have the answer.
    """
    row, size = sample.token_ids, sample.answer_len
    answer, end = row[-size:], len(row) - size
    for start in range(end - size, -1, -1):
        if row[start : start + size] == answer:
            return Places(slice(start, start + size), slice(end - 1, len(row) - 1), len(row))
    raise ValueError(f"no fact holds the answer {answer}")


def as_it_is(inputs: Inputs, at: Places) -> Inputs:
    """Nothing changed."""
    return inputs


def no_decay(inputs: Inputs, at: Places) -> Inputs:
    """Nothing fades."""
    kept = 0.0 if inputs["decay_normalizer"] is None else NO_DECAY
    shared = inputs["shared"]
    return inputs | {
        "log_decay": torch.full_like(inputs["log_decay"], kept),
        "shared": shared and (*shared[:2], torch.full_like(shared[2], kept), *shared[3:]),
    }


def reads_all(inputs: Inputs, at: Places) -> Inputs:
    """Questions read every partition."""
    return inputs | {"read_top_k": inputs["router_logits"].shape[-1]}


def nothing_else_written(inputs: Inputs, at: Places) -> Inputs:
    """Tokens outside of fact and question write nothing; what they let fade stays faded."""
    own = at.own().to(inputs["v"].device)
    muted = {name: _times(inputs[name], own) for name in ("v", "write_strength", "shared_write_strength")}
    shared = inputs["shared"]
    return inputs | muted | {"shared": shared and (*shared[:3], *(_times(v, own) for v in shared[3:]))}


CHANGES: dict[str, Callable[[Inputs, Places], Inputs]] = {
    "as it is": as_it_is,
    "no decay": no_decay,
    "reads all": reads_all,
    "nothing else written": nothing_else_written,
}


def _times(x: Tensor | None, own: Tensor) -> Tensor | None:
    return None if x is None else x * own.view(-1, *[1] * (x.dim() - 1))


@dc.dataclass(frozen=True, slots=True)
class Look:
    """What became of a row."""

    depth: float
    right: dict[str, list[bool]]
    """by change, of each token of the answer"""
    crowd: float
    """tokens that wrote to the partitions of the value, for one in a partition of average load"""
    read: float
    """share of the value's tokens that a head reads from a partition they were written to, mean over heads"""

    def found(self, change: str = "as it is") -> bool:
        """Whether the answer was right."""
        return all(self.right[change])


class Watch:
    """Changes what a layer's operator is given, and keeps its choices of partitions.

    Args:
        layer: a recurrent one.
    """

    def __init__(self, layer: SSEAttention) -> None:
        self._layer = layer
        self.written: Tensor
        """[T, H or 1, k], partitions that tokens wrote to"""
        self.read: Tensor
        """the same of what they read"""

    @contextlib.contextmanager
    def changing(self, change: Callable[[Inputs, Places], Inputs], at: Places) -> Iterator[None]:
        """Inside, the operator is given changed inputs."""
        own = self._layer.operator_inputs

        def changed(*args: Any) -> Inputs:
            inputs = own(*args)
            self.written, self.read = _choices(inputs)
            return change(inputs, at)

        with mock.patch.object(self._layer, "operator_inputs", changed):
            yield

    def crowd(self, at: Places) -> float:
        """As `Look.crowd`."""
        partitions, heads = self._layer.mixer.num_partitions, self.written.shape[1]
        loads = torch.stack([self.written[:, h].flatten().bincount(minlength=partitions) for h in range(heads)])
        value = self.written[at.value]
        mine = torch.stack([loads[h][value[:, h]] for h in range(heads)]).double()
        return float(mine.mean() / (self.written[:, 0].numel() / partitions))

    def share_read(self, at: Places) -> float:
        """As `Look.read`."""
        same = self.written[at.value][..., :, None] == self.read[at.answer][..., None, :]
        return float(same.flatten(-2).any(-1).double().mean())


def _choices(inputs: Inputs) -> tuple[Tensor, Tensor]:
    written, read, bias = inputs["router_logits"], inputs["read_logits"], inputs["router_bias"]
    read_top_k = inputs["read_top_k"] or inputs["top_k"]
    return _best(written, inputs["top_k"], bias), _best(written if read is None else read, read_top_k, bias)


def _best(logits: Tensor, top_k: int, bias: Tensor | None) -> Tensor:
    """[T, H or 1, top_k] of logits [T, H, N] or [T, N]."""
    return best_partitions(logits.flatten(0, -2), top_k, bias)[1].view(len(logits), -1, top_k)


def looks(model: PreTrainedModel, layer: SSEAttention, samples: Sequence[NeedleSample]) -> Iterator[Look]:
    """What becomes of rows under every change."""
    watch = Watch(layer)
    for sample in samples:
        at, right = places(sample), {}
        for name, change in CHANGES.items():
            with watch.changing(change, at):
                (right[name],) = right_tokens(model, [sample])
        yield Look(sample.depth, right, watch.crowd(at), watch.share_read(at))


def summary(rows: Sequence[Look]) -> dict[str, Any]:
    """Figures of a kind of needle: found and brought back by each change, where answers go wrong, and what lost and
    found needles have of their own."""
    lost = [row for row in rows if not row.found()]
    apart = {"found": [row for row in rows if row.found()], "lost": lost}
    return {
        "samples": len(rows),
        "found": {name: Accuracy(sum(row.found(name) for row in rows), len(rows)).to_dict() for name in CHANGES},
        "brought_back": {name: sum(row.found(name) for row in lost) for name in CHANGES},
        "by_depth": depth_entries(by_depth([(row.depth, row.found()) for row in rows])),
        "first_wrong": dict(sorted(Counter(place(row.right["as it is"]) for row in rows).items())),
        "crowd": {name: fmean(row.crowd for row in own) if own else None for name, own in apart.items()},
        "read": {name: fmean(row.read for row in own) if own else None for name, own in apart.items()},
    }


def recurrent_layer(model: PreTrainedModel, layer: int | None) -> tuple[int, SSEAttention]:
    """The layer that is looked at, and its index.

    Raises:
        UsageError: it is not recurrent, or there is not one alone where none is named.
    """
    spec, count = source_spec(model.config.model_type), model.config.num_hidden_layers
    found = {i: model.get_submodule(spec.attention_path(i)) for i in range(count)}
    recurrent = {i: module for i, module in found.items() if isinstance(module, SSEAttention)}
    if layer is None and len(recurrent) == 1:
        (layer,) = recurrent
    if layer not in recurrent:
        what = "no --layer" if layer is None else f"--layer {layer}"
        raise UsageError(what, expected=f"one of the recurrent layers, {sorted(recurrent)}")
    return layer, recurrent[layer]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path, help="the trained hybrid")
    p.add_argument("--recipe", required=True, help="its recipe: text, key words, and needles that are asked for")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    p.add_argument("--layer", type=int, help="index of a recurrent layer; default: the only one")
    p.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return p


@reporting_errors
def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    hush_libraries()
    recipe, model = load_recipe(options.recipe, options.set), load_model(options.checkpoint)
    index, layer = recurrent_layer(model, options.layer)
    settings = {"checkpoint": str(options.checkpoint), "model": recipe.model, "seed": recipe.train.seed, "layer": index}
    parts: list[dict[str, Any]] = []
    report = {"schema": 1, "environment": environment(model.device), "settings": settings, "parts": parts}
    for samples in needle_rows(recipe):
        first = samples[0]
        kind = {"kind": first.kind, "keys": first.keys, "length": len(first.token_ids)}
        parts.append(kind | summary(list(looks(model, layer, samples))))
        write_json(options.out, report)
        say(f"{kind}: {parts[-1]['samples']}, lost {parts[-1]['brought_back']}")


if __name__ == "__main__":
    sys.exit(main())
