"""What must hold before the end-to-end benchmark times anything."""

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.hybrid_decoding import OWN, prefill, step_attention
from benchmarks.kernels.hybrid_measure import attention
from benchmarks.kernels.hybrid_models import TEACHER, Subject, build, set_backend
from benchmarks.kernels.hybrid_profile import gpu_kernels
from benchmarks.kernels.hybrid_training import next_token_loss, random_ids
from sse_convert.inference.cuda_graphs import TokenStep

BATCH, LENGTH, NEW_TOKENS = 2, 330, 4
LOGITS_LIMIT, GRADIENT_LIMIT, DECODE_LIMIT = 1e-4, 1e-3, 1e-3
"""of relative errors in float32"""
ROUNDING_FACTOR = 3
"""a backend's bfloat16 error may be this many times the other's"""


@dc.dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    what: str
    error: float
    """relative, by norms"""
    limit: float

    @property
    def ok(self) -> bool:
        """Whether it holds; NaN does not."""
        return self.error <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**dc.asdict(self), "ok": self.ok}


def error(value: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    truth = truth.double()
    return float((value.double() - truth).norm() / truth.norm())


def other_backend(backend: str) -> str:
    """What a backend is compared with."""
    return "reference" if backend == "varlen" else "varlen"


def backends_agree(subject: Subject, device: torch.device, backend: str) -> list[Check]:
    """Logits and gradients of all layers, under the backend to be timed and another, in float32 and bfloat16."""
    other, checks = other_backend(backend), []
    for name in subject.models[1:]:
        model = build(subject.short(), name, device=device, dtype=torch.float32)
        ids = random_ids(model, BATCH, LENGTH)
        wide = {choice: _logits_and_gradients(model, ids, choice) for choice in (backend, other)}
        model = model.to(torch.bfloat16)
        narrow = {choice: _logits_and_gradients(model, ids, choice) for choice in (backend, other)}
        for i, (what, limit) in enumerate((("logits", LOGITS_LIMIT), ("gradients", GRADIENT_LIMIT))):
            label = f"{name}: {what}, {backend} against {other}"
            checks.append(Check(f"{label}, float32", error(wide[backend][i], wide[other][i]), limit))
            rounding = ROUNDING_FACTOR * error(narrow[other][i], wide[other][i])
            checks.append(Check(f"{label} in float32, bfloat16", error(narrow[backend][i], wide[other][i]), rounding))
    return checks


def _logits_and_gradients(model: Any, ids: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    set_backend(model, backend)
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits.detach()
    next_token_loss(model, ids).backward()  # type: ignore[no-untyped-call]
    return logits, torch.cat([_grad(p) for p in model.base_model.layers.parameters()])


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.flatten().float()


@torch.no_grad()
def decoding_agrees(subject: Subject, device: torch.device, backend: str) -> list[Check]:
    """The last of several steps, and a step that fills the cache, against a forward over all their tokens."""
    checks = []
    for name in subject.models:
        model: Any = build(subject.short(), name, device=device, dtype=torch.float32, backend=backend)
        ids = random_ids(model, 1, LENGTH)
        for choice, steps in ((OWN, NEW_TOKENS), ("default", 1)):
            last = model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
            step = TokenStep(model, prefill(model, ids), last, LENGTH + steps)
            tokens = [ids]
            with step_attention(model, choice):
                for _ in range(steps):
                    tokens.append(step.tokens.clone())
                    logits = step()
            whole = model(input_ids=torch.cat(tokens, 1), use_cache=False).logits[:, -1]
            checks.append(Check(f"{name}: step {steps}, {choice} attention, against forward", error(logits, whole),
                                DECODE_LIMIT))  # fmt: skip
    return checks


def attention_kernels(subject: Subject, device: torch.device, choice: str) -> list[str]:
    """Names of the attention kernels that a bfloat16 teacher's forward and backward run under a choice."""
    model = build(subject.short(), TEACHER, device=device, dtype=torch.bfloat16)
    ids = random_ids(model, BATCH, LENGTH)
    with attention(choice):
        kernels = gpu_kernels(lambda: next_token_loss(model, ids).backward())  # type: ignore[no-untyped-call]
    words = ("flash", "fmha", "sdpa", "cudnn")
    return sorted({kernel.key for kernel in kernels if any(word in kernel.key.lower() for word in words)})
