"""Triton's interpreter spends most of its time on making the same types again; here each is made once."""

from typing import Any

import numpy as np


def speed_up(interpreter: Any) -> None:
    """Keep what depends on types alone: attributes, shapes of tensors, NumPy's dtypes, what needs no cast and is
    broadcast to which shape; and the tensor that a number becomes beside one of a type."""
    import triton.language as tl

    _keep_numpy_dtypes(interpreter)
    _check_each_size_once(interpreter.TensorHandle)
    _shape_at_once(interpreter.InterpreterBuilder, interpreter.TensorHandle)
    _call_builtins_at_once(interpreter, tl.core)
    _keep_block_types(tl.core)
    _keep_shapes(tl.core)
    _compare_by_identity_first(tl.core.dtype)
    _know_what_is_wrapped(tl.core)
    _know_equal_shapes(interpreter.TritonSemantic)
    _know_operands(interpreter.TritonSemantic, tl.core.tensor, interpreter.TensorHandle)


def _keep_numpy_dtypes(interpreter: Any) -> None:
    find, found = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = numpy_dtype


def _check_each_size_once(handle: Any) -> None:
    check, checked = handle.__post_init__, set()

    def init(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        key = (data.itemsize, dtype.name)
        if key not in checked:
            check(self)
            checked.add(key)

    handle.__init__ = init


def broadcast(data: Any, shape: tuple[int, ...]) -> Any:
    """A copy where its shape is another: NumPy takes three times as long to make a view."""
    if data.shape == shape:
        return data
    whole = np.empty(shape, data.dtype)
    whole[...] = data
    return whole


def _shape_at_once(builder: Any, handle: Any) -> None:
    """Without NumPy's functions in Python."""

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        return handle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    builder.create_expand_dims = expand_dims
    builder.create_broadcast = lambda self, arg, shape: handle(broadcast(arg.data, tuple(shape)), arg.dtype.scalar)


def _call_builtins_at_once(interpreter: Any, core: Any) -> None:
    """Without the wrapper that asks whether there is a semantic."""
    asking = core.builtin(lambda: None).__code__

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is asking else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def _keep_block_types(core: Any) -> None:
    make, made = core.block_type.__init__, {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size if type(size) is int else getattr(size, "value", size) for size in shape])
        if key not in made:
            make(self, element_ty, shape)
            made[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.__dict__ = {**made[key], "element_ty": element_ty}

    core.block_type.__init__ = init


def _keep_shapes(core: Any) -> None:
    make, made = core.tensor.__init__, {}

    def init(self: Any, handle: Any, type: Any) -> None:
        known = made.get(type.name)
        if known is None:
            make(self, handle, type)
            known = made[type.name] = {name: value for name, value in vars(self).items() if name != "handle"}
        self.__dict__ = {**known, "handle": handle}

    core.tensor.__init__ = init


def _compare_by_identity_first(dtype: Any) -> None:
    equal = dtype.__eq__
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _know_what_is_wrapped(core: Any) -> None:
    unwrap, plain = core._unwrap_if_constexpr, {}

    def unwrap_unless_plain(x: Any) -> Any:
        kind = type(x)
        if kind not in plain:
            plain[kind] = not issubclass(kind, (list, tuple, core.tuple, core.constexpr))
        return x if plain[kind] else x.value if kind is core.constexpr else unwrap(x)

    core._unwrap_if_constexpr = unwrap_unless_plain


def _know_equal_shapes(semantic: Any) -> None:
    broadcast, alike = semantic.broadcast_impl_value, set()

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        pair = (lhs.type.name, rhs.type.name)
        if pair in alike:
            return lhs, rhs
        found = broadcast(self, lhs, rhs)
        if found[0] is lhs and found[1] is rhs:
            alike.add(pair)
        return found

    semantic.broadcast_impl_value = broadcast_unless_alike


def _know_operands(semantic: Any, tensor: type, handle: type) -> None:
    """What becomes of each operand: None where it stays, the tensor of a number, or the type and shape that it is
    broadcast to, and NumPy's dtype, which a splat takes from the type. What is cast is never known."""
    check, known = semantic.binary_op_type_checking_impl, {}

    def is_cast(x: Any, new: Any) -> bool:
        return isinstance(x, tensor) and x.type.scalar != new.type.scalar

    def change(x: Any, new: Any) -> Any:
        if not isinstance(x, tensor):
            return new
        if x is new:
            return None
        return new.type, new.handle.data.shape, None if x.type.is_block() else new.handle.data.dtype

    def changed(x: Any, how: Any) -> Any:
        if isinstance(how, tensor):
            return how
        to, shape, dtype = how
        data = x.handle.data if dtype is None else x.handle.data.astype(dtype, copy=False)
        return tensor(handle(broadcast(data, shape), x.handle.dtype.scalar), to)

    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        left = lhs.type.name if isinstance(lhs, tensor) else repr(lhs)
        right = rhs.type.name if isinstance(rhs, tensor) else repr(rhs)
        key = (left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if key not in known:
            given, made = (lhs, rhs), check(self, lhs, rhs, *key[2:])
            if any(map(is_cast, given, made)):
                return made
            known[key] = tuple(change(x, new) for x, new in zip(given, made, strict=True))
        of_left, of_right = known[key]
        return (
            lhs if of_left is None else changed(lhs, of_left),
            rhs if of_right is None else changed(rhs, of_right),
        )

    semantic.binary_op_type_checking_impl = operands
