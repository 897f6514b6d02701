"""The experiment of Figure mqa_topk: many small models learn associative recall side by side.

Shape letters beside those of the package: S settings of the filler (zeros, then noise), N examples.
"""

import dataclasses as dc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.paper.row_sparse.adamw import AdamW
from benchmarks.paper.row_sparse.model import ModelSettings, RecallModel
from benchmarks.paper.row_sparse.mqar import MQAR, mqar, with_noise
from benchmarks.paper.row_sparse.update import RowSparse
from sse_convert.errors import UsageError
from sse_convert.files import replacing

WARM_UP = 0.05
"""share of the steps in which the learning rate rises to its value; a cosine takes it to 0"""
EAGER_STEPS = 3
"""steps before a GPU's step is captured, in which libraries set themselves up"""
EVALUATION_ROWS = 100
"""rows per forward of each model"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What sets one model apart from the others that are trained with it."""

    noise: bool
    """setting 2 of the figure (random tokens between pairs and queries) instead of setting 1 (zeros)"""
    update: RowSparse | None
    """None for the dense model"""
    learning_rate: float
    """highest of the schedule"""
    seed: int
    """of first weights and order of the data; equal seeds are equal in both, whatever else differs"""


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long and on how much every model trains."""

    steps: int
    """optimizer steps"""
    batch: int = 64
    """rows per step"""
    weight_decay: float = 0.1
    """as published for the task"""
    balance: float = 0.0
    """coefficient of the row balance loss; sparse models alone have one"""
    capture: bool = True
    """on a GPU, replay the step as a CUDA graph"""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise UsageError(f"{self.steps} steps of {self.batch} rows", expected="at least one of each")


@dc.dataclass(frozen=True, slots=True)
class Questions:
    """Rows of the task in both settings; pairs, queries and answers are the same in both."""

    inputs_SNT: Tensor
    """int64 token ids"""
    positions_NK: Tensor
    """int64, where the queries stand"""
    values_NK: Tensor
    """int64, what they ask for"""
    distances_NK: Tensor
    """int64, tokens since the asked key"""

    @staticmethod
    def draw(task: MQAR, num_examples: int, seed: int, device: torch.device) -> "Questions":
        """Rows of the published generator; the task's own `noise` does not matter."""
        plain = mqar(dc.replace(task, noise=False), num_examples, seed)
        inputs = torch.stack([plain.inputs, with_noise(plain, task.vocab_size, seed).inputs])
        positions, values = plain.queries()
        return Questions(*(x.to(device) for x in (inputs, positions, values, plain.distances())))


