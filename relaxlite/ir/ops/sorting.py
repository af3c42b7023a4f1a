"""Stable sorting along an axis, with NaN as the greatest value (as in NumPy and PyTorch): argsort, sort, top_k;
and binary search in sorted rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Expr, ShapeValue, Tuple
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.elementwise import NUMBER, check_dtype
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.reduce import normalize_axis
from relaxlite.ir.ops.scalars import Scalar, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, Check, For, IfThenElse, LetIndex, Load, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, ceildiv, smin, sym, syms
from relaxlite.ir.types import TensorType, TupleType, Type

MAX_INSERTION = 64  # largest k for which top_k inserts into a sorted list rather than sorting all elements

At = Callable[[IntLike], Shape]  # position along the sorted axis -> indices of the buffer


def is_better(a: Scalar, b: Scalar, descending: bool) -> Scalar:
    """Whether a sorts strictly before b."""
    first = a > b if descending else a < b
    if not dtypes.is_float(a.dtype):
        return first
    high, low = (a, b) if descending else (b, a)
    return first | (high.unary("isnan") & ~low.unary("isnan"))


def row_loops(shape: Shape, axis: int, make: Callable[[At], Stmt]) -> Stmt:
    """Loops over all dimensions but `axis`; `make` gets a function from a position along the axis to indices."""

    def row(*outer: SymExpr) -> Stmt:
        return make(lambda t: (*outer[:axis], sym(t), *outer[axis:]))

    return loops("ijklmn", shape[:axis] + shape[axis + 1 :], row)


def _let(name: str, value: Scalar, make: Callable[[SymVar], Stmt], lower: int = 0) -> Stmt:
    var = SymVar(name, lower=lower)
    return LetIndex(var, value.value, make(var))


def merge_sort(x: Buffer, order: Buffer, merged: Buffer, at: At, size: SymExpr, descending: bool) -> Stmt:
    """Bottom-up merge sort of one row of `order`, indices into x: merge runs of `width` pairwise and copy them back."""
    known = as_int(size)
    passes = 62 if known is None else max(known - 1, 0).bit_length()

    def one_pass(width: SymVar) -> Stmt:
        merge = loops(
            "b",
            (ceildiv(size, width * 2),),
            lambda b: _merge(x, order, merged, at, b * width * 2, width, size, descending),
        )
        copy = loops("t", (size,), lambda t: Store(order, at(t), merged[at(t)]))
        return IfThenElse((index(width) < size).value, seq(merge, copy))

    def doubled(p: SymVar) -> Stmt:
        one = Scalar(literal(1, "int64"))
        return _let("width", one.binary("shift_left", index(p)), one_pass, lower=1)

    return seq(loops("t", (size,), lambda t: Store(order, at(t), index(t).value)), loops("p", (passes,), doubled))


def _merge(
    x: Buffer, order: Buffer, merged: Buffer, at: At, low: SymExpr, width: SymExpr, size: SymExpr, descending: bool
) -> Stmt:
    """Merge order[low:middle] and order[middle:high], with the left one of equal elements first."""
    middle, high = smin(low + width, size), smin(low + width * 2, size)
    cursor = Buffer.of("cursor", (2,), "int64", "local")

    def take(side: int, source: SymVar, t: SymExpr) -> Stmt:
        store = Store(merged, at(low + t), index(source).value)
        return seq(store, Store(cursor, syms((side,)), literal(1, "int64"), "add"))

    def choose(t: SymExpr, left: SymVar, right: SymVar) -> Stmt:
        has_left, has_right = index(left) < middle, index(right) < high

        def compare(p: SymVar, q: SymVar) -> Stmt:
            right_first = is_better(Scalar(x[at(q)]), Scalar(x[at(p)]), descending)
            takes_right = has_right & (~has_left | right_first)
            return IfThenElse(takes_right.value, take(1, q, t), take(0, p, t))

        zero = Scalar(literal(0, "int64"))
        first = select(has_left, Scalar(order[at(left)]), zero)
        second = select(has_right, Scalar(order[at(right)]), zero)
        return _let("p", first, lambda p: _let("q", second, lambda q: compare(p, q)))

    def step(t: SymVar) -> Stmt:
        left, right = Scalar(cursor[0]), Scalar(cursor[1])
        return _let("left", left, lambda a: _let("right", right, lambda b: choose(t, a, b)))

    start = seq(Store(cursor, syms((0,)), index(low).value), Store(cursor, syms((1,)), index(middle).value))
    return Allocate(cursor, seq(start, loops("t", (high - low,), step)))


def argsort_reference(x: Any, axis: int, descending: bool) -> Any:
    """Stable argsort in NumPy, with NaN as the greatest value, in both orders."""
    x = x.astype(np.float32) if x.dtype.name == "bfloat16" else x
    if not descending:
        return np.argsort(x, axis, kind="stable").astype(np.int64)
    backwards = np.argsort(np.flip(x, axis), axis, kind="stable")
    return np.ascontiguousarray(x.shape[axis] - 1 - np.flip(backwards, axis)).astype(np.int64)


def draw_with_ties(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Draw sample data with equal elements."""
    return rng.integers(-3, 4, shape)


