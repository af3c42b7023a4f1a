"""Gather, scatter and reverse_sequence: ops with data-dependent indices.

`LetIndex` binds an index to a symbol and a `Check` tests its range inside the innermost loop, so that nests stay
perfect; scheduling hoists both out of loops that they do not depend on. Negative indices count from the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.elementwise import check_dtype
from relaxlite.ir.ops.linalg import equality_checks
from relaxlite.ir.ops.reduce import normalize_axes, normalize_axis
from relaxlite.ir.ops.scalars import Scalar, index, select
from relaxlite.ir.ops.shape import int_tuple
from relaxlite.ir.program import Buffer, Check, LetIndex, Load, Stmt, Store, Value, compute, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

REDUCTIONS = ("none", "add", "mul", "max", "min")
_UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}

Draw = Callable[[tuple[int, ...], np.random.Generator], Any]


@dataclass(frozen=True, slots=True)
class DynamicIndex:
    """Data-dependent index along a dimension of `size`; negative indices count from the end."""

    value: Value
    size: SymExpr
    message: str  # error text if the index is out of range

    def from_start(self) -> Value:
        """Normalize a negative index."""
        wide = Scalar(self.value).cast("int64")
        if self.value.dtype in dtypes.UNSIGNED:
            return wide.value
        return select(wide < 0, wide + self.size, wide).value

    @staticmethod
    def along(op: Op, x: Buffer, axis: int, value: Value) -> DynamicIndex:
        """Index along an axis of a buffer, with the op's name in the error text."""
        size = x.shape[axis]
        return DynamicIndex(value, size, f"{op.name}: an index is out of range for axis {axis} of size {size}")


def with_checked_indices(positions: Sequence[DynamicIndex], make: Callable[..., Stmt]) -> Stmt:
    """Bind indices to symbols and check their ranges around the statement make(*symbols)."""
    names = [f"p{k}" if len(positions) > 1 else "p" for k in range(len(positions))]
    symbols = [SymVar(name, lower=None) for name in names]  # unbounded before the check
    checks = [
        Check(((index(p) >= 0) & (index(p) < position.size)).value, position.message)
        for p, position in zip(symbols, positions, strict=True)
    ]
    stmt = seq(*checks, make(*symbols))
    for symbol, position in reversed(list(zip(symbols, positions, strict=True))):
        stmt = LetIndex(symbol, position.from_start(), stmt)
    return stmt


def constant_indices(indices: Any) -> Any:
    """Convert indices to int64, also from an object array; TypeError if an element is a symbolic expression."""
    if indices.dtype != object:
        return indices.astype(np.int64)
    return np.array([int(v) for v in indices.reshape(-1)], np.int64).reshape(indices.shape)


def draw_indices(size: int) -> Draw:
    """Generator of sample indices, positive and negative, for an axis of this size."""
    return lambda shape, rng: rng.integers(-size, size, shape)


class _Indexed(Op):
    """Base of gathers and scatters."""

    is_symbolic = True

    def index_type(self, indices: Expr) -> TensorType:
        ty = self.tensor(indices, "indices")
        check_dtype(self, ty, dtypes.INTEGERS, "indices")
        return ty


@register
class Gather(_Indexed):
    """Gather slices of x along `axis`: out[a..., i..., b...] = x[a..., indices[i...], b...]."""

    name = "gather"
    operands = ("x", "indices")
    attrs = {"axis": Attr("int", 0)}

    def infer(self, x: Expr, indices: Expr, *, axis: int) -> Type:
        ty, positions = self.tensor(x, "x"), self.index_type(indices)
        dims = ty.shape or ()
        axis = normalize_axis(self, axis, len(dims))
        return TensorType.of((*dims[:axis], *(positions.shape or ()), *dims[axis + 1 :]), ty.dtype)

    def lower(self, x: Buffer, indices: Buffer, *, out: Buffer, axis: int) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))
        stop = axis + len(indices.shape)

        def element(*i: SymExpr) -> Stmt:
            position = DynamicIndex.along(self, x, axis, indices[i[axis:stop]])
            return with_checked_indices([position], lambda p: Store(out, i, Load(x, (*i[:axis], p, *i[stop:]))))

        return loops("ijklmn", out.shape, element)

    def reference(self, x: Any, indices: Any, *, axis: int) -> Any:
        return np.take(x, constant_indices(indices), axis)

    def samples(self) -> Iterable[Sample]:
        yield Sample(((5, "n"), ("m",)), {"axis": 0}, ("float32", "int64"), make={1: draw_indices(5)})
        yield Sample((("n", 3, "m"), (2, "n")), {"axis": 1}, ("float32", "int32"), make={1: draw_indices(3)})
        yield Sample((("n", 4), ()), {"axis": -1}, ("int64", "int64"), make={1: draw_indices(4)})


