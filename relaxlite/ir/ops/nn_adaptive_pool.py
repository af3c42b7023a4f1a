"""Adaptive pooling: windows that divide each spatial dimension evenly, to any number of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Op, Sample, register
from relaxlite.ir.ops.broadcast import Shape, format_shape
from relaxlite.ir.ops.linalg import accumulator, nonempty_checks, to_accumulator_dtype
from relaxlite.ir.ops.scalars import Scalar, identity, index
from relaxlite.ir.program import Allocate, Buffer, IfThenElse, LetIndex, Stmt, Store, loops, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, floordiv, product, sym
from relaxlite.ir.types import TensorType, TupleType, Type


class _AdaptivePool(Op):
    """Base of the adaptive pools: window o of a dimension is o * size // count to ceildiv((o + 1) * size, count)."""

    operands = ("x", "counts")
    accepts: ClassVar[tuple[str, ...]] = dtypes.FLOATS

    def infer(self, x: Expr, counts: Expr) -> Type:
        xt, windows = self.tensor(x, "x"), self.shape(counts, "counts")
        shape = xt.shape or ()
        if not windows or len(shape) < len(windows):
            self.fail(
                f"x must be (..., spatial) with the spatial dimensions of counts={format_shape(windows)}, got {xt}"
            )
        if xt.dtype not in self.accepts:
            self.fail(f"x must be one of {', '.join(self.accepts)}, got {xt.dtype}")
        return self.result_type(TensorType.of((*shape[: -len(windows)], *windows), xt.dtype))

    def result_type(self, ty: TensorType) -> Type:
        return ty

    def lower_windows(
        self, x: Buffer, out: Buffer, body: Callable[[Shape, Sequence[SymExpr], Sequence[SymExpr]], Stmt], count: int
    ) -> Stmt:
        """Build a nest that calls body(index of the result, begins, sizes) for each window."""
        first = len(x.shape) - count

        def element(*i: SymVar) -> Stmt:
            begins = [SymVar(f"begin{k}") for k in range(count)]
            sizes = [SymVar(f"size{k}") for k in range(count)]
            stmt = body(i, begins, sizes)
            for k in reversed(range(count)):
                size, windows, o = x.shape[first + k], out.shape[first + k], i[first + k]
                extent = ceildiv((o + 1) * size, windows) - floordiv(o * size, windows)
                stmt = LetIndex(sizes[k], index(extent).value, stmt)
                stmt = LetIndex(begins[k], index(floordiv(o * size, windows)).value, stmt)
            return stmt

        checks = nonempty_checks(self.name, "a window has no elements", x, range(first, len(x.shape)), out)
        return seq(*checks, loops("ncijklm", out.shape, element))

    def samples(self) -> Iterable[Sample]:
        kinds = ("float32", "shape")
        yield Sample((("n", 2, "h+1", "w+1"), (3, 2)), {}, kinds)
        yield Sample((("n", "l+1"), ("k",)), {}, kinds)
        yield Sample(((2, "h+1", 4, 5), (2, "h+1", 7)), {}, kinds)
        yield Sample((("n", 1, 7), (4,)), {}, ("float16", "shape"), tolerance=2e-3)


