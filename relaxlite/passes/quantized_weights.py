"""Keep the weights of matrix products in the few bits that they have.

    matmul(x, w),  w = what constants compute    =>    matmul(x, dequantize_linear(unpack_integers(words), scale, zero))

A weight counts as quantized if its values, whatever ops compute them, are integers times a scale that many rows share:
DequantizeLinear in all its forms, or plain casts, shifts, subtractions and a multiplication. The integers are
evaluated, and stored in as few bits as their values need: 2 or 4 in words of 32, or bytes. Where no such width holds
all of them, but a zero point for each column of a group of rows makes it do, they get one. The values stay the same to
the last bit. Weights in half precision stay as they are, too.

Weights that as float32 fit into the L2 cache become float32: they are read from there, and there is nothing to unpack.
For half precision, which one conversion widens, all weights of the function have to fit: where many follow each other,
as in a decoder, none is still there when its turn comes again, and only the bytes count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import RelaxliteError
from relaxlite.ir.expr import Array, Call, Constant, Expr, Function, Let, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.quantize import pack_integers
from relaxlite.ir.symbolic import as_int, product, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, bodies, map_functions
from relaxlite.passes.manager import PassContext

LEAST_GROUP = 16  # rows that share a scale: with fewer, the scales take as much room as the numbers
_LARGEST = 1 << 15  # magnitude of integers whose differences and float32 values are exact


@dataclass(frozen=True, slots=True)
class Scaled:
    """integers * scale as float32; the scale broadcasts, None: 1."""

    integers: Array
    scale: Array | None = None

    def moved(self, move: Callable[[Array], Array]) -> Scaled:
        """After an op that only moves elements."""
        scale = None if self.scale is None else move(np.broadcast_to(self.scale, self.integers.shape))
        return Scaled(move(self.integers), scale)


@dataclass(frozen=True, slots=True)
class Half:
    """Half-precision numbers as float32."""

    values: Array

    def moved(self, move: Callable[[Array], Array]) -> Half:
        """After an op that only moves elements."""
        return Half(move(self.values))


Known: TypeAlias = "Array | tuple[int, ...] | Scaled | Half"


def keep_quantized(module: IRModule, context: PassContext) -> IRModule:
    """Give constant weights of matrix products the form that takes the fewest bytes."""
    return map_functions(module, lambda f: _KeepQuantized(context, _bytes_of_weights(f)).function(f))


def _bytes_of_weights(function: Function) -> int:
    """What the right operands of the function's products take as float32, where their shapes are constant."""
    found: dict[int, int] = {}
    for body in bodies(function):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "matmul":
                w = value.args[1]
                size = None if not isinstance(w.ty, TensorType) or w.ty.shape is None else as_int(product(w.ty.shape))
                found[id(w)] = 4 * (size or 0)
    return sum(found.values())


class _KeepQuantized(Rewriter):
    def __init__(self, context: PassContext, together: int) -> None:
        super().__init__()
        self._context, self._together = context, together
        self._bound: dict[Var, Expr] = {}
        self._known: dict[Var, Known | None] = {}
        self._weights: dict[Var, Expr | None] = {}

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        self._bound[var] = value

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or value.callee.name != "matmul":
            return None
        x, w = value.args
        if not isinstance(w, Var) or not isinstance(w.ty, TensorType) or w.ty.dtype != "float32":
            return None
        if w not in self._weights:
            self._weights[w] = self._weight(w)
        weight = self._weights[w]
        return None if weight is None else replace(value, args=(x, weight))

    def _weight(self, w: Var) -> Expr | None:
        found = self._evaluate(w)
        if not isinstance(found, Scaled | Half):
            return None
        integers = found.integers if isinstance(found, Scaled) else found.values
        if isinstance(found, Half) and self._context.precision == "bf16":
            return None  # it is rounded to what that precision takes
        widened, l2 = 4 * integers.size, self._context.target.l2_bytes
        if (self._together if isinstance(found, Half) else widened) <= l2:
            what = "all weights together fit" if isinstance(found, Half) else "it fits"
            reason = f"as float32 {what} into the L2 cache of {l2} bytes"
            self._context.decide("keep_quantized", w.name, False, reason, bytes_widened=sym(widened))
            return Constant.of(_as_floats(found), name=w.name)
        stored = _stored(found) if integers.ndim == 2 else None
        if stored is None:
            reason = "its scales follow no groups of rows, or it is no matrix of at most 8 bits"
            self._context.decide("keep_quantized", w.name, False, reason, bytes_widened=sym(widened))
            return None
        expr, size, form = stored.emit(self), stored.num_bytes, stored.form
        figures = {"bytes_stored": sym(size), "bytes_widened": sym(widened)}
        self._context.decide("keep_quantized", w.name, True, f"it is kept as {form}", **figures)
        return expr

    def _evaluate(self, expr: Expr) -> Known | None:
        if isinstance(expr, Constant):
            return expr.value
        if isinstance(expr, ShapeValue):
            values = [as_int(v) for v in expr.values]
            return None if None in values else tuple(v for v in values if v is not None)
        if not isinstance(expr, Var) or expr not in self._bound:
            return None
        if expr not in self._known:
            value = self._bound[expr]
            self._known[expr] = self._call(value) if isinstance(value, Call) else self._evaluate(value)
        return self._known[expr]

    def _call(self, call: Call) -> Known | None:
        if not isinstance(call.callee, Op) or not call.callee.is_pure or not isinstance(call.ty, TensorType):
            return None
        operands = [self._evaluate(arg) for arg in call.args]
        if any(o is None for o in operands) or not operands:
            return None
        rule = _RULES.get(call.callee.name)
        found = None if rule is None else rule(call.attrs, *operands)
        if found is not None:
            return found
        if any(isinstance(o, Scaled | Half) for o in operands):
            return None
        given = [o for o in operands if isinstance(o, np.ndarray)]
        widens = dtypes.is_float(call.ty.dtype) and any(o.dtype.kind in "iub" for o in given)
        if widens or type(call.callee).reference is Op.reference:
            return None
        try:
            with np.errstate(all="ignore"):
                result = np.asarray(call.callee.reference(*operands, **call.attrs))
        except (RelaxliteError, IndexError, ValueError, ArithmeticError):  # an error of run time, if this is ever run
            return None
        return result.astype(dtypes.to_numpy(call.ty.dtype), copy=False)


