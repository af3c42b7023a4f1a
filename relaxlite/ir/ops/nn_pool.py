"""Pooling over any number of spatial dimensions, channels first (N C spatial...) or last (N spatial... C).

`pads` is a shape operand (begins, then ends). Lazy selects skip elements outside x, along the dimensions that need it
only. Global pooling is a reduction, not a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import AttrValue, Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.linalg import accumulator, to_accumulator_dtype
from relaxlite.ir.ops.nn_conv import to_channels_first, to_channels_last
from relaxlite.ir.ops.scalars import Scalar, all_of, identity, index, literal, select
from relaxlite.ir.program import Buffer, Stmt, Value, compute, reduce, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, ceildiv, product, smax, smin, sym
from relaxlite.ir.types import TensorType, TupleType, Type
from relaxlite.records import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Geometry of a window sliding over the spatial dimensions of x."""

    size: Shape  # of x, spatial dimensions only
    pads: Shape
    kernel: Ints
    strides: Ints
    dilations: Ints
    ceil_mode: bool
    at_least_one: bool
    channels_last: bool = False

    @staticmethod
    def of(shape: Shape, pads: Shape, attrs: Mapping[str, Any]) -> Window:
        """Window of a pool with these attributes over x of this shape."""
        kernel = attrs["kernel"]
        ones = (1,) * len(kernel)
        strides, dilations = attrs["strides"] or ones, attrs["dilations"] or ones
        last = bool(attrs.get("channels_last", False))
        size = shape[1:-1] if last else shape[2:]
        return Window(size, pads, kernel, strides, dilations, attrs["ceil_mode"], attrs["at_least_one"], last)

    def channels_first(self, i: Shape) -> Shape:
        """Reorder the indices of a nest over the result and the taps to (n, c, o..., taps...)."""
        outer = 2 + len(self.kernel)
        return (*to_channels_first(i[:outer]), *i[outer:]) if self.channels_last else i

    @property
    def reduced(self) -> list[int]:
        """The axes with more than one tap."""
        return [k for k, extent in enumerate(self.kernel) if extent != 1]

    def begin(self, k: int) -> SymExpr:
        return self.pads[k]

    def end(self, k: int) -> SymExpr:
        return self.pads[len(self.kernel) + k]

    def extent(self, k: int) -> int:
        """Number of elements that the dilated kernel spans along axis k."""
        return (self.kernel[k] - 1) * self.dilations[k] + 1

    def padded(self, k: int) -> SymExpr:
        """Size of x with its padding along axis k."""
        return self.size[k] + self.begin(k) + self.end(k)

    def counts_partial(self, k: int) -> bool:
        """Whether there are windows along axis k that reach beyond the padding, by ceil_mode."""
        return self.ceil_mode and self.strides[k] != 1

    def may_be_single(self, k: int) -> bool:
        """Whether axis k may have a single window that is larger than x with its padding (see `at_least_one`)."""
        is_wide = self.extent(k) > self.strides[k] or PROVER.can_prove_le(self.extent(k), self.padded(k))
        return self.at_least_one and not is_wide

    def later_may_overrun(self, k: int) -> bool:
        """Whether a window after the first may reach beyond the end of x along axis k."""
        return as_int(self.end(k)) != 0 or self.counts_partial(k)

    def may_overrun(self, k: int) -> bool:
        """Whether any window may reach beyond the end of x along axis k."""
        return self.later_may_overrun(k) or self.may_be_single(k)

    def out_dim(self, k: int) -> SymExpr:
        """Number of windows along axis k: with ceil_mode also partial ones, unless they start in the end padding."""
        stride, extent, padded = self.strides[k], self.extent(k), self.padded(k)
        if not self.counts_partial(k):
            whole = (padded - extent) // stride + 1
            return smax(whole, 1) if self.may_be_single(k) else whole
        fitting = ceildiv(padded - extent, stride) + 1
        starting = ceildiv(self.size[k] + self.begin(k), stride)
        return fitting if PROVER.can_prove_le(self.end(k) + stride, extent) else smin(fitting, starting)

    def at(self, i: Shape) -> tuple[Shape, list[Scalar]]:
        """Indices of the x element under a tap, and conditions for being inside x; `i`: see `channels_first`."""
        outer, i = 2 + len(self.kernel), self.channels_first(i)
        o, full = i[2:outer], [sym(0)] * len(self.kernel)
        for k, tap in zip(self.reduced, i[outer:], strict=True):
            full[k] = tap
        where, conditions = list(i[:2]), []
        for k, tap in enumerate(full):
            position = o[k] * self.strides[k] + tap * self.dilations[k] - self.begin(k)
            where.append(position)
            if as_int(self.begin(k)) != 0:
                conditions.append(index(position) >= 0)
            if self.may_overrun(k):
                last = position if self.later_may_overrun(k) else tap * self.dilations[k] - self.begin(k)
                conditions.append(index(last) < index(self.size[k]))
        return to_channels_last(tuple(where)) if self.channels_last else tuple(where), conditions

    def count(self, o: Shape, *, include_pad: bool) -> SymExpr:
        """Number of taps of window `o` in x, or with include_pad in x and its padding."""
        counts = []
        for k, extent in enumerate(self.kernel):
            limit = self.size[k] + (self.end(k) if include_pad else 0)
            start, dilation = o[k] * self.strides[k] - self.begin(k), self.dilations[k]
            if not self.later_may_overrun(k):
                limit += o[k] * self.strides[k]  # only the first window, where this term is 0, may be partial
            is_partial = self.counts_partial(k) or self.may_be_single(k) if include_pad else self.may_overrun(k)
            last = smin(extent, ceildiv(limit - start, dilation)) if is_partial else sym(extent)
            skips_begin = not include_pad and as_int(self.begin(k)) != 0
            counts.append(last - smax(0, ceildiv(-start, dilation)) if skips_begin else last)
        return product(counts)

    def reduce(
        self,
        out: Buffer,
        x: Buffer,
        combine: str,
        value: Callable[[Scalar], Scalar],
        finish: Callable[..., Value] = lambda total, *i: total,
        wide: str | None = None,
    ) -> Stmt:
        """Build out[n, c, o...] = finish(combine over the window of value(x element), n, c, o...), in dtype `wide`."""
        start = identity(combine, wide or out.dtype)

        def tap(*i: SymVar) -> Value:
            where, conditions = self.at(i)
            result = value(Scalar(x[where]))
            return select(all_of(conditions), result, Scalar(start)).value if conditions else result.value

        extents = [self.kernel[k] for k in self.reduced]
        return reduce(out, extents, combine, start, tap, lambda total, *i: finish(total, *self.channels_first(i)))


