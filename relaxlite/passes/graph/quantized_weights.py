"""Keep the weights of matrix products in the few bits that they have.

    matmul(x, w),  w = what constants compute    =>    matmul(x, dequantize_linear(unpack_integers(words), scale, zero))

A weight counts as quantized if its values, whatever ops compute them, are integers times a scale that many rows share
(known_weights.py). The integers are stored in as few bits as their values need: 2 or 4 in words of 32, or bytes. Where
no such width holds all of them, but a zero point for each column of a group of rows makes it do, they get one. The
values stay the same to the last bit. Weights in half precision stay as they are, too.

Weights that as float32 fit into the L2 cache become float32: they are read from there, and there is nothing to unpack.
For half precision, which one conversion widens, all weights of the function have to fit: where many follow each other,
as in a decoder, none is still there when its turn comes again, and only the bytes count.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Array, Call, Constant, Expr, Function, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.quantize import pack_integers
from relaxlite.ir.symbolic import as_int, product, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, bodies, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.known_weights import Half, Known, Scaled
from relaxlite.records import dataclass

MIN_GROUP = 16  # rows that share a scale: with fewer, the scales take as much room as the numbers


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
        self._known = Known()
        self._weights: dict[Var, Expr | None] = {}

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        self._known.bind(var, value)

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
        found = self._known.evaluate(w)
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
            return Constant.of(found.floats(), name=w.name)
        stored = _stored(found) if integers.ndim == 2 else None
        if stored is None:
            reason = "its scales follow no groups of rows, or it is no matrix of at most 8 bits"
            self._context.decide("keep_quantized", w.name, False, reason, bytes_widened=sym(widened))
            return None
        expr, size, form = stored.emit(self), stored.num_bytes, stored.form
        figures = {"bytes_stored": sym(size), "bytes_widened": sym(widened)}
        self._context.decide("keep_quantized", w.name, True, f"it is kept as {form}", **figures)
        return expr


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
    if group and group < MIN_GROUP:
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
