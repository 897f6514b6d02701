"""Forward and backward of a micro batch as a CUDA graph. Launching the kernels of a small model one by one takes the
host longer than the GPU needs for them; a graph launches them all at once.

All micro batches of a stage have one shape. Those whose rows hold several documents have graphs of their own, for up to
8, 16, 32, ... documents. The first graph is one more set of activations in memory, which the others use too. Each is
compared with plain passes at first.
"""

import contextlib
import dataclasses as dc
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import masking_utils

from sse_convert.compat import end_allocation
from sse_convert.console import say
from sse_convert.modeling.arch_spec import decoder_config
from sse_convert.modeling.architectures import has_experts
from sse_convert.modeling.layer_arguments import OFFSETS
from sse_convert.modeling.router import RouterTrace
from sse_convert.recipe.schema import Stage
from sse_convert.training.objective import Batch

PLAIN = 3
"""micro batches before one of their kind is recorded: what is compiled, chosen or tuned on the first is done by then"""
FEWEST_DOCUMENTS = 8
"""documents that the smallest graph for packed rows has room for"""
COMPARISONS = 2
"""micro batches that go through a graph and a plain pass: the one it was made of, and another"""
TOLERANCE = 1e-3
"""of loss and gradient norm of the graph, relative to those of the plain pass"""
REPEATS = 2
"""of the plain pass, where a graph is off by more: kernels that add up in any order differ from pass to pass"""

Pass = Callable[[Batch, Any, float], dict[str, Tensor]]
"""forward and backward of a micro batch's tensors, with 1 / tokens of the step and the micro batch's share of it; adds
to the gradients and returns 0-d contributions to the step's means"""