@register
class GatherElements(_Indexed):
    """Gather elements of x: out[i...] = x[i...] with i[axis] replaced by indices[i...]."""

    name = "gather_elements"
    operands = ("x", "indices")
    attrs = {"axis": Attr("int", 0)}

    def infer(self, x: Expr, indices: Expr, *, axis: int) -> Type:
        ty, positions = self.tensor(x, "x"), self.index_type(indices)
        if ty.rank != positions.rank:
            self.fail(f"x {ty} and indices {positions} must have the same rank")
        normalize_axis(self, axis, ty.rank or 0)
        return TensorType(positions.shape, ty.dtype, ty.rank)

    def lower(self, x: Buffer, indices: Buffer, *, out: Buffer, axis: int) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))

        def element(*i: SymExpr) -> Stmt:
            position = DynamicIndex.along(self, x, axis, indices[i])
            return with_checked_indices([position], lambda p: Store(out, i, Load(x, (*i[:axis], p, *i[axis + 1 :]))))

        return seq(*element_checks(self.name, x, indices, axis), loops("ijklmn", out.shape, element))

    def reference(self, x: Any, indices: Any, *, axis: int) -> Any:
        grid = list(np.indices(indices.shape))
        grid[axis] = constant_indices(indices)
        return x[tuple(grid)]

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3), ("n", 5)), {"axis": 1}, ("float32", "int64"), make={1: draw_indices(3)})
        yield Sample(((4, "n"), (2, "n")), {"axis": -2}, ("float32", "int64"), make={1: draw_indices(4)})


def element_checks(op: str, x: Buffer, indices: Buffer, axis: int) -> list[Stmt]:
    """Run-time checks that dimensions of `indices` other than `axis` are no larger than those of x."""
    checks: list[Stmt] = []
    for k, (d, n) in enumerate(zip(x.shape, indices.shape, strict=True)):
        if k != axis and not PROVER.can_prove_le(n, d):
            checks.append(
                Check((index(n) <= d).value, f"{op}: dimension {k} of indices, {n}, is larger than that of x, {d}")
            )
    return checks


class _IndexTuples(_Indexed):
    """Base of gather_nd and scatter_nd: the last dimension of `indices`, of constant size, holds index tuples."""

    def tuple_size(self, ty: TensorType, positions: TensorType, batch_dims: int = 0) -> int:
        size = as_int(positions.shape[-1]) if positions.shape else None
        if size is None or size > (ty.rank or 0) - batch_dims:
            self.fail(f"the last dimension of indices {positions} must be a constant of at most the rank of x {ty}")
        return size

    def positions(self, x: Buffer, indices: Buffer, at: tuple[SymExpr, ...], batch_dims: int = 0) -> list[DynamicIndex]:
        """The components of the index tuple at `at`."""
        count = as_int(indices.shape[-1]) or 0
        return [DynamicIndex.along(self, x, batch_dims + c, Load(indices, (*at, sym(c)))) for c in range(count)]


