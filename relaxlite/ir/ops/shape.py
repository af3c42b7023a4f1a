"""Shapes as values, and data movement that only rearranges indices: reshape, transpose, broadcast, concat."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register, shape_value
from relaxlite.ir.ops.broadcast import PROVER, Shape, broadcast_checks, broadcast_dim, broadcast_index, format_shape
from relaxlite.ir.ops.reduce import normalize_axes, normalize_axis
from relaxlite.ir.ops.scalars import index, literal
from relaxlite.ir.program import Buffer, Check, Seq, Stmt, Store, compute, loops, seq
from relaxlite.ir.symbolic import IntLike, SymExpr, as_int, product, sym, syms
from relaxlite.ir.types import ShapeType, TensorType, Type


def as_object_array(values: Sequence[Any]) -> Any:
    """Object array, a vector, of values such as SymExpr."""
    array = np.empty(len(values), dtype=object)
    array[:] = list(values)
    return array


def int_tuple(shape: Iterable[Any]) -> tuple[int, ...]:
    """Convert dimensions to ints; TypeError if one is symbolic."""
    return tuple(int(d) for d in shape)


@register
class ShapeOf(Op):
    """Shape of x as an int64 vector; its symbolic value is known, so that it is rarely computed at run time."""

    name = "shape_of"
    operands = ("x",)
    is_symbolic = True

    def infer(self, x: Expr) -> Type:
        return TensorType.of((len(self.tensor(x, "x").shape or ()),), "int64")

    def lower(self, x: Buffer, *, out: Buffer) -> Stmt:
        return _store_values(x.shape, out)

    def reference(self, x: Any) -> Any:
        return np.array(x.shape, dtype=np.int64)

    def evaluate_symbolic(self, x: Expr) -> Any:
        ty = x.ty
        return as_object_array(ty.shape) if isinstance(ty, TensorType) and ty.shape is not None else None

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3),))


def _store_values(values: Shape, out: Buffer) -> Stmt:
    stores = [Store(out, (sym(k),), index(v, out.dtype).value) for k, v in enumerate(values)]
    return seq(*stores) if stores else Seq(())


@register
class ShapeToTensor(Op):
    """Convert a shape to an int64 vector."""

    name = "shape_to_tensor"
    operands = ("shape",)
    is_symbolic = True

    def infer(self, shape: Expr) -> Type:
        if not isinstance(shape.ty, ShapeType) or shape.ty.rank is None:
            self.fail("shape must be a shape of known length")
        return TensorType.of((shape.ty.rank,), "int64")

    def lower(self, shape: Shape, *, out: Buffer) -> Stmt:
        return _store_values(shape, out)

    def reference(self, shape: Any) -> Any:
        return np.array(shape, dtype=np.int64)

    def evaluate_symbolic(self, shape: Any) -> Any:
        return as_object_array(shape)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3, "m"),), dtypes=("shape",))


@register
class TensorToShape(Op):
    """Read an integer tensor of rank 0 or 1 as a shape at run time; a MatchShape binds symbols to its values.

    Compiled to a builtin of the virtual machine, not to loops.
    """

    name = "tensor_to_shape"
    operands = ("x",)

    def infer(self, x: Expr) -> Type:
        ty = self.tensor(x, "x")
        if not dtypes.is_integer(ty.dtype) or len(ty.shape or ()) > 1:
            self.fail(f"x must be an integer tensor of rank 0 or 1, got {ty}")
        if isinstance(x, Constant):
            return ShapeType.of(int_tuple(x.value.reshape(-1)))
        return ShapeType(None, 1 if not ty.shape else as_int(ty.shape[0]))

    def reference(self, x: Any) -> Any:
        return int_tuple(x.reshape(-1))


class _ShapeOp(Op):
    """Base of ops whose reference also accepts arrays of symbolic elements."""

    is_symbolic = True


@register
class Reshape(_ShapeOp):
    """Reshape x in row-major order; element counts that are not provably equal are checked at run time."""

    name = "reshape"
    operands = ("x", "shape")

    def infer(self, x: Expr, shape: Expr) -> Type:
        ty, dims = self.tensor(x, "x"), self.shape(shape)
        if any((as_int(d) or 0) < 0 for d in dims):
            self.fail(
                f"the shape {format_shape(dims)} has a negative size; a -1 is resolved before (see infer_dimension)"
            )
        before, after = product(ty.shape or ()), product(dims)
        if PROVER.can_prove_ne(before, after):
            self.fail(
                f"cannot reshape {format_shape(ty.shape or ())} ({before} elements) to {format_shape(dims)} ({after})"
            )
        return TensorType.of(dims, ty.dtype)

    def lower(self, x: Buffer, shape: Shape, *, out: Buffer) -> Stmt:
        if any(as_int(d) == 0 for d in x.shape):  # `out` is empty too, but possibly only by the check below
            nest = compute(out, lambda *i: literal(0, out.dtype))
        else:
            nest = compute(out, lambda *i: x[reshape_index(x.shape, out.shape, i)])
        before, after = product(x.shape), product(out.shape)
        if PROVER.can_prove_equal(before, after):
            return nest
        message = f"reshape: {format_shape(x.shape)} and {format_shape(out.shape)} do not have equally many elements"
        return seq(Check(index(before).equals(after).value, message), nest)

    def reference(self, x: Any, shape: Any) -> Any:
        return np.reshape(x, int_tuple(shape))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 6), ("n", 2, 3)), dtypes=("float32", "shape"))
        yield Sample((("n", "m", 4), ("n*m", 4)), dtypes=("float32", "shape"))
        yield Sample((("n", 12), (4, "n", 3)), dtypes=("float32", "shape"))
        yield Sample((("n", 1), ("m",)), dtypes=("float32", "shape"))


def infer_dimension(shape: Shape, target: Sequence[IntLike]) -> Shape:
    """Replace the -1 in `target`, if any, by the quotient of element counts; `shape` is reshaped to `target`."""
    remaining, known = list(shape), sym(1)
    for dim in syms(target):
        if dim in remaining:  # equal factors cancel exactly, even if they are 0 at run time
            remaining.remove(dim)
        elif as_int(dim) != -1:
            known = known * dim
    missing = sym(0) if as_int(known) == 0 else product(remaining) // known
    return tuple(missing if as_int(d) == -1 else d for d in syms(target))


def reshape_index(shape: Shape, out_shape: Shape, out_indices: Sequence[SymExpr]) -> Shape:
    """Indices in `shape` of element `out_indices` of a reshaped tensor; matching dimensions are not linearized."""
    if any(as_int(d) == 0 for d in (*shape, *out_shape)):
        return (sym(0),) * len(shape)
    result: dict[int, SymExpr] = {}
    for axes, out_axes in _matching_groups(shape, out_shape):
        linear = sym(0)
        for k in out_axes:
            linear = linear * out_shape[k] + (sym(0) if as_int(out_shape[k]) == 1 else out_indices[k])
        non_unit_axes = [k for k in axes if as_int(shape[k]) != 1]
        result.update(dict.fromkeys(axes, sym(0)))
        for k in reversed(non_unit_axes):
            first = k == non_unit_axes[0]
            result[k] = linear if first else linear % shape[k]
            linear = linear if first else linear // shape[k]
    return tuple(result[k] for k in range(len(shape)))


def _matching_groups(a: Shape, b: Shape) -> list[tuple[list[int], list[int]]]:
    """Match runs of dimensions with provably equal element counts, as short as possible.

    (n, 6, 4) and (n, 2, 3, 4) give three pairs of runs.
    """
    groups = []
    ends = {_prefix(b, j): j for j in range(len(b), -1, -1)}
    start_a = start_b = 0
    for stop_a in range(1, len(a) + 1):
        stop_b = ends.get(_prefix(a, stop_a))
        if stop_b is not None and stop_b >= start_b and stop_a < len(a):
            groups.append((list(range(start_a, stop_a)), list(range(start_b, stop_b))))
            start_a, start_b = stop_a, stop_b
    tail = []
    end_a, end_b = len(a), len(b)
    while end_a - 1 > start_a and end_b - 1 > start_b and a[end_a - 1] is b[end_b - 1]:
        end_a, end_b = end_a - 1, end_b - 1
        tail.append(([end_a], [end_b]))
    groups.append((list(range(start_a, end_a)), list(range(start_b, end_b))))
    return groups + tail[::-1]


@functools.lru_cache(maxsize=4096)
def _prefix(shape: Shape, count: int) -> SymExpr:
    return product(shape[:count])


class _UnitAxes(_ShapeOp):
    """Base of expand_dims and squeeze: reshapes that add or remove dimensions of size 1."""

    operands = ("x",)
    attrs = {"axes": Attr("ints")}

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr:
        assert isinstance(call.ty, TensorType)
        return get_op("reshape")(call.args[0], shape_value(call.ty.shape or ()))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 1, 3, 1),), {"axes": (1, -1)})
        yield Sample(((1, "n", 1),), {"axes": (0,)}, ("int64",))


@register
class ExpandDims(_UnitAxes):
    """Insert dimensions of size 1, at `axes` of the result."""

    name = "expand_dims"

    def infer(self, x: Expr, *, axes: tuple[int, ...]) -> Type:
        ty = self.tensor(x, "x")
        dims = list(ty.shape or ())
        for axis in normalize_axes(self, axes, len(dims) + len(axes)):
            dims.insert(axis, sym(1))
        return TensorType.of(tuple(dims), ty.dtype)

    def reference(self, x: Any, *, axes: tuple[int, ...]) -> Any:
        return np.expand_dims(x, axes)


@register
class Squeeze(_UnitAxes):
    """Remove the dimensions `axes`, which must have size 1 (checked at run time if unknown)."""

    name = "squeeze"

    def infer(self, x: Expr, *, axes: tuple[int, ...]) -> Type:
        ty = self.tensor(x, "x")
        dims = ty.shape or ()
        over = normalize_axes(self, axes, len(dims))
        for axis in over:
            if PROVER.can_prove_ne(dims[axis], 1):
                self.fail(f"dimension {axis} of {format_shape(dims)} has size {dims[axis]}, not 1")
        return TensorType.of(tuple(d for k, d in enumerate(dims) if k not in over), ty.dtype)

    def reference(self, x: Any, *, axes: tuple[int, ...]) -> Any:
        return np.squeeze(x, axes)


@register
class BroadcastTo(_ShapeOp):
    """Broadcast x to `shape`: repeat it along dimensions of size 1 and along new leading dimensions."""

    name = "broadcast_to"
    operands = ("x", "shape")

    def infer(self, x: Expr, shape: Expr) -> Type:
        ty, target = self.tensor(x, "x"), self.shape(shape)
        dims = ty.shape or ()
        if len(dims) > len(target) or any(
            broadcast_dim(d, t) is None or (as_int(t) == 1 and PROVER.can_prove_ne(d, 1))
            for d, t in zip(dims, target[len(target) - len(dims) :], strict=True)
        ):
            self.fail(f"{format_shape(dims)} cannot be broadcast to {format_shape(target)}")
        return TensorType.of(target, ty.dtype)

    def lower(self, x: Buffer, shape: Shape, *, out: Buffer) -> Stmt:
        nest = compute(out, lambda *i: x[broadcast_index(x.shape, i, out.shape)])
        return seq(*broadcast_checks("broadcast_to", x.shape, out.shape, directed=True), nest)

    def reference(self, x: Any, shape: Any) -> Any:
        return np.broadcast_to(x, int_tuple(shape)).copy()

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 1), (2, "n", 3)), dtypes=("float32", "shape"))
        yield Sample((("n",), ("m",)), dtypes=("int64", "shape"))


@register
class Transpose(_ShapeOp):
    """Permute the dimensions of x to the order `axes`; None reverses them."""

    name = "transpose"
    operands = ("x",)
    attrs = {"axes": Attr("ints", None)}

    def infer(self, x: Expr, *, axes: tuple[int, ...] | None) -> Type:
        ty = self.tensor(x, "x")
        dims = ty.shape or ()
        return TensorType.of(tuple(dims[a] for a in self.order(axes, len(dims))), ty.dtype)

    def order(self, axes: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
        if axes is None:
            return tuple(reversed(range(rank)))
        if sorted(a % max(rank, 1) for a in axes) != list(range(rank)):
            self.fail(f"axes {axes} are not a permutation of the {rank} dimensions")
        return tuple(a % rank for a in axes)

    def lower(self, x: Buffer, *, out: Buffer, axes: tuple[int, ...] | None) -> Stmt:
        order = self.order(axes, len(x.shape))
        return compute(out, lambda *i: x[tuple(i[order.index(k)] for k in range(len(i)))])

    def reference(self, x: Any, *, axes: tuple[int, ...] | None) -> Any:
        return np.ascontiguousarray(np.transpose(x, axes)) if x.ndim else x

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3, "m"),), {"axes": (2, 0, 1)})
        yield Sample((("n", 3),))


@register
class Concat(_ShapeOp):
    """Concatenate the operands along `axis`: one loop nest per operand, each storing at its own offset."""

    name = "concat"
    operands = ("*xs",)
    attrs = {"axis": Attr("int")}

    def infer(self, *xs: Expr, axis: int) -> Type:
        if not xs:
            self.fail("needs at least one operand")
        types = [self.tensor(x, f"operand {k}") for k, x in enumerate(xs)]
        shapes = [t.shape or () for t in types]
        axis = normalize_axis(self, axis, len(shapes[0]))
        for k, (ty, shape) in enumerate(zip(types, shapes, strict=True)):
            if ty.dtype != types[0].dtype or len(shape) != len(shapes[0]):
                self.fail(f"operand {k} is {ty}, operand 0 is {types[0]}: dtypes and ranks must agree")
        dims = tuple(self._size(axis, k, [s[k] for s in shapes]) for k in range(len(shapes[0])))
        return TensorType.of(dims, types[0].dtype)

    def _size(self, axis: int, k: int, dims: list[SymExpr]) -> SymExpr:
        if k == axis:
            return sum(dims, sym(0))
        for dim in dims:
            if PROVER.can_prove_ne(dim, dims[0]):
                self.fail(f"dimension {k} is {dims[0]} in one operand and {dim} in another")
        return next((d for d in dims if d.is_const), dims[0])

    def lower(self, *xs: Buffer, out: Buffer, axis: int) -> Stmt:
        axis = normalize_axis(self, axis, len(out.shape))
        stmts, offset = self._checks(xs, out, axis), sym(0)
        for x in xs:
            stmts.append(self._copy(x, out, axis, offset))
            offset = offset + x.shape[axis]
        return seq(*stmts)

    def _checks(self, xs: Sequence[Buffer], out: Buffer, axis: int) -> list[Stmt]:
        pairs = dict.fromkeys((x.shape[k], d) for x in xs for k, d in enumerate(out.shape) if k != axis)
        unproven = [(a, b) for a, b in pairs if not PROVER.can_prove_equal(a, b)]
        return [Check(index(a).equals(b).value, f"concat: sizes {a} and {b} of operands differ") for a, b in unproven]

    def _copy(self, x: Buffer, out: Buffer, axis: int, offset: SymExpr) -> Stmt:
        def store(*i: SymExpr) -> Stmt:
            return Store(out, (*i[:axis], i[axis] + offset, *i[axis + 1 :]), x[i])

        return loops("ijklmn", x.shape, store)

    def reference(self, *xs: Any, axis: int) -> Any:
        return np.concatenate(xs, axis)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3), ("m", 3), (2, 3)), {"axis": 0})
        yield Sample((("n", 2), ("n", "m")), {"axis": -1})
