"""Lower products of quantized activations with quantized weights to 8-bit integer dot products.

    matmul(dequantize_linear(a, s, p), w * t)   =>   cast(total) * (s * t)
    matmul_integer(a, b, p, q)                  =>   total
        total = matmul_integer(a, w) - p * sum of each column of w

Activations are uint8 and constant weights int8, for instructions that add four products to an int32 lane (dot4_u8s8).
The sums are exact for any zero point p of the activations; the zero point of the weights is folded into the weights.
A column whose weights then exceed int8, as those of uint8 weights may, is shifted by an offset o, and its sums are
corrected by o * (sum of the row of a - p * rows of w). int8 activations are shifted by 128. In convolutions, a window
takes the place of the row.

Targets without dp4a but with int16 pairs (dot2_i16) multiply 16-bit integers, which hold the difference to a zero
point:

    matmul_integer(a, b, p, q)                  =>   matmul_integer(int16(a) - p, int16(b) - q)

Only integer ops are rewritten so, as int16 pairs of AVX2 are no faster than float32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Array, Call, Constant, Expr, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op, shape_value
from relaxlite.ir.ops.linalg import emit_op
from relaxlite.ir.ops.nn_conv import is_zero_padding
from relaxlite.ir.symbolic import as_int
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.weight_values import Scaled, WeightEvaluator
from relaxlite.passes.products.strategy_table import DOT_INT8, DOT_INT16
from relaxlite.records import dataclass

MAX_ROWS = (2**31 - 1) // (255 * 255)  # of the weights: sums fit int32, zero points included
GROUP, PAIR = 4, 2  # products that one instruction sums: of 8 bits, of 16 bits
BYTE_DTYPES = ("uint8", "int8")
MAX_TERMS = 2**24 // (255 * 255)  # of a sum of products of 8-bit integers that is exact in float32
MIN_FILTERS = 8  # of a convolution worth vectorizing along output channels


def byte_products(module: IRModule, context: PassContext) -> IRModule:
    """Rewrite products of quantized activations with constant quantized weights as 8-bit or 16-bit integer products.

    Requires dot product instructions of the target (dp4a or int16 pairs). Other integer convolutions with few products
    per output become float32 convolutions, which are exact for them.
    """
    return map_functions(module, lambda f: _ByteProducts(context).function(f))


@dataclass(frozen=True, slots=True)
class _Activations:
    """Quantized activations: (codes - zero) * scale."""

    codes: Expr  # uint8 (..., k)
    zero: Expr | None  # one element of uint8
    scale: Expr | None = None  # one element


@dataclass(frozen=True, slots=True)
class _Int8Weight:
    """An int8 weight (k, n) and the offset (n,) in int32 that was subtracted from each column."""

    values: Array
    offset: Array


class _ByteProducts(Rewriter):
    def __init__(self, context: PassContext) -> None:
        super().__init__()
        self._context = context
        self._known = WeightEvaluator()

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        self._known.bind(var, value)

    def may_rewrite(self, value: Expr) -> bool:
        names = ("matmul_integer", "conv_integer", "dequantize_linear")
        return isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name in names

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return None
        replacement, reason = self._integer_product(value.callee.name, value)
        if replacement is None and value.callee.name == "conv_integer" and _dtype(value.args[0]) in BYTE_DTYPES:
            replacement, reason = self._in_floats(value), "floats hold the sums of so few products exactly"
        if replacement is not None:
            self._context.decide("byte_products", var.name, True, reason)
        return replacement

    def _integer_product(self, name: str, call: Call) -> tuple[Expr | None, str]:
        """The replacement of an op by the target's integer dot products, or None, and its reason."""
        target, rules = self._context.target, {"matmul_integer": self._matmul_pairs, "conv_integer": self._conv_pairs}
        reason = "two products of 16 bits are one instruction, and their sums are exact"
        if DOT_INT8.lacking(target) is None:
            rules = {
                "matmul": self._matmul, "matmul_integer": self._matmul_integer,
                "conv": self._conv, "conv_integer": self._conv_integer,
            }  # fmt: skip
            reason = "its operands are bytes, and sums of their products are exact"
        elif DOT_INT16.lacking(target) is not None:
            rules = {}
        rule = rules.get(name)
        return (None if rule is None else rule(call)), reason

    def _matmul(self, call: Call) -> Expr | None:
        x, w = call.args
        activations = self._dequantized(x) if _dtype(call) == "float32" else None
        weight = None if activations is None else self._known.evaluate(w)
        if (
            activations is None
            or activations.scale is None
            or not isinstance(weight, Scaled)
            or not _has_rows(x, weight.integers)
        ):
            return None
        scale = np.broadcast_to(np.float32(1) if weight.scale is None else weight.scale, weight.integers.shape)
        narrow = _to_int8(weight.integers)
        if narrow is None or not (scale == scale[:1]).all():
            return None  # scales that differ from row to row cannot be factored out of the sums
        factor = emit_op(self.bb, "multiply", activations.scale, Constant.of(np.ascontiguousarray(scale[0])))
        total = self.bb.emit(self._total(self._unsigned(activations), narrow))
        return get_op("multiply")(emit_op(self.bb, "cast", total, dtype="float32"), factor)

    def _matmul_integer(self, call: Call) -> Expr | None:
        a, b, *zeros = call.args
        weight = self._known.evaluate(b)
        if not isinstance(weight, np.ndarray) or not _has_rows(a, weight):
            return None
        if not zeros and (_dtype(a), _dtype(b)) == ("uint8", "int8"):
            return None  # has the target form already
        zero = self._known.evaluate(zeros[1]) if len(zeros) > 1 else np.zeros((), np.int32)
        if not isinstance(zero, np.ndarray) or (zeros and not _is_one(zeros[0])):
            return None
        narrow = _to_int8(np.subtract(weight, zero, dtype=np.int32))
        if narrow is None:
            return None
        return self._total(self._unsigned(_Activations(a, zeros[0] if zeros else None)), narrow)

    def _matmul_pairs(self, call: Call) -> Expr | None:
        a, b, *zeros = call.args
        weight = self._known.evaluate(b)
        zero = self._known.evaluate(zeros[1]) if len(zeros) > 1 else np.zeros((), np.int32)
        if not isinstance(weight, np.ndarray) or not isinstance(zero, np.ndarray) or _dtype(a) not in BYTE_DTYPES:
            return None
        if not _has_rows(a, weight, PAIR) or (zeros and not _is_one(zeros[0])):
            return None
        centered = np.subtract(weight, zero, dtype=np.int16)
        return get_op("matmul_integer")(
            self._centered_activations(_Activations(a, zeros[0] if zeros else None)), Constant.of(centered)
        )

    def _conv_pairs(self, call: Call) -> Expr | None:
        x, _, _, *zeros = call.args
        filters = self._centered(call)
        if filters is None or _dtype(x) not in BYTE_DTYPES or not _is_worth_bytes(call, filters):
            return None
        centered = self._centered_activations(_Activations(x, zeros[0] if zeros else None))
        wide, weight = self._pad_channels(centered, filters.astype(np.int16), PAIR)
        attrs: Any = call.attrs
        return get_op("conv_integer")(wide, Constant.of(weight), call.args[2], **attrs)

    def _centered_activations(self, x: _Activations) -> Expr:
        """codes - zero, in int16."""
        wide = emit_op(self.bb, "cast", x.codes, dtype="int16")
        if x.zero is None:
            return wide
        zero = emit_op(self.bb, "cast", emit_op(self.bb, "reshape", x.zero, shape_value(())), dtype="int16")
        return emit_op(self.bb, "subtract", wide, zero)

    def _conv(self, call: Call) -> Expr | None:
        x, w = call.args[:2]
        weight = self._known.evaluate(w) if _dtype(call) == "float32" else None
        if not isinstance(weight, Scaled) or not _is_worth_bytes(call, weight.integers):
            return None
        flat = (len(weight.integers), -1)
        scale = np.broadcast_to(np.float32(1) if weight.scale is None else weight.scale, weight.integers.shape)
        scale = scale.reshape(flat)
        activations, narrow = self._dequantized_through_pad(x), _to_int8(weight.integers.reshape(flat).T)
        if activations is None or activations.scale is None or narrow is None or (scale != scale[:, :1]).any():
            return None
        total = self.bb.emit(self._window_sums(call, self._unsigned(activations), weight.integers, narrow))
        factor = emit_op(
            self.bb, "multiply", activations.scale, Constant.of(_per_channel(scale[:, 0], weight.integers))
        )
        return get_op("multiply")(emit_op(self.bb, "cast", total, dtype="float32"), factor)

    def _conv_integer(self, call: Call) -> Expr | None:
        x, _, _, *zeros = call.args
        integers = self._centered(call)
        if integers is None or not _is_worth_bytes(call, integers):
            return None
        narrow = _to_int8(integers.reshape(len(integers), -1).T)
        if narrow is None:
            return None
        return self._window_sums(call, self._unsigned(_Activations(x, zeros[0] if zeros else None)), integers, narrow)

    def _centered(self, call: Call) -> Array | None:
        """The constant filters (oc, c, kernel...) of a convolution of integers, less their zero points, in int32."""
        _, w, _, *zeros = call.args
        weight = self._known.evaluate(w)
        zero = self._known.evaluate(zeros[1]) if len(zeros) > 1 else np.zeros((), np.int32)
        if not isinstance(weight, np.ndarray) or not isinstance(zero, np.ndarray):
            return None
        centered: Array = np.subtract(weight, zero.reshape(-1, *(1,) * (weight.ndim - 1)), dtype=np.int32)
        return centered

    def _in_floats(self, call: Call) -> Expr | None:
        """An integer convolution, such as a depthwise one, as a float32 convolution, for which there are schedules."""
        x, _, pads, *zeros = call.args
        filters = self._centered(call)
        if filters is None or math.prod(filters.shape[1:]) > MAX_TERMS or call.attrs["layout"] != "first":
            return None
        x, pads = self._fold_pad(x, pads, zeros[0] if zeros else None)
        wide = emit_op(self.bb, "cast", x, dtype="float32")
        if zeros:
            zero_of_x = emit_op(self.bb, "reshape", zeros[0], shape_value(()))
            wide = emit_op(self.bb, "subtract", wide, emit_op(self.bb, "cast", zero_of_x, dtype="float32"))
        attrs: Any = call.attrs
        result = emit_op(self.bb, "conv", wide, Constant.of(filters.astype(np.float32)), pads, **attrs)
        return get_op("cast")(result, dtype="int32")

    def _fold_pad(self, x: Expr, pads: Expr, zero: Expr | None) -> tuple[Expr, Expr]:
        """Fold an explicit pad of `x` with its zero point into the pads of the convolution: (unpadded x, pads)."""
        pad = self._known.value(x)
        if not isinstance(pad, Call) or not isinstance(pad.callee, Op) or pad.callee.name != "pad":
            return x, pads
        source, before, after, *value = pad.args
        filled, point = self._number(value[0] if value else None), self._number(zero)
        if filled is None or filled != point or pad.attrs["mode"] != "constant":
            return x, pads
        if not isinstance(before, ShapeValue) or not isinstance(after, ShapeValue):
            return x, pads
        if any(as_int(d) != 0 for sides in (before, after) for d in sides.values[:2]):
            return x, pads
        return source, ShapeValue((*before.values[2:], *after.values[2:]))

    def _number(self, x: Expr | None) -> float | None:
        """The value of a one-element constant; 0 for a missing operand, None for other operands."""
        constant = np.zeros(()) if x is None else self._known.evaluate(x)
        return float(constant.item()) if isinstance(constant, np.ndarray) and constant.size == 1 else None

    def _dequantized_through_pad(self, x: Expr) -> _Activations | None:
        """The operands of the dequantize_linear that computes `x`, looking through a pad with 0, which becomes a pad of
        the codes with the zero point."""
        pad = self._known.value(x)
        if not isinstance(pad, Call) or not isinstance(pad.callee, Op) or pad.callee.name != "pad":
            return self._dequantized(x)
        source, before, after, *value = pad.args
        activations = self._dequantized(source)
        if activations is None or pad.attrs["mode"] != "constant" or self._number(value[0] if value else None) != 0:
            return None
        zero = (
            np.zeros((), dtypes.to_numpy(_dtype(activations.codes))) if activations.zero is None else activations.zero
        )
        if not isinstance(zero, np.ndarray):
            zero = emit_op(self.bb, "reshape", zero, shape_value(()))
        return replace(activations, codes=emit_op(self.bb, "pad", activations.codes, before, after, zero))

    def _window_sums(self, call: Call, x: _Activations, weight: Array, fits: _Int8Weight) -> Expr:
        """The convolution of codes - zero with `weight`, in int32. `fits`: the int8 weight with one filter per
        column."""
        rank = weight.ndim
        codes, narrow = self._pad_channels(x.codes, fits.values.T.reshape(weight.shape), GROUP)
        attrs: Any = call.attrs
        total = get_op("conv_integer")(codes, Constant.of(narrow), call.args[2], **attrs)
        if fits.offset.any():
            wide = emit_op(self.bb, "cast", x.codes, dtype="int32")
            sums = emit_op(self.bb, "sum", wide, axes=(1,), keepdims=True)
            ones = Constant.of(np.ones((1, 1, *weight.shape[2:]), np.int32))
            sums = emit_op(self.bb, "conv", sums, ones, call.args[2], **attrs)
            correction = emit_op(self.bb, "multiply", sums, Constant.of(_per_channel(fits.offset, weight)))
            total = get_op("add")(self.bb.emit(total), correction)
        if x.zero is None:
            return total
        zero = emit_op(self.bb, "cast", x.zero, dtype="int32")
        of_filters = Constant.of(_per_channel(weight.sum(axis=tuple(range(1, rank)), dtype=np.int32), weight))
        return get_op("subtract")(self.bb.emit(total), emit_op(self.bb, "multiply", zero, of_filters))

    def _pad_channels(self, x: Expr, filters: Array, group: int) -> tuple[Expr, Array]:
        """Pad the input channels of x and filters with zeros to a multiple of `group`."""
        missing, rank = -filters.shape[1] % group, filters.ndim
        if missing:
            filters = np.pad(filters, [(0, 0), (0, missing), *[(0, 0)] * (rank - 2)])
            x = emit_op(self.bb, "pad", x, (0,) * rank, (0, missing, *(0,) * (rank - 2)))
        return x, np.ascontiguousarray(filters)

    def _dequantized(self, x: Expr) -> _Activations | None:
        """The operands of the dequantize_linear that computes `x`, if its scale and zero point are per tensor."""
        call = self._known.value(x)
        if not isinstance(call, Call) or not isinstance(call.callee, Op) or call.callee.name != "dequantize_linear":
            return None
        codes, scale, *zero = call.args
        if _dtype(codes) not in BYTE_DTYPES or not all(map(_is_one, call.args[1:])):
            return None
        return _Activations(codes, zero[0] if zero else None, scale)

    def _unsigned(self, x: _Activations) -> _Activations:
        """Activations as uint8: int8 codes and zero points are shifted by 128."""
        if _dtype(x.codes) == "uint8":
            return x
        zero = Constant.of(np.zeros((), np.int8)) if x.zero is None else x.zero
        return _Activations(self._shifted(x.codes), self._shifted(zero), x.scale)

    def _shifted(self, x: Expr) -> Expr:
        call = self._known.value(x)
        if isinstance(call, Call) and isinstance(call.callee, Op) and call.callee.name == "quantize_linear":
            source, scale, *zero = call.args
            if zero:  # rounds and saturates alike; NaN, which has no code, becomes the lowest code
                attrs: Any = {**call.attrs, "dtype": "uint8"}
                return self.bb.emit(get_op("quantize_linear")(source, scale, self._shifted(zero[0]), **attrs))
        wide = emit_op(self.bb, "cast", x, dtype="int16")
        return emit_op(self.bb, "cast", emit_op(self.bb, "add", wide, np.asarray(128, np.int16)), dtype="uint8")

    def _total(self, x: _Activations, weight: _Int8Weight) -> Expr:
        """(codes - zero) @ weight, in int32."""
        total, offset = get_op("matmul_integer")(x.codes, Constant.of(weight.values)), weight.offset
        if offset.any():
            codes = emit_op(self.bb, "cast", x.codes, dtype="int32")
            rows = emit_op(self.bb, "sum", codes, axes=(-1,), keepdims=True)
            total = get_op("add")(self.bb.emit(total), emit_op(self.bb, "multiply", rows, offset))
        if x.zero is None:
            return total
        zero = emit_op(self.bb, "cast", x.zero, dtype="int32")
        sums = np.add(weight.values.sum(axis=0, dtype=np.int32), len(weight.values) * offset)
        return get_op("subtract")(self.bb.emit(total), emit_op(self.bb, "multiply", zero, sums))