def _cast(attrs: Mapping[str, Any], x: Known) -> Known | None:
    if attrs["dtype"] != "float32" or not isinstance(x, np.ndarray):
        return None
    if x.dtype.kind in "iu" and _is_exact(x):
        return Scaled(x)
    return Half(x) if dtypes.from_numpy(x.dtype) in ("float16", "bfloat16") else None


def _dequantize(attrs: Mapping[str, Any], x: Known, scale: Known, zero: Known | None = None) -> Known | None:
    if not isinstance(x, np.ndarray) or not isinstance(scale, np.ndarray) or scale.dtype != np.float32:
        return None
    if not isinstance(zero, np.ndarray | None) or not _is_exact(x):
        return None
    axis, block = int(attrs["axis"]) % max(x.ndim, 1), int(attrs["block_size"])
    integers: Array = x.astype(np.int32)
    if zero is not None:
        integers = np.subtract(integers, _spread(zero.astype(np.int32), x.shape, axis, block))
    return Scaled(integers, _spread(scale, x.shape, axis, block))


def _spread(scale: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """One per element, by broadcasting."""
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(()), shape)
    if not block:
        return np.broadcast_to(scale.reshape(-1, *(1,) * (len(shape) - 1 - axis)), shape)
    return np.take(np.repeat(scale, block, axis), np.arange(shape[axis]), axis)


def _multiply(attrs: Mapping[str, Any], a: Known, b: Known) -> Known | None:
    for x, scale in ((a, b), (b, a)):
        if isinstance(x, Scaled) and x.scale is None and isinstance(scale, np.ndarray) and scale.dtype == np.float32:
            shape = np.broadcast_shapes(x.integers.shape, scale.shape)
            return Scaled(np.broadcast_to(x.integers, shape), np.broadcast_to(scale, shape))
    return None


def _subtract(attrs: Mapping[str, Any], a: Known, b: Known) -> Known | None:
    """A zero point that is a whole number, as a float or widened like the numbers."""
    if isinstance(b, Scaled) and b.scale is None:
        b = b.integers
    if not isinstance(a, Scaled) or a.scale is not None or not isinstance(b, np.ndarray):
        return None
    with np.errstate(all="ignore"):
        zero = b.astype(np.int32)
    return Scaled(a.integers.astype(np.int32) - zero) if np.array_equal(zero, b) and _is_exact(zero) else None


def _add(attrs: Mapping[str, Any], a: Known, b: Known) -> Known | None:
    """integers * scale + offset, where the offset is a whole number of scales and nothing is rounded."""
    for x, offset in ((a, b), (b, a)):
        if not isinstance(x, Scaled) or x.scale is None or not isinstance(offset, np.ndarray):
            continue
        with np.errstate(all="ignore"):
            zero = np.broadcast_to(np.nan_to_num(np.rint(np.divide(offset, x.scale))), x.integers.shape)
        integers: Array = np.add(x.integers, zero.clip(-_LARGEST, _LARGEST).astype(np.int32))
        found = Scaled(integers, x.scale)
        if _is_exact(integers) and np.array_equal(_as_floats(found), np.add(_as_floats(x), offset)):
            return found
    return None


def _transpose(attrs: Mapping[str, Any], x: Known) -> Known | None:
    return x.moved(lambda v: np.transpose(v, attrs["axes"])) if isinstance(x, Scaled | Half) else None


def _reshape(attrs: Mapping[str, Any], x: Known, shape: Known) -> Known | None:
    return x.moved(lambda v: np.reshape(v, shape)) if isinstance(x, Scaled | Half) else None  # type: ignore[arg-type]


