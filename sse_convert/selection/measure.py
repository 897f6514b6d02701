"""How good the model is with some layers kept and stand-ins in all others. Every set is measured once, and remembered.

One forward over the probe gives cross entropy and KL to the teacher, in nats per scored token, apart for running text
and for recall. Both count alike in what methods compare, whatever the number of their tokens.
"""

import csv
import dataclasses as dc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from sse_convert.console import Bar, progress
from sse_convert.errors import CheckpointError
from sse_convert.files import replacing
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import backbone_of
from sse_convert.modeling.head import Head, token_chunks
from sse_convert.selection.layer_outputs import LayerOutputs
from sse_convert.selection.layer_swap import Swap
from sse_convert.selection.probe import Probe
from sse_convert.selection.recall_probes import NAMES, Rows
from sse_convert.selection.team import ALONE, Team
from sse_convert.training.setup import decoder_layers

TOKENS_ON_CPU, TOKENS_ELSEWHERE = 4096, 16384
"""that the model reads at a time; few do not keep a GPU busy"""
Key = tuple[str, tuple[int, ...]]
"""what recall is measured with, and the layers that are kept"""


@dc.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The model with some layers kept."""

    probe: str
    """what recall was measured with"""
    kept: tuple[int, ...]
    """layers left as softmax attention, of those that can be replaced"""
    text_loss: float
    """cross entropy of running text, nats per token"""
    text_kl: float
    """KL(teacher || model) on running text, nats per token"""
    recall_loss: float
    """cross entropy of the tokens to be recalled, nats per token"""
    recall_kl: float
    """KL there"""
    recall_accuracy: float
    """share of answers that are exact; of copies, share of tokens"""
    tokens: int
    """tokens the model read"""
    seconds: float

    def kl(self, recall_weight: float) -> float:
        """Text KL plus weighted recall KL."""
        return self.text_kl + recall_weight * self.recall_kl


@dc.dataclass(slots=True)
class Cost:
    """What different measurements cost together, whether made now or remembered; without passes for layers' outputs."""

    tokens: int = 0
    seconds: float = 0.0
    counted: set[Key] = dc.field(default_factory=set)
    """sets that are in the sums"""