@dc.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Where a training is kept, to go on from in a later process."""

    path: Path
    """file of weights, moments and steps; removed by whoever is done with the training"""
    end: float = math.inf
    """as of `time.monotonic()`; a training that is not done then is kept and left"""
    every: int = 1000
    """steps after which it is kept in any case"""

    @property
    def over(self) -> bool:
        """Whether there is no time left."""
        return time.monotonic() > self.end

    def due(self, steps: int) -> bool:
        """Whether to keep a training after so many steps."""
        return self.over or steps % self.every == 0


class Paused(Exception):  # noqa: N818  nothing went wrong
    """Time was over before the last step; the training is kept."""


def train(
    settings: ModelSettings, runs: Sequence[Run], questions: Questions, budget: Budget, pause: Pause | None = None
) -> RecallModel:
    """Train one model per run, all at once.

    Args:
        settings: the shape they share.
        runs: what sets them apart.
        questions: the training rows; they are drawn anew for each step, with replacement.
        budget: how long.
        pause: where to go on from and when to stop; None trains to the end.

    Raises:
        Paused: time was over before the last step.
        UsageError: what was kept is of other models or another budget.
    """
    device = questions.inputs_SNT.device
    model = new_models(settings, runs).to(device)
    step = _Step(model, runs, questions, budget)
    identity = repr((settings, list(runs), budget))
    done = _kept(pause.path, step, identity) if pause else 0
    call: Callable[[], None] = step
    for i, (rows_RB, factor) in enumerate(_schedule(runs, len(questions.values_NK), budget)):
        if i < done:
            continue
        if pause and i > done and pause.due(i):
            _keep(pause.path, step, identity, i)
            if pause.over:
                raise Paused
        step.rows_RB.copy_(rows_RB)
        step.factor.fill_(factor)
        if budget.capture and device.type == "cuda" and i == done + EAGER_STEPS:
            call = _captured(step)
        call()
    return model


def _keep(path: Path, step: "_Step", identity: str, done: int) -> None:
    with replacing(path) as temporary:
        torch.save({"identity": identity, "done": done, "tensors": step.tensors()}, temporary)


def _kept(path: Path, step: "_Step", identity: str) -> int:
    """Steps that are done, after which everything is as `path` has it; 0 without it."""
    if not path.is_file():
        return 0
    kept = torch.load(path, map_location="cpu", weights_only=True)
    if kept["identity"] != identity:
        raise UsageError(
            f"{path} was kept from other models: {kept['identity']:.200}", expected=f"{identity:.200}", fix="remove it"
        )
    for own, earlier in zip(step.tensors(), kept["tensors"], strict=True):
        own.copy_(earlier)
    return int(kept["done"])


def new_models(settings: ModelSettings, runs: Sequence[Run]) -> RecallModel:
    """Untrained models on the CPU; runs with the same seed start from the same weights."""
    with torch.random.fork_rng(devices=[]):
        weights = {}
        for seed in {run.seed for run in runs}:
            torch.manual_seed(seed)
            weights[seed] = RecallModel(settings, [None]).state_dict()
        model = RecallModel(settings, [run.update for run in runs])
    model.load_state_dict({name: torch.cat([weights[run.seed][name] for run in runs]) for name in model.state_dict()})
    return model


@torch.no_grad()
def answers(model: RecallModel, runs: Sequence[Run], questions: Questions) -> Tensor:
    """Which questions each model answers with the right token, of the whole vocabulary: bool [R, N, K]."""
    setting_R = torch.tensor([int(run.noise) for run in runs], device=questions.inputs_SNT.device)
    correct = []
    for rows in torch.split(torch.arange(len(questions.values_NK), device=setting_R.device), EVALUATION_ROWS):
        logits_RBKV, _ = model(*_inputs(questions, setting_R, rows.expand(len(runs), -1)))
        correct.append(logits_RBKV.argmax(-1) == questions.values_NK[rows])
    return torch.cat(correct, 1)


def _inputs(questions: Questions, setting_R: Tensor, rows_RB: Tensor) -> tuple[Tensor, Tensor]:
    """Each model's rows [R, B, T] in its own setting, and the positions [R, B, K] of the queries."""
    return questions.inputs_SNT[setting_R[:, None], rows_RB], questions.positions_NK[rows_RB]


def _schedule(runs: Sequence[Run], num_examples: int, budget: Budget) -> Iterator[tuple[Tensor, float]]:
    """Rows [R, B] and factor of the learning rate of every step; equal seeds see equal rows."""
    generators = {run.seed: torch.Generator().manual_seed(run.seed) for run in runs}
    warm_up = max(1, round(WARM_UP * budget.steps))
    for step in range(budget.steps):
        rows = {seed: torch.randint(num_examples, (budget.batch,), generator=g) for seed, g in generators.items()}
        cosine = 0.5 * (1 + math.cos(math.pi * step / budget.steps))
        yield torch.stack([rows[run.seed] for run in runs]), min(1.0, (step + 1) / warm_up) * cosine


class _Step:
    """One optimizer step of all models; reads `rows_RB` and `factor`, which stay where they are."""

    def __init__(self, model: RecallModel, runs: Sequence[Run], questions: Questions, budget: Budget) -> None:
        device = questions.inputs_SNT.device
        self.model, self.questions, self.balance = model, questions, budget.balance
        self.parameters = list(model.parameters())
        rates_R = torch.tensor([run.learning_rate for run in runs], device=device)
        self.optimizer = AdamW(self.parameters, rates_R, budget.weight_decay)
        self.setting_R = torch.tensor([int(run.noise) for run in runs], device=device)
        self.rows_RB = torch.zeros(len(runs), budget.batch, dtype=torch.int64, device=device)
        self.factor = torch.zeros((), device=device)

    def tensors(self) -> list[Tensor]:
        """What changes from step to step: weights, moments and the number of steps."""
        own = self.optimizer
        return [p.detach() for p in (*self.parameters, *own.first, *own.second, own.steps)]

    def __call__(self) -> None:
        """The models are independent, so the gradient of the sum of their losses is the gradient of each."""
        logits_RBKV, keys = self.model(*_inputs(self.questions, self.setting_R, self.rows_RB))
        values = self.questions.values_NK[self.rows_RB]
        loss = F.cross_entropy(logits_RBKV.flatten(0, 2), values.flatten(), reduction="sum") / values[0].numel()
        if self.balance:
            loss = loss + self.balance * self.model.balance_loss(keys).sum()
        self.optimizer.step(torch.autograd.grad(loss, self.parameters), self.factor)


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph: hundreds of small kernels without the time to launch each."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