class _Pool(Op):
    """Base of the pools: attributes, their checks and the shape rule.

    at_least_one: where the window is no larger than the stride, an x smaller than the window gives one partial window
    instead of none: (size - window) / stride + 1, rounded towards zero.
    """

    operands = ("x", "pads")
    attrs: ClassVar[Mapping[str, Attr]] = {
        "kernel": Attr("ints"), "strides": Attr("ints", None), "dilations": Attr("ints", None),
        "ceil_mode": Attr("bool", False), "at_least_one": Attr("bool", False), "channels_last": Attr("bool", False),
    }  # fmt: skip
    accepts: ClassVar[tuple[str, ...]] = dtypes.FLOATS

    def infer(self, x: Expr, pads: Expr, **attrs: Any) -> Type:
        xt, padding = self.tensor(x, "x"), self.shape(pads, "pads")
        shape = xt.shape or ()
        count = len(attrs["kernel"])
        if count == 0 or len(shape) != count + 2:
            self.fail(f"x must be (n, c, spatial...) with as many spatial sizes as kernel={attrs['kernel']}, got {xt}")
        if len(padding) != 2 * count:
            self.fail(f"pads must be {count} begins, then as many ends, got {format_shape(padding)}")
        for name in ("kernel", "strides", "dilations"):
            values = attrs[name] or (1,) * count
            if len(values) != count or any(v < 1 for v in values):
                self.fail(f"{name} must be {count} positive integers, got {values}")
        if xt.dtype not in self.accepts:
            self.fail(f"x must be one of {', '.join(self.accepts)}, got {xt.dtype}")
        window = Window.of(shape, padding, attrs)
        dims = [window.out_dim(k) for k in range(count)]
        for k, dim in enumerate(dims):
            if PROVER.can_prove_lt(dim, 0):
                size, extent = window.size[k], window.kernel[k]
                self.fail(f"spatial dimension {k} of x has size {size}, less than the window of {extent}")
        outer = (shape[0], *dims, shape[-1]) if window.channels_last else (shape[0], shape[1], *dims)
        return self.result_type(TensorType.of(outer, xt.dtype))

    def result_type(self, ty: TensorType) -> Type:
        return ty

    def samples(self) -> Iterable[Sample]:
        kinds, partial = ("float32", "shape"), {"ceil_mode": True}
        yield Sample((("n", 2, 5, "w"), (0, 0, 0, 0)), {"kernel": (2, 1)}, kinds)
        yield Sample((("n", 2, "h", "w"), (1, 1, 1, 1)), {"kernel": (3, 3), "strides": (2, 2)}, kinds)
        yield Sample((("n", 1, "h", "w"), (1, 0, 1, 1)), {"kernel": (3, 2), "strides": (2, 3), **partial}, kinds)
        yield Sample((("n", 1, "l"), (3, 0)), {"kernel": (2,), "dilations": (3,)}, kinds)
        yield Sample((("n", 2, 4, 6, 5), (0,) * 6), {"kernel": (2, 2, 2), "strides": (2, 2, 2), **partial}, kinds)
        yield Sample((("n", 2, "l"), (0, 0)), {"kernel": (1,), "strides": (2,)}, kinds)
        yield Sample((("n", 2, "l"), (1, 1)), {"kernel": (3,)}, ("float16", "shape"), tolerance=2e-3)
        single: dict[str, AttrValue] = {"kernel": (4, 3), "strides": (5, 3), "at_least_one": True}
        yield Sample((("n", 2, "h+1", "w+1"), (1, 0, 0, 0)), single, kinds)