def unrecordable(accelerator: Accelerator, student: Any, stage: Stage) -> str | None:
    """Why no pass of a stage can be recorded, or None. What this does not know shows when it is tried."""
    layers = student.sse_layers().values()
    rope = rope_type(decoder_config(student.config))
    reasons = {
        "there is no CUDA device": accelerator.device.type != "cuda",
        "a loss of ce picks its targets": stage.loss == "ce",
        "loss_mask picks its tokens, and the head has a bias": stage.loss_mask != "all" and _has_bias(student),
        "data-parallel wrappers exchange gradients": accelerator.distributed_type != DistributedType.NO,
        "gradient_checkpointing repeats forwards": stage.gradient_checkpointing is True,
        "each pass drops out other values": _drops_out(student),
        "experts are chosen token by token": has_experts(student.config),
        f"rope_type {rope} looks at the positions": rope in ("dynamic", "longrope"),
        "a backend other than triton waits for the device": any(
            x.backend not in ("auto", "triton") or x.trains_on_torch(accelerator.device) for x in layers
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _has_bias(student: Any) -> bool:
    """Whether logits of zeros are not zeros, by which a recording leaves tokens out."""
    return getattr(student.get_output_embeddings(), "bias", None) is not None


def rope_type(config: Any) -> str:
    """Of a configuration's rotary embedding; `default` where it names none."""
    return str((getattr(config, "rope_parameters", None) or {}).get("rope_type", "default"))


def _drops_out(student: Any) -> bool:
    """Whether passes of a model in training draw random numbers."""
    config = decoder_config(student.config)
    attention = getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0)
    return attention > 0 or any(isinstance(m, nn.Dropout) and m.p > 0 for m in student.modules())


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
        self._pool = torch.cuda.graph_pool_handle()

    def aside(self, body: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Run it in the stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            found = body()
        torch.cuda.current_stream().wait_stream(self._stream)
        return found

    def record(self, body: Callable[[], dict[str, Tensor]]) -> tuple[Callable[[], None], dict[str, Tensor]]:
        """Record it in the stream, in the memory of the first recording.

        Raises:
            Exception: what kept it from being recorded, for example that something waits for the device.
        """
        gc.collect()  # no graph may be taken down in a capture
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would leave it current after an error
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                found = body()
            except Exception:
                self._abandon(graph)
                raise
            graph.capture_end()
        return graph.replay, found

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, and the allocation in its pool."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):
            end_allocation(self._stream.device_index, self._pool)
        torch.cuda.synchronize()


@dc.dataclass(frozen=True, slots=True)
class Recording:
    """A graph and the tensors that it reads and writes."""

    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    weight: Tensor
    """0-d"""
    found: dict[str, Tensor]
    routers: list[tuple[RouterTrace, Tensor | None]]
    """what routers remember of the pass"""

    def __call__(self, batch: Batch, weight: float) -> dict[str, Tensor]:
        """Replay it for a micro batch."""
        for name, value in batch.items():
            self.inputs[name].copy_(value)
        self.weight.fill_(weight)
        self.replay()
        for trace, logits in self.routers:
            trace.logits_TN = logits
        return {name: value.clone() for name, value in self.found.items()}


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
        self._traces: list[RouterTrace] = [layer.trace for layer in student.sse_layers().values()]
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._recordings: dict[int, Recording] = {}
        self._plain: Counter[int] = Counter()
        self._compared: Counter[int] = Counter()
        self._refused = False

    def __call__(self, batch: Batch, weight: float, share: float) -> dict[str, Tensor]:
        """Forward and backward.

        Args:
            batch: tensors on the device; with `position_ids` and `OFFSETS` where rows hold several documents.
            weight: 1 / tokens that count in the whole step.
            share: this micro batch's part of the step, the same for all.

        Returns:
            Detached 0-d contributions to the step's means.
        """
        kind = len(batch.get(OFFSETS, ()))
        step_begins = all(p.grad is None for p in self._parameters)
        self._attach()
        recorded = kind in self._recordings
        if recorded and (self._compared[kind] == COMPARISONS or not step_begins):
            return self._recordings[kind](batch, weight)
        if step_begins and not self._refused and self._plain[kind] >= PLAIN:
            return self._compare(kind, batch, weight, share)
        self._plain[kind] += 1
        return self._aside(batch, weight, share)

    def _aside(self, batch: Batch, weight: float, share: float) -> dict[str, Tensor]:
        return self._device.aside(lambda: self._run(batch, weight, share))

    def _compare(self, kind: int, batch: Batch, weight: float, share: float) -> dict[str, Tensor]:
        """The first micro batch of a step through both, plain pass and graph, which is made if there is none."""
        plain = self._aside(batch, weight, share)
        expected = self._size(plain)
        if not expected.isfinite().all():  # which says nothing; a later one will
            return plain
        self._gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        self._zero()
        del plain
        why = None if kind in self._recordings else self._record(kind, batch, weight, share)
        if why is None:
            found = self._recordings[kind](batch, weight)
            size = self._size(found)
            if torch.allclose(size, expected, rtol=TOLERANCE, atol=0):
                self._compared[kind] += 1
                return found
            if self._plain_differs_as_much(size, expected, lambda: self._aside(batch, weight, share)):
                self._compared[kind] += 1
                self._zero()
                return self._recordings[kind](batch, weight)
            why = f"a graph has loss and gradient norm {size.tolist()}, a plain pass {expected.tolist()}"
        self._give_up(why)
        return self._aside(batch, weight, share)

    def _plain_differs_as_much(self, size: Tensor, expected: Tensor, plain: Callable[[], dict[str, Tensor]]) -> bool:
        """Whether a graph's loss and gradient norm [2] lie among those of several plain passes, or as far outside as
        these lie apart."""
        sizes = [expected]
        for _ in range(REPEATS):
            self._zero()
            sizes.append(self._size(plain()))
        lowest, highest = torch.stack(sizes).aminmax(dim=0)
        room = highest - lowest + TOLERANCE * expected
        return bool(((lowest - room <= size) & (size <= highest + room)).all())

    def _record(self, kind: int, batch: Batch, weight: float, share: float) -> str | None:
        """Make a graph for micro batches like this one; says why if that cannot be."""
        inputs = {name: value.clone() for name, value in batch.items()}
        factor = next(iter(inputs.values())).new_full((), weight, dtype=torch.float32)
        try:
            with contextlib.nullcontext() if kind else one_document_per_row():
                replay, found = self._device.record(lambda: self._run(inputs, factor, share))
        except Exception as error:
            return f"{(str(error).splitlines() or [type(error).__name__])[0]} ({_place(error)})"
        routers = [(trace, trace.logits_TN) for trace in self._traces]
        self._recordings[kind] = Recording(replay, inputs, factor, found, routers)
        return None

    def _give_up(self, why: str) -> None:
        """No graphs any more: after a capture that failed torch may not be able to make another."""
        self._refused = True
        self._recordings.clear()
        for trace in self._traces:
            trace.forget()
        gc.collect()
        self._zero()
        say(f"the stage goes on without CUDA graphs: {why}")

    def _attach(self) -> None:
        """Give parameters the gradients that graphs add to, as zeros, after a step has taken them away."""
        if self._recordings and next(iter(self._gradients)).grad is None:
            self._zero()
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

    def _zero(self) -> None:
        torch._foreach_zero_(list(self._gradients.values()))

    def _size(self, found: Mapping[str, Tensor]) -> Tensor:
        """[2] loss and gradient norm, in float64."""
        norms = torch._foreach_norm([p.grad for p in self._parameters if p.grad is not None])
        return torch.stack([found["loss"].double(), torch.stack(norms).double().norm()])


def _place(error: Exception) -> str:
    """Where an error came from: the innermost line of this package, and of all code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "sse_" in frame.filename]
    return ", ".join(dict.fromkeys(f"{frame.filename}:{frame.lineno}" for frame in (*own[-1:], frames[-1])))


def padded_offsets(starts: Tensor) -> Tensor:
    """Where documents begin in a flattened batch, for a graph with room for more of them: those are empty, at its end.

    Args:
        starts: bool [B * T], True for the first token of each document.

    Returns:
        int64 [S + 1] for the smallest S of 8, 16, 32, ... that suffices.
    """
    offsets = starts.nonzero()[:, 0]
    room = max(FEWEST_DOCUMENTS, 1 << (len(offsets) - 1).bit_length())
    return F.pad(offsets, (0, room + 1 - len(offsets)), value=len(starts))


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