@register
class GatherNd(_IndexTuples):
    """Gather slices of x at index tuples: out[q..., t...] = x[q[:batch_dims]..., indices[q..., :]..., t...]."""

    name = "gather_nd"
    operands = ("x", "indices")
    attrs = {"batch_dims": Attr("int", 0)}

    def infer(self, x: Expr, indices: Expr, *, batch_dims: int) -> Type:
        ty, positions = self.tensor(x, "x"), self.index_type(indices)
        dims, places = ty.shape or (), positions.shape or ()
        size = self.tuple_size(ty, positions, batch_dims)
        for k in range(batch_dims):
            if PROVER.can_prove_ne(dims[k], places[k]):
                self.fail(f"batch dimension {k} is {dims[k]} in x and {places[k]} in indices")
        return TensorType.of((*places[:-1], *dims[batch_dims + size :]), ty.dtype)

    def lower(self, x: Buffer, indices: Buffer, *, out: Buffer, batch_dims: int) -> Stmt:
        outer = len(indices.shape) - 1

        def element(*i: SymExpr) -> Stmt:
            at = i[:outer]
            positions = self.positions(x, indices, at, batch_dims)
            return with_checked_indices(
                positions, lambda *p: Store(out, i, Load(x, (*at[:batch_dims], *p, *i[outer:])))
            )

        batches: list[Stmt] = [
            Check(index(a).equals(b).value, f"gather_nd: batch dimension {k} is {a} in x and {b} in indices")
            for k, (a, b) in enumerate(zip(x.shape[:batch_dims], indices.shape[:batch_dims], strict=True))
            if not PROVER.can_prove_equal(a, b)
        ]
        return seq(*batches, loops("ijklmn", out.shape, element))

    def reference(self, x: Any, indices: Any, *, batch_dims: int) -> Any:
        positions = constant_indices(indices)
        shape = positions.shape[:-1] + x.shape[batch_dims + positions.shape[-1] :]
        out = np.empty(shape, x.dtype)
        for at in np.ndindex(positions.shape[:-1]):
            out[at] = x[at[:batch_dims]][tuple(positions[at])]
        return out

    def samples(self) -> Iterable[Sample]:
        types = ("float32", "int64")
        yield Sample(((3, 3, "n"), ("m", 2)), {}, types, make={1: draw_indices(3)})
        yield Sample((("n", 4, 2), ("n", 3, 1)), {"batch_dims": 1}, types, make={1: draw_indices(4)})
        yield Sample(((4, 4), ("n", 2, 2)), {}, ("int64", "int64"), make={1: draw_indices(4)})


class _Scatter(_IndexTuples):
    operands = ("x", "indices", "updates")

    def check_updates(self, ty: TensorType, updates: Expr, expected: Shape) -> None:
        updates_type = self.tensor(updates, "updates")
        shape = updates_type.shape or ()
        if updates_type.dtype != ty.dtype:
            self.fail(f"updates have dtype {updates_type.dtype}, x has {ty.dtype}")
        if len(shape) != len(expected) or any(map(PROVER.can_prove_ne, shape, expected)):
            self.fail(f"updates have shape {format_shape(shape)}; x and indices need {format_shape(expected)}")

    def update_checks(self, updates: Buffer, expected: Shape) -> list[Stmt]:
        pairs = dict.fromkeys(zip(updates.shape, expected, strict=True))
        return [
            Check(index(a).equals(b).value, f"{self.name}: updates have a dimension of size {a} where {b} is needed")
            for a, b in pairs
            if not PROVER.can_prove_equal(a, b)
        ]

    def scatter(self, out: Any, where: Any, updates: Any, reduction: str) -> Any:
        if reduction == "none":
            out[where] = updates
        else:
            _UFUNCS[reduction].at(out, where, updates)
        return out


def _combine(reduction: str) -> str | None:
    return None if reduction == "none" else reduction


@register
class ScatterElements(_Scatter):
    """Copy of x with element i..., where i[axis] is replaced by indices[i...], set to or combined with updates[i...].

    The last of several updates of one element wins, unless `reduction` combines them.
    """

    name = "scatter_elements"
    attrs = {"axis": Attr("int", 0), "reduction": Attr("str", "none", REDUCTIONS)}

    def infer(self, x: Expr, indices: Expr, updates: Expr, *, axis: int, reduction: str) -> Type:
        ty, positions = self.tensor(x, "x"), self.index_type(indices)
        if ty.rank != positions.rank:
            self.fail(f"x {ty} and indices {positions} must have the same rank")
        normalize_axis(self, axis, ty.rank or 0)
        self.check_updates(ty, updates, positions.shape or ())
        return ty

    def lower(self, x: Buffer, indices: Buffer, updates: Buffer, *, out: Buffer, axis: int, reduction: str) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))

        def update(*i: SymExpr) -> Stmt:
            position = DynamicIndex.along(self, x, axis, indices[i])
            return with_checked_indices(
                [position], lambda p: Store(out, (*i[:axis], p, *i[axis + 1 :]), updates[i], _combine(reduction))
            )

        checks = [*self.update_checks(updates, indices.shape), *element_checks(self.name, x, indices, axis)]
        return seq(*checks, compute(out, lambda *i: x[i]), loops("ijklmn", indices.shape, update))

    def reference(self, x: Any, indices: Any, updates: Any, *, axis: int, reduction: str) -> Any:
        grid = list(np.indices(indices.shape))
        grid[axis] = constant_indices(indices)
        return self.scatter(x.copy(), tuple(grid), updates, reduction)

    def samples(self) -> Iterable[Sample]:
        types = ("float32", "int64", "float32")
        for reduction in REDUCTIONS:
            shapes = (("n", 5), ("n", 3), ("n", 3))
            yield Sample(shapes, {"axis": 1, "reduction": reduction}, types, make={1: draw_indices(5)})


