"""Forward and backward of a micro batch as a CUDA graph. Launching the kernels of a small model one by one takes the
host longer than the GPU needs for them; a graph launches them all at once.

The graph is one more set of activations in memory, and is compared with a plain pass when it is made. All micro batches
of a stage have one shape; those whose rows hold several documents cannot go through it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import masking_utils

from sse_convert.console import say
from sse_convert.recipe.schema import Stage

PLAIN = 3
"""micro batches before the one that is recorded: what is compiled, chosen or tuned on the first ones is done by then"""
TOLERANCE = 1e-3
"""of loss and gradient norm of the graph, relative to those of the plain pass"""

Pass = Callable[[Mapping[str, Tensor], Any, float], dict[str, Tensor]]
"""forward and backward of a micro batch's tensors, with 1 / tokens of the step and the micro batch's share of it; adds
to the gradients and returns 0-d contributions to the step's means"""


def unrecordable(accelerator: Accelerator, student: Any, stage: Stage) -> str | None:
    """Why no pass of a stage can be recorded, or None."""
    mixers = [layer.mixer for layer in student.sse_layers().values()]
    reasons = {
        "there is no CUDA device": accelerator.device.type != "cuda",
        "a loss of ce picks its targets": stage.loss == "ce",
        "several processes exchange gradients": accelerator.num_processes > 1,
        "fp16 scales its loss anew": accelerator.mixed_precision == "fp16",
        "gradient_checkpointing repeats forwards": stage.gradient_checkpointing,
        "balance: bias counts tokens": any(mixer.balance == "bias" for mixer in mixers),
        "branch_dropout changes the layers": any(getattr(mixer, "branch_dropout", 0) for mixer in mixers),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class Device(Protocol):
    """What can record."""

    def aside(self, body: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run it where a recording will run."""

    def record(self, body: Callable[[], dict[str, Tensor]]) -> tuple[Callable[[], None], dict[str, Tensor]]:
        """Record it, without effect on any tensor; how to replay it, and the results, which each replay overwrites."""


class CudaDevice:
    """A stream of its own: autograd remembers where a parameter was first used, which must not be the default stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def aside(self, body: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run it in the stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            found = body()
        torch.cuda.current_stream().wait_stream(self._stream)
        return found

    def record(self, body: Callable[[], dict[str, Tensor]]) -> tuple[Callable[[], None], dict[str, Tensor]]:
        """Record it in the stream.

        Raises:
            RuntimeError: something in it waits for the device, or cannot be recorded for another reason.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                found = body()
        except RuntimeError:
            torch.cuda.synchronize()
            raise
        return graph.replay, found


class RecordedPass:
    """Runs micro batches, after some plain ones as a graph.

    Args:
        run: the plain pass.
        student: what is trained; its routers' traces show the last micro batch.
        device: records.
    """

    def __init__(self, run: Pass, student: Any, device: Device) -> None:
        self._run, self._device = run, device
        self._parameters: list[nn.Parameter] = [p for p in student.parameters() if p.requires_grad]
        self._traces = [layer.trace for layer in student.sse_layers().values()]
        self._plain = 0
        self._replay: Callable[[], None] | None = None
        self._refused = False

    def __call__(self, batch: Mapping[str, Tensor], weight: float, share: float) -> dict[str, Tensor]:
        """Forward and backward.

        Args:
            batch: tensors on the device, of rows that are one document each.
            weight: 1 / tokens that count in the whole step.
            share: this micro batch's part of the step.
        """
        if self._replay is not None:
            self._attach()
            return self._replayed(batch, weight)
        if self._plain >= PLAIN and not self._refused and all(p.grad is None for p in self._parameters):
            return self._record(batch, weight, share)
        self._plain += 1
        return self.aside(batch, weight, share)

    def aside(self, batch: Mapping[str, Tensor], weight: float, share: float) -> dict[str, Tensor]:
        """The plain pass, for any micro batch."""
        if self._replay is not None:
            self._attach()
        return self._device.aside(lambda: self._run(batch, weight, share))

    def _record(self, batch: Mapping[str, Tensor], weight: float, share: float) -> dict[str, Tensor]:
        """Record at the first micro batch of a step, whose plain pass shows whether the graph does the same."""
        plain = self._size(self.aside(batch, weight, share))
        self._gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        self._inputs = {name: value.clone() for name, value in batch.items()}
        self._weight = torch.full((), weight, device=plain.device)
        self._zero()
        try:
            with one_document_per_row():
                self._replay, self._found = self._device.record(lambda: self._run(self._inputs, self._weight, share))
        except RuntimeError as error:
            return self._give_up(str(error).splitlines()[0], batch, weight, share)
        self._remembered = [(trace, trace.logits_TN, trace.positions_T) for trace in self._traces]
        found = self._replayed(batch, weight)
        size = self._size(found)
        if not torch.allclose(size, plain, rtol=TOLERANCE, atol=0):
            what = f"it has loss and gradient norm {size.tolist()}, a plain pass has {plain.tolist()}"
            self._replay = None
            self._zero()
            return self._give_up(what, batch, weight, share)
        return found

    def _give_up(self, why: str, batch: Mapping[str, Tensor], weight: float, share: float) -> dict[str, Tensor]:
        self._refused = True
        say(f"no CUDA graph of this stage's passes, which go on without: {why}")
        return self.aside(batch, weight, share)

    def _replayed(self, batch: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
        assert self._replay is not None
        for name, value in batch.items():
            self._inputs[name].copy_(value)
        self._weight.fill_(weight)
        self._replay()
        for trace, logits, positions in self._remembered:
            trace.logits_TN, trace.positions_T = logits, positions
        return {name: value.clone() for name, value in self._found.items()}

    def _attach(self) -> None:
        """Give parameters the gradients that the graph adds to, as zeros, after a step has taken them away."""
        if next(iter(self._gradients)).grad is None:
            self._zero()
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

    def _zero(self) -> None:
        torch._foreach_zero_(list(self._gradients.values()))

    def _size(self, found: Mapping[str, Tensor]) -> Tensor:
        """[2] loss and gradient norm, in float64."""
        norms = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None])
        return torch.stack([found["loss"].double(), torch.stack(norms).double().norm()])


@contextlib.contextmanager
def one_document_per_row() -> Iterator[None]:
    """Tell transformers that rows are neither packed nor padded. While a graph is recorded it cannot look for that on
    the device, and would make masks of all pairs of tokens to be sure, which keeps attention from its fast kernels."""
    answers: dict[str, Callable[..., Any]] = {
        "find_packed_sequence_indices": lambda position_ids: None,
        "is_tracing": lambda tensor=None: False,
    }
    asked = {name: getattr(masking_utils, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(masking_utils, name, answer)
        yield
    finally:
        for name, question in asked.items():
            setattr(masking_utils, name, question)