class _Sorting(Op):
    operands = ("x",)
    attrs = {"axis": Attr("int", -1), "descending": Attr("bool", False)}

    def samples(self) -> Iterable[Sample]:
        yield Sample(((2, "n"),), {}, make={0: draw_with_ties})
        yield Sample((("n", 2),), {"axis": 0, "descending": True}, make={0: draw_with_ties})
        yield Sample(((9, "n"),), {"axis": 0}, ("int64",), make={0: draw_with_ties})


@register
class ArgSort(_Sorting):
    """Indices (int64) that sort x along an axis; the sort is stable."""

    name = "argsort"

    def infer(self, x: Expr, *, axis: int, descending: bool) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, NUMBER)
        normalize_axis(self, axis, ty.rank or 0)
        return TensorType(ty.shape, "int64", ty.rank)

    def lower(self, x: Buffer, *, out: Buffer, axis: int, descending: bool) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))
        merged = Buffer("merged", out.shape, "int64")
        nest = row_loops(x.shape, axis, lambda at: merge_sort(x, out, merged, at, x.shape[axis], descending))
        return Allocate(merged, nest)

    def reference(self, x: Any, *, axis: int, descending: bool) -> Any:
        return argsort_reference(x, axis, descending)


@register
class Sort(_Sorting):
    """Sort x along an axis."""

    name = "sort"

    def infer(self, x: Expr, *, axis: int, descending: bool) -> Type:
        ty = self.tensor(x, "x")
        check_dtype(self, ty, NUMBER)
        normalize_axis(self, axis, ty.rank or 0)
        return ty

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        order = bb.emit(get_op("argsort")(call.args[0], axis=call.attrs["axis"], descending=call.attrs["descending"]))
        return get_op("gather_elements")(call.args[0], order, axis=call.attrs["axis"])

    def reference(self, x: Any, *, axis: int, descending: bool) -> Any:
        return np.take_along_axis(x, argsort_reference(x, axis, descending), axis)


@register
class TopK(Op):
    """The k largest or smallest elements along an axis, in order, and their indices (int64); ties by lower index.

    `k` is a shape of one value, so that it may be a symbol. The result is sorted even if `sorted=False`, which permits
    any order.
    """

    name = "top_k"
    operands = ("x", "k")
    attrs = {"axis": Attr("int", -1), "largest": Attr("bool", True), "sorted": Attr("bool", True)}

    def infer(self, x: Expr, k: Expr, *, axis: int, largest: bool, sorted: bool) -> Type:
        ty, count = self.tensor(x, "x"), self.shape(k, "k")
        check_dtype(self, ty, NUMBER)
        dims = list(ty.shape or ())
        axis = normalize_axis(self, axis, len(dims))
        if len(count) != 1 or PROVER.can_prove_lt(dims[axis], count[0]):
            self.fail(f"k {format_shape(count)} must be one value, at most the size {dims[axis]} of axis {axis}")
        dims[axis] = count[0]
        return TupleType((TensorType.of(tuple(dims), ty.dtype), TensorType.of(tuple(dims), "int64")))

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, k = call.args
        assert isinstance(k, ShapeValue)
        if 0 < (as_int(k.values[0]) or 0) <= MAX_INSERTION:
            return None
        axis = call.attrs["axis"]
        order = bb.emit(get_op("argsort")(x, axis=axis, descending=call.attrs["largest"]))
        indices = bb.emit(get_op("slice")(order, shape_value((0,)), k, axes=(axis,)))
        return Tuple((bb.emit(get_op("gather_elements")(x, indices, axis=axis)), indices))

    def lower(self, x: Buffer, k: Shape, *, out: tuple[Buffer, Buffer], axis: int, largest: bool, sorted: bool) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))
        size = x.shape[axis]
        nest = row_loops(x.shape, axis, lambda at: _insert_all(x, out, at, size, k[0], largest))
        if PROVER.can_prove_le(k[0], size):
            return nest
        return seq(
            Check((index(k[0]) <= size).value, f"top_k: k = {k[0]} exceeds the size {size} of axis {axis}"), nest
        )

    def reference(self, x: Any, k: Any, *, axis: int, largest: bool, sorted: bool) -> Any:
        if int(k[0]) > x.shape[axis]:
            raise ValueError(f"top_k: k = {k[0]} exceeds the size {x.shape[axis]}")
        indices = np.take(argsort_reference(x, axis, largest), range(int(k[0])), axis)
        return np.take_along_axis(x, indices, axis), indices

    def samples(self) -> Iterable[Sample]:
        types = ("float32", "shape")
        yield Sample(((2, "n+2"), (3,)), {}, types, make={0: draw_with_ties})
        yield Sample((("n", 2), ("n",)), {"axis": 0, "largest": False}, types, make={0: draw_with_ties})
        yield Sample(((5, "n"), (5,)), {"axis": 0, "largest": False}, ("int64", "shape"), make={0: draw_with_ties})
        yield Sample((("n", 70), (66,)), {}, types, make={0: draw_with_ties})


