"""Resizing of any dimensions: nearest, linear and cubic, with all coordinate transformations of ONNX's Resize.

Nearest is one loop nest, with symbolic integer indices where the scale is a whole factor. Linear and cubic resize one
dimension at a time: a table of source coordinates and weights, then a nest that sums weighted neighbours. Coordinates
are computed in float32, as in onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import AttrValue, Call, Expr, ShapeValue
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.linalg import emit_op, nonempty_checks
from relaxlite.ir.ops.scalars import Scalar, identity, index, literal, select
from relaxlite.ir.program import Allocate, Buffer, LetIndex, Stmt, Store, Value, compute, loops, reduce, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, floordiv, smax, smin, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

COORDINATES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)  # fmt: skip
Choose = Callable[..., Any]  # select of Scalars, or np.where
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


@dataclass(frozen=True, slots=True)
class _Axis:
    """Dimension k, resized from `size` to `out` elements."""

    k: int
    size: SymExpr
    out: SymExpr
    scale: float | None  # None: out / size
    roi: tuple[float, float]
    attrs: Mapping[str, Any]
    shared: Any = None  # scale known at run time only: an Expr, a Scalar, or a NumPy number

    @property
    def crops(self) -> bool:
        return bool(self.attrs["coordinate_transformation_mode"] == "tf_crop_and_resize")

    def is_identity(self) -> bool:
        """Whether resizing provably copies the dimension."""
        same = PROVER.can_prove_equal(self.size, self.out) and self.scale in (None, 1.0) and self.shared is None
        return same and (not self.crops or self.roi == (0.0, 1.0))

    def scale_value(self) -> Scalar:
        """Scale in float32, out / size by default."""
        if self.shared is not None:
            return Scalar(self.shared.value)
        if self.scale is not None:
            return Scalar(literal(float(np.float32(self.scale)), "float32"))
        return index(self.out).cast("float32") / index(self.size).cast("float32")

    def coordinate(self, o: SymExpr) -> Scalar:
        """Source coordinate in x of element o of the result, float32."""
        at, scale = index(o).cast("float32"), self.scale_value()
        out, size = index(self.out).cast("float32"), index(self.size).cast("float32")
        value = Scalar(_coordinate(at, scale, out, size, self.roi, self.attrs, select).value)
        has_default_scale = self.scale is None and self.shared is None
        if self.attrs["coordinate_transformation_mode"] == "tf_half_pixel_for_nn" and has_default_scale:
            return select(out.equals(size), at, value)  # a copy, see is_identity
        return value

    def factor(self) -> tuple[int, int]:
        """Whole factors (up, 1) or (1, down) of the resize, down a power of two; (0, 0) if there are none."""
        if self.shared is not None:
            return 0, 0
        up, down = as_int(_quotient(self.out, self.size)) or 0, as_int(_quotient(self.size, self.out)) or 0
        if up >= 1 and self.out is self.size * up and self.scale in (None, up):
            return up, 1
        if down > 1 and self.size is self.out * down and down & (down - 1) == 0 and self.scale in (None, 1 / down):
            return 1, down
        return 0, 0

    def nearest(self, o: SymExpr) -> SymExpr | None:
        """Index of the nearest element in integer arithmetic; None if the scale is no whole factor."""
        mode, (up, down) = self.attrs["coordinate_transformation_mode"], self.factor()
        half_pixel_modes = ("half_pixel", "half_pixel_symmetric") + (("pytorch_half_pixel",) if down == 1 else ())
        if up == 0 or mode not in ("asymmetric", "tf_half_pixel_for_nn", *half_pixel_modes):
            return None

        def source(i: SymExpr) -> SymExpr:
            if mode == "asymmetric":
                return _rounded(i * down, up, self.attrs["nearest_mode"])
            shift = up if mode in half_pixel_modes else 0
            return _rounded((i * 2 + 1) * down - shift, 2 * up, self.attrs["nearest_mode"])

        result = source(o)
        if int(source(sym(0))) < 0:
            result = smax(0, result)
        return result if int(source(sym(-1))) < 0 else smin(result, self.size - 1)


def _quotient(a: SymExpr, b: SymExpr) -> SymExpr:
    return sym(0) if as_int(b) == 0 else floordiv(a, b)


def _rounded(p: SymExpr, q: int, mode: str) -> SymExpr:
    """Round p / q to an integer."""
    if mode == "floor":
        return p // q
    if mode == "ceil":
        return ceildiv(p, q)
    if mode == "round_prefer_ceil":
        return (p * 2 + q) // (2 * q)
    return ceildiv(p * 2 - q, 2 * q)


def _coordinate(
    at: Any, scale: Any, out: Any, size: Any, roi: tuple[float, float], attrs: Mapping[str, Any], choose: Choose
) -> Any:
    """Apply a coordinate transformation of ONNX to float32 Scalars or NumPy arrays."""
    mode = attrs["coordinate_transformation_mode"]
    half = (at + 0.5) / scale - 0.5
    if mode == "half_pixel":
        return half
    if mode == "asymmetric":
        return at / scale
    if mode == "tf_half_pixel_for_nn":
        return (at + 0.5) / scale
    if mode == "half_pixel_symmetric":
        return size * 0.5 * (1.0 - out / (scale * size)) + half
    if mode == "pytorch_half_pixel":
        return choose(out > 1.0, half, 0.0)
    if mode == "align_corners":
        return choose(out > 1.0, at * (size - 1.0) / (out - 1.0), 0.0)
    start, end = (float(np.float32(v)) for v in roi)
    inside = (size - 1.0) * start + at * float(np.float32(end) - np.float32(start)) * (size - 1.0) / (out - 1.0)
    return choose(out > 1.0, inside, (size - 1.0) * (0.5 * (start + end)))


def _nearest(x: Any, mode: str, floor: Any, choose: Choose) -> Any:
    """Round x to a whole float32 number; `floor` is floor(x)."""
    rest = x - floor
    if mode == "floor":
        return floor
    if mode == "round_prefer_ceil":
        return choose(rest >= 0.5, floor + 1.0, floor)
    return choose(rest > (0.0 if mode == "ceil" else 0.5), floor + 1.0, floor)


def _cubic(distance: Any, a: float, choose: Choose) -> Any:
    """Keys' cubic convolution kernel at a distance >= 0; 0 from 2 on."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1.0
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return choose(distance <= 1.0, near, choose(distance < 2.0, far, 0.0))