def _samples_last() -> Iterable[Sample]:
    """Samples with channels last."""
    kinds, last = ("float32", "shape"), {"channels_last": True}
    yield Sample((("n", "h", "w", 19), (1, 1, 1, 1)), {"kernel": (3, 3), "strides": (2, 2), **last}, kinds)
    yield Sample((("n", "h", 7, "c"), (1, 0, 1, 1)), {"kernel": (3, 2), "ceil_mode": True, **last}, kinds)
    yield Sample((("n", "l", 2), (0, 0)), {"kernel": (2,), "strides": (2,), **last}, kinds)


@register
class MaxPool(_Pool):
    """Maximum over each window of x; padding is ignored."""

    name = "max_pool"
    accepts = (*dtypes.FLOATS, *dtypes.INTEGERS)

    def lower(self, x: Buffer, pads: Shape, *, out: Buffer, **attrs: Any) -> Stmt:
        return Window.of(x.shape, pads, attrs).reduce(out, x, "max", lambda v: v)

    def reference(self, x: Any, pads: Ints, **attrs: Any) -> Any:
        low = identity("max", dtypes.from_numpy(x.dtype) or "float32").value
        return np.max(np.stack(list(_taps(x, pads, attrs, low))), axis=0)

    def samples(self) -> Iterable[Sample]:
        yield from super().samples()
        yield from _samples_last()
        yield Sample((("n", 2, "l"), (1, 1)), {"kernel": (2,)}, ("uint8", "shape"))


