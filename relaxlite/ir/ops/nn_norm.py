"""Softmax, norms and other normalizations over the last axis, as row programs.

    for each row:  reductions into local scalars, one loop over the row each;  then one loop that stores the row
                   (passes/loops/row_program.py defines the possible stages)

Decompositions move or flatten other axes into the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, ShapeValue
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.linalg import accumulator, emit_op, emit_reshape, equality_checks, to_accumulator_dtype
from relaxlite.ir.ops.reduce import normalize_axis
from relaxlite.ir.ops.scalars import Scalar, identity, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product
from relaxlite.ir.types import Type

LOG2_E = 1 / math.log(2)
_MIN_WEIGHT = -100


def softmax_exp(difference: Scalar, min_exponent: int = _MIN_WEIGHT) -> Scalar:
    """Softmax numerator exp(difference) for difference <= 0, flushed to 0 below 2**min_exponent.

    The default keeps products with weights out of the slow subnormal range (docs/measurements/irops.md), and a weight
    below 2**-100 of the largest one cannot change a sum.
    """
    power = difference * LOG2_E
    is_small = power < float(min_exponent)
    return select(is_small, 0.0, select(is_small, float(min_exponent), power).exp2())  # avoids subnormals


Element = Callable[[SymExpr], Scalar]


class RowBuilder:
    """Builder of the stages for one row, x[i..., :] -> out[i..., :], computed in `accumulator(x.dtype)`."""

    def __init__(self, x: Buffer, out: Buffer, i: tuple[SymVar, ...]) -> None:
        self.x, self.out, self.i = x, out, i
        self.dtype = accumulator(x.dtype)
        self.size = x.shape[-1]
        self.locals: list[Buffer] = []
        self.stages: list[Stmt] = []

    def __call__(self, j: SymExpr) -> Scalar:
        """Element j of the row of x."""
        where = (*self.i, j)
        return Scalar(self.x[where]).cast(self.dtype)

    @property
    def count(self) -> Scalar:
        """Number of elements of the row, in the dtype of the computation."""
        known = as_int(self.size)
        return index(self.size).cast(self.dtype) if known is None else Scalar(literal(known, self.dtype))

    def let(self, name: str, value: Scalar) -> Scalar:
        """Store a value in a new local scalar and return its load."""
        local = Buffer(name, (), self.dtype, "local")
        self.locals.append(local)
        self.stages.append(Store(local, (), value.value))
        return Scalar(local[()])

    def fold(self, name: str, combine: str, value: Element) -> Scalar:
        """Reduce value(j) over the row into a new local scalar and return its load."""
        result = self.let(name, Scalar(identity(combine, self.dtype)))
        local = self.locals[-1]
        self.stages.append(loops("j", (self.size,), lambda j: Store(local, (), value(j).value, combine)))
        return result

    def materialize(self, name: str, value: Element) -> Element:
        """Materialize value(j) in a new local row and return its loads."""
        local = Buffer(name, (self.size,), self.dtype)
        self.locals.append(local)
        self.stages.append(loops("j", (self.size,), lambda j: Store(local, (j,), value(j).value)))
        return lambda j: Scalar(local[j])

    def write(self, value: Element) -> None:
        """Append the stage out[i..., j] = value(j)."""

        def store(j: SymVar) -> Stmt:
            return Store(self.out, (*self.i, j), value(j).cast(self.out.dtype).value)

        self.stages.append(loops("j", (self.size,), store))

    def finish(self) -> Stmt:
        """Join the stages inside the allocations of their locals."""
        body = seq(*self.stages)
        for local in reversed(self.locals):
            body = Allocate(local, body)
        return body


def row_program(x: Buffer, out: Buffer, make: Callable[[RowBuilder], None]) -> Stmt:
    """Loop over the rows of x; `make` appends the stages of a row."""

    def row(*i: SymVar) -> Stmt:
        builder = RowBuilder(x, out, i)
        make(builder)
        return builder.finish()

    return loops("iklmn", x.shape[:-1], row)


class _AxisOp(Op):
    """Base of row ops along any axis: decomposition makes the axis the last one by a reshape or a transpose."""

    operands = ("x",)
    attrs: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", -1)}

    def infer(self, x: Expr, *, axis: int, **attrs: Any) -> Type:
        ty = self.tensor(x, "x")
        if not dtypes.is_float(ty.dtype):
            self.fail(f"x must be of a float dtype, got {ty.dtype}")
        normalize_axis(self, axis, len(ty.shape or ()))
        return ty

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        (x,) = call.args
        shape = self.tensor(x).shape or ()
        attrs: dict[str, Any] = {**call.attrs, "axis": -1}
        axis = normalize_axis(self, int(call.attrs["axis"]), len(shape))  # type: ignore[arg-type]
        if axis == len(shape) - 1:
            return None
        if all(as_int(d) == 1 for d in shape[axis + 1 :]):
            row = bb.emit(self(emit_reshape(bb, x, shape[: axis + 1]), **attrs))
            return get_op("reshape")(row, ShapeValue(shape))
        order = [k for k in range(len(shape)) if k != axis] + [axis]
        row = bb.emit(self(emit_op(bb, "transpose", x, axes=order), **attrs))
        return get_op("transpose")(row, axes=[order.index(k) for k in range(len(shape))])

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", "m"),))
        yield Sample(((2, "n", 3, "m"),))
        yield Sample(((2, "n", 3),), {"axis": 1})
        yield Sample((("n", 5, 1, 1),), {"axis": 1})
        yield Sample((("n", 5),), dtypes=("float16",), tolerance=2e-3)


def apply_in_accumulator(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a NumPy function in the accumulator dtype of x and round the result to the dtype of x."""
    with np.errstate(all="ignore"):
        return np.asarray(function(to_accumulator_dtype(x))).astype(x.dtype)