def _triangle(distance: Any, choose: Choose) -> Any:
    """Kernel of linear interpolation at a distance >= 0."""
    return choose(distance < 1.0, 1.0 - distance, 0.0)


@register
class Resize(Op):
    """Resize x to `sizes`, with the attributes of ONNX's Resize.

    Coordinates use sizes / shape, or `scales` (one per dimension), or for the dimensions `axes` (None: all) the operand
    `scale`, a float32 scalar. `roi` (starts, then ends, of every dimension) is for tf_crop_and_resize, which gives
    `extrapolation_value` outside x. Half-precision floats and integers compute in float32; nearest copies any dtype.
    """

    name = "resize"
    operands = ("x", "sizes", "scale?")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "mode": Attr("str", "nearest", ("nearest", "linear", "cubic")),
        "coordinate_transformation_mode": Attr("str", "half_pixel", COORDINATES),
        "nearest_mode": Attr("str", "round_prefer_floor", ROUNDINGS),
        "cubic_coeff_a": Attr("float", -0.75),
        "exclude_outside": Attr("bool", False),
        "extrapolation_value": Attr("float", 0.0),
        "antialias": Attr("bool", False),
        "scales": Attr("floats", None),
        "roi": Attr("floats", None),
        "axes": Attr("ints", None),
    }

    def infer(self, x: Expr, sizes: Expr, scale: Expr | None = None, **attrs: Any) -> Type:
        ty, dims = self.tensor(x, "x"), self.shape(sizes, "sizes")
        rank = len(ty.shape or ())
        if len(dims) != rank:
            self.fail(f"sizes must have one value per dimension of x {ty}, got {format_shape(dims)}")
        for name, count in (("scales", rank), ("roi", 2 * rank)):
            if attrs[name] is not None and len(attrs[name]) != count:
                self.fail(f"{name} must have {count} values, got {attrs[name]}")
        if scale is not None and self.tensor(scale, "scale") != TensorType.of((), "float32"):
            self.fail(f"scale must be a scalar of float32, got {scale.ty}")
        if any(not 0 <= axis < rank for axis in attrs["axes"] or ()):
            self.fail(f"axes must be dimensions of x {ty}, got {attrs['axes']}")
        if attrs["mode"] != "nearest" and ty.dtype == "bool":
            self.fail("x must not be bool, unless mode is nearest")
        return TensorType.of(dims, ty.dtype)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, sizes, *scale_operand = call.args
        ty, target, attrs = self.tensor(x), self.shape(sizes), dict[str, Any](call.attrs)
        axes = _resized_axes(ty.shape or (), target, attrs, *scale_operand)
        if not axes:
            return get_op("reshape")(x, ShapeValue(target))
        if attrs["mode"] == "nearest":
            return None
        if ty.dtype not in ("float32", "float64"):
            wide = emit_op(
                bb, "resize", emit_op(bb, "cast", x, dtype="float32"), ShapeValue(target), *scale_operand, **attrs
            )
            return get_op("cast")(wide, dtype=ty.dtype)
        if len(axes) == 1:
            return None
        dims, rank = list(ty.shape or ()), len(target)
        for axis in axes:
            dims[axis.k] = target[axis.k]
            scales = None if axis.scale is None else [axis.scale if k == axis.k else 1.0 for k in range(rank)]
            roi = [axis.roi[end] if k == axis.k else float(end) for end in (0, 1) for k in range(rank)]
            axis_attrs: dict[str, Any] = {**attrs, "scales": scales, "roi": roi}
            if scale_operand:
                axis_attrs["axes"] = (axis.k,) if axis.shared is not None else ()
            x = bb.emit(self(x, ShapeValue(tuple(dims)), *scale_operand, **axis_attrs))
        return x

    def lower(self, x: Buffer, sizes: Shape, scale: Buffer | None = None, *, out: Buffer, **attrs: Any) -> Stmt:
        axes = _resized_axes(x.shape, sizes, attrs, None if scale is None else Scalar(scale[()]))
        checks = nonempty_checks(self.name, "no elements to interpolate between", x, [axis.k for axis in axes], out)
        if attrs["mode"] == "nearest":
            return seq(*checks, _lower_nearest(x, out, axes, attrs))
        (axis,) = axes
        return seq(*checks, _lower_weighted(x, out, axis, attrs))

    def reference(self, x: Any, sizes: tuple[int, ...], scale: Any = None, **attrs: Any) -> Any:
        if x.size == 0 and all(sizes):
            raise IndexError(f"resize: no elements to interpolate between: {x.shape} to {sizes}")
        if not all(sizes):  # resizing axis by axis could read from an empty dimension
            return np.zeros(sizes, x.dtype)
        is_nearest = attrs["mode"] == "nearest"
        wide = x if is_nearest or x.dtype in (np.float32, np.float64) else x.astype(np.float32)
        with np.errstate(all="ignore"):
            for axis in _resized_axes(tuple(map(sym, x.shape)), tuple(map(sym, sizes)), attrs, scale):
                wide = _resize_axis(wide, axis, attrs)
        return get_op("cast").reference(wide, dtype=dtypes.from_numpy(x.dtype)).reshape(sizes)

    def samples(self) -> Iterable[Sample]:
        kinds = ("float32", "shape")
        yield Sample((("n", 2, "h", "w"), ("n", 2, "h*2", "w*3")), {"nearest_mode": "ceil"}, kinds)
        yield Sample((("n", "h"), ("n", "h*2")), {"coordinate_transformation_mode": "asymmetric"}, kinds)
        yield Sample((("h*2", "w*4"), ("h", "w")), {"nearest_mode": "floor"}, ("uint8", "shape"))
        crop: dict[str, AttrValue] = {"roi": (0.0, 0.2, 1.0, 1.3), "extrapolation_value": 7.0}
        for coordinates in COORDINATES:
            attrs: dict[str, AttrValue] = {"coordinate_transformation_mode": coordinates, **crop}
            yield Sample((("n", "h"), ("n", 5)), attrs, kinds)
            yield Sample((("n", "h"), ("n", 5)), {"mode": "linear", **attrs}, kinds, tolerance=1e-4)
        yield Sample(((1, "h", "w"), (1, 4, "w*2")), {"mode": "linear"}, kinds, tolerance=1e-4)
        yield Sample(((1, "h", 5), (1, "h+3", 3)), {"mode": "cubic", "exclude_outside": True}, kinds, tolerance=1e-4)
        yield Sample(((1, "h"), (1, 6)), {"mode": "cubic", "scales": (1.0, 2.5)}, kinds, tolerance=1e-4)
        yield Sample((("h", 7), ("h", 3)), {"mode": "linear", "antialias": True}, kinds, tolerance=1e-4)
        yield Sample((("h*3", 7), ("h", 9)), {"mode": "cubic", "antialias": True}, kinds, tolerance=1e-4)
        yield Sample((("n", 3), ("n", 5)), {"mode": "linear"}, ("float16", "shape"), tolerance=4e-3)
        yield Sample((("n", 3), ("n", 6)), {"mode": "linear"}, ("int32", "shape"))
        shapes: tuple[tuple[int | str, ...], ...] = (("n", "h", "w"), ("n", "h+2", "w*2"), ())
        draws = {2: lambda shape, rng: np.asarray(rng.uniform(0.4, 3, shape), np.float32)}
        for mode in ("nearest", "linear", "cubic"):
            attrs = {"mode": mode, "axes": (1, 2), "antialias": mode == "linear"}
            yield Sample(shapes, attrs, (*kinds, "float32"), draws, tolerance=1e-4)


