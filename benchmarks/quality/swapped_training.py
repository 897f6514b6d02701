"""Training of swapped layers by KL to the teacher, through the frozen layers above; a CUDA graph per row length.

Shape letters: R rows of a step, T tokens per row, D hidden size, V vocabulary.
"""

import dataclasses as dc
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.quality.swapped_states import Bed, arguments, climb
from benchmarks.quality.swapped_variants import Optimizer
from sse_convert.modeling.head import Head
from sse_convert.recipe.schema import Stage
from sse_convert.training.losses import linear_kl
from sse_convert.training.optimizer import make_optimizer
from sse_convert.training.schedule import Schedule
from sse_convert.training.setup import converted_attention

CLIP = 1.0
WARMUP, FLOOR = 0.05, 0.1


@dc.dataclass(frozen=True, slots=True)
class Phase:
    """Steps on rows of one length."""

    length: int
    """tokens per row"""
    rows: int
    """rows in all; more than there are means again in another order"""
    step_rows: int
    """rows per optimizer step"""

    def finer(self, times: int) -> "Phase":
        """The same rows in steps of so many times fewer, but one at least."""
        return dc.replace(self, step_rows=max(1, self.step_rows // times))


PHASES = (Phase(512, 4096, 32), Phase(2048, 6144, 8), Phase(8192, 512, 2))
"""18.9M tokens in 1,152 steps"""


@dc.dataclass(frozen=True, slots=True)
class Trained:
    """What a training did."""

    steps: int
    tokens: int
    curve: list[float]
    """KL to the teacher in nats per token, mean of each tenth of the steps"""


def train(
    student: PreTrainedModel,
    bed: Bed,
    *,
    rate: float,
    seed: int,
    phases: tuple[Phase, ...] = PHASES,
    optimizer: Optimizer = "adamw",
) -> Trained:
    """Train the attention of the converted layers; all else is frozen. Linear warm-up, then a cosine to a tenth.

    Args:
        student: the converted model, in float32.
        bed: rows and the teacher's states.
        rate: peak learning rate.
        seed: order of the rows.
        phases: what to train on.
        optimizer: adamw, or muon for matrices and adamw for the rest.
    """
    paths = tuple(f"{path}." for path in converted_attention(student).values())
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name.startswith(paths))
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    own_rate = torch.tensor(0.0, device=student.device)
    own_optimizer = _optimizer(student, optimizer, own_rate)
    order = torch.Generator().manual_seed(seed)
    plan = [(phase, rows) for phase in phases for rows in _draws(bed, phase, order)]
    # of a schedule whose steps differ in rows and their length, as these do, only the factor has a meaning
    schedule = Schedule(len(plan), rows=0, seq_len=0, warmup=math.ceil(WARMUP * len(plan)), floor=FLOOR)
    steps = {phase: _Step(student, bed, own_optimizer, parameters, phase) for phase in phases}
    losses = []
    student.train()
    for i, (phase, rows) in enumerate(plan):
        own_rate.fill_(rate * schedule.factor(i))
        losses.append(steps[phase](rows))
    curve = torch.stack(losses).cpu().split(math.ceil(len(losses) / 10))
    return Trained(len(plan), sum(p.length * len(rows) for p, rows in plan), [float(part.mean()) for part in curve])


def _optimizer(student: PreTrainedModel, name: Optimizer, rate: Tensor) -> torch.optim.Optimizer:
    """A stage's optimizer of what is trained, without weight decay; its steps can be recorded and read `rate`, 0-d."""
    cuda = student.device.type == "cuda"
    # of a stage, only optimizer and weight decay have a meaning here
    stage = Stage(name="swapped", loss="kl", tokens=0, seq_len=0, lr=0.0, weight_decay=0.0, optimizer=name)
    made, _ = make_optimizer(
        student.named_parameters(), stage, is_mixer=lambda _: True, is_inner=lambda _: True, fused=cuda
    )
    for group in made.param_groups:
        group.update(lr=rate, capturable=cuda)
    return made


def _draws(bed: Bed, phase: Phase, order: torch.Generator) -> list[Tensor]:
    left, draws = phase.rows, []
    while left > 0:
        rows = torch.randperm(len(bed.train[phase.length].ids_RT), generator=order)[:left]
        draws += [part for part in rows.split(phase.step_rows) if len(part) == phase.step_rows]
        left -= len(rows)
    return draws


class _Step:
    """One optimizer step over fixed buffers: plain the first time, then recorded and replayed."""

    def __init__(
        self,
        student: PreTrainedModel,
        bed: Bed,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        phase: Phase,
    ) -> None:
        self._student, self._bed, self._optimizer, self._parameters = student, bed, optimizer, parameters
        self._states = bed.train[phase.length]
        shape = phase.step_rows, phase.length, self._states.first_RTD.shape[-1]
        self._first, self._last = (torch.zeros(shape, dtype=x.dtype, device=x.device)
                                   for x in (self._states.first_RTD, self._states.last_RTD))  # fmt: skip
        self._given = arguments(student, phase.step_rows, phase.length)
        self._loss = torch.zeros((), device=student.device)
        self._graph: Any = None
        self._can_record = student.device.type == "cuda"
        self._warm = False

    def __call__(self, rows: Tensor) -> Tensor:
        """KL of the step in nats per token, 0-d, after the optimizer has moved."""
        rows = rows.to(self._first.device)
        self._first.copy_(self._states.first_RTD[rows])
        self._last.copy_(self._states.last_RTD[rows])
        if self._graph is None:
            self._optimizer.zero_grad(set_to_none=True)
            self._run()
        else:
            self._graph.replay()
        return self._loss.clone()

    def _run(self) -> None:
        if not self._can_record:
            self._body()
        elif not self._warm:
            self._aside()
        else:
            self._record()
        self._warm = True

    def _aside(self) -> None:
        """On a stream of its own, as recording wants its first run."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._body()
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._body()
        except RuntimeError:  # torch's delta rule waits for the device
            torch.cuda.synchronize()
            self._can_record = False
            self._optimizer.zero_grad(set_to_none=True)
            self._body()
            return
        self._graph = graph
        graph.replay()

    def _body(self) -> None:
        device = self._student.device
        student: Any = self._student
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            own_TD = climb(student, self._first, self._bed.first, self._given).flatten(0, 1)
            theirs_TD = self._last.flatten(0, 1)
            divergence = linear_kl(own_TD, Head.of(student), theirs_TD, Head.of(self._bed.teacher)) / len(own_TD)
        self._loss.copy_(divergence.detach())
        (divergence + student.sse_balance_loss()).backward()
        nn.utils.clip_grad_norm_(self._parameters, CLIP)
        self._optimizer.step()