def _min_normal_exponent(x: Scalar) -> int:
    """Exponent of the smallest normal number of the dtype."""
    return int(np.finfo(dtypes.to_numpy(x.value.dtype)).minexp)


@register
class Softmax(_AxisOp):
    """Softmax exp(x - max(x)) / sum(exp(x - max(x))) along an axis.

    Exponentials that would be subnormal (float32: below 1.2e-38) are flushed to 0.
    """

    name = "softmax"

    def lower(self, x: Buffer, *, out: Buffer, axis: int) -> Stmt:
        def stages(row: RowBuilder) -> None:
            top = row.fold("max", "maxnum", row)  # a NaN makes all exponentials NaN
            exps = row.materialize("exps", lambda j: softmax_exp(row(j) - top, _min_normal_exponent(row(j))))
            scale = row.let("scale", 1.0 / row.fold("sum", "add", exps))
            row.write(lambda j: exps(j) * scale)

        return row_program(x, out, stages)

    def reference(self, x: Any, *, axis: int) -> Any:
        return apply_in_accumulator(lambda v: _exps(v, axis) / np.sum(_exps(v, axis), axis=axis, keepdims=True), x)


@register
class LogSoftmax(_AxisOp):
    """Logarithm of the softmax along an axis, x - max(x) - log(sum(exp(x - max(x))))."""

    name = "log_softmax"

    def lower(self, x: Buffer, *, out: Buffer, axis: int) -> Stmt:
        def stages(row: RowBuilder) -> None:
            top = row.fold("max", "maxnum", row)
            total = row.fold("sum", "add", lambda j: softmax_exp(row(j) - top))
            log = row.let("log", total.unary("log"))
            row.write(lambda j: row(j) - top - log)

        return row_program(x, out, stages)

    def reference(self, x: Any, *, axis: int) -> Any:
        def log_softmax(v: Any) -> Any:
            top = np.max(v, axis=axis, keepdims=True, initial=-np.inf)
            return v - top - np.log(np.sum(np.exp(v - top), axis=axis, keepdims=True))

        return apply_in_accumulator(log_softmax, x)


