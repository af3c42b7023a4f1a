"""Sampling of feature maps at data-dependent coordinates: grid_sample, affine_grid, roi_align."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape
from relaxlite.ir.ops.linalg import accumulator, equality_checks, nonempty_checks, to_accumulator_dtype
from relaxlite.ir.ops.scalars import Scalar, all_of, identity, index, select
from relaxlite.ir.program import Allocate, Buffer, Check, LetIndex, Stmt, Store, Value, compute, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, smax, smin, sym
from relaxlite.ir.types import TensorType, Type

Extremum = Callable[..., Any]
_TAPS = {"nearest": (0, 1), "linear": (0, 2), "cubic": (-1, 4)}  # mode -> (first neighbour, number of neighbours)


def _cubic_weights(rest: Any, a: float = -0.75) -> list[Any]:
    """Weights of Keys' cubic convolution for the four neighbours of a coordinate with this fraction."""

    def far(d: Any) -> Any:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    def near(d: Any) -> Any:
        return ((a + 2) * d - (a + 3)) * d * d + 1.0

    return [far(rest + 1.0), near(rest), near(1.0 - rest), far(2.0 - rest)]


def _weights(mode: str, rest: Any) -> list[Any]:
    """Weights of the neighbours of a coordinate with this fraction; None is 1."""
    if mode == "nearest":
        return [None]
    return [1.0 - rest, rest] if mode == "linear" else _cubic_weights(rest)


def _padded_index(i: Any, size: Any, padding: str, align_corners: bool, low: Extremum, high: Extremum) -> Any:
    """Index of the element that position i, possibly outside x, reads; `low` and `high` are min and max."""
    if padding == "reflection":
        period = high(2 * (size - 1), 1) if align_corners else high(2 * size, 1)
        phase = i % period
        i = low(phase, (period if align_corners else period - 1) - phase)
    return low(high(i, 0), size - 1)


