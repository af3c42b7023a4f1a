"""Ops with data-dependent result sizes: non_zero, compress, unique.

The result type of such an op has no shape; a MatchShape gives it one, with a fresh symbol for the unknown size. Each op
decomposes into a program that counts, `tensor_to_shape` and a MatchShape that bind the symbol, and a program that fills
a result of that size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, Tuple, TupleGetItem
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import Shape
from relaxlite.ir.ops.elementwise import BOOL, NUMBER, check_dtype
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.reduce import normalize_axis
from relaxlite.ir.ops.scalars import Scalar, index, literal
from relaxlite.ir.ops.sorting import draw_with_ties
from relaxlite.ir.program import Allocate, Buffer, IfThenElse, LetIndex, Stmt, Store, loops, reduce, seq
from relaxlite.ir.symbolic import SymVar, product, smax, sym
from relaxlite.ir.types import TensorType, TupleType, Type

ONE = literal(1, "int64")
ZERO = literal(0, "int64")


def bind_count(bb: BlockBuilder, count: Expr, name: str) -> SymVar:
    """Bind the element of `count`, int64 of shape (1,), to a fresh symbol and return the symbol."""
    size = bb.symbol(name)
    bb.match_shape(bb.emit(get_op("tensor_to_shape")(count)), (size,))
    return size


def make_counter() -> Buffer:
    """Local int64 counter of shape (1,)."""
    return Buffer.of("counter", (1,), "int64", "local")


def increment(count: Buffer) -> Stmt:
    """Increment a counter."""
    return Store(count, (sym(0),), ONE, "add")


@register
class NonzeroCount(Op):
    """Number of nonzero elements of x: int64 of shape (1,)."""

    name = "nonzero_count"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        self.tensor(x, "x")
        return TensorType.of((1,), "int64")

    def lower(self, x: Buffer, *, out: Buffer) -> Stmt:
        return reduce(out, x.shape, "add", ZERO, lambda _, *r: Scalar(x[r]).differs(0).cast("int64").value)

    def reference(self, x: Any) -> Any:
        return np.array([np.count_nonzero(x)], np.int64)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3),), dtypes=("bool",))
        yield Sample((("n",),), make={0: draw_with_ties})


@register
class NonzeroFill(Op):
    """Indices of the `count` nonzero elements of x in row-major order: int64 (rank, count)."""

    name = "nonzero_fill"
    operands = ("x", "count")

    def infer(self, x: Expr, count: Expr) -> Type:
        rank = len(self.tensor(x, "x").shape or ())
        return TensorType.of((rank, *self.shape(count, "count")), "int64")

    def lower(self, x: Buffer, count: Shape, *, out: Buffer) -> Stmt:
        filled = make_counter()

        def visit(*i: SymVar) -> Stmt:
            position = SymVar("p")
            stores = [Store(out, (sym(axis), position), index(e).value) for axis, e in enumerate(i)]
            is_stored = Scalar(x[i]).differs(0) & (Scalar(filled[0]) < count[0])
            return IfThenElse(is_stored.value, LetIndex(position, filled[0], seq(*stores, increment(filled))))

        return Allocate(filled, seq(Store(filled, (sym(0),), ZERO), loops("ijklmn", x.shape, visit)))

    def reference(self, x: Any, count: Any) -> Any:
        return np.array(np.nonzero(x), dtype=np.int64)

    def samples(self) -> Iterable[Sample]:
        ones = {0: lambda shape, rng: np.ones(shape)}
        yield Sample((("n", 3), ("n*3",)), dtypes=("float32", "shape"), make=ones)


@register
class NonZero(Op):
    """Indices of the nonzero elements of x in row-major order: int64 (rank, count).

    The type has no shape: bind it by `bb.match_shape(result, (rank, bb.symbol("count")))`.
    """

    name = "non_zero"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.tensor(x, "x")
        if not ty.shape:
            self.fail("x must have at least one dimension; reshape a scalar to (1,)")
        return TensorType(None, "int64", 2)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        x = call.args[0]
        size = bind_count(bb, bb.emit(get_op("nonzero_count")(x)), "nonzero")
        return get_op("nonzero_fill")(x, shape_value((size,)))

    def reference(self, x: Any) -> Any:
        return np.array(np.nonzero(x), dtype=np.int64)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3),), dtypes=("bool",))
        yield Sample((("n", 2, "m"),), make={0: draw_with_ties})


@register
class Compress(Op):
    """Slices of x along `axis` (None: elements of x, flattened) where the bool vector `condition` is true.

    Slices beyond the end of a shorter condition are dropped. The type has no shape: bind it by a MatchShape.
    """

    name = "compress"
    operands = ("x", "condition")
    attrs = {"axis": Attr("int", None)}

    def infer(self, x: Expr, condition: Expr, *, axis: int | None) -> Type:
        ty, flags = self.tensor(x, "x"), self.tensor(condition, "condition")
        check_dtype(self, flags, BOOL, "condition")
        if flags.rank != 1:
            self.fail(f"condition must be a vector, got {flags}")
        if axis is not None:
            normalize_axis(self, axis, ty.rank or 0)
        return TensorType(None, ty.dtype, 1 if axis is None else ty.rank)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        x, condition = call.args
        axis = call.attrs["axis"]
        assert isinstance(x.ty, TensorType)
        size = bind_count(bb, bb.emit(get_op("nonzero_count")(condition)), "kept")
        positions = bb.emit(get_op("nonzero_fill")(condition, shape_value((size,))))
        indices = bb.emit(get_op("reshape")(positions, shape_value((size,))))
        if axis is None:
            x = bb.emit(get_op("reshape")(x, shape_value((product(x.ty.shape or ()),))))
        return get_op("gather")(x, indices, axis=axis or 0)

    def reference(self, x: Any, condition: Any, *, axis: int | None) -> Any:
        return np.compress(condition, x, axis)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3), ("n",)), {"axis": 0}, ("float32", "bool"))
        yield Sample((("n", 3), (2,)), {"axis": -1}, ("int64", "bool"))
        yield Sample((("n", 3), ("n",)), {}, ("float32", "bool"))


@register
class UniqueCount(Op):
    """Number of distinct values of the vector x, whose argsort is `order`: int64 of shape (1,)."""

    name = "unique_count"
    operands = ("x", "order")

    def infer(self, x: Expr, order: Expr) -> Type:
        self.tensor(x, "x")
        return TensorType.of((1,), "int64")

    def lower(self, x: Buffer, order: Buffer, *, out: Buffer) -> Stmt:
        return seq(
            *_order_checks(self.name, x, order),
            Store(out, (sym(0),), ZERO),
            _loop_in_order(x, order, lambda p, is_new: IfThenElse(is_new.value, increment(out))),
        )

    def reference(self, x: Any, order: Any) -> Any:
        return np.array([len(np.unique(x))], np.int64)

    def samples(self) -> Iterable[Sample]:
        yield _sorted_sample((("n",), ("n",)), ("float32", "int64"))


def _order_checks(name: str, x: Buffer, order: Buffer) -> tuple[Stmt, ...]:
    return equality_checks(f"{name}: x and its order differ in size", (x.shape[0], order.shape[0]))


def _sorted_sample(shapes: Any, types: Any) -> Sample:
    """Sample with a sorted x, so that `order` is 0, 1, 2, ..."""
    draws = {0: lambda shape, rng: np.arange(shape[0]), 1: lambda shape, rng: np.arange(shape[0])}
    return Sample(shapes, {}, types, make=draws)


def _loop_in_order(x: Buffer, order: Buffer, make: Any) -> Stmt:
    """Loop over the positions of x in sorted order: make(p, is_new).

    `is_new`: x[p] differs from its predecessor. NaNs, which come last, count as one value.
    """

    def step(t: SymVar) -> Stmt:
        p, q = SymVar("p"), SymVar("q")
        value, previous = Scalar(x[p]), Scalar(x[q])
        differs = value.differs(previous)
        if dtypes.is_float(x.dtype):
            differs = differs & (value.equals(value) | previous.equals(previous))
        is_new = index(t).equals(0) | differs
        return LetIndex(p, order[t], LetIndex(q, order[smax(t - 1, 0)], make(p, is_new)))

    return loops("t", x.shape, step)


@register
class UniqueFill(Op):
    """Distinct values of the vector x with their first indices, the inverse mapping, and their counts.

    The values are sorted; `order` is the argsort of x and `count` the number of distinct values, a shape of one value.
    Results: values (count,), first indices int64 (count,), inverse int64 (size of x,), counts int64 (count,).
    """

    name = "unique_fill"
    operands = ("x", "order", "count")

    def infer(self, x: Expr, order: Expr, count: Expr) -> Type:
        ty, size = self.tensor(x, "x"), self.shape(count, "count")
        places = TensorType.of(size, "int64")
        return TupleType((TensorType.of(size, ty.dtype), places, TensorType(ty.shape, "int64", 1), places))

    def lower(self, x: Buffer, order: Buffer, count: Shape, *, out: tuple[Buffer, Buffer, Buffer, Buffer]) -> Stmt:
        values, first, inverse, counts = out
        groups = make_counter()

        def visit(p: SymVar, is_new: Scalar) -> Stmt:
            g = SymVar("g")
            next_group = Scalar(groups[0])
            new_group = SymVar("g")
            init_stores = [
                Store(values, (new_group,), x[p]),
                Store(first, (new_group,), index(p).value),
                Store(counts, (new_group,), ZERO),
            ]
            open_group = LetIndex(new_group, next_group.value, seq(*init_stores, increment(groups)))
            member = seq(Store(inverse, (p,), index(g).value), Store(counts, (g,), ONE, "add"))
            return seq(IfThenElse(is_new.value, open_group), LetIndex(g, (next_group - 1).value, member))

        visits = Allocate(groups, seq(Store(groups, (sym(0),), ZERO), _loop_in_order(x, order, visit)))
        return seq(*_order_checks(self.name, x, order), visits)

    def reference(self, x: Any, order: Any, count: Any) -> Any:
        values, *places = np.unique(x, True, True, True)
        return values, *(np.asarray(p, dtype=np.int64) for p in places)

    def samples(self) -> Iterable[Sample]:
        yield _sorted_sample((("n",), ("n",), ("n",)), ("float32", "int64", "shape"))


@register
class Unique(Op):
    """Distinct elements of x, flattened: (values, first indices, inverse, counts), as in numpy.unique.

    `sorted=False`: in the order of their first occurrence. The types of all but `inverse` have no shape: bind them by
    MatchShapes with one common symbol.
    """

    name = "unique"
    operands = ("x",)
    attrs = {"sorted": Attr("bool", True)}

    def infer(self, x: Expr, *, sorted: bool) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, NUMBER)
        places = TensorType(None, "int64", 1)
        inverse = TensorType.of((product(ty.shape or ()),), "int64")
        return TupleType((TensorType(None, ty.dtype, 1), places, inverse, places))

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        x = call.args[0]
        assert isinstance(x.ty, TensorType)
        flat = bb.emit(get_op("reshape")(x, shape_value((product(x.ty.shape or ()),))))
        order = bb.emit(get_op("argsort")(flat))
        size = bind_count(bb, bb.emit(get_op("unique_count")(flat, order)), "unique")
        filled = bb.emit(get_op("unique_fill")(flat, order, shape_value((size,))))
        values, first, inverse, counts = (bb.emit(TupleGetItem(filled, k)) for k in range(4))
        if call.attrs["sorted"]:
            return Tuple((values, first, inverse, counts))
        by_first = bb.emit(get_op("argsort")(first))
        rank = bb.emit(get_op("argsort")(by_first))
        values, first, counts = (bb.emit(get_op("gather")(v, by_first)) for v in (values, first, counts))
        return Tuple((values, first, bb.emit(get_op("gather")(rank, inverse)), counts))

    def reference(self, x: Any, *, sorted: bool) -> Any:
        values, first, inverse, counts = np.unique(x.reshape(-1), True, True, True)
        if not sorted:
            by_first = np.argsort(first)
            values, first, counts = values[by_first], first[by_first], counts[by_first]
            inverse = np.argsort(by_first)[inverse]
        return values, *(np.asarray(p, dtype=np.int64) for p in (first, inverse, counts))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3),), {}, make={0: draw_with_ties})
        yield Sample((("n", 3),), {"sorted": False}, ("int64",), make={0: draw_with_ties})