def _exps(x: Any, axis: int) -> Any:
    return np.exp(x - np.max(x, axis=axis, keepdims=True, initial=-np.inf))


@register
class LpNormalize(_AxisOp):
    """Divide x by its p-norm along an axis, p = 1 or 2; 0 where the norm is 0."""

    name = "lp_normalize"
    attrs: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", -1), "p": Attr("int", 2, (1, 2))}

    def lower(self, x: Buffer, *, out: Buffer, axis: int, p: int) -> Stmt:
        def stages(row: RowBuilder) -> None:
            total = row.fold("sum", "add", lambda j: row(j).abs() if p == 1 else row(j) * row(j))
            norm = row.let("norm", total if p == 1 else total.unary("sqrt"))
            divisor = row.let("divisor", select(norm.equals(0.0), 1.0, norm))
            row.write(lambda j: row(j) / divisor)

        return row_program(x, out, stages)

    def reference(self, x: Any, *, axis: int, p: int) -> Any:
        def normalize(v: Any) -> Any:
            norm = np.sum(np.abs(v) ** p, axis=axis, keepdims=True) ** (1 / p)
            return v / np.where(norm == 0, 1, norm)

        return apply_in_accumulator(normalize, x)

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        yield Sample((("n", 4),), {"p": 1})
        yield Sample((("n", 4),), make={0: lambda shape, rng: np.zeros(shape, np.float32)})


class _TailNorm(Op):
    """Base of normalizations over all axes from `axis` on, with optional scale and bias of the shape of these axes."""

    attrs: ClassVar[Mapping[str, Attr]] = {"axis": Attr("int", -1), "epsilon": Attr("float", 1e-5)}

    def infer(self, x: Expr, *weights: Expr, axis: int, epsilon: float) -> Type:
        ty = self.tensor(x, "x")
        if not dtypes.is_float(ty.dtype):
            self.fail(f"x must be of a float dtype, got {ty.dtype}")
        shape = ty.shape or ()
        tail = shape[normalize_axis(self, axis, len(shape)) :]
        for operand, name in zip(weights, ("scale", "bias"), strict=False):
            weight_type = self.tensor(operand, name)
            weight_shape = weight_type.shape or ()
            if len(weight_shape) != len(tail) or any(map(PROVER.can_prove_ne, weight_shape, tail)):
                self.fail(
                    f"{name} must have the normalized shape {format_shape(tail)}, got {format_shape(weight_shape)}"
                )
            if not dtypes.is_float(weight_type.dtype):
                self.fail(f"{name} must be of a float dtype, got {weight_type.dtype}")
        return ty

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        shape = self.tensor(call.args[0]).shape or ()
        attrs: dict[str, Any] = {**call.attrs, "axis": -1}
        axis = normalize_axis(self, int(call.attrs["axis"]), len(shape))  # type: ignore[arg-type]
        if axis == len(shape) - 1:
            return None
        flat = product(shape[axis:])
        weights = [emit_reshape(bb, operand, (flat,)) for operand in call.args[1:]]
        rows = bb.emit(self(emit_reshape(bb, call.args[0], (*shape[:axis], flat)), *weights, **attrs))
        return get_op("reshape")(rows, ShapeValue(shape))

    def checks(self, x: Buffer, *weights: Buffer | None) -> Iterable[Stmt]:
        pairs = [(x.shape[-1], w.shape[0]) for w in weights if w is not None]
        return equality_checks(f"{self.name}: scale or bias does not have the size of the rows of x", *pairs)


def scale_and_shift(row: RowBuilder, value: Scalar, scale: Buffer | None, bias: Buffer | None, at: Shape) -> Scalar:
    """Scale and shift: value * scale[at] + bias[at], by default 1 and 0."""
    scaled = value if scale is None else value * Scalar(scale[at]).cast(row.dtype)
    return scaled if bias is None else scaled + Scalar(bias[at]).cast(row.dtype)


