"""Reductions over axes, arg-reductions and cumulative sums, products and extremes.

`axes=None` reduces every axis, `axes=()` none. Half-precision floats accumulate in float32. An empty reduction yields
the identity of its operation: 0, 1, or for max and min the least and greatest value of the dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import AttrValue, Call, Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, register_op
from relaxlite.ir.ops.elementwise import BOOL, FLOAT, NUMBER, check_dtype
from relaxlite.ir.ops.scalars import HALF, Scalar, identity, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, Stmt, Store, Value, loops, seq
from relaxlite.ir.program import reduce as reduce_loops
from relaxlite.ir.symbolic import SymExpr, product, smax, smin, sym
from relaxlite.ir.types import TensorType, Type

REDUCTION_ATTRS = {"axes": Attr("ints", None), "keepdims": Attr("bool", False)}


def normalize_axes(op: Op, axes: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    """Normalize axes to ascending numbers in 0..rank-1, None to all axes; fail the op if they are invalid."""
    if axes is None:
        return tuple(range(rank))
    for axis in axes:
        if not -rank <= axis < rank:
            op.fail(f"axis {axis} does not exist in a tensor of rank {rank}")
    result = tuple(sorted(axis % rank for axis in axes))
    if len(set(result)) != len(result):
        op.fail(f"axes {axes} name the same axis twice")
    return result


def normalize_axis(op: Op, axis: int, rank: int) -> int:
    """Normalize an axis to 0..rank-1; fail the op if it does not exist."""
    return normalize_axes(op, (axis,), rank)[0]


def reduced_shape(shape: tuple[SymExpr, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[SymExpr, ...]:
    """Shape after a reduction over axes."""
    dims = [(sym(1) if k in axes else dim) for k, dim in enumerate(shape) if keepdims or k not in axes]
    return tuple(dims)


def reduce_axes(
    out: Buffer, x: Buffer, axes: tuple[int, ...], keepdims: bool, combine: str, value: Callable[..., Value],
    init: Value | None = None, finish: Callable[..., Value] = lambda total, *i: total,
) -> Stmt:  # fmt: skip
    """Build out = finish(combine of value(*indices of x) over the axes)."""
    rank = len(x.shape)
    outer = len(out.shape)

    def at_indices(*i: SymExpr) -> Value:
        outer_indices, reduced_indices = list(i[:outer]), list(i[outer:])
        where = []
        for axis in range(rank):
            if axis in axes:
                where.append(reduced_indices.pop(0))
                if keepdims:
                    outer_indices.pop(0)
            else:
                where.append(outer_indices.pop(0))
        return value(*where)

    start = init if init is not None else identity(combine, out.dtype)
    return reduce_loops(out, [x.shape[a] for a in axes], combine, start, at_indices, finish)


def _accumulator(dtype: DType, is_finished: bool) -> DType:
    """Accumulator dtype of a reduction; `is_finished`: a function is applied to the total.

    Integers wrap, which a division of the total would expose: such totals have 64 bits, as in NumPy.
    """
    if dtype in HALF:
        return "float32"
    if is_finished and dtypes.is_integer(dtype):
        return "int64" if dtypes.is_signed(dtype) else "uint64"
    return dtype


class ReduceOp(Op):
    """Reduction op: `combine` over the axes, then `finish(total, number of elements)`."""

    operands = ("x",)
    attrs = REDUCTION_ATTRS
    accepts: ClassVar[tuple[DType, ...]]
    combine: ClassVar[str]
    numpy: ClassVar[Callable[..., Any]]
    symbolic: ClassVar[Callable[[Any], Any] | None]
    finish: ClassVar[Callable[..., Scalar] | None]

    def infer(self, x: Expr, *, axes: tuple[int, ...] | None, keepdims: bool) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, self.accepts)
        shape = ty.shape or ()
        return TensorType.of(reduced_shape(shape, normalize_axes(self, axes, len(shape)), keepdims), ty.dtype)

    def lower(self, x: Buffer, *, out: Buffer, axes: tuple[int, ...] | None, keepdims: bool) -> Stmt:
        over = normalize_axes(self, axes, len(x.shape))
        last = type(self).finish or (lambda v, n: v)
        wide = _accumulator(x.dtype, is_finished=type(self).finish is not None)
        count = product(x.shape[a] for a in over)

        def finish(total: Value, *i: SymExpr) -> Value:
            return last(Scalar(total), count).cast(out.dtype).value

        init = identity(self.combine, wide)
        return reduce_axes(out, x, over, keepdims, self.combine, lambda *i: Scalar(x[i]).cast(wide).value, init, finish)

    def reference(self, x: Any, *, axes: tuple[int, ...] | None, keepdims: bool) -> Any:
        wide = x.astype(np.float32) if x.dtype.name in HALF else x
        over = tuple(range(x.ndim)) if axes is None else axes
        with np.errstate(all="ignore"):
            return np.asarray(type(self).numpy(wide, axis=over, keepdims=keepdims)).astype(x.dtype)

    def evaluate_symbolic(self, x: Any, *, axes: tuple[int, ...] | None, keepdims: bool) -> Any:
        function = type(self).symbolic
        if function is None:
            return None
        over = normalize_axes(self, axes, x.ndim)
        outer_axes = [a for a in range(x.ndim) if a not in over]
        rows = x.transpose((*outer_axes, *over)).reshape(
            [x.shape[a] for a in outer_axes] + [math.prod(x.shape[a] for a in over)]
        )
        out = np.empty(rows.shape[:-1], dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = function(rows[at])
        return np.expand_dims(out, over) if keepdims else out

    def samples(self) -> Iterable[Sample]:
        dtype = "float32" if "float32" in self.accepts else "bool"
        several: tuple[dict[str, AttrValue], ...] = (
            {},
            {"axes": (-1,)},
            {"axes": (0, 2), "keepdims": True},
            {"axes": ()},
        )
        for attrs in several:
            yield Sample((("n", 2, "m"),), attrs, (dtype,), tolerance=1e-4)
        if "float16" in self.accepts:
            yield Sample(((2, "n"),), {"axes": (1,)}, ("float16",), tolerance=1e-2)
        if "int32" in self.accepts:
            yield Sample((("n", 3),), {"axes": (0,)}, ("int32",))


def reduction(
    name: str,
    doc: str,
    combine: str,
    numpy: Callable[..., Any],
    accepts: tuple[DType, ...],
    *,
    finish: Callable[[Scalar, SymExpr], Scalar] | None = None,
    symbolic: Callable[[Any], Any] | None = None,
) -> None:
    """Register a reduction op."""
    members = {
        "name": name, "__doc__": doc, "combine": combine, "accepts": accepts, "numpy": staticmethod(numpy),
        "finish": None if finish is None else staticmethod(finish), "is_symbolic": symbolic is not None,
        "symbolic": None if symbolic is None else staticmethod(symbolic),
    }  # fmt: skip
    register_op(type(f"Reduce_{name}", (ReduceOp,), members)())


def _divide(total: Scalar, count: SymExpr) -> Scalar:
    """Divide a total by a count; integers round towards zero, and the mean of no integers is 0."""
    if dtypes.is_float(total.dtype):
        return total / index(count, total.dtype)
    return total.binary("truncdiv", index(smax(count, 1), total.dtype))


def _mean(x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Any:
    total = np.sum(x, axis=axis, keepdims=keepdims)
    count = int(np.prod([x.shape[a] for a in axis]))
    if np.issubdtype(x.dtype, np.integer):
        return np.sign(total) * (np.abs(total) // max(count, 1))
    return total / x.dtype.type(count)


def _extreme(function: Callable[..., Any], combine: str) -> Callable[..., Any]:
    def evaluate(x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Any:
        start = identity(combine, str(x.dtype)).value
        return function(x, axis=axis, keepdims=keepdims, initial=x.dtype.type(start))

    return evaluate


def _fold(function: Callable[[Any, Any], SymExpr]) -> Callable[[Any], Any]:
    return lambda row: functools.reduce(function, row)


reduction("sum", "The sum over axes.", "add", np.sum, NUMBER, symbolic=lambda row: sum(row, sym(0)))
reduction("prod", "The product over axes.", "mul", np.prod, NUMBER, symbolic=product)
reduction("max", "The maximum over axes; NaN wins.", "max", _extreme(np.max, "max"), NUMBER, symbolic=_fold(smax))
reduction("min", "The minimum over axes; NaN wins.", "min", _extreme(np.min, "min"), NUMBER, symbolic=_fold(smin))
reduction("mean", "The arithmetic mean over axes; NaN of nothing.", "add", _mean, NUMBER, finish=_divide)
reduction("all", "Whether every element over axes is true.", "and", np.all, BOOL)
reduction("any", "Whether some element over axes is true.", "or", np.any, BOOL)


class _ComposedReduction(Op):
    """Reduction composed of other ops: `compose(bb, x, axes=..., keepdims=...)`."""

    operands = ("x",)
    attrs = REDUCTION_ATTRS
    accepts: ClassVar[tuple[DType, ...]] = NUMBER
    compose: ClassVar[Callable[..., Expr]]
    numpy: ClassVar[Callable[..., Any]]

    def infer(self, x: Expr, *, axes: tuple[int, ...] | None, keepdims: bool) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, self.accepts)
        shape = ty.shape or ()
        return TensorType.of(reduced_shape(shape, normalize_axes(self, axes, len(shape)), keepdims), ty.dtype)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        return composed_in_float32(bb, call.args[0], lambda x: type(self).compose(bb, x, **call.attrs))

    def reference(self, x: Any, *, axes: tuple[int, ...] | None, keepdims: bool) -> Any:
        wide = x.astype(np.float32) if x.dtype.name in HALF else x
        over = tuple(range(x.ndim)) if axes is None else axes
        with np.errstate(all="ignore"):
            return np.asarray(type(self).numpy(wide, axis=over, keepdims=keepdims)).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 2, "m"),), {"axes": (-1,)}, tolerance=1e-4)
        yield Sample((("n", 3),), {"axes": None, "keepdims": True}, tolerance=1e-4)


def _composed(
    name: str, doc: str, compose: Callable[..., Expr], numpy: Callable[..., Any], accepts: tuple[DType, ...] = NUMBER
) -> None:
    members = {
        "name": name, "__doc__": doc, "accepts": accepts, "compose": staticmethod(compose),
        "numpy": staticmethod(numpy),
    }  # fmt: skip
    register_op(type(f"Composed_{name}", (_ComposedReduction,), members)())


def composed_in_float32(bb: BlockBuilder, x: Expr, compose: Callable[[Expr], Expr]) -> Expr:
    """Emit compose(x), for half-precision floats in float32 and rounded once: 300 ** 2 overflows float16."""
    assert isinstance(x.ty, TensorType)
    if x.ty.dtype not in HALF:
        return compose(x)
    return get_op("cast")(bb.emit(compose(_emit(bb, "cast", x, dtype="float32"))), dtype=x.ty.dtype)


def _emit(bb: BlockBuilder, op: str, *operands: Any, **attrs: Any) -> Expr:
    return bb.emit(get_op(op)(*operands, **attrs))


def _sum_of(op: str, twice: bool = False) -> Callable[..., Expr]:
    def compose(bb: BlockBuilder, x: Expr, **attrs: Any) -> Expr:
        return _emit(bb, "sum", _emit(bb, op, x, x) if twice else _emit(bb, op, x), **attrs)

    return compose


def _l2(bb: BlockBuilder, x: Expr, **attrs: Any) -> Expr:
    return _emit(bb, "sqrt", _emit(bb, "sum", _emit(bb, "multiply", x, x), **attrs))


def _log_sum(bb: BlockBuilder, x: Expr, **attrs: Any) -> Expr:
    return _emit(bb, "log", _emit(bb, "sum", x, **attrs))


def _log_sum_exp(bb: BlockBuilder, x: Expr, *, axes: tuple[int, ...] | None, keepdims: bool) -> Expr:
    """Emit log(sum(exp(x - m))) + m with m = max(x), or 0 where the maximum is infinite."""
    assert isinstance(x.ty, TensorType)
    top = _emit(bb, "max", x, axes=axes, keepdims=True)
    zero = np.zeros((), dtypes.to_numpy(x.ty.dtype))
    m = _emit(bb, "where", _emit(bb, "isinf", top), zero, top)
    sums = _emit(bb, "log", _emit(bb, "sum", _emit(bb, "exp", _emit(bb, "subtract", x, m)), axes=axes, keepdims=True))
    total = _emit(bb, "add", sums, m)
    if keepdims:
        return total
    over = normalize_axes(get_op("log_sum_exp"), axes, x.ty.rank or 0)
    return _emit(bb, "squeeze", total, axes=over)


def _log_sum_exp_numpy(x: Any, **where: Any) -> Any:
    wide = x.astype(np.float64)
    top = np.max(wide, axis=where.get("axis"), keepdims=True, initial=-np.inf)
    top = np.where(np.isinf(top), 0, top)
    sums = np.log(np.sum(np.exp(wide - top), **where))
    return sums + top.reshape(sums.shape)


_composed("l1_norm", "The sum of |x| over axes.", _sum_of("abs"), lambda x, **w: np.sum(np.abs(x), **w))
_composed(
    "sum_square", "The sum of x * x over axes.", _sum_of("multiply", twice=True), lambda x, **w: np.sum(x * x, **w)
)
_composed(
    "l2_norm", "The square root of the sum of x * x over axes.", _l2, lambda x, **w: np.sqrt(np.sum(x * x, **w)), FLOAT
)
_composed("log_sum", "log(sum(x)) over axes", _log_sum, lambda x, **w: np.log(np.sum(x, **w)), FLOAT)
_composed("log_sum_exp", "log(sum(exp(x))) over axes, without overflow", _log_sum_exp, _log_sum_exp_numpy, FLOAT)


class _ArgReduce(Op):
    """Base of argmax and argmin: reduce to the extreme value, then to the first or last index that has it."""

    operands = ("x",)
    attrs = {"axis": Attr("int", 0), "keepdims": Attr("bool", False), "select_last_index": Attr("bool", False)}
    combine: ClassVar[str]

    def infer(self, x: Expr, *, axis: int, keepdims: bool, select_last_index: bool) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, NUMBER)
        shape = ty.shape or ()
        return TensorType.of(reduced_shape(shape, (normalize_axis(self, axis, len(shape)),), keepdims), "int64")

    def lower(self, x: Buffer, *, out: Buffer, axis: int, keepdims: bool, select_last_index: bool) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))
        best = Buffer("best", reduced_shape(x.shape, (axis,), keepdims), x.dtype)

        def position(*i: SymExpr) -> Value:
            best_index = tuple((sym(0) if keepdims else None) if k == axis else e for k, e in enumerate(i))
            value, top = Scalar(x[i]), Scalar(best[tuple(e for e in best_index if e is not None)])
            is_best = value.equals(top)
            if dtypes.is_float(x.dtype):  # NaN wins, as in NumPy
                is_best = is_best | value.unary("isnan")
            return select(is_best, index(i[axis]), index(-1 if select_last_index else x.shape[axis])).value

        start = literal(-1, "int64") if select_last_index else index(x.shape[axis]).value
        return Allocate(best, seq(
            reduce_axes(best, x, (axis,), keepdims, self.combine, lambda *i: x[i]),
            reduce_axes(out, x, (axis,), keepdims, "max" if select_last_index else "min", position, start),
        ))  # fmt: skip

    def reference(self, x: Any, *, axis: int, keepdims: bool, select_last_index: bool) -> Any:
        if x.dtype.name == "bfloat16":
            x = x.astype(np.float32)
        function = np.argmax if self.combine == "max" else np.argmin
        if not select_last_index:
            return np.asarray(function(x, axis=axis, keepdims=keepdims), dtype=np.int64)
        last: Any = x.shape[axis] - 1 - function(np.flip(x, axis), axis=axis, keepdims=keepdims)
        return np.asarray(last, dtype=np.int64)

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(0, 3, shape).astype(np.float32)

        for attrs in ({"axis": 1}, {"axis": -1, "keepdims": True}, {"axis": 1, "select_last_index": True}):
            yield Sample((("n", 5, 2),), attrs, make={0: draw})
        yield Sample(((2, 4),), {"axis": 0}, ("int64",))


@register
class ArgMax(_ArgReduce):
    """Index (int64) of the first maximum along an axis, or with select_last_index of the last."""

    name = "argmax"
    combine = "max"


@register
class ArgMin(_ArgReduce):
    """Index (int64) of the first minimum along an axis, or with select_last_index of the last."""

    name = "argmin"
    combine = "min"


class _Scan(Op):
    """Base of cumulative reductions along one axis."""

    operands = ("x",)
    attrs = {"axis": Attr("int"), "exclusive": Attr("bool", False), "reverse": Attr("bool", False)}
    is_symbolic = True
    combine: ClassVar[str]

    def infer(self, x: Expr, *, axis: int, exclusive: bool, reverse: bool) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, NUMBER)
        normalize_axis(self, axis, ty.rank or 0)
        return ty

    def lower(self, x: Buffer, *, out: Buffer, axis: int, exclusive: bool, reverse: bool) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))
        extent = x.shape[axis]
        total = Buffer.of("total", (1,), "float32" if x.dtype in HALF else x.dtype, "local")
        zero = (sym(0),)

        def row(*outer: SymExpr) -> Stmt:
            def step(t: SymExpr) -> Stmt:
                at = (*outer[:axis], extent - 1 - t if reverse else t, *outer[axis:])
                combine = Store(total, zero, Scalar(x[at]).cast(total.dtype).value, self.combine)
                store = Store(out, at, Scalar(total[0]).cast(out.dtype).value)
                return seq(store, combine) if exclusive else seq(combine, store)

            start = identity(self.combine, total.dtype)
            return Allocate(total, seq(Store(total, zero, start), loops("t", (extent,), step)))

        return loops("ijklmn", (*x.shape[:axis], *x.shape[axis + 1 :]), row)

    def reference(self, x: Any, *, axis: int, exclusive: bool, reverse: bool) -> Any:
        wide = x.astype(np.float32) if x.dtype.name in HALF else x
        wide = np.flip(wide, axis) if reverse else wide
        function = _SCANS[self.combine]
        if exclusive:
            neutral = {"add": 0, "mul": 1}.get(self.combine)
            start = identity(self.combine, wide.dtype.name).value if neutral is None else neutral
            first, rest = np.split(np.roll(wide, 1, axis), [1], axis)
            wide = np.concatenate([np.full_like(first, start), rest], axis)
        result = function(wide, axis=axis)
        return (np.flip(result, axis) if reverse else result).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        for attrs in ({"axis": 0}, {"axis": -1, "exclusive": True}, {"axis": 1, "reverse": True, "exclusive": True}):
            yield Sample((("n", 3),), attrs, tolerance=1e-4)
        yield Sample(((4, "n"),), {"axis": 1}, ("int64",))


_SCANS: Mapping[str, Callable[..., Any]] = {
    "add": np.cumsum,
    "mul": np.cumprod,
    "max": np.maximum.accumulate,
    "min": np.minimum.accumulate,
}


@register
class CumSum(_Scan):
    """Cumulative sum along an axis; `exclusive` leaves out the element itself, `reverse` starts from the end."""

    name = "cumsum"
    combine = "add"


@register
class CumProd(_Scan):
    """Cumulative product along an axis; `exclusive` leaves out the element itself, `reverse` starts from the end."""

    name = "cumprod"
    combine = "mul"


@register
class CumMax(_Scan):
    """Cumulative maximum along an axis, NaN from the first one on; `exclusive` and `reverse` as in cumsum."""

    name = "cummax"
    combine = "max"


@register
class CumMin(_Scan):
    """Cumulative minimum along an axis, NaN from the first one on; `exclusive` and `reverse` as in cumsum."""

    name = "cummin"
    combine = "min"


@register
class LogCumSumExp(_Scan):
    """Logarithm of the cumulative sum of exp(x) along an axis, without overflow."""

    name = "log_cumsum_exp"
    attrs = {"axis": Attr("int")}
    is_symbolic = False

    def infer(self, x: Expr, *, axis: int) -> Type:  # type: ignore[override]
        ty = self.tensor(x, "x")
        check_dtype(self, ty, FLOAT)
        normalize_axis(self, axis, ty.rank or 0)
        return ty

    def lower(self, x: Buffer, *, out: Buffer, axis: int) -> Stmt:  # type: ignore[override]
        axis = normalize_axis(self, axis, len(x.shape))
        total = Buffer.of("total", (1,), "float32" if x.dtype in HALF else x.dtype, "local")
        zero = (sym(0),)

        def row(*outer: SymExpr) -> Stmt:
            def step(t: SymExpr) -> Stmt:
                at = (*outer[:axis], t, *outer[axis:])
                value = _log_add_exp(Scalar(total[0]), Scalar(x[at]).cast(total.dtype))
                return seq(Store(total, zero, value.value), Store(out, at, Scalar(total[0]).cast(out.dtype).value))

            start = literal(float("-inf"), total.dtype)
            return Allocate(total, seq(Store(total, zero, start), loops("t", (x.shape[axis],), step)))

        return loops("ijklmn", (*x.shape[:axis], *x.shape[axis + 1 :]), row)

    def reference(self, x: Any, *, axis: int) -> Any:  # type: ignore[override]
        with np.errstate(all="ignore"):
            return np.logaddexp.accumulate(x.astype(np.float64), axis=axis).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3),), {"axis": 0}, tolerance=1e-4)
        yield Sample(((2, "n", 3),), {"axis": 1}, tolerance=1e-4)


def _log_add_exp(a: Scalar, b: Scalar) -> Scalar:
    """log(exp(a) + exp(b)) as max(a, b) + log(1 + exp(-|a - b|)); equal infinities stay as they are."""
    same = a.unary("isinf") & a.equals(b)
    return select(same, a, a.maximum(b) + (-(a - b).abs()).exp().log1p())
