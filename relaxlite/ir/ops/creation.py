"""Ops that create tensors from shapes and scalars: full, arange, eye, trilu, one_hot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape
from relaxlite.ir.ops.elementwise import NUMBER, check_dtype
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.reduce import normalize_axis
from relaxlite.ir.ops.scalars import HALF, Scalar, index, literal, select
from relaxlite.ir.ops.shape import int_tuple
from relaxlite.ir.ops.slicing import only_element
from relaxlite.ir.program import Buffer, Load, Stmt, Value, compute, seq
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType, Type


def check_scalar(op: Op, operand: Expr, name: str) -> TensorType:
    """Check that an operand has one element, as far as its type tells; return the type."""
    ty = op.tensor(operand, name)
    if any(PROVER.can_prove_ne(d, 1) for d in ty.shape or ()):
        op.fail(f"{name} must have one element, got {ty}")
    return ty


@register
class Full(Op):
    """Tensor of `shape` filled with `value`, a tensor of one element."""

    name = "full"
    operands = ("shape", "value")
    is_symbolic = True

    def infer(self, shape: Expr, value: Expr) -> Type:
        return TensorType.of(self.shape(shape), check_scalar(self, value, "value").dtype)

    def lower(self, shape: Shape, value: Buffer, *, out: Buffer) -> Stmt:
        checks = equality_checks("full: the value must have one element", *((d, 1) for d in value.shape))
        return seq(*checks, compute(out, lambda *i: only_element(value)))

    def reference(self, shape: Any, value: Any) -> Any:
        return np.full(int_tuple(shape), value.reshape(-1)[0], dtype=value.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3), ()), dtypes=("shape", "float32"))
        yield Sample((("n",), (1,)), dtypes=("shape", "int64"))


@register
class Arange(Op):
    """Vector of `count` elements start, start + delta, ...

    `start` and `delta` are tensors of one element, `count` is a shape of one value.
    """

    name = "arange"
    operands = ("start", "delta", "count")
    is_symbolic = True

    def infer(self, start: Expr, delta: Expr, count: Expr) -> Type:
        first, step = check_scalar(self, start, "start"), check_scalar(self, delta, "delta")
        check_dtype(self, first, NUMBER, "start")
        if first.dtype != step.dtype:
            self.fail(f"start has dtype {first.dtype}, delta {step.dtype}")
        dims = self.shape(count, "count")
        if len(dims) != 1:
            self.fail(f"count must be a shape of one value, got {len(dims)}")
        return TensorType.of(dims, first.dtype)

    def lower(self, start: Buffer, delta: Buffer, count: Shape, *, out: Buffer) -> Stmt:
        wide = "float32" if out.dtype in HALF else out.dtype

        def value(i: SymExpr) -> Value:
            first, step = Scalar(only_element(start)).cast(wide), Scalar(only_element(delta)).cast(wide)
            return (first + step * index(i, wide)).cast(out.dtype).value

        return compute(out, value)

    def reference(self, start: Any, delta: Any, count: Any) -> Any:
        wide = np.dtype(np.float32) if start.dtype.name in HALF else start.dtype
        steps = np.arange(int_tuple(count)[0]).astype(wide)
        first, step = start.reshape(-1)[0], delta.reshape(-1)[0]
        if start.dtype == object:
            return first + step * steps
        return (wide.type(first) + wide.type(step) * steps).astype(start.dtype)

    def samples(self) -> Iterable[Sample]:
        for dtype in ("float32", "int64", "float16"):
            yield Sample(
                ((), (), ("n",)), dtypes=(dtype, dtype, "shape"), tolerance=1e-3 if dtype == "float16" else 1e-5
            )


@register
class Eye(Op):
    """Matrix of `shape` with ones on diagonal k (column - row == k) and zeros elsewhere."""

    name = "eye"
    operands = ("shape",)
    attrs = {"k": Attr("int", 0), "dtype": Attr("dtype", "float32")}

    def infer(self, shape: Expr, *, k: int, dtype: DType) -> Type:
        dims = self.shape(shape)
        if len(dims) != 2:
            self.fail(f"shape must have two dimensions, got {len(dims)}")
        return TensorType.of(dims, dtype)

    def lower(self, shape: Shape, *, out: Buffer, k: int, dtype: DType) -> Stmt:
        def value(i: SymExpr, j: SymExpr) -> Value:
            return select(index(j - i).equals(k), Scalar(literal(1, dtype)), 0).value

        return compute(out, value)

    def reference(self, shape: Any, *, k: int, dtype: DType) -> Any:
        rows, columns = int_tuple(shape)
        return np.eye(rows, columns, k=k).astype(dtypes.to_numpy(dtype))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", "m"),), dtypes=("shape",))
        yield Sample((("n", 4),), {"k": -1, "dtype": "int64"}, ("shape",))


@register
class Trilu(Op):
    """Upper (column - row >= k) or lower (column - row <= k) triangle of each matrix of x; zeros elsewhere.

    `k` is a shape of one value, which may be negative.
    """

    name = "trilu"
    operands = ("x", "k")
    attrs = {"upper": Attr("bool", True)}

    def infer(self, x: Expr, k: Expr, *, upper: bool) -> Type:
        ty = self.tensor(x, "x")
        if len(ty.shape or ()) < 2 or len(self.shape(k, "k")) != 1:
            self.fail(f"x must have at least two dimensions and k one value, got {ty} and {k.ty}")
        return ty

    def lower(self, x: Buffer, k: Shape, *, out: Buffer, upper: bool) -> Stmt:
        def value(*i: SymExpr) -> Value:
            diagonal = index(i[-1] - i[-2])
            keep = diagonal >= k[0] if upper else diagonal <= k[0]
            return select(keep, Scalar(x[i]), 0).value

        return compute(out, value)

    def reference(self, x: Any, k: Any, *, upper: bool) -> Any:
        return np.asarray((np.triu if upper else np.tril)(x, int(k[0])))

    def samples(self) -> Iterable[Sample]:
        yield Sample(((2, "n", 3), (1,)), {}, ("float32", "shape"))
        yield Sample((("n", "m"), (-1,)), {"upper": False}, ("int64", "shape"))


@register
class OneHot(Op):
    """One-hot encoding: values[1] where the index equals the position along a new axis of size `depth`, else values[0].

    Negative indices count from the end; rows of indices out of range are all values[0].
    """

    name = "one_hot"
    operands = ("indices", "depth", "values")
    attrs = {"axis": Attr("int", -1)}

    def infer(self, indices: Expr, depth: Expr, values: Expr, *, axis: int) -> Type:
        index_type, value_type = self.tensor(indices, "indices"), self.tensor(values, "values")
        check_dtype(self, index_type, dtypes.INTEGERS, "indices")
        depth_shape = self.shape(depth, "depth")
        if len(depth_shape) != 1 or value_type.rank != 1:
            self.fail(
                f"depth must be a shape of one value and values a vector (off, on), got {depth.ty} and {value_type}"
            )
        dims = list(index_type.shape or ())
        dims.insert(normalize_axis(self, axis, len(dims) + 1), depth_shape[0])
        return TensorType.of(tuple(dims), value_type.dtype)

    def lower(self, indices: Buffer, depth: Shape, values: Buffer, *, out: Buffer, axis: int) -> Stmt:
        axis = normalize_axis(self, axis, len(out.shape))

        def value(*i: SymExpr) -> Value:
            position = Scalar(Load(indices, (*i[:axis], *i[axis + 1 :]))).cast("int64")
            is_on = position.equals(i[axis]) | (position + depth[0]).equals(i[axis])
            return select(is_on, Scalar(values[1]), Scalar(values[0])).value

        return seq(*equality_checks("one_hot: values must be (off, on)", (values.shape[0], 2)), compute(out, value))

    def reference(self, indices: Any, depth: Any, values: Any, *, axis: int) -> Any:
        size = int(depth[0])
        wide = np.expand_dims(indices.astype(np.int64), axis)
        positions = np.arange(size).reshape([-1 if k == axis % wide.ndim else 1 for k in range(wide.ndim)])
        return np.where((wide == positions) | (wide + size == positions), values[1], values[0])

    def samples(self) -> Iterable[Sample]:
        types = ("int64", "shape", "float32")
        yield Sample((("n", 2), ("m",), (2,)), {}, types)
        yield Sample((("n",), (4,), (2,)), {"axis": 0}, types)
