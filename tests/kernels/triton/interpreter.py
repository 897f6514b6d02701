"""Triton's interpreter runs the kernels on a CPU. What it does differently from a GPU is mended or refused here.

`install` comes before the first import of triton: triton.language is itself made of jitted functions, and each is
compiled or interpreted for good when it is decorated. Wrong in Triton 3.6 and 3.9:
- tl.dot and arithmetic on bfloat16 use the raw bits as integers;
- float32 to bfloat16 truncates, a GPU rounds to nearest even;
- a tf32 dot keeps all bits of float32, a GPU drops 13 of them;
- lanes that a mask switches off load zeros, a GPU leaves anything there: here NaN, as in the rest of the tests;
- an address outside the arguments is read and written all the same: here it is an error.

NumPy 2.4 or newer needs Triton 3.9 (triton issue 9171).
"""

import dataclasses as dc
import math
import os
import types
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tests.kernels.triton.interpreter_speed import speed_up


def install() -> None:
    """Interpret kernels, if there is no CUDA device and triton is installed; harmless to call again."""
    if torch.cuda.is_available():
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(tl.cdiv, "rewriter"):
        raise RuntimeError("triton was imported before TRITON_INTERPRET was set: call install() earlier")
    if not issubclass(interpreter.InterpreterBuilder, _Mended):
        _mend(interpreter)


class _Mended:
    """Marks the builder that has been mended."""


def _mend(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    builder.__class__ = _builder_class(interpreter)
    interpreter.InterpreterBuilder = builder.__class__
    precisions = (*builder.options.allowed_dot_input_precisions, "bf16x3", "bf16x6")
    # overflow is computed at every integer operation, but reported only under `debug`
    builder.options = dc.replace(builder.options, allowed_dot_input_precisions=precisions, sanitize_overflow=False)
    speed_up(interpreter)
    executor = interpreter.GridExecutor
    to_host = executor._init_args_hst

    def note_arguments(self: Any, args: Any, kwargs: Any) -> Any:
        hosts = to_host(self, args, kwargs)
        builder.memory = _Memory([*_tensors(hosts[0]), *_tensors(hosts[1].values())])
        return hosts

    executor._init_args_hst = note_arguments
    interpreter._patch_lang = _patch_once(interpreter)


def _patch_once(interpreter: Any) -> Callable[[Any], Any]:
    """Swap triton.language for the interpreted one once per launch, not at every call of a device function as well; the
    first launch finds what is swapped for what."""
    import triton.language as tl

    patch, nothing, active = interpreter._patch_lang, interpreter._LangPatchScope(), []
    everything = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    swaps: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}

    def restore() -> None:
        active.clear()
        for owner, name, before, _ in swaps.values():
            if before is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def patch_once(fn: Any) -> Any:
        if active:
            return nothing
        if not swaps:
            for owner, name, before in patch(everything)._changes:
                swaps.setdefault((id(owner), name), (owner, name, before, vars(owner)[name]))
        for owner, name, _, interpreted in swaps.values():
            setattr(owner, name, interpreted)
        active.append(fn)
        return types.SimpleNamespace(restore=restore)

    return patch_once


def _builder_class(interpreter: Any) -> type:
    import triton.language as tl
    from triton._C.libtriton import ir

    handle = interpreter.TensorHandle

    def is_bf16(x: Any) -> bool:
        return bool(x.dtype.scalar == tl.bfloat16)

    def floats(x: Any) -> Any:
        return bf16_to_float32(x.data) if is_bf16(x) else x.data

    class Builder(_Mended, interpreter.InterpreterBuilder):  # type: ignore[misc, name-defined]
        memory: "_Memory"

        def cast_impl(self, src: Any, dst_type: Any) -> Any:
            if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
                return handle(float32_to_bf16(src.data), tl.bfloat16)
            if is_bf16(src) and dst_type.scalar == tl.float32:
                return handle(bf16_to_float32(src.data), tl.float32)
            if is_bf16(src) != (dst_type.scalar == tl.bfloat16):
                return self.cast_impl(self.cast_impl(src, tl.float32), dst_type)
            return super().cast_impl(src, dst_type)

        def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
            if rounding_mode == ir.ROUNDING_MODE.RTNE and tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
                return self.cast_impl(src, dst_type)
            return super().create_fp_to_fp(src, dst_type, rounding_mode)

        def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
            if not is_bf16(lhs):
                return super().binary_op(lhs, rhs, op)
            out = op(floats(lhs), floats(rhs))
            return handle(out if out.dtype == np.bool_ else float32_to_bf16(out), tl.bfloat16)

        def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
            if not is_bf16(arg):
                return super().unary_op(arg, op)
            return handle(float32_to_bf16(op(floats(arg))), tl.bfloat16)

        def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
            a_data, b_data = floats(a), floats(b)
            if input_precision == ir.INPUT_PRECISION.TF32 and a_data.dtype == b_data.dtype == np.float32:
                a_data, b_data = float32_to_tf32(a_data), float32_to_tf32(b_data)
            return handle(np.matmul(a_data, b_data, dtype=d.data.dtype) + d.data, d.dtype.scalar)

        def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *policy: Any) -> Any:
            self.memory.check(ptrs, mask, "load")
            element = ptrs.get_element_ty()
            if other is None and element.is_floating():
                other = self.cast_impl(handle(np.full(ptrs.data.shape, np.nan, np.float32), tl.float32), element)
            return super().create_masked_load(ptrs, mask, other, *policy)

        def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *policy: Any) -> Any:
            self.memory.check(ptrs, mask, "store")
            return super().create_masked_store(ptrs, value, mask, *policy)

        def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
            self.memory.check(ptr, mask, "atomic")
            return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)

    return Builder


class _Memory:
    """The address ranges of the tensors a kernel was given; nothing else may be touched."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        ranges = self.ranges = [(0, 0)]
        for start, end in sorted(_extent(t) for t in tensors if t.numel()):
            if start < ranges[-1][1]:  # views of the same elements
                ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
            else:
                ranges.append((start, end))
        self.starts = np.array([start for start, _ in ranges], dtype=np.uint64)
        self.ends = np.array([end for _, end in ranges], dtype=np.uint64)

    def holds(self, start: int, end: int) -> bool:
        """Whether one of the ranges has all from the first address to the last."""
        return end <= self.ranges[bisect_right(self.ranges, (start, math.inf)) - 1][1]

    def check(self, ptrs: Any, mask: Any, action: str) -> None:
        """Raise unless every address that the mask leaves on lies in one of the ranges."""
        addresses, on = ptrs.data if ptrs.data.ndim else np.atleast_1d(ptrs.data), mask.data
        touched = addresses[on if on.shape == addresses.shape else np.broadcast_to(on, addresses.shape)]
        if touched.size == 0:
            return
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        if self.holds(int(touched.min()), int(touched.max()) + size):  # as mostly
            return
        index = np.searchsorted(self.starts, touched, side="right") - 1
        inside = touched + np.uint64(size) <= self.ends[index]
        if not inside.all():
            raise IndexError(f"{action} of {(~inside).sum()} elements outside the kernel's arguments")


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first element, and that after its last: its storage may be larger."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def bf16_to_float32(bits: Any) -> Any:
    """Values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bf16(values: Any) -> Any:
    """Bit patterns (uint16) of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(np.shape(values))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def float32_to_tf32(values: Any) -> Any:
    """float32 without its last 13 bits, which is what a tensor core sees."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    return np.where(np.isfinite(values), (bits & np.uint32(0xFFFFE000)).view(np.float32), values)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif hasattr(value, "base"):
            yield value.base