_RULES: Mapping[str, Callable[..., Known | None]] = {
    "cast": _cast,
    "dequantize_linear": _dequantize,
    "multiply": _multiply,
    "subtract": _subtract,
    "add": _add,
    "transpose": _transpose,
    "reshape": _reshape,
}


def _is_exact(integers: Array) -> bool:
    return bool(integers.size == 0 or (integers.min() > -_LARGEST and integers.max() < _LARGEST))


def _as_floats(found: Scaled | Half) -> Array:
    if isinstance(found, Half):
        return found.values.astype(np.float32)
    wide: Array = found.integers.astype(np.float32)
    return np.ascontiguousarray(wide if found.scale is None else np.multiply(wide, found.scale))


@dataclass(frozen=True, slots=True)
class _Stored:
    """The form of a matrix (k, n) that takes the fewest bytes."""

    values: Array  # of half precision, or integers less the zero points
    bits: int = 0  # 0: half precision
    group: int = 0  # rows that share a scale and a zero point; 0: all
    scale: Array | None = None  # (n,), or (groups, n)
    zero: Array | None = None  # of the same shape

    @property
    def num_bytes(self) -> int:
        bits = self.values.size * 8 * self.values.itemsize
        if 0 < self.bits < 8:
            bits = -(-self.values.shape[0] * self.bits // 32) * 32 * self.values.shape[1]
        return int(bits // 8 + sum(a.nbytes for a in (self.scale, self.zero) if a is not None))

    @property
    def form(self) -> str:
        if not self.bits:
            return str(self.values.dtype)
        rows = f"{self.group} rows" if self.group else "all rows"
        zero = "" if self.zero is None else " and a zero point"
        return f"integers of {self.bits} bits, {rows} of a column share a scale{zero}"

    def emit(self, rewriter: Rewriter) -> Expr:
        emit = rewriter.bb.emit
        if not self.bits:
            return emit(get_op("cast")(Constant.of(np.ascontiguousarray(self.values)), dtype="float32"))
        integers: Expr = Constant.of(np.ascontiguousarray(self.values))
        if self.bits < 8:
            rows, dtype = self.values.shape[0], dtypes.from_numpy(self.values.dtype) or "int8"
            words = Constant.of(pack_integers(self.values, self.bits))
            integers = emit(get_op("unpack_integers")(words, rows=rows, bits=self.bits, dtype=dtype))
        if self.scale is None:
            return emit(get_op("cast")(integers, dtype="float32"))
        zero = None if self.zero is None else Constant.of(self.zero)
        axis = 0 if self.group else 1
        scale = Constant.of(self.scale)
        return emit(get_op("dequantize_linear")(integers, scale, zero, axis=axis, block_size=self.group))


def _stored(found: Scaled | Half) -> _Stored | None:
    if isinstance(found, Half):
        return _Stored(found.values)
    integers, scale = found.integers, found.scale
    group = 0 if scale is None else _group(scale)
    if group and group < LEAST_GROUP:
        return None
    scales = None if scale is None else np.ascontiguousarray(scale[::group] if group else scale[0])
    low, high = int(integers.min(initial=0)), int(integers.max(initial=0))
    least: Any = _by_group(integers, group, np.minimum)
    greatest: Any = _by_group(integers, group, np.maximum)
    for bits in (2, 4):
        half = 1 << bits - 1
        if -half <= low and high < half:
            return _Stored(integers.astype(np.int8), bits, group, scales)
        if scales is not None and int((greatest - least).max(initial=0)) < 2 * half:
            zero = -half - least
            narrow = np.int8 if zero.min() >= -128 and zero.max() <= 127 else np.int16
            return _Stored(_added(integers, zero, group).astype(narrow), bits, group, scales, zero.astype(narrow))
    for narrow in (np.int8, np.uint8):
        if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
            return _Stored(integers.astype(narrow), 8, group, scales)
    zero = -np.minimum(least, 0)
    if scales is None or int((greatest + zero).max()) > 255 or int(zero.max()) > 255:
        return None
    return _Stored(_added(integers, zero, group).astype(np.uint8), 8, group, scales, zero.astype(np.uint8))


def _added(integers: Array, zero: Array, group: int) -> Array:
    """integers + zero, of which there is one for each column of a group."""
    return np.add(integers, np.repeat(zero, group, 0)[: len(integers)] if group else zero)


def _group(scale: Array) -> int:
    """Rows from a multiple of this number on share their scales; 0: all do."""
    rows = np.arange(1, len(scale))[np.any(scale[1:] != scale[:-1], axis=1)]
    return math.gcd(*map(int, rows)) if len(rows) else 0


def _by_group(integers: Array, group: int, least: np.ufunc) -> Array:
    """The least or greatest of each column of a group."""
    wide = integers.astype(np.int32)
    if not group:
        return np.asarray(least.reduce(wide, axis=0))
    return np.asarray(least.reduceat(wide, np.arange(0, len(wide), group), axis=0))