class Meter:
    """Measures kept sets, with a CSV file as memory.

    Args:
        load: gives the swappable teacher; called when the first set has to be measured.
        probe: what is asked.
        layers: numbers of what can be kept or replaced, ascending: layers, or heads.
        file: CSV of all measurements so far, rewritten (under a temporary name, then renamed) with each new one.
        team: processes that share the measurements; the first one reads and writes the file.
        span: 1 for layers, else the factor in the numbers of heads (`recipe.pattern.OpenChoice`).
    """

    def __init__(
        self,
        load: Callable[[], Swap],
        probe: Probe,
        layers: Sequence[int],
        file: Path,
        team: Team = ALONE,
        span: int = 1,
    ) -> None:
        self.probe, self.span = probe, span
        self.layers = layers
        self.recall = "needle"
        self.recall_weight = 1.0
        self._bar: Bar | None = None
        self._load = load
        self._swap: Swap | None = None
        self._file, self._team = file, team
        before = team.together(read_measurements(file) if team.leads else [])
        self._known: dict[Key, Measurement] = {(m.probe, m.kept): m for m in before}
        self._teacher: dict[str, list[Tensor]] = {}
        self._outputs: LayerOutputs | None = None
        self._cost = Cost()

    @property
    def swap(self) -> Swap:
        """The swappable teacher."""
        if self._swap is None:
            self._swap = self._load()
        return self._swap

    def measure(self, kept: Iterable[int]) -> Measurement:
        """The model with these layers kept and all others replaced."""
        own = tuple(kept)
        (found,) = self.measure_all([own], beside=own)
        return found

    def measure_all(self, sets: Iterable[Iterable[int]], beside: Iterable[int]) -> list[Measurement]:
        """The model with each of some sets kept; the team shares those that are not known.

        Args:
            sets: each differs little from `beside`.
            beside: a set; others are computed from the first layer on in which they differ from it.
        """
        keys = [(self.recall, tuple(sorted(kept))) for kept in sets]
        unknown = [key for key in dict.fromkeys(keys) if key not in self._known]
        own = self._team.share(unknown)
        if own:
            self._remember(base := tuple(sorted(beside)), measured=(self.recall, base) in own)
        for key in own:
            self._learn([self._measure(key[1])])
            self._show(key)
        if self._team.count > 1 and unknown:
            self._learn(self._team.together([self._known[key] for key in own]))
        for key in keys:
            self._count(key)
            if key not in own:
                self._show(key)
        return [self._known[key] for key in keys]

    @contextmanager
    def costing(self) -> Iterator[Cost]:
        """Sums what is measured inside."""
        outer, self._cost = self._cost, Cost()
        try:
            yield self._cost
        finally:
            self._cost = outer

    @contextmanager
    def shown(self, description: str, most: int) -> Iterator[None]:
        """A bar that counts sets, each once and known ones included, and ends with the last of them."""
        with progress(description, most) if self._team.leads else nullcontext() as self._bar:
            self._seen: set[Key] = set()
            yield
            if self._bar is not None:
                self._bar.expect(0)
        self._bar = None

    def count_pass(self, tokens: int) -> None:
        """Count a pass of the current method's own."""
        self._cost.tokens += tokens
        if self._bar is not None:
            self._bar.update()

    def parts(self) -> dict[str, Rows]:
        """The rows in use."""
        return {"text": self.probe.text, self.recall: self.probe.recall[self.recall]}

    def teacher_hidden(self) -> dict[str, list[Tensor]]:
        """The teacher's final hidden states at the scored positions, one CPU tensor per pass, for each part in use."""
        for name, rows in self.parts().items():
            if name not in self._teacher:
                with self.swap.keeping(self.layers) as model:
                    self._teacher[name] = [scored_hidden(model, part).cpu() for part in passes(rows, model.device)]
        return self._teacher

    def _learn(self, found: Iterable[Measurement]) -> None:
        self._known |= {(m.probe, m.kept): m for m in found}
        if self._team.leads:
            write_measurements(self._file, self._known.values())

    def _count(self, key: Key) -> None:
        if key not in self._cost.counted:
            self._cost.counted.add(key)
            self._cost.tokens += self._known[key].tokens
            self._cost.seconds += self._known[key].seconds

    def _show(self, key: Key) -> None:
        if self._bar is not None and key not in self._seen:
            self._seen.add(key)
            self._bar.update(note=f"keeping {len(key[1])} of {len(self.layers)}")

    @torch.no_grad()
    def _remember(self, kept: tuple[int, ...], *, measured: bool) -> None:
        """Have the outputs of layers of a set, for those beside it; if it is measured itself, they come of that."""
        outputs = self._layer_outputs()
        outputs.remember(kept, self.parts())
        if measured:
            return
        with self.swap.keeping(kept) as model:
            for name, rows in self.parts().items():
                for i, part in enumerate(passes(rows, model.device)):
                    if not outputs.has((name, i)):
                        with outputs.during((name, i), kept):
                            scored_hidden(model, part)

    def _layer_outputs(self) -> LayerOutputs:
        if self._outputs is None:
            model = self.swap.model
            tokens = sum(rows.ids.numel() for rows in self.parts().values())
            hidden_bytes = decoder_config(model.config).hidden_size * model.dtype.itemsize
            self._outputs = LayerOutputs(list(decoder_layers(model)), tokens * hidden_bytes, model.device, self.span)
        return self._outputs

    @torch.no_grad()
    def _measure(self, kept: tuple[int, ...]) -> Measurement:
        teacher, parts = self.teacher_hidden(), self.parts()
        start = time.monotonic()
        (text_loss, text_kl, _), (recall_loss, recall_kl, hits) = (
            self._scores(kept, name, rows, teacher[name]) for name, rows in parts.items()
        )
        return Measurement(
            probe=self.recall,
            kept=kept,
            text_loss=text_loss.mean().item(),
            text_kl=text_kl.mean().item(),
            recall_loss=recall_loss.mean().item(),
            recall_kl=recall_kl.mean().item(),
            recall_accuracy=_accuracy(hits, parts[self.recall].asked, whole=self.recall != "copy"),
            tokens=sum(rows.ids.numel() for rows in parts.values()),
            seconds=round(time.monotonic() - start, 3),
        )

    def _scores(self, kept: tuple[int, ...], name: str, rows: Rows, teacher: list[Tensor]) -> list[Tensor]:
        """Cross entropy, KL and hits of all scored positions of some rows."""
        found, outputs = [], self._layer_outputs()
        with self.swap.keeping(kept) as model:
            head = Head.of(model)
            for i, (part, teacher_hidden) in enumerate(zip(passes(rows, model.device), teacher, strict=True)):
                with outputs.during((name, i), kept):
                    hidden = scored_hidden(model, part)
                targets = part.ids[:, 1:][part.asked].to(model.device)
                found.append(token_scores(head, hidden, teacher_hidden.to(hidden), targets))
        return [torch.cat(values) for values in zip(*found, strict=True)]