def _windows(x: Any, counts: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Iterate over the windows: the index of each in the result, and its elements in x."""
    spatial = x.shape[x.ndim - len(counts) :]
    for o in np.ndindex(*counts):
        parts = zip(o, spatial, counts, strict=True)
        slices = (slice(k * size // count, -(-(k + 1) * size // count)) for k, size, count in parts)
        yield (Ellipsis, *o), (Ellipsis, *slices)


@register
class AdaptiveAvgPool(_AdaptivePool):
    """Mean over the windows that divide each of the last dimensions of x evenly into `counts` windows."""

    name = "adaptive_avg_pool"

    def lower(self, x: Buffer, counts: Shape, *, out: Buffer) -> Stmt:
        wide, first = accumulator(x.dtype), len(x.shape) - len(counts)

        def body(i: Shape, begins: Sequence[SymExpr], sizes: Sequence[SymExpr]) -> Stmt:
            total = Buffer("total", (), wide, "local")

            def add(*taps: SymVar) -> Stmt:
                place = (*i[:first], *(b + t for b, t in zip(begins, taps, strict=True)))
                return Store(total, (), Scalar(x[place]).cast(wide).value, "add")

            mean = Scalar(total[()]) / index(product(sizes)).cast(wide)
            summed = loops("rst", tuple(sizes), add)
            start, finish = Store(total, (), identity("add", wide)), Store(out, i, mean.cast(out.dtype).value)
            return Allocate(total, seq(start, summed, finish))

        return self.lower_windows(x, out, body, len(counts))

    def reference(self, x: Any, counts: tuple[int, ...]) -> Any:
        wide, axes = to_accumulator_dtype(x), tuple(range(-len(counts), 0))
        out = np.zeros((*x.shape[: x.ndim - len(counts)], *counts), wide.dtype)
        if out.size and not x.size:
            raise IndexError(f"{self.name}: a window has no elements: {x.shape}")
        for at, window in _windows(x, counts):
            out[at] = wide[window].mean(axis=axes)
        return out.astype(x.dtype)


@register
class AdaptiveMaxPool(_AdaptivePool):
    """Maximum over the windows that divide each of the last dimensions of x evenly into `counts` windows.

    Also the int64 index of the first maximum in the flattened last dimensions; of NaNs, the last one.
    """

    name = "adaptive_max_pool"
    accepts = (*dtypes.FLOATS, *dtypes.INTEGERS)

    def result_type(self, ty: TensorType) -> Type:
        return TupleType((ty, TensorType(ty.shape, "int64", ty.rank)))

    def lower(self, x: Buffer, counts: Shape, *, out: tuple[Buffer, Buffer]) -> Stmt:
        values, places = out
        first = len(x.shape) - len(counts)

        def body(i: Shape, begins: Sequence[SymExpr], sizes: Sequence[SymExpr]) -> Stmt:
            best, place = Buffer("best", (), x.dtype, "local"), Buffer("place", (), "int64", "local")

            def visit(*taps: SymVar) -> Stmt:
                at = tuple(b + t for b, t in zip(begins, taps, strict=True))
                value, flat = Scalar(x[i[:first] + at]), sym(0)
                for k, position in enumerate(at):
                    flat = flat * x.shape[first + k] + position
                is_better = value > Scalar(best[()])
                if dtypes.is_float(x.dtype):
                    is_better = is_better | value.unary("isnan")
                stores = seq(Store(best, (), value.value), Store(place, (), index(flat).value))
                return IfThenElse(is_better.value, stores)

            start, flat = list(i[:first]), sym(0)
            for k, begin in enumerate(begins):
                start.append(begin)
                flat = flat * x.shape[first + k] + begin
            initial = (Store(best, (), x[tuple(start)]), Store(place, (), index(flat).value))
            results = (Store(values, i, best[()]), Store(places, i, place[()]))
            visited = loops("rst", tuple(sizes), visit)
            return Allocate(best, Allocate(place, seq(*initial, visited, *results)))

        return self.lower_windows(x, values, body, len(counts))

    def reference(self, x: Any, counts: tuple[int, ...]) -> Any:
        outer = x.shape[: x.ndim - len(counts)]
        spatial = x.shape[x.ndim - len(counts) :]
        values, places = np.zeros((*outer, *counts), x.dtype), np.zeros((*outer, *counts), np.int64)
        if values.size and not x.size:
            raise IndexError(f"{self.name}: a window has no elements: {x.shape}")
        positions = np.arange(int(np.prod(spatial))).reshape(spatial)
        for at, window in _windows(x, counts):
            elements = x[window].reshape(*outer, positions[window].size)
            is_nan = np.isnan(elements) if x.dtype.kind == "f" else np.zeros(elements.shape, bool)
            last_nan = elements.shape[-1] - 1 - np.argmax(is_nan[..., ::-1], axis=-1)
            best = np.where(is_nan.any(axis=-1), last_nan, np.argmax(elements, axis=-1))
            values[at] = np.take_along_axis(elements, best[..., None], -1)[..., 0]
            places[at] = positions[window].reshape(-1)[best]
        return values, places