@register
class ScatterNd(_Scatter):
    """Copy of x with the slices at index tuples, out[indices[q..., :]..., t...], set to or combined with updates.

    The last of several updates of one element wins, unless `reduction` combines them.
    """

    name = "scatter_nd"
    attrs = {"reduction": Attr("str", "none", REDUCTIONS)}

    def infer(self, x: Expr, indices: Expr, updates: Expr, *, reduction: str) -> Type:
        ty, positions = self.tensor(x, "x"), self.index_type(indices)
        size = self.tuple_size(ty, positions)
        self.check_updates(ty, updates, (*(positions.shape or ())[:-1], *(ty.shape or ())[size:]))
        return ty

    def lower(self, x: Buffer, indices: Buffer, updates: Buffer, *, out: Buffer, reduction: str) -> Stmt:
        outer, size = len(indices.shape) - 1, as_int(indices.shape[-1]) or 0
        shape = (*indices.shape[:-1], *x.shape[size:])

        def update(*i: SymExpr) -> Stmt:
            positions = self.positions(x, indices, i[:outer])
            return with_checked_indices(
                positions, lambda *p: Store(out, (*p, *i[outer:]), updates[i], _combine(reduction))
            )

        checks = self.update_checks(updates, shape)
        return seq(*checks, compute(out, lambda *i: x[i]), loops("ijklmn", shape, update))

    def reference(self, x: Any, indices: Any, updates: Any, *, reduction: str) -> Any:
        positions = constant_indices(indices)
        where = tuple(positions[..., c] for c in range(positions.shape[-1]))
        return self.scatter(x.copy(), where, updates, reduction)

    def samples(self) -> Iterable[Sample]:
        types = ("float32", "int64", "float32")
        for reduction in REDUCTIONS:
            shapes = ((4, 4, "n"), ("m", 2), ("m", "n"))
            yield Sample(shapes, {"reduction": reduction}, types, make={1: draw_indices(4)})
        yield Sample((("n+1",), (1, 1), (1,)), {}, ("int64", "int64", "int64"), make={1: draw_indices(1)})


@register
class ReverseSequence(_Indexed):
    """Reverse the first lengths[b] elements along the time axis for each b along the batch axis."""

    name = "reverse_sequence"
    operands = ("x", "lengths")
    attrs = {"batch_axis": Attr("int", 1), "time_axis": Attr("int", 0)}
    is_symbolic = False

    def infer(self, x: Expr, lengths: Expr, *, batch_axis: int, time_axis: int) -> Type:
        ty = self.tensor(x, "x")
        self.index_type(lengths)
        normalize_axes(self, (batch_axis, time_axis), ty.rank or 0)
        return ty

    def lower(self, x: Buffer, lengths: Buffer, *, out: Buffer, batch_axis: int, time_axis: int) -> Stmt:
        batch, time = batch_axis % len(x.shape), time_axis % len(x.shape)

        def element(*i: SymExpr) -> Stmt:
            length, t = Scalar(lengths[i[batch]]).cast("int64"), i[time]
            source = select(index(t) < length, length - 1 - t, index(t)).value
            message = f"reverse_sequence: a length lies outside of 0..{x.shape[time]}"
            return with_checked_indices(
                [DynamicIndex(source, x.shape[time], message)],
                lambda p: Store(out, i, Load(x, (*i[:time], p, *i[time + 1 :]))),
            )

        pair = (lengths.shape[0], x.shape[batch])
        checks = equality_checks("reverse_sequence: lengths must have one value per sequence", pair)
        return seq(*checks, loops("ijklmn", out.shape, element))

    def reference(self, x: Any, lengths: Any, *, batch_axis: int, time_axis: int) -> Any:
        out, axes = x.copy(), (batch_axis, time_axis)
        moved, source = np.moveaxis(out, axes, (0, 1)), np.moveaxis(x, axes, (0, 1))
        for b, length in enumerate(int_tuple(lengths)):
            moved[b, :length] = source[b, :length][::-1]
        return out

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.integers(0, 5, shape)

        yield Sample(((4, "n", 2), ("n",)), {}, ("float32", "int64"), make={1: draw})
        attrs = {"batch_axis": 0, "time_axis": 1}
        yield Sample((("n", 4), ("n",)), attrs, ("float32", "int32"), make={1: draw})