def _insert_all(x: Buffer, out: tuple[Buffer, Buffer], at: At, size: SymExpr, k: SymExpr, largest: bool) -> Stmt:
    """Compute one row of top_k for small k by insertion of its elements into a sorted list."""
    values, indices = out
    place = Buffer.of("place", (1,), "int64", "local")
    zero = syms((0,))

    def insert(t: SymVar, p: SymVar) -> Stmt:
        def shift(s: SymVar) -> Stmt:
            to, source = at(k - 1 - s), at(k - 2 - s)
            return seq(Store(values, to, values[source]), Store(indices, to, indices[source]))

        store_new = seq(Store(values, at(p), x[at(t)]), Store(indices, at(p), index(t).value))
        return seq(loops("s", (k - 1 - p,), shift), store_new)

    def attempt(t: SymVar) -> Stmt:
        new = Scalar(x[at(t)])

        def count_ahead(s: SymExpr) -> Stmt:
            is_ahead = ~is_better(new, Scalar(values[at(s)]), largest)
            return Store(place, zero, is_ahead.cast("int64").value, "add")

        count = loops("s", (smin(t, k),), count_ahead)
        code = seq(Store(place, zero, literal(0, "int64")), count, _let("p", Scalar(place[0]), lambda p: insert(t, p)))
        is_inserted = select(
            index(t) < k, Scalar(literal(True, "bool")), is_better(new, Scalar(values[at(k - 1)]), largest)
        )
        return IfThenElse(is_inserted.value, code)

    t = SymVar("t")
    return Allocate(place, For(t, size, attempt(t)))


@register
class SearchSorted(Op):
    """Number of elements of a sorted row before which x belongs: of those < x, or with `right` of those <= x.

    rows (b..., n) sorted along the last axis, x (b..., m): int64 (b..., m). NaN belongs at the end.
    """

    name = "search_sorted"
    operands = ("rows", "x")
    attrs = {"right": Attr("bool", False)}

    def infer(self, rows: Expr, x: Expr, *, right: bool) -> Type:
        ty, points = self.tensor(rows, "rows"), self.tensor(x, "x")
        check_dtype(self, ty, NUMBER, "rows")
        check_dtype(self, points, (ty.dtype,), "x")
        dims, outer = points.shape or (), (ty.shape or ())[:-1]
        if not ty.rank or len(dims) != ty.rank or any(map(PROVER.can_prove_ne, outer, dims[:-1])):
            self.fail(f"rows {ty} and x {points} must agree in all dimensions but the last")
        return TensorType.of(dims, "int64")

    def lower(self, rows: Buffer, x: Buffer, *, out: Buffer, right: bool) -> Stmt:
        size = rows.shape[-1]
        known = as_int(size)
        steps = 63 if known is None else known.bit_length()
        bounds = Buffer.of("bounds", (2,), "int64", "local")
        low, high = (Scalar(bounds[k]) for k in range(2))

        def element(*i: SymExpr) -> Stmt:
            point = Scalar(x[i])

            def halve(middle: SymVar) -> Stmt:
                value = Scalar(Load(rows, (*i[:-1], middle)))
                goes_right = ~(value > point) if right else ~(value >= point)
                store_low = Store(bounds, syms((0,)), (index(middle) + 1).value)
                return IfThenElse(goes_right.value, store_low, Store(bounds, syms((1,)), index(middle).value))

            middle = low + (high - low).binary("shift_right", 1)
            step = IfThenElse((low < high).value, _let("middle", middle, halve))
            start = seq(Store(bounds, syms((0,)), literal(0, "int64")), Store(bounds, syms((1,)), index(size).value))
            return seq(start, loops("s", (steps,), lambda _: step), Store(out, i, low.value))

        pairs = zip(rows.shape[:-1], x.shape[:-1], strict=True)
        checks = equality_checks("search_sorted: rows and x differ in a leading dimension", *pairs)
        return seq(*checks, Allocate(bounds, loops("ijklmn", out.shape, element)))

    def reference(self, rows: Any, x: Any, *, right: bool) -> Any:
        out = np.empty(x.shape, np.int64)
        for at in np.ndindex(x.shape[:-1]):
            out[at] = np.searchsorted(rows[at], x[at], "right" if right else "left")
        return out

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return np.sort(draw_with_ties(shape, rng), -1)

        makes = {0: draw, 1: draw_with_ties}
        yield Sample(((2, "n"), (2, "m")), {}, ("float32", "float32"), make=makes)
        yield Sample((("n",), ("m",)), {"right": True}, ("int64", "int64"), make=makes)
        yield Sample((("n", 5), ("n", 3)), {"right": True}, ("float32", "float32"), make=makes)