@register
class GridSample(Op):
    """Sample x (n, c, spatial...) at grid (n, out..., d): coordinates in -1..1, the last spatial dimension first.

    padding_mode defines the elements outside x: zeros, the border elements, or x reflected. Modes: nearest, linear
    (multilinear) and cubic interpolation.
    """

    name = "grid_sample"
    operands = ("x", "grid")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "mode": Attr("str", "linear", ("nearest", "linear", "cubic")),
        "padding_mode": Attr("str", "zeros", ("zeros", "border", "reflection")),
        "align_corners": Attr("bool", False),
    }

    def infer(self, x: Expr, grid: Expr, **attrs: Any) -> Type:
        xt, gt = self.tensor(x, "x"), self.tensor(grid, "grid")
        xs, gs = xt.shape or (), gt.shape or ()
        count = len(xs) - 2
        if count < 1 or len(gs) != count + 2 or PROVER.can_prove_ne(gs[-1], count) or PROVER.can_prove_ne(gs[0], xs[0]):
            expected = f"grid ({xs[0] if xs else 'n'}, out..., {count})"
            self.fail(f"x (n, c, spatial...) needs a {expected}, got x {xt} and grid {gt}")
        if not dtypes.is_float(xt.dtype) or not dtypes.is_float(gt.dtype):
            self.fail(f"x and grid must be of float dtypes, got {xt.dtype} and {gt.dtype}")
        return TensorType.of((*xs[:2], *gs[1:-1]), xt.dtype)

    def lower(self, x: Buffer, grid: Buffer, *, out: Buffer, mode: str, padding_mode: str, align_corners: bool) -> Stmt:
        count, wide = len(x.shape) - 2, accumulator(x.dtype)
        where = Buffer("where", grid.shape, accumulator(grid.dtype))
        begin, taps = _TAPS[mode]
        corners = [SymVar(f"s{k}", lower=None) for k in range(count)]

        def coordinate(*i: SymVar) -> Value:
            """Convert a grid coordinate to elements."""
            position = Scalar(grid[i]).cast(where.dtype)
            result = Scalar(_denormalize(position, _size_of(x.shape, i[-1], where.dtype), align_corners).value)
            return (result.unary("round") if mode == "nearest" else result).value

        def pixel(i: tuple[SymVar, ...], offsets: tuple[int, ...]) -> Scalar:
            positions = [corner + begin + offset for corner, offset in zip(corners, offsets, strict=True)]
            sizes = x.shape[2:]
            at = [
                _padded_index(p, d, padding_mode, align_corners, smin, smax)
                for p, d in zip(positions, sizes, strict=True)
            ]
            if padding_mode != "zeros":
                return Scalar(x[i[:2] + tuple(at)]).cast(wide)
            inside = [c for p, d in zip(positions, sizes, strict=True) for c in (index(p) >= 0, index(p) < index(d))]
            return select(all_of(inside), Scalar(x[i[:2] + tuple(positions)]).cast(wide), 0.0)

        def element(*i: SymVar) -> Stmt:
            points = [(i[0], *i[2:], sym(count - 1 - k)) for k in range(count)]
            places = [Scalar(where[point]) for point in points]
            fractions = [_weights(mode, (p - p.unary("floor")).cast(wide)) for p in places]
            total: Scalar | None = None
            for offsets in itertools.product(range(taps), repeat=count):
                term = pixel(i, offsets)
                for k, offset in enumerate(offsets):
                    weight = fractions[k][offset]
                    term = term if weight is None else term * weight
                total = term if total is None else total + term
            assert total is not None
            body: Stmt = Store(out, i, total.cast(out.dtype).value)
            for corner, place in zip(corners, places, strict=True):
                body = LetIndex(corner, place.unary("floor").cast("int64").value, body)
            return body

        pairs = [(grid.shape[0], x.shape[0]), (grid.shape[-1], sym(count))]
        checks = equality_checks("grid_sample: grid does not fit x", *pairs)
        if padding_mode != "zeros":
            checks += nonempty_checks(self.name, "it has no border", x, range(2, len(x.shape)), out)
            if any(as_int(d) == 0 for d in x.shape):  # `out` is empty too, or a check stops the run
                return seq(*checks)
        return seq(*checks, Allocate(where, seq(compute(where, coordinate), loops("ncijk", out.shape, element))))

    def reference(self, x: Any, grid: Any, *, mode: str, padding_mode: str, align_corners: bool) -> Any:
        count, wide = x.ndim - 2, to_accumulator_dtype(x)
        begin, taps = _TAPS[mode]
        if 0 in x.shape[2:]:
            if padding_mode != "zeros" and 0 not in (*x.shape[:2], *grid.shape[1:-1]):
                raise IndexError(f"grid_sample: x is empty: it has no border: {x.shape}")
            wide = np.zeros((*x.shape[:2], *(max(d, 1) for d in x.shape[2:])), wide.dtype)  # all padding
        sizes = np.array(x.shape[2:][::-1], to_accumulator_dtype(grid).dtype)
        where = _denormalize(to_accumulator_dtype(grid), sizes, align_corners)[..., ::-1]
        where = np.rint(where) if mode == "nearest" else where
        floor = np.floor(where)
        corners, rest = floor.astype(np.int64), (where - floor).astype(wide.dtype)
        weights = [_weights(mode, rest[..., k]) for k in range(count)]
        batch = np.arange(x.shape[0]).reshape(-1, *(1,) * count)
        total = np.zeros((*grid.shape[:-1], x.shape[1]), wide.dtype)
        for offsets in itertools.product(range(taps), repeat=count):
            positions = [corners[..., k] + begin + offset for k, offset in enumerate(offsets)]
            at = [
                _padded_index(p, d, padding_mode, align_corners, np.minimum, np.maximum)
                for p, d in zip(positions, x.shape[2:], strict=True)
            ]
            weight = np.ones(grid.shape[:-1], wide.dtype)
            for k, offset in enumerate(offsets):
                weight = weight if mode == "nearest" else weight * weights[k][offset]
                if padding_mode == "zeros":
                    weight = weight * (positions[k] == at[k])
            places = (batch, *at)
            total += np.moveaxis(wide, 1, -1)[places] * weight[..., None]
        return np.ascontiguousarray(np.moveaxis(total, -1, 1)).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            return rng.uniform(-1.4, 1.4, shape).astype(np.float32)

        make = {1: draw}
        for k, mode in enumerate(("linear", "nearest", "cubic")):
            for padding in ("zeros", "border", "reflection"):
                attrs: dict[str, Any] = {"mode": mode, "padding_mode": padding, "align_corners": k == 0}
                yield Sample((("n", 2, "h", 4), ("n", 3, "w", 2)), attrs, make=make, tolerance=1e-4)
        yield Sample((("n", 1, 2, "h", 3), ("n", 2, 1, "w", 3)), make=make, tolerance=1e-4)