def _to_int8(weight: Array) -> _Int8Weight | None:
    """The weight in int8, with offsets for the columns that need them; None: the range of a column exceeds int8."""
    low, high = weight.min(axis=0, initial=0), weight.max(axis=0, initial=0)
    offset: Array = np.clip(0, high - 127, low + 128).astype(np.int32)
    if (low - offset < -128).any() or (high - offset > 127).any():
        return None
    return _Int8Weight(np.ascontiguousarray(np.subtract(weight, offset).astype(np.int8)), offset)


def _per_channel(values: Array, weight: Array) -> Array:
    """Values per filter (oc,), reshaped to broadcast to a result (n, oc, spatial...)."""
    return np.ascontiguousarray(values.reshape(-1, *(1,) * (weight.ndim - 2)))


def _is_worth_bytes(call: Call, weight: Array) -> bool:
    """Whether a convolution is eligible: explicit padding, one group, channels first, sums that fit int32, and at least
    `MIN_FILTERS` output channels."""
    pads = call.args[2]
    if not isinstance(pads, ShapeValue) or not is_zero_padding(pads.values):
        return False
    if call.attrs["groups"] != 1 or call.attrs["layout"] != "first" or len(weight) < MIN_FILTERS:
        return False
    return 0 < math.prod(weight.shape[1:]) <= MAX_ROWS


def _has_rows(x: Expr, weight: Array, group: int = GROUP) -> bool:
    """Whether the depth of `x` is known to equal that of the weight, fits int32 sums, and is a multiple of `group`."""
    if not isinstance(x.ty, TensorType) or x.ty.shape is None or len(x.ty.shape) < 2 or weight.ndim != 2:
        return False
    return as_int(x.ty.shape[-1]) == len(weight) and 0 < len(weight) <= MAX_ROWS and len(weight) % group == 0


def _is_one(x: Expr) -> bool:
    return isinstance(x.ty, TensorType) and x.ty.shape is not None and all(as_int(d) == 1 for d in x.ty.shape)


def _dtype(x: Expr) -> str:
    assert isinstance(x.ty, TensorType)
    return x.ty.dtype
