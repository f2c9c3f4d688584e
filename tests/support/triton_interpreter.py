"""Triton's interpreter for tests: on before Triton is first imported, quicker, and three faults put right.

Triton reads TRITON_INTERPRET as its own functions are decorated, so it cannot be turned on later.
"""

import math
import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support.lanes import NIGHTLY

CONSTANTS, CONSTANT_BYTES = 4096, 16 << 10
"""Most tensors of constants that are kept, and the size of the largest."""


def turn_on() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    if getattr(interpreter, "_llmbox_patched", False):
        return
    patch_tensor, convert_float = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch(tensor: Any, scope: Any) -> None:
        """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Triton 3.6 loses the carry when rounding to E4M3 reaches the next power of two."""
        if str(target) != "fp8e4nv" or str(source) != "fp32":
            return convert_float(numbers, source, target, rounding)
        return torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def multiply(a: Any, b: Any, dtype: Any) -> Any:
        """Let bits of a row not depend on its place in the tile, as some BLAS kernels for float32 do."""
        if dtype != np.float32:
            return np.matmul(a, b, dtype=dtype)
        return np.matmul(a, b, dtype=np.float64).astype(np.float32)

    interpreter._patch_lang_tensor, interpreter._convert_float = patch, convert
    interpreter.np = SimpleNamespace(**{**vars(np), "matmul": multiply})
    interpreter._llmbox_patched = True
    quicken_types(interpreter)
    quicken_operands(interpreter)
    quicken_launches(interpreter)


def quicken_launches(interpreter: Any) -> None:
    """Patch `triton.language` once a launch, by a list made here: Triton searches it for what to patch, and
    does so again in every call from a kernel to a function.
    """
    from triton import language

    semantic = interpreter.interpreter_semantic

    def straight(value: Any) -> Any:
        """Call what the patch of a builtin calls in the end, without the two functions in between."""
        builtin = (getattr(value, "__kwdefaults__", None) or {}).get("member")
        if builtin is None:
            return value
        function = getattr(builtin, "__wrapped__", builtin)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    originals: dict[tuple[Any, str], Any] = {}
    for place, name, original in scope._changes:
        originals.setdefault((place, name), original)
    patched = [(place, name, straight(vars(place)[name])) for place, name in originals]
    scope.restore()
    lock, launches = threading.Lock(), 0

    def patch(_: Any) -> Any:
        nonlocal launches
        with lock:
            launches += 1
            if launches == 1:
                for place, name, value in patched:
                    setattr(place, name, value)
        return SimpleNamespace(restore=restore)

    def restore() -> None:
        nonlocal launches
        with lock:
            launches -= 1
            if launches == 0:
                for (place, name), original in originals.items():
                    if original is interpreter._MISSING:
                        delattr(place, name)
                    else:
                        setattr(place, name, original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang, interpreter.InterpretedFunction.__call__ = patch, call


def quicken_types(interpreter: Any) -> None:
    """Make types of tensors once for each dtype and shape: most of the time went there.

    By day additions are not computed once more in 64 bits to find overflows: shapes of tests are tiny.
    """
    from triton.language import core

    make_type, dtype_of = core.block_type.__init__, interpreter._get_np_dtype
    types: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(s.value if isinstance(s, core.constexpr) else s for s in shape))
        if (made := types.get(key)) is None:
            make_type(self, element_ty, shape)
            made = types[key] = vars(self)
            made["shape_and_numel"] = shape_of(self.shape)
        self.__dict__ = made

    def shape_of(sizes: Any) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.shape_and_numel

    def np_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(tt_dtype)
        return dtypes[name]

    core.dtype.shape_and_numel = shape_of(())
    core.block_type.__init__, core.tensor.__init__ = make_block_type, make_tensor
    interpreter._get_np_dtype = np_dtype

    def equal(self: Any, other: Any) -> bool:
        other = other.value if isinstance(other, core.constexpr) else other
        return isinstance(other, core.dtype) and self.name == other.name

    unwrap = core._unwrap_if_constexpr
    plain = (core.tensor, int, float, type(None), core.dtype)

    def unwrapped(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return value if isinstance(value, plain) else unwrap(value)

    core.dtype.__eq__, core._unwrap_if_constexpr = equal, unwrapped
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=NIGHTLY)


def quicken_operands(interpreter: Any) -> None:
    """Match the operands of an operation at once where Triton would leave them as they are, and make a number
    the same tensor of constants whenever it meets a type again.

    Only the interpreter's own semantic is patched: what is compiled for GPUs takes Triton's way.
    """
    from triton.language import core

    semantic, handle_type = interpreter.interpreter_semantic, interpreter.TensorHandle
    match, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constants: dict[Any, Any] = {}

    def match_quickly(lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        """`flags`: may the first, may the second be a pointer; are types promoted; is it a division."""
        if named:
            return match(lhs, rhs, *flags, **named)
        if isinstance(lhs, core.tensor):
            if isinstance(rhs, core.tensor):
                kind, other = lhs.type.scalar, rhs.type.scalar
                if kind.is_ptr():
                    if flags[:1] == (True,) and other.is_int():
                        return broadcast_quickly(lhs, rhs)
                elif kind.name == other.name and (kind.name not in {"fp16", "bf16"} or len(flags) < 4):
                    return broadcast_quickly(lhs, rhs)
                return match(lhs, rhs, *flags)
            tensor, number, place = lhs, rhs, 1
        elif isinstance(rhs, core.tensor):
            tensor, number, place = rhs, lhs, 0
        else:
            return match(lhs, rhs, *flags)
        key = (tensor.type.name, number, type(number), place, flags)
        if (constant := constants.get(key)) is not None:
            return (tensor, constant) if place else (constant, tensor)
        pair = match(lhs, rhs, *flags)
        if pair[1 - place] is tensor and pair[place].handle.data.nbytes <= CONSTANT_BYTES:
            if len(constants) == CONSTANTS:
                constants.clear()
            constants[key] = pair[place]
        return pair

    def broadcast_quickly(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (fill(left, lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, fill(right, rhs, left)
        one, other = left.shape.values, right.shape.values
        if one == other:
            return lhs, rhs
        if len(one) != len(other):
            return broadcast(lhs, rhs)
        both = [a if b == 1 else b for a, b in zip(one, other, strict=True)]
        return spread(left, lhs, both), spread(right, rhs, both)

    def fill(kind: Any, scalar: Any, like: Any) -> Any:
        """Return a block of one number, of the shape of `like`."""
        number = scalar.handle
        block = np.empty(like.shape.values, dtype=number.data.dtype)
        block.fill(number.data.item())
        return core.tensor(handle_type(block, number.dtype.scalar), core.block_type(kind, like.shape))

    def spread(kind: Any, block: Any, shape: list[int]) -> Any:
        if kind.shape.values == shape:
            return block
        handle = handle_type(np.broadcast_to(block.handle.data, shape), block.handle.dtype.scalar)
        return core.tensor(handle, core.block_type(kind.element_ty, shape))

    semantic.binary_op_type_checking_impl = match_quickly
    semantic.broadcast_impl_value = broadcast_quickly
    bytes_of: dict[str, int] = {}
    check = handle_type.__post_init__

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        """With the check of the size of numbers, by what was found of their type."""
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > bytes_of.get(dtype.name, 0):
            check(self)
            bytes_of[dtype.name] = data.itemsize

    handle_type.__init__ = make_handle