def _size_of(shape: Shape, k: SymExpr, dtype: str) -> Scalar:
    """Size of spatial dimension k, counted from the last, for a loop variable k."""
    result = index(shape[-1]).cast(dtype)
    for back in range(1, len(shape) - 2):
        result = select(index(k).equals(back), index(shape[-1 - back]).cast(dtype), result)
    return result


def _denormalize(position: Any, size: Any, align_corners: bool) -> Any:
    """Map -1..1 to elements: between the centres of the first and last element, or between their outer edges."""
    if align_corners:
        return (position + 1.0) / 2.0 * (size - 1.0)
    return ((position + 1.0) * size - 1.0) / 2.0


@register
class AffineGrid(Op):
    """Grid (n, out..., d) for `grid_sample` from affine maps theta (n, d, d + 1), over `sizes` = out..."""

    name = "affine_grid"
    operands = ("theta", "sizes")
    attrs: ClassVar[Mapping[str, Attr]] = {"align_corners": Attr("bool", False)}

    def infer(self, theta: Expr, sizes: Expr, *, align_corners: bool) -> Type:
        ty, dims = self.tensor(theta, "theta"), self.shape(sizes, "sizes")
        shape, count = ty.shape or (), len(dims)
        expected = (sym(count), sym(count + 1))
        if len(shape) != 3 or any(map(PROVER.can_prove_ne, shape[1:], expected)) or not dtypes.is_float(ty.dtype):
            self.fail(f"theta must be (n, {count}, {count + 1}) of a float dtype for {count} sizes, got {ty}")
        return TensorType.of((shape[0], *dims, count), ty.dtype)

    def lower(self, theta: Buffer, sizes: Shape, *, out: Buffer, align_corners: bool) -> Stmt:
        wide = accumulator(theta.dtype)

        def value(*i: SymVar) -> Value:
            n, places, row = i[0], i[1:-1], i[-1]
            total = Scalar(theta[n, row, len(sizes)]).cast(wide)
            for k, (place, size) in enumerate(zip(reversed(places), reversed(sizes), strict=True)):
                position = _normalize(index(place).cast(wide), index(size).cast(wide), align_corners, select)
                total = total + Scalar(theta[n, row, k]).cast(wide) * position
            return total.cast(out.dtype).value

        pairs = [(theta.shape[1], len(sizes)), (theta.shape[2], len(sizes) + 1)]
        return seq(*equality_checks("affine_grid: theta does not fit sizes", *pairs), compute(out, value))

    def reference(self, theta: Any, sizes: tuple[int, ...], *, align_corners: bool) -> Any:
        wide = to_accumulator_dtype(theta)
        axes = [_normalize(np.arange(d, dtype=wide.dtype), wide.dtype.type(d), align_corners, np.where) for d in sizes]
        places = np.stack(np.meshgrid(*axes, indexing="ij")[::-1], axis=-1)  # (out..., d)
        mapped = np.einsum("nij,...j->n...i", wide[:, :, :-1], places)
        return (mapped + wide[:, :, -1].reshape(-1, *(1,) * len(sizes), len(sizes))).astype(theta.dtype)

    def samples(self) -> Iterable[Sample]:
        kinds = ("float32", "shape")
        yield Sample((("n", 2, 3), ("h", 4)), {}, kinds)
        yield Sample((("n", 2, 3), ("h", 4)), {"align_corners": True}, kinds)
        yield Sample((("n", 3, 4), (2, "h", 3)), {}, kinds)


def _normalize(i: Any, size: Any, align_corners: bool, choose: Callable[..., Any]) -> Any:
    """Map element i to -1..1; 0 for a single element with align_corners."""
    if align_corners:
        return choose(size > 1.0, i * 2.0 / (size - 1.0) - 1.0, 0.0)
    return (i * 2.0 + 1.0) / size - 1.0