def standardize(row: RowBuilder, epsilon: float) -> Element:
    """Standardize a row, (x - mean) / sqrt(variance + epsilon); mean and variance take one pass each."""
    mean = row.let("mean", row.fold("sum", "add", row) / row.count)
    square_sum = row.fold("squares", "add", lambda j: (row(j) - mean) * (row(j) - mean))
    scale = row.let("rstd", 1.0 / (square_sum / row.count + epsilon).unary("sqrt"))
    return lambda j: (row(j) - mean) * scale


def standardize_array(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    """Standardize an array over axes, (x - mean) / sqrt(variance + epsilon)."""
    centered = x - mean_over(x, axes)
    return centered / np.sqrt(mean_over(centered * centered, axes) + x.dtype.type(epsilon))


def mean_over(x: Any, axes: tuple[int, ...]) -> Any:
    """Mean over axes, with keepdims; NaN over no elements, without the warning of np.mean."""
    count = np.prod([x.shape[a] for a in axes], dtype=x.dtype)
    return np.sum(x, axis=axes, keepdims=True) / count


@register
class LayerNorm(_TailNorm):
    """Layer normalization (x - mean) / sqrt(variance + epsilon) * scale + bias over the axes from `axis` on."""

    name = "layer_norm"
    operands = ("x", "scale?", "bias?")

    def lower(
        self,
        x: Buffer,
        scale: Buffer | None = None,
        bias: Buffer | None = None,
        *,
        out: Buffer,
        axis: int,
        epsilon: float,
    ) -> Stmt:
        def stages(row: RowBuilder) -> None:
            value = standardize(row, epsilon)
            row.write(lambda j: scale_and_shift(row, value(j), scale, bias, (j,)))

        return seq(*self.checks(x, scale, bias), row_program(x, out, stages))

    def reference(self, x: Any, scale: Any = None, bias: Any = None, *, axis: int, epsilon: float) -> Any:
        tail = tuple(range(axis % x.ndim, x.ndim))
        factor, shift = (neutral if w is None else to_accumulator_dtype(w) for w, neutral in ((scale, 1), (bias, 0)))
        return apply_in_accumulator(lambda v: standardize_array(v, tail, epsilon) * factor + shift, x)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", "m"), ("m",), ("m",)), tolerance=1e-4)
        yield Sample((("b", "n", 5), (5,)))
        yield Sample((("n", 7),), tolerance=1e-4)
        yield Sample((("b", 2, "n", 4), (2, "n", 4), (2, "n", 4)), {"axis": 1, "epsilon": 0.1})
        yield Sample((("n", 6), (6,), (6,)), dtypes=("float16",) * 3, tolerance=5e-3)


@register
class RmsNorm(_TailNorm):
    """RMS normalization x / sqrt(mean(x ** 2) + epsilon) * scale over the axes from `axis` on."""

    name = "rms_norm"
    operands = ("x", "scale?")

    def lower(self, x: Buffer, scale: Buffer | None = None, *, out: Buffer, axis: int, epsilon: float) -> Stmt:
        def stages(row: RowBuilder) -> None:
            square_sum = row.fold("squares", "add", lambda j: row(j) * row(j))
            factor = row.let("rms", 1.0 / (square_sum / row.count + epsilon).unary("sqrt"))
            row.write(lambda j: scale_and_shift(row, row(j) * factor, scale, None, (j,)))

        return seq(*self.checks(x, scale), row_program(x, out, stages))

    def reference(self, x: Any, scale: Any = None, *, axis: int, epsilon: float) -> Any:
        tail = tuple(range(axis % x.ndim, x.ndim))
        factor = 1 if scale is None else to_accumulator_dtype(scale)

        def normalize(v: Any) -> Any:
            return v / np.sqrt(mean_over(v * v, tail) + v.dtype.type(epsilon)) * factor

        return apply_in_accumulator(normalize, x)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", "m"), ("m",)))
        yield Sample((("n", 7),))
        yield Sample((("b", "n", 5), ("n", 5)), {"axis": -2, "epsilon": 1e-3})
        yield Sample((("n", 6), (6,)), dtypes=("bfloat16", "bfloat16"), tolerance=2e-2)