@register
class MaxPoolWithIndices(_Pool):
    """Maximum over each window, and the int64 index of its first maximum in the flattened x.

    storage_order 1 flattens the spatial dimensions in column-major order.
    """

    name = "max_pool_with_indices"
    attrs: ClassVar[Mapping[str, Attr]] = {
        **{name: attr for name, attr in _Pool.attrs.items() if name != "channels_last"},
        "storage_order": Attr("int", 0, (0, 1)),
    }
    accepts = MaxPool.accepts

    def result_type(self, ty: TensorType) -> Type:
        return TupleType((ty, TensorType(ty.shape, "int64", ty.rank)))

    def lower(self, x: Buffer, pads: Shape, *, out: tuple[Buffer, Buffer], storage_order: int, **attrs: Any) -> Stmt:
        window, (values, indices) = Window.of(x.shape, pads, attrs), out
        last = literal(np.iinfo(np.int64).max, "int64")

        def place(*i: SymVar) -> Value:
            where, conditions = window.at(i)
            element = Scalar(x[where])
            is_max = element.equals(Scalar(values[i[: len(x.shape)]]))
            if dtypes.is_float(x.dtype):
                is_max = is_max | element.unary("isnan")
            value = select(is_max, index(_flatten(where, x.shape)), Scalar(last))
            return select(all_of(conditions), value, Scalar(last)).value if conditions else value.value

        extents = [window.kernel[k] for k in window.reduced]
        stages = [window.reduce(values, x, "max", lambda v: v), reduce(indices, extents, "min", last, place)]

        def counted(*i: SymVar) -> Value:
            value = Scalar(indices[i])
            flat_index = _column_major(value, x.shape[2:]) if storage_order == 1 else value
            return select(value.equals(Scalar(last)), index(sym(0)), flat_index).value  # 0 for windows of padding only

        return seq(*stages, compute(indices, counted))

    def reference(self, x: Any, pads: Ints, *, storage_order: int, **attrs: Any) -> Any:
        low = identity("max", dtypes.from_numpy(x.dtype) or "float32").value
        images = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1,) * (x.ndim - 2))
        pixels = np.prod(x.shape[2:], dtype=np.int64)
        positions = images * pixels + np.arange(pixels).reshape(x.shape[2:], order="F" if storage_order else "C")
        values = np.stack(list(_taps(x, pads, attrs, low)))
        inside = np.stack(list(_taps(np.ones(x.shape, bool), pads, attrs, False)))
        tap_positions = np.stack(list(_taps(positions, pads, attrs, 0)))
        best = values.max(axis=0)
        first = np.argmax((values == best) & inside, axis=0)[None]
        return best, np.take_along_axis(tap_positions, first, axis=0)[0]

    def samples(self) -> Iterable[Sample]:
        yield from _Pool.samples(self)
        yield Sample((("n", 2, "h", 3), (1, 1, 1, 1)), {"kernel": (2, 2), "storage_order": 1}, ("float32", "shape"))


def _flatten(where: Iterable[SymExpr], shape: Shape) -> SymExpr:
    flat = sym(0)
    for i, size in zip(where, shape, strict=True):
        flat = flat * size + i
    return flat


def _column_major(flat: Scalar, spatial: Shape) -> Scalar:
    """Convert the spatial part of a row-major flat index to column-major order."""
    if any(as_int(size) == 0 for size in spatial):  # x is empty
        return flat
    image = product(spatial)
    rest = flat.binary("floormod", index(image))
    result, weight = flat - rest, image
    for size in reversed(spatial):
        weight = weight // size
        result = result + rest.binary("floormod", index(size)) * index(weight)
        rest = rest.binary("floordiv", index(size))
    return result


class _SumPool(_Pool):
    """Base of pools that sum a function of x over each window and apply another to the sum."""

    def lower_sum(
        self, x: Buffer, window: Window, out: Buffer, f: Callable[[Scalar], Scalar], g: Callable[..., Scalar]
    ) -> Stmt:
        """Build out = g(sum of f(x), o...), summed in dtype `accumulator(out.dtype)`."""
        wide = accumulator(out.dtype)

        def finish(total: Value, *i: SymVar) -> Value:
            return g(Scalar(total), i[2:]).cast(out.dtype).value

        return window.reduce(out, x, "add", lambda v: f(v.cast(wide)), finish, wide)