@register
class RoiAlign(Op):
    """Pool regions of x (n, c, h, w) to (r, c, *output): each bin is the mean or maximum of bilinear samples.

    rois (r, 4) are x1, y1, x2, y2 in units of 1 / spatial_scale, batch (r,) is the image of each. A bin has
    sampling_ratio samples per axis, with 0 as many as the region has elements per bin. half_pixel shifts coordinates by
    a half; without it a region is at least one element wide. The maximum is over the weighted corners of the samples,
    as ONNX defines it.
    """

    name = "roi_align"
    operands = ("x", "rois", "batch")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "output": Attr("ints", (1, 1)), "mode": Attr("str", "avg", ("avg", "max")), "sampling_ratio": Attr("int", 0),
        "spatial_scale": Attr("float", 1.0), "half_pixel": Attr("bool", True),
    }  # fmt: skip

    def infer(self, x: Expr, rois: Expr, batch: Expr, *, output: tuple[int, ...], **attrs: Any) -> Type:
        xt, rt, bt = self.tensor(x, "x"), self.tensor(rois, "rois"), self.tensor(batch, "batch")
        if xt.rank != 4 or rt.rank != 2 or bt.rank != 1 or PROVER.can_prove_ne((rt.shape or ())[-1], 4):
            self.fail(f"x must be (n, c, h, w), rois (r, 4) and batch (r,), got {xt}, {rt} and {bt}")
        if xt.dtype not in ("float32", "float64") or rt.dtype != xt.dtype or not dtypes.is_integer(bt.dtype):
            self.fail(f"x and rois must both be float32 or float64 and batch integer, got {xt}, {rt} and {bt}")
        if len(output) != 2 or attrs["sampling_ratio"] < 0:
            self.fail(f"output={output} must be two sizes, sampling_ratio={attrs['sampling_ratio']} not negative")
        return TensorType.of(((rt.shape or ())[0], (xt.shape or ())[1], *output), xt.dtype)

    def lower(self, x: Buffer, rois: Buffer, batch: Buffer, *, out: Buffer, **attrs: Any) -> Stmt:
        dtype, ratio = x.dtype, attrs["sampling_ratio"]
        combine: Any = "add" if attrs["mode"] == "avg" else "max"

        def check(r: SymVar) -> Stmt:
            at = Scalar(batch[r]).cast("int64")
            return Check(((at >= 0) & (at < index(x.shape[0]))).value, "roi_align: batch names a picture that x lacks")

        def element(r: SymVar, c: SymVar, *bins: SymVar) -> Stmt:
            total, picture = Buffer("total", (), dtype, "local"), SymVar("picture")
            counts = [SymVar("samples_y"), SymVar("samples_x")]
            begins, sizes = _bins([Scalar(rois[r, k]) for k in range(4)], attrs, Scalar.maximum)

            def add_sample(*steps: SymVar) -> Stmt:
                inner = [(index(steps[k]).cast(dtype) + 0.5) / index(counts[k]).cast(dtype) for k in (0, 1)]
                places = [begins[k] + (index(bins[k]).cast(dtype) + inner[k]) * sizes[k] for k in (0, 1)]
                return _bilinear(x, (picture, c), places, lambda v: Store(total, (), v.value, combine), combine)

            result, number = Scalar(total[()]), (index(counts[0]) * index(counts[1])).maximum(1).cast(dtype)
            result = result / number if combine == "add" else select(result.equals(float("-inf")), 0.0, result)
            start, finish = Store(total, (), identity(combine, dtype)), Store(out, (r, c, *bins), result.value)
            body: Stmt = Allocate(total, seq(start, loops("ij", counts, add_sample), finish))
            for count, size in zip(counts, sizes, strict=True):
                needed = index(ratio) if ratio else size.unary("ceil").cast("int64").maximum(0)
                body = LetIndex(count, needed.value, body)
            return LetIndex(picture, Scalar(batch[r]).cast("int64").value, body)

        pairs = [(rois.shape[1], sym(4)), (rois.shape[0], batch.shape[0])]
        checks = equality_checks("roi_align: rois and batch", *pairs)
        checks += nonempty_checks(self.name, "a picture has no elements", x, (2, 3), out)
        if any(as_int(d) == 0 for d in x.shape):  # `out` is empty too, or a check stops the run
            return seq(*checks, loops("r", batch.shape, check))
        return seq(*checks, loops("r", batch.shape, check), loops("rcij", out.shape, element))

    def reference(self, x: Any, rois: Any, batch: Any, **attrs: Any) -> Any:
        ratio, output = attrs["sampling_ratio"], attrs["output"]
        result = np.zeros((rois.shape[0], x.shape[1], *output), x.dtype)
        if 0 in x.shape[2:] and result.size:
            raise IndexError(f"roi_align: a picture has no elements: {x.shape}")
        for r, (roi, picture) in enumerate(zip(rois, batch, strict=True)):
            begins, sizes = _bins(list(roi), attrs, np.maximum)
            counts = [ratio or max(0, int(np.ceil(size))) for size in sizes]
            for bins in np.ndindex(*output):
                samples = [
                    _bilinear_array(x[picture], [
                        begins[k] + (bins[k] + x.dtype.type(steps[k] + 0.5) / counts[k]) * sizes[k] for k in (0, 1)
                    ])
                    for steps in np.ndindex(*counts)
                ]  # fmt: skip
                if samples:
                    average = attrs["mode"] == "avg"
                    pooled = np.sum(samples, axis=(0, 1)) / len(samples) if average else np.max(samples, axis=(0, 1))
                    result[r, :, bins[0], bins[1]] = pooled
        return result

    def samples(self) -> Iterable[Sample]:
        def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
            first = rng.uniform(-1, 3, (shape[0], 2))
            return np.concatenate([first, first + rng.uniform(0.5, 4, (shape[0], 2))], axis=1)

        make = {1: draw, 2: lambda shape, rng: rng.integers(0, 2, shape)}
        kinds = ("float32", "float32", "int64")
        shapes = ((2, 2, 5, 4), ("r", 4), ("r",))
        for k, mode in enumerate(("avg", "max")):
            attrs: dict[str, Any] = {"output": (2, 3), "mode": mode}
            yield Sample(shapes, {**attrs, "half_pixel": k == 0}, kinds, make, tolerance=1e-4)
            yield Sample(shapes, {**attrs, "sampling_ratio": 2, "spatial_scale": 0.7}, kinds, make, tolerance=1e-4)