def passes(rows: Rows, device: torch.device) -> Iterator[Rows]:
    """Some rows at a time, as many as suit the device."""
    size = max(1, (TOKENS_ON_CPU if device.type == "cpu" else TOKENS_ELSEWHERE) // rows.ids.shape[1])
    for first in range(0, len(rows.ids), size):
        yield Rows(rows.ids[first : first + size], rows.asked[first : first + size])


def scored_hidden(model: PreTrainedModel, rows: Rows) -> Tensor:
    """Final hidden states [n, D] at the n scored positions, row by row."""
    ids = rows.ids.to(model.device)
    hidden: Tensor = backbone_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][rows.asked.to(model.device)]


def token_scores(head: Head, hidden: Tensor, teacher_hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, KL from the teacher and whether the first choice is right, at n positions; float64 [n].

    Args:
        head: of both.
        hidden: [n, D] final hidden states.
        teacher_hidden: [n, D] the teacher's.
        targets: int64 [n] the next tokens.
    """
    found = []
    for part in token_chunks(len(hidden), head.weight.shape[0], hidden.device):
        log_p = F.log_softmax(head.logits(teacher_hidden[part]), -1)
        log_q = F.log_softmax(head.logits(hidden[part]), -1)
        target = targets[part]
        loss = -log_q.gather(1, target[:, None])[:, 0]
        kl = (log_p.exp() * (log_p - log_q)).sum(1)
        found.append(torch.stack([loss, kl, (log_q.argmax(1) == target).to(kl)]))
    loss_n, kl_n, hit_n = torch.cat(found, 1).cpu().double()
    return loss_n, kl_n, hit_n


def _accuracy(hits_n: Tensor, asked: Tensor, *, whole: bool) -> float:
    """Share of hits, or of rows without a miss."""
    if not whole:
        return hits_n.mean().item()
    missed = torch.zeros(len(asked), dtype=hits_n.dtype).index_add(0, asked.nonzero()[:, 0], 1 - hits_n)
    return (missed == 0).double().mean().item()


def read_measurements(file: Path) -> list[Measurement]:
    """What an earlier run measured; nothing without the file.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not file.is_file():
        return []
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            return [_from_text(row) for row in csv.DictReader(stream)]
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise CheckpointError(
            f"{file} is damaged: {error}",
            expected="what an earlier selection measured",
            fix="restore it from a copy, or remove it: everything is measured again",
        ) from error


def write_measurements(file: Path, measurements: Iterable[Measurement]) -> None:
    """Write the CSV anew.

    Raises:
        OutputError: it cannot be written.
    """
    names = [field.name for field in dc.fields(Measurement)]
    with replacing(file) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        for m in measurements:
            writer.writerow({**dc.asdict(m), "kept": " ".join(map(str, m.kept))})


def _named(probe: str) -> str:
    if probe not in NAMES:
        raise ValueError(f"probe is {probe!r}")
    return probe


def _from_text(row: dict[str, str]) -> Measurement:
    numbers = {f.name: f.type for f in dc.fields(Measurement) if f.type in (int, float)}
    return Measurement(
        probe=_named(row["probe"]),
        kept=tuple(map(int, row["kept"].split())),
        **{name: kind(row[name]) for name, kind in numbers.items()},  # type: ignore[arg-type, operator]
    )
