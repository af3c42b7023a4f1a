"""Compact storage of quantized weights of matrix products: as few bits as their values need.

    matmul(x, w),  w computed from constants     =>    matmul(x, dequantize_linear(unpack_integers(words), scale, zero))

A weight counts as quantized if its values are integers times a scale shared by many rows, whatever ops compute them
(weight_values.py). The integers are stored with 2 or 4 bits, packed into int32, or with 8 bits; a zero point per column
of a group of rows is added if it makes a width sufficient. Values are preserved exactly. Half-precision weights keep
their dtype.

A weight that fits the L2 cache as float32 is stored as float32, which saves unpacking. Half precision, which one
conversion widens, is kept unless all weights of the function fit together: in a sequence of large layers, as in a
decoder, each weight is evicted before its next use, and its size decides.
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
from relaxlite.passes.graph.weight_values import Half, Scaled, WeightEvaluator
from relaxlite.records import dataclass

MIN_SCALE_GROUP_ROWS = 16  # rows that share a scale: with fewer, scales need as much memory as the codes


def keep_quantized(module: IRModule, context: PassContext) -> IRModule:
    """Store constant weights of matrix products in the smallest exact form, with dequantization ops to widen them.

    Weights that fit the L2 cache as float32 become float32.
    """
    return map_functions(module, lambda f: _KeepQuantized(context, _bytes_of_weights(f)).function(f))


def _bytes_of_weights(function: Function) -> int:
    """The bytes of all distinct right operands of matmuls as float32; operands of symbolic shape count as 0."""
    sizes: dict[int, int] = {}
    for body in bodies(function):
        for binding in body.bindings():
            value = binding.value if isinstance(binding, Let) else binding.source
            if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "matmul":
                w = value.args[1]
                size = None if not isinstance(w.ty, TensorType) or w.ty.shape is None else as_int(product(w.ty.shape))
                sizes[id(w)] = 4 * (size or 0)
    return sum(sizes.values())


class _KeepQuantized(Rewriter):
    def __init__(self, context: PassContext, total_bytes: int) -> None:
        super().__init__()
        self._context, self._total_bytes = context, total_bytes
        self._known = WeightEvaluator()
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
        weight = self._known.evaluate(w)
        if not isinstance(weight, Scaled | Half):
            return None
        integers = weight.integers if isinstance(weight, Scaled) else weight.values
        if isinstance(weight, Half) and self._context.precision == "bf16":
            return None  # lower_precision rounds it to bfloat16
        widened, l2 = 4 * integers.size, self._context.target.l2_bytes
        if (self._total_bytes if isinstance(weight, Half) else widened) <= l2:
            fitting = "all weights together fit" if isinstance(weight, Half) else "it fits"
            reason = f"as float32 {fitting} into the L2 cache of {l2} bytes"
            self._context.decide("keep_quantized", w.name, False, reason, bytes_widened=sym(widened))
            return Constant.of(weight.floats(), name=w.name)
        stored = _stored(weight) if integers.ndim == 2 else None
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
    """The storage form of a weight (k, n)."""

    values: Array  # half-precision values, or codes
    bits: int = 0  # 0: half precision
    group: int = 0  # rows that share a scale and a zero point; 0: all
    scale: Array | None = None  # (n,), or (groups, n)
    zero: Array | None = None  # of the same shape

    @property
    def num_bytes(self) -> int:
        """The size of codes, scales and zero points."""
        bits = self.values.size * 8 * self.values.itemsize
        if 0 < self.bits < 8:
            bits = -(-self.values.shape[0] * self.bits // 32) * 32 * self.values.shape[1]
        return int(bits // 8 + sum(a.nbytes for a in (self.scale, self.zero) if a is not None))

    @property
    def form(self) -> str:
        """A description for decisions."""
        if not self.bits:
            return str(self.values.dtype)
        rows = f"{self.group} rows" if self.group else "all rows"
        zero = "" if self.zero is None else " and a zero point"
        return f"integers of {self.bits} bits, {rows} of a column share a scale{zero}"

    def emit(self, rewriter: Rewriter) -> Expr:
        """Emit the constants and the ops that widen them to float32; returns the float32 weight."""
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


def _stored(weight: Scaled | Half) -> _Stored | None:
    """The smallest exact storage form; None: groups are too short or codes exceed 8 bits."""
    if isinstance(weight, Half):
        return _Stored(weight.values)
    integers, scale = weight.integers, weight.scale
    group = 0 if scale is None else _group(scale)
    if group and group < MIN_SCALE_GROUP_ROWS:
        return None
    scales = None if scale is None else np.ascontiguousarray(scale[::group] if group else scale[0])
    low, high = int(integers.min(initial=0)), int(integers.max(initial=0))
    minimum: Any = _by_group(integers, group, np.minimum)
    maximum: Any = _by_group(integers, group, np.maximum)
    for bits in (2, 4):
        half = 1 << bits - 1
        if -half <= low and high < half:
            return _Stored(integers.astype(np.int8), bits, group, scales)
        if scales is not None and int((maximum - minimum).max(initial=0)) < 2 * half:
            zero = -half - minimum
            narrow = np.int8 if zero.min() >= -128 and zero.max() <= 127 else np.int16
            return _Stored(_added(integers, zero, group).astype(narrow), bits, group, scales, zero.astype(narrow))
    for narrow in (np.int8, np.uint8):
        if np.iinfo(narrow).min <= low and high <= np.iinfo(narrow).max:
            return _Stored(integers.astype(narrow), 8, group, scales)
    zero = -np.minimum(minimum, 0)
    if scales is None or int((maximum + zero).max()) > 255 or int(zero.max()) > 255:
        return None
    return _Stored(_added(integers, zero, group).astype(np.uint8), 8, group, scales, zero.astype(np.uint8))


def _added(integers: Array, zero: Array, group: int) -> Array:
    """integers (k, n) + zero (groups, n) or (n,), broadcast over the rows of each group."""
    return np.add(integers, np.repeat(zero, group, 0)[: len(integers)] if group else zero)


def _group(scale: Array) -> int:
    """The largest group length (in rows) such that all rows of a group share their scales; 0: all rows do."""
    rows = np.arange(1, len(scale))[np.any(scale[1:] != scale[:-1], axis=1)]
    return math.gcd(*map(int, rows)) if len(rows) else 0


def _by_group(integers: Array, group: int, reduction: np.ufunc) -> Array:
    """The minimum or maximum (`reduction`) of each column, within groups of rows."""
    wide = integers.astype(np.int32)
    if not group:
        return np.asarray(reduction.reduce(wide, axis=0))
    return np.asarray(reduction.reduceat(wide, np.arange(0, len(wide), group), axis=0))