def _bins(roi: list[Any], attrs: Mapping[str, Any], maximum: Extremum) -> tuple[list[Any], list[Any]]:
    """Start of a region and size of its bins, each for y and x."""
    offset = 0.5 if attrs["half_pixel"] else 0.0
    x1, y1, x2, y2 = (value * attrs["spatial_scale"] - offset for value in roi)
    extents = [y2 - y1, x2 - x1]
    if not attrs["half_pixel"]:
        extents = [maximum(extent, 1.0) for extent in extents]
    return [y1, x1], [extent / float(count) for extent, count in zip(extents, attrs["output"], strict=True)]


def _bilinear(
    x: Buffer, at: tuple[SymExpr, ...], places: list[Scalar], use: Callable[[Scalar], Stmt], combine: str
) -> Stmt:
    """Pass the combined four weighted neighbours in x[at] of a point to `use`; 0 more than one element outside x."""
    lows = [SymVar("y"), SymVar("x")]
    bounds = [index(d).cast(x.dtype) for d in x.shape[2:]]
    inside = [c for p, bound in zip(places, bounds, strict=True) for c in (p >= -1.0, p <= bound)]
    near = [p.maximum(0.0).minimum(bound - 1.0) for p, bound in zip(places, bounds, strict=True)]
    rests = [place - place.unary("floor") for place in near]
    total: Scalar | None = None
    for offsets in itertools.product((0, 1), repeat=2):
        corner = at + tuple(smin(lows[k] + offsets[k], x.shape[2 + k] - 1) for k in (0, 1))
        weights = [rests[k] if offsets[k] else 1.0 - rests[k] for k in (0, 1)]
        term = weights[0] * weights[1] * Scalar(x[corner])
        total = term if total is None else total + term if combine == "add" else total.maximum(term)
    assert total is not None
    body = use(select(all_of(inside), total, 0.0))
    for low, place in zip(lows, near, strict=True):
        body = LetIndex(low, place.unary("floor").cast("int64").value, body)
    return body


def _bilinear_array(x: Any, places: list[Any]) -> Any:
    """Weighted four neighbours in x (c, h, w) of a point: (4, c)."""
    sizes = x.shape[1:]
    if any(p < -1 or p > d for p, d in zip(places, sizes, strict=True)):
        return np.zeros((4, x.shape[0]), x.dtype)
    near = [min(max(p, x.dtype.type(0)), x.dtype.type(d - 1)) for p, d in zip(places, sizes, strict=True)]
    result = []
    for offsets in itertools.product((0, 1), repeat=2):
        corner = [min(int(p) + o, d - 1) for p, o, d in zip(near, offsets, sizes, strict=True)]
        weights = [p - np.floor(p) if o else 1 - (p - np.floor(p)) for p, o in zip(near, offsets, strict=True)]
        result.append(weights[0] * weights[1] * x[:, corner[0], corner[1]])
    return np.stack(result)