def _resized_axes(shape: Shape, sizes: Shape, attrs: Mapping[str, Any], shared: Any = None) -> list[_Axis]:
    """Axes that are not provably copied."""
    rank, scales, roi = len(shape), attrs["scales"], attrs["roi"]
    shared_axes = range(rank) if attrs["axes"] is None else attrs["axes"]
    axes = []
    for k in range(rank):
        axis_roi = (0.0, 1.0) if roi is None else (roi[k], roi[rank + k])
        scale = None if scales is None else scales[k]
        axes.append(_Axis(k, shape[k], sizes[k], scale, axis_roi, attrs, shared if k in shared_axes else None))
    return [axis for axis in axes if not axis.is_identity()]


def _outside(where: Any, size: Any) -> Any:
    return (where < 0.0) | (where > size - 1.0)


def _fill_coordinates(where: Buffer, axis: _Axis) -> Stmt:
    return compute(where, lambda o: axis.coordinate(o).value)


def _lower_nearest(x: Buffer, out: Buffer, axes: list[_Axis], attrs: Mapping[str, Any]) -> Stmt:
    integer_axes = {axis.k: axis for axis in axes if axis.nearest(sym(0)) is not None}
    tables = {axis.k: Buffer(f"nearest{axis.k}", (axis.out,), "int64") for axis in axes if axis.k not in integer_axes}
    places = {axis.k: Buffer(f"where{axis.k}", (axis.out,), "float32") for axis in axes if axis.crops}
    sources = {k: SymVar(f"s{k}") for k in tables}

    def nearest(axis: _Axis, o: SymExpr) -> Value:
        where = axis.coordinate(o)
        result = Scalar(_nearest(where, attrs["nearest_mode"], where.unary("floor"), select).value).cast("int64")
        return result.minimum(index(axis.size - 1)).maximum(0).value

    def source(k: int, o: SymExpr) -> SymExpr:
        result = integer_axes[k].nearest(o) if k in integer_axes else sources.get(k, o)
        return o if result is None else result

    def copy(*i: SymVar) -> Stmt:
        value = Scalar(x[tuple(source(k, o) for k, o in enumerate(i))])
        for axis in axes:
            if axis.crops:
                outside = _outside(Scalar(places[axis.k][i[axis.k]]), index(axis.size).cast("float32"))
                value = select(outside, attrs["extrapolation_value"], value)
        body: Stmt = Store(out, i, value.value)
        for k, table in tables.items():
            body = LetIndex(sources[k], table[i[k]], body)
        return body

    stages = [compute(tables[axis.k], partial(nearest, axis)) for axis in axes if axis.k in tables]
    stages += [_fill_coordinates(places[axis.k], axis) for axis in axes if axis.crops]
    body = seq(*stages, loops("ijklmn", out.shape, copy))
    for buffer in (*tables.values(), *places.values()):
        body = Allocate(buffer, body)
    return body


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Interpolation kernel, linear or cubic: weights of `taps` neighbours of a source coordinate, from `first` on."""

    axis: _Axis
    attrs: Mapping[str, Any]

    @property
    def half(self) -> int:
        return 1 if self.attrs["mode"] == "linear" else 2

    @property
    def taps(self) -> SymExpr:
        """Number of taps: twice the support, which antialiasing stretches by the factor that x shrinks by.

        A shared scale, from which `out` was rounded, is at least (out - 1/2) / size.
        """
        if not self.attrs["antialias"]:
            return sym(2 * self.half)
        if self.axis.shared is not None:
            return smax(self.half, ceildiv(self.axis.size * self.half * 2, smax(self.axis.out * 2 - 1, 1))) * 2 + 1
        if self.axis.scale is not None:
            return sym(2 * math.ceil(self.half * max(1.0, 1 / self.axis.scale)) + 1)
        return smax(self.half, ceildiv(self.axis.size * self.half, smax(self.axis.out, 1))) * 2 + 1

    @property
    def is_normalized(self) -> bool:
        return bool(self.attrs["antialias"] or self.attrs["exclude_outside"])

    def stretch(self, scale: Any, maximum: Callable[[Any, Any], Any]) -> Any:
        """Factor by which antialiasing stretches the kernel."""
        return maximum(1.0 / scale, 1.0) if self.attrs["antialias"] else 1.0

    def first(self, where: Any, stretch: Any, floor: Callable[[Any], Any]) -> Any:
        """First neighbour of a coordinate, a whole float32 number, possibly outside x."""
        return floor(where + (1.0 - stretch * float(self.half)))

    def weight(self, distance: Any, stretch: Any, choose: Choose) -> Any:
        """Weight of a neighbour at a distance >= 0."""
        near = distance / stretch if self.attrs["antialias"] else distance
        return _triangle(near, choose) if self.half == 1 else _cubic(near, self.attrs["cubic_coeff_a"], choose)


class _Tables:
    """Tables of source coordinates and neighbour weights per element of the result."""

    def __init__(self, kernel: _Kernel) -> None:
        self.kernel, axis = kernel, kernel.axis
        self.where = Buffer("where", (axis.out,), "float32")
        self.weights = Buffer("weights", (axis.out, kernel.taps), "float32")
        self.stretch = kernel.stretch(axis.scale_value(), Scalar.maximum)
        self.size = index(axis.size).cast("float32")

    def begin(self, o: SymExpr) -> Scalar:
        """First neighbour of the source coordinate of element o."""
        result = self.kernel.first(Scalar(self.where[o]), self.stretch, lambda v: v.unary("floor"))
        return Scalar(result.value)

    def is_outside(self, o: SymExpr) -> Scalar:
        return Scalar(_outside(Scalar(self.where[o]), self.size).value)

    def fill(self) -> Stmt:
        """Compute the tables."""
        kernel, weights = self.kernel, self.weights

        def weight(o: SymExpr, t: SymExpr) -> Value:
            position = self.begin(o) + index(t).cast("float32")
            value = Scalar(kernel.weight((position - Scalar(self.where[o])).abs(), self.stretch, select).value)
            excludes = kernel.attrs["exclude_outside"]
            return (select(_outside(position, self.size), 0.0, value) if excludes else value).value

        stages = seq(_fill_coordinates(self.where, kernel.axis), compute(weights, weight))
        if not kernel.is_normalized:
            return stages
        totals, zero = Buffer("totals", self.where.shape, "float32"), identity("add", "float32")
        total = reduce(totals, (kernel.taps,), "add", zero, lambda o, t: weights[o, t])
        divided = compute(weights, lambda o, t: (Scalar(weights[o, t]) / Scalar(totals[o])).value)
        return Allocate(totals, seq(stages, total, divided))


def _lower_weighted(x: Buffer, out: Buffer, axis: _Axis, attrs: Mapping[str, Any]) -> Stmt:
    """Build out = sum over taps t of weights[o, t] * x[first(o) + t], with indices clamped into x."""
    kernel, k = _Kernel(axis, attrs), axis.k
    tables, first = _Tables(kernel), SymVar("first", lower=None)

    def term(i: tuple[SymVar, ...], t: SymExpr) -> Scalar:
        clamped = smin(smax(first + t, 0), axis.size - 1)
        at = (*i[:k], clamped, *i[k + 1 :])
        return Scalar(tables.weights[i[k], t]).cast(out.dtype) * Scalar(x[at])

    def element(*i: SymVar) -> Stmt:
        start, taps = tables.begin(i[k]).cast("int64").value, as_int(kernel.taps)
        if taps is not None and not attrs["antialias"]:
            explicit = term(i, sym(0))
            for t in range(1, taps):
                explicit = explicit + term(i, sym(t))
            return LetIndex(first, start, Store(out, i, explicit.value))
        total = Buffer("total", (), out.dtype, "local")
        summed = loops("t", (kernel.taps,), lambda t: Store(total, (), term(i, t).value, "add"))
        stages = (Store(total, (), identity("add", out.dtype)), summed, Store(out, i, total[()]))
        return LetIndex(first, start, Allocate(total, seq(*stages)))

    def cropped(*i: SymVar) -> Value:
        return select(tables.is_outside(i[k]), attrs["extrapolation_value"], Scalar(out[i])).value

    body = seq(tables.fill(), loops("ijlmnp", out.shape, element))
    body = seq(body, compute(out, cropped)) if axis.crops else body
    return Allocate(tables.where, Allocate(tables.weights, body))


def _resize_axis(x: Any, axis: _Axis, attrs: Mapping[str, Any]) -> Any:
    """Resize one dimension in NumPy, by gathers: a product with a weight matrix would spread NaNs everywhere."""
    size, out = int(axis.size), int(axis.out)
    axis_scale = axis.scale if axis.shared is None else axis.shared
    scale = np.float32(axis_scale) if axis_scale is not None else np.float32(out) / np.float32(size)
    at = np.arange(out, dtype=np.float32)
    where = _coordinate(at, scale, np.float32(out), np.float32(size), axis.roi, attrs, np.where).astype(np.float32)
    where = np.broadcast_to(where, (out,))
    weight_shape = (-1, *(1,) * (x.ndim - 1 - axis.k))
    if attrs["mode"] == "nearest":
        nearest = np.clip(_nearest(where, attrs["nearest_mode"], np.floor(where), np.where), 0, size - 1)
        result = np.take(x, nearest.astype(np.int64), axis.k)
    else:
        kernel = _Kernel(axis, attrs)
        stretch = kernel.stretch(scale, np.maximum)
        positions = kernel.first(where, stretch, np.floor)[:, None] + np.arange(int(kernel.taps), dtype=np.float32)
        weights = kernel.weight(np.abs(positions - where[:, None]), stretch, np.where)
        if attrs["exclude_outside"]:
            weights = np.where(_outside(positions, size), 0, weights)
        if kernel.is_normalized:
            weights = weights / weights.sum(axis=1, keepdims=True)
        columns = np.clip(positions, 0, size - 1).astype(np.int64)
        terms = zip(weights.astype(x.dtype).T, columns.T, strict=True)
        result = sum(weight.reshape(weight_shape) * np.take(x, column, axis.k) for weight, column in terms)
    if not axis.crops:
        return result
    outside = _outside(where, size).reshape(weight_shape)
    return np.where(outside, x.dtype.type(attrs["extrapolation_value"]), result)
