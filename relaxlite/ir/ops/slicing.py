"""Slicing, padding, tiling and other data movement with affine or modular index arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape
from relaxlite.ir.ops.elementwise import check_dtype
from relaxlite.ir.ops.reduce import normalize_axes, normalize_axis
from relaxlite.ir.ops.scalars import Scalar, all_of, index, literal, select
from relaxlite.ir.ops.shape import int_tuple
from relaxlite.ir.program import Buffer, Check, Load, Stmt, Value, compute, seq
from relaxlite.ir.symbolic import SymExpr, as_int, smax, smin, sym
from relaxlite.ir.types import TensorType, Type


@register
class Slice(Op):
    """Strided slice: x[begin + i * step] for i < size along each of `axes` (None: all).

    Begins are absolute, never counted from the end, and sizes are those of the result. Steps may be negative, never 0.
    """

    name = "slice"
    operands = ("x", "begins", "sizes")
    attrs = {"axes": Attr("ints", None), "steps": Attr("ints", None)}
    is_symbolic = True

    def infer(self, x: Expr, begins: Expr, sizes: Expr, *, axes: Any, steps: Any) -> Type:
        ty, starts, counts = self.tensor(x, "x"), self.shape(begins, "begins"), self.shape(sizes, "sizes")
        dims = list(ty.shape or ())
        over = self.axes(axes, len(dims))
        strides = steps or (1,) * len(over)
        if not len(over) == len(starts) == len(counts) == len(strides):
            self.fail(f"{len(over)} axes, but {len(starts)} begins, {len(counts)} sizes and {len(strides)} steps")
        for axis, begin, size, step in zip(over, starts, counts, strides, strict=True):
            if step == 0 or (as_int(size) or 0) < 0:
                self.fail(f"axis {axis}: the step must not be 0 and the size not negative, got {step} and {size}")
            low, high = _index_range(begin, size, step)
            outside = PROVER.can_prove_lt(low, 0) or PROVER.can_prove_le(dims[axis], high)
            if outside and PROVER.can_prove_le(1, size):
                self.fail(f"axis {axis} of {ty}: begin {begin}, size {size} and step {step} leave it")
            dims[axis] = size
        return TensorType.of(tuple(dims), ty.dtype)

    def axes(self, axes: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
        """Normalize axes without sorting, as begins, sizes and steps are in their order."""
        normalize_axes(self, axes, rank)
        return tuple(range(rank)) if axes is None else tuple(a % rank for a in axes)

    def lower(self, x: Buffer, begins: Shape, sizes: Shape, *, out: Buffer, axes: Any, steps: Any) -> Stmt:
        over = self.axes(axes, len(x.shape))
        begin = dict(zip(over, begins, strict=True))
        step = dict(zip(over, steps or (1,) * len(over), strict=True))

        def value(*i: SymExpr) -> Value:
            return x[tuple(begin[k] + e * step[k] if k in begin else e for k, e in enumerate(i))]

        checks = [self._check(x, out, axis, begin[axis], step[axis]) for axis in over]
        return seq(*(c for c in checks if c is not None), compute(out, value))

    def _check(self, x: Buffer, out: Buffer, axis: int, begin: SymExpr, step: int) -> Check | None:
        size = out.shape[axis]
        low, high = _index_range(begin, size, step)
        if PROVER.can_prove_le(0, low) and PROVER.can_prove_lt(high, x.shape[axis]):
            return None
        inside = (index(low) >= 0) & (index(high) < x.shape[axis])
        message = f"slice: axis {axis} of size {x.shape[axis]}: begin {begin}, size {size} and step {step} leave it"
        return Check((index(size).equals(0) | inside).value, message)

    def reference(self, x: Any, begins: Any, sizes: Any, *, axes: Any, steps: Any) -> Any:
        over = self.axes(axes, x.ndim)
        for axis, begin, size, step in zip(over, begins, sizes, steps or (1,) * len(over), strict=True):
            x = np.take(x, int(begin) + step * np.arange(int(size)), axis)
        return x

    def samples(self) -> Iterable[Sample]:
        types = ("float32", "shape", "shape")
        yield Sample((("n+2", 4), (1, 0), ("n", 2)), {"steps": (1, 2)}, types)
        yield Sample((("n", 4), (3,), (2,)), {"axes": (-1,), "steps": (-2,)}, types)
        yield Sample((("n", "m"), ("n-1",), ("n",)), {"axes": (0,), "steps": (-1,)}, types)
        yield Sample((("n", 4), (1, "n-1"), (2, "min(1, n)")), {"axes": (1, 0)}, ("int64", "shape", "shape"))


def _index_range(begin: SymExpr, size: SymExpr, step: int) -> tuple[SymExpr, SymExpr]:
    """Least and greatest index that a nonempty slice reads."""
    last = begin + (size - 1) * step
    return (begin, last) if step > 0 else (last, begin)


@register
class Pad(Op):
    """Pad x by `before` and `after` elements at the ends of each dimension; negative numbers crop.

    mode "constant" pads with `value` (None: 0), "edge" with the edge element, "reflect" with x mirrored at the edge
    element, "wrap" periodically. The constant mode reads x by lazy selects, inside its bounds only.
    """

    name = "pad"
    operands = ("x", "before", "after", "value?")
    attrs = {"mode": Attr("str", "constant", ("constant", "reflect", "edge", "wrap"))}
    is_symbolic = True

    def infer(self, x: Expr, before: Expr, after: Expr, value: Expr | None = None, *, mode: str) -> Type:
        ty, low, high = self.tensor(x, "x"), self.shape(before, "before"), self.shape(after, "after")
        dims = ty.shape or ()
        if not len(low) == len(high) == len(dims):
            self.fail(f"x has rank {len(dims)}, but before and after have {len(low)} and {len(high)} values")
        if value is not None:
            check_dtype(self, self.tensor(value, "value"), (ty.dtype,), "value")
        return TensorType.of(tuple(d + b + a for d, b, a in zip(dims, low, high, strict=True)), ty.dtype)

    def lower(
        self, x: Buffer, before: Shape, after: Shape, value: Buffer | None = None, *, out: Buffer, mode: str
    ) -> Stmt:
        if mode != "constant":
            checks = self._checks(x, before, after)
            if any(as_int(d) == 0 for d in x.shape):  # the result is empty too, or a check raises
                return seq(*checks)
            nest = compute(out, lambda *i: x[tuple(map(_ADJUST[mode], _shifted(i, before), x.shape))])
            return seq(*checks, nest)
        fill = Scalar(literal(0, x.dtype)) if value is None else Scalar(only_element(value))

        def padded(*i: SymExpr) -> Value:
            at = _shifted(i, before)
            sides = [(index(p) >= 0, b) for p, b in zip(at, before, strict=True)]
            sides += [(index(p) < d, a) for p, d, a in zip(at, x.shape, after, strict=True)]
            inside = [cond for cond, amount in sides if not PROVER.can_prove_le(amount, 0)]
            return select(all_of(inside), Scalar(x[at]), fill).value if inside else x[at]

        return compute(out, padded)

    def _checks(self, x: Buffer, before: Shape, after: Shape) -> list[Check]:
        padded_dims = [d for d, b, a in zip(x.shape, before, after, strict=True) if not (as_int(b) == as_int(a) == 0)]
        unproven = [d for d in dict.fromkeys(padded_dims) if not PROVER.can_prove_le(1, d)]
        return [
            Check((index(d) >= 1).value, f"pad: a dimension of size {d} is empty: nothing to repeat") for d in unproven
        ]

    def reference(self, x: Any, before: Any, after: Any, value: Any = None, *, mode: str) -> Any:
        low, high = int_tuple(before), int_tuple(after)
        if x.ndim == 0:  # numpy.pad rejects scalars
            return x
        widths = [(max(b, 0), max(a, 0)) for b, a in zip(low, high, strict=True)]
        fill = np.zeros((), x.dtype) if value is None else value
        options = {"constant_values": fill.reshape(-1)[0]} if mode == "constant" else {}
        padded = np.pad(x, widths, mode=mode, **options)  # type: ignore[call-overload]
        crops = [slice(max(-b, 0), n - max(-a, 0)) for n, b, a in zip(padded.shape, low, high, strict=True)]
        return np.ascontiguousarray(padded[tuple(crops)])

    def samples(self) -> Iterable[Sample]:
        types = ("float32", "shape", "shape")
        yield Sample((("n", 3), (1, 0), (0, "n")), {}, types)
        yield Sample((("n", 5), (1, -1), (2, -2), ()), {}, ("int64", "shape", "shape", "int64"))
        for mode in ("reflect", "edge", "wrap"):
            yield Sample((("n", 4), ("n", 1), (2, 3)), {"mode": mode}, types)


def _shifted(i: tuple[SymExpr, ...], before: Shape) -> Shape:
    return tuple(e - b for e, b in zip(i, before, strict=True))


def _reflect(i: SymExpr, size: SymExpr) -> SymExpr:
    """Reflect an index at both ends, with period 2 * (size - 1)."""
    phase = i % smax(2 * (size - 1), 1)
    return smin(phase, 2 * (size - 1) - phase)


_ADJUST = {
    "reflect": _reflect,
    "edge": lambda i, size: smin(smax(i, 0), size - 1),
    "wrap": lambda i, size: i % size,
}


def only_element(x: Buffer) -> Value:
    """Load the element of a tensor with one element."""
    return x[(0,) * len(x.shape)]


@register
class Tile(Op):
    """Tile x: repeat it `repeats` times along each dimension."""

    name = "tile"
    operands = ("x", "repeats")
    is_symbolic = True

    def infer(self, x: Expr, repeats: Expr) -> Type:
        ty, counts = self.tensor(x, "x"), self.shape(repeats, "repeats")
        dims = ty.shape or ()
        if len(counts) != len(dims):
            self.fail(f"x has rank {len(dims)}, but repeats has {len(counts)} values")
        return TensorType.of(tuple(d * r for d, r in zip(dims, counts, strict=True)), ty.dtype)

    def lower(self, x: Buffer, repeats: Shape, *, out: Buffer) -> Stmt:
        def position(i: SymExpr, size: SymExpr, repeat: SymExpr) -> SymExpr:
            return sym(0) if as_int(size) in (0, 1) else i if as_int(repeat) == 1 else i % size

        return compute(out, lambda *i: x[tuple(map(position, i, x.shape, repeats))])

    def reference(self, x: Any, repeats: Any) -> Any:
        return np.tile(x, int_tuple(repeats))

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 1, 3), (2, "m", 1)), dtypes=("float32", "shape"))


@register
class Roll(Op):
    """Rotate elements of x cyclically by `shift` positions along an axis."""

    name = "roll"
    operands = ("x",)
    attrs = {"shift": Attr("int"), "axis": Attr("int")}
    is_symbolic = True

    def infer(self, x: Expr, *, shift: int, axis: int) -> Type:
        ty = self.tensor(x, "x")
        normalize_axis(self, axis, ty.rank or 0)
        return ty

    def lower(self, x: Buffer, *, out: Buffer, shift: int, axis: int) -> Stmt:
        axis = normalize_axis(self, axis, len(x.shape))
        size = x.shape[axis]
        if as_int(size) == 0:
            return compute(out, lambda *i: x[i])
        return compute(out, lambda *i: Load(x, (*i[:axis], (i[axis] - shift) % size, *i[axis + 1 :])))

    def reference(self, x: Any, *, shift: int, axis: int) -> Any:
        return np.roll(x, shift, axis)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3),), {"shift": 2, "axis": 0})
        yield Sample((("n", 3),), {"shift": -1, "axis": -1})


class _ImageBlocks(Op):
    """Base of ops that move blocks of images (batch, channels, height, width) into channels or back."""

    operands = ("x",)

    def picture(self, x: Expr, blocksize: int) -> tuple[TensorType, Shape]:
        """Check x and return its type and shape."""
        ty = self.tensor(x, "x")
        if ty.rank != 4 or blocksize < 1:
            self.fail(f"x must have rank 4 and blocksize be positive, got {ty} and {blocksize}")
        return ty, ty.shape or ()


@register
class SpaceToDepth(_ImageBlocks):
    """Move each block of s x s pixels into channels: (b, c, h*s, w*s) -> (b, c*s*s, h, w)."""

    name = "space_to_depth"
    attrs = {"blocksize": Attr("int")}

    def infer(self, x: Expr, *, blocksize: int) -> Type:
        ty, (b, c, h, w) = self.picture(x, blocksize)
        for dim in (h, w):
            if PROVER.can_prove_ne(dim % blocksize, 0):
                self.fail(f"size {dim} of {ty} is no multiple of blocksize {blocksize}")
        return TensorType.of((b, c * blocksize * blocksize, h // blocksize, w // blocksize), ty.dtype)

    def lower(self, x: Buffer, *, out: Buffer, blocksize: int) -> Stmt:
        s, (_, channels, *sizes) = blocksize, x.shape
        unproven = [d for d in sizes if not PROVER.can_prove_equal(d % s, 0)]
        message = f"space_to_depth: a size is no multiple of blocksize {s}"
        checks = [Check(index(d % s).equals(0).value, message) for d in unproven]

        def value(b: SymExpr, c: SymExpr, i: SymExpr, j: SymExpr) -> Value:
            block = c // channels
            return x[b, c % channels, i * s + block // s, j * s + block % s]

        return seq(*checks, compute(out, value))

    def reference(self, x: Any, *, blocksize: int) -> Any:
        b, c, h, w = x.shape
        s = blocksize
        blocks = x.reshape(b, c, h // s, s, w // s, s).transpose(0, 3, 5, 1, 2, 4)
        return blocks.reshape(b, c * s * s, h // s, w // s)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3, 4, "m*2"),), {"blocksize": 2})


@register
class DepthToSpace(_ImageBlocks):
    """Move channels into blocks of s x s pixels: (b, c*s*s, h, w) -> (b, c, h*s, w*s).

    The block is the outer part of a channel index in mode "DCR", the inner part in mode "CRD".
    """

    name = "depth_to_space"
    attrs = {"blocksize": Attr("int"), "mode": Attr("str", "DCR", ("DCR", "CRD"))}

    def infer(self, x: Expr, *, blocksize: int, mode: str) -> Type:
        ty, (b, c, h, w) = self.picture(x, blocksize)
        if not PROVER.can_prove_equal(c % (blocksize * blocksize), 0):
            self.fail(f"the {c} channels of {ty} are not provably a multiple of {blocksize} * {blocksize}")
        return TensorType.of((b, c // (blocksize * blocksize), h * blocksize, w * blocksize), ty.dtype)

    def lower(self, x: Buffer, *, out: Buffer, blocksize: int, mode: str) -> Stmt:
        s, channels = blocksize, out.shape[1]

        def value(b: SymExpr, c: SymExpr, i: SymExpr, j: SymExpr) -> Value:
            block = (i % s) * s + j % s
            return x[b, block * channels + c if mode == "DCR" else c * (s * s) + block, i // s, j // s]

        return compute(out, value)

    def reference(self, x: Any, *, blocksize: int, mode: str) -> Any:
        b, c, h, w = x.shape
        s, depth = blocksize, c // blocksize**2
        if mode == "DCR":
            blocks = x.reshape(b, s, s, depth, h, w).transpose(0, 3, 4, 1, 5, 2)
        else:
            blocks = x.reshape(b, depth, s, s, h, w).transpose(0, 1, 4, 2, 5, 3)
        return blocks.reshape(b, depth, h * s, w * s)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 8, "m", 3),), {"blocksize": 2})
        yield Sample((("n", 8, 2, "m"),), {"blocksize": 2, "mode": "CRD"})