@register
class AvgPool(_SumPool):
    """Mean over each window, of its elements in x or with count_include_pad also of the zeros of the padding."""

    name = "avg_pool"
    attrs: ClassVar[Mapping[str, Attr]] = {**_Pool.attrs, "count_include_pad": Attr("bool", False)}

    def lower(self, x: Buffer, pads: Shape, *, out: Buffer, count_include_pad: bool, **attrs: Any) -> Stmt:
        window = Window.of(x.shape, pads, attrs)

        def mean(total: Scalar, o: Shape) -> Scalar:
            count = window.count(o, include_pad=count_include_pad)
            known = as_int(count)
            return total / (index(count).cast(total.dtype) if known is None else known)

        return self.lower_sum(x, window, out, lambda v: v, mean)

    def reference(self, x: Any, pads: Ints, *, count_include_pad: bool, **attrs: Any) -> Any:
        wide = to_accumulator_dtype(x)
        total = sum(_taps(wide, pads, attrs, 0))
        counts = sum(_taps(np.ones_like(wide), pads, attrs, int(count_include_pad), 0))
        return (total / counts).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        for sample in (*super().samples(), *_samples_last()):
            yield sample
            yield replace(sample, attrs={**sample.attrs, "count_include_pad": True})


@register
class LpPool(_SumPool):
    """p-norm over each window: (sum of |x| ** p) ** (1 / p)."""

    name = "lp_pool"
    attrs: ClassVar[Mapping[str, Attr]] = {**_Pool.attrs, "p": Attr("int", 2)}

    def lower(self, x: Buffer, pads: Shape, *, out: Buffer, p: int, **attrs: Any) -> Stmt:
        def power(v: Scalar) -> Scalar:
            return v * v if p == 2 else v.abs() if p == 1 else v.abs().binary("pow", p)

        def root(v: Scalar, _: Shape) -> Scalar:
            return v.unary("sqrt") if p == 2 else v if p == 1 else v.binary("pow", 1 / p)

        return self.lower_sum(x, Window.of(x.shape, pads, attrs), out, power, root)

    def reference(self, x: Any, pads: Ints, *, p: int, **attrs: Any) -> Any:
        total = sum(_taps(np.abs(to_accumulator_dtype(x)) ** p, pads, attrs, 0))
        return (np.asarray(total) ** (1 / p)).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        for p, sample in zip((2, 1, 3, 2, 1, 2, 2, 1), super().samples(), strict=True):
            yield replace(sample, attrs={**sample.attrs, "p": p}, tolerance=max(2e-5, sample.tolerance))
        yield from (replace(sample, tolerance=2e-5) for sample in _samples_last())


def _taps(x: Any, pads: Ints, attrs: Mapping[str, Any], padding: Any, beyond: Any = None) -> Iterator[Any]:
    """Iterate over the kernel taps: NumPy arrays of the elements under the tap in every window.

    `padding` and `beyond` (None: as padding) are the values of elements in the padding and beyond.
    """
    if attrs.get("channels_last"):
        moved = np.moveaxis(x, -1, 1)
        for elements in _taps(moved, pads, {**attrs, "channels_last": False}, padding, beyond):
            yield np.moveaxis(elements, 1, -1)
        return
    window = Window.of(tuple(map(sym, x.shape)), tuple(map(sym, pads)), attrs)
    rank = len(window.kernel)
    dims = [int(window.out_dim(k)) for k in range(rank)]
    spans = [(dims[k] - 1) * window.strides[k] + (window.kernel[k] - 1) * window.dilations[k] + 1 for k in range(rank)]
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)], constant_values=padding)
    missing = [(0, max(0, spans[k] - x.shape[2 + k])) for k in range(rank)]
    x = np.pad(x, [(0, 0), (0, 0), *missing], constant_values=padding if beyond is None else beyond)
    for tap in np.ndindex(*window.kernel):
        begins = [tap[k] * window.dilations[k] for k in range(rank)]
        where = [slice(b, b + n * s, s) for b, n, s in zip(begins, dims, window.strides, strict=True)]
        yield x[(slice(None),) * 2 + tuple(where)]
