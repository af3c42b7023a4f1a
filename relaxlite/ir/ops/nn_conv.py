"""Convolutions over any number of spatial dimensions, channels first (N C spatial...) or last (N spatial... C).

There is no bias: an `add` after a convolution is fused. Padding is a shape operand (begins, then ends), so that "same"
padding of a symbolic size is an expression of that size. Padding decomposes into a `pad`, which leaves a loop nest
without conditions, except for small depthwise windows, where a padded copy would take as long as the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import AttrValue, Call, Expr
from relaxlite.ir.op import Attr, Op, Sample, register
from relaxlite.ir.ops.broadcast import PROVER, Shape, format_shape
from relaxlite.ir.ops.linalg import (
    PRODUCT_DTYPES,
    accumulate,
    accumulator,
    emit_op,
    emit_reshape,
    equality_checks,
    to_accumulator_dtype,
)
from relaxlite.ir.ops.scalars import Scalar, all_of, index, select
from relaxlite.ir.program import Buffer, Stmt, seq
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.ir.types import TensorType, Type

Ints = tuple[int, ...]
MAX_TAPS = 128  # most kernel taps of a small window
MAX_STRIDE = 2  # largest stride of small windows along the last dimension


def window_extent(kernel: SymExpr | int, dilation: int) -> SymExpr:
    """Number of elements that a dilated window spans."""
    return (sym(kernel) - 1) * dilation + 1


LAYOUTS = ("first", "last", "first_to_last")


def to_channels_first(dims: Shape) -> Shape:
    """Reorder (n, spatial..., c) to (n, c, spatial...)."""
    return (dims[0], dims[-1], *dims[1:-1])


def to_channels_last(dims: Shape) -> Shape:
    """Reorder (n, c, spatial...) to (n, spatial..., c)."""
    return (dims[0], *dims[2:], dims[1])


def filters_to_channels_first(dims: Shape) -> Shape:
    """Reorder (kernel..., c, oc) to (oc, c, kernel...)."""
    return (dims[-1], dims[-2], *dims[:-2])


def filters_to_channels_last(dims: Shape) -> Shape:
    """Reorder (oc, c, kernel...) to (kernel..., c, oc)."""
    return (*dims[2:], dims[1], dims[0])


def is_zero_padding(pads: Shape) -> bool:
    """Whether all pads are known to be 0."""
    return all(as_int(p) == 0 for p in pads)


def is_small_depthwise(w: Shape, strides: Ints | None) -> bool:
    """Whether filters (oc, c / groups, kernel...) are small depthwise windows (passes/products/windows.py)."""
    taps = [as_int(size) for size in w[2:]]
    has_few = None not in taps and math.prod(size or 0 for size in taps) <= MAX_TAPS
    return as_int(w[1]) == 1 and has_few and (strides or (1,))[-1] <= MAX_STRIDE


class Convolution(Op):
    """Base of the convolutions: attributes and their checks."""

    attrs: ClassVar[Mapping[str, Attr]] = {
        "strides": Attr("ints", None), "dilations": Attr("ints", None), "groups": Attr("int", 1),
    }  # fmt: skip

    def shapes(self, x: Expr, w: Expr, pads: Expr, layout: str = "first") -> tuple[Shape, Shape, Shape]:
        """Shapes of x and w, channels first, and values of pads; fails if ranks disagree."""
        xs, ws, padding = self.tensor(x, "x").shape or (), self.tensor(w, "w").shape or (), self.shape(pads, "pads")
        if len(xs) < 3 or len(ws) != len(xs):
            self.fail(f"x must be (n, c, spatial...) and w of the same rank, got x {x.ty} and w {w.ty}")
        if len(padding) != 2 * (len(xs) - 2):
            self.fail(f"pads must be {len(xs) - 2} begins, then as many ends, got {format_shape(padding)}")
        return xs, ws, padding

    def per_axis(self, values: Ints | None, count: int, what: str) -> Ints:
        """Strides or dilations per axis, 1 by default; fails if they are not `count` positive integers."""
        full_values = (1,) * count if values is None else values
        if len(full_values) != count or any(v < 1 for v in full_values):
            self.fail(f"{what} must be {count} positive integers, got {full_values}")
        return full_values

    def check_channels(self, channels: SymExpr, expected: SymExpr, groups: int, filters: SymExpr) -> None:
        if groups < 1 or PROVER.can_prove_ne(filters % groups, 0):
            self.fail(f"groups={groups} must be positive and divide the {filters} channels of w")
        if PROVER.can_prove_ne(channels, expected):
            self.fail(f"x has {channels} channels, but w takes {expected} (groups={groups})")

    def common_dtype(self, x: Expr, w: Expr) -> str:
        left, right = self.tensor(x).dtype, self.tensor(w).dtype
        if left != right or left == "bool":
            self.fail(f"x and w must have one numeric dtype, got {left} and {right}; cast one of them")
        return left

    def result_shape(
        self, x: Expr, w: Expr, pads: Expr, *, strides: Ints | None, dilations: Ints | None, groups: int, **layout: str
    ) -> Shape:
        """Infer the result shape (n, c, spatial...); fails if a window is known to be larger than the padded x."""
        xs, ws, padding = self.shapes(x, w, pads, **layout)
        self.check_channels(xs[1], ws[1] * groups, groups, ws[0])
        count = len(xs) - 2
        strides = self.per_axis(strides, count, "strides")
        dims = []
        for k, extent in enumerate(window_extents(ws, self.per_axis(dilations, count, "dilations"))):
            dim = (xs[k + 2] + padding[k] + padding[count + k] - extent) // strides[k] + 1
            if PROVER.can_prove_lt(dim, 0):
                self.fail(f"spatial dimension {k} of x has size {xs[k + 2]}, less than the window of {extent}")
            dims.append(dim)
        return (xs[0], ws[0], *dims)


class ConvolutionWithLayout(Convolution):
    """Convolution with a layout attribute.

    "first": x (n, c, spatial...), w (oc, c / groups, kernel...). "last": x and result (n, spatial..., c), w (kernel...,
    c / groups, oc). "first_to_last": as "last", but x is (n, c, spatial...).
    """

    attrs: ClassVar[Mapping[str, Attr]] = {**Convolution.attrs, "layout": Attr("str", "first", LAYOUTS)}

    def shapes(self, x: Expr, w: Expr, pads: Expr, layout: str = "first") -> tuple[Shape, Shape, Shape]:
        """Shapes of x and w, reordered to channels first, and values of pads; fails if ranks disagree."""
        xs, ws, padding = super().shapes(x, w, pads)
        if layout == "first":
            return xs, ws, padding
        return to_channels_first(xs) if layout == "last" else xs, filters_to_channels_first(ws), padding

    def result(self, dtype: str, x: Expr, w: Expr, pads: Expr, *, layout: str, **window: Any) -> TensorType:
        """Result type in the layout."""
        shape = self.result_shape(x, w, pads, layout=layout, **window)
        return TensorType.of(shape if layout == "first" else to_channels_last(shape), dtype)

    def reference_convolution(self, x: Any, w: Any, pads: Ints, *, layout: str, **window: Any) -> Any:
        """Compute the convolution in NumPy, in the dtype of x."""
        if layout == "last":
            x = np.moveaxis(x, -1, 1)
        if layout != "first":
            w = np.moveaxis(w, (-1, -2), (0, 1))
        result = correlate(x, w, pads, **window)
        return result if layout == "first" else np.ascontiguousarray(np.moveaxis(result, 1, -1))


@register
class Conv(ConvolutionWithLayout):
    """Convolution (cross-correlation) of x (n, c, spatial...) with w (oc, c / groups, kernel...).

    pads: begins, then ends, of the spatial dimensions. Half-precision floats accumulate in float32. `layout` "last": x
    (n, spatial..., c), w (kernel..., c / groups, oc), result as x; "first_to_last": the same, but x channels first.
    """

    name = "conv"
    operands = ("x", "w", "pads")

    def infer(self, x: Expr, w: Expr, pads: Expr, **attrs: Any) -> Type:
        return self.result(self.common_dtype(x, w), x, w, pads, **attrs)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, w, pads = call.args
        values = self.shape(pads)
        attrs: dict[str, Any] = dict(call.attrs)
        is_last, filters = attrs["layout"] == "last", self.tensor(w).shape or ()
        if is_zero_padding(values) or (
            attrs["groups"] != 1 and (is_last or is_small_depthwise(filters, attrs["strides"]))
        ):
            return None
        padded = pad_spatial(bb, x, values, last=is_last)
        return self(padded, w, (0,) * len(values), **attrs)

    def lower(self, x: Buffer, w: Buffer, pads: Shape, *, out: Buffer, layout: str, **window: Any) -> Stmt:
        wide = accumulator(out.dtype)

        def term(a: Scalar, b: Scalar, _: SymExpr) -> Scalar:
            return a.cast(wide) * b.cast(wide)

        return lower_windows(self.name, x, w, out, window, term, layout, pads)

    def reference(self, x: Any, w: Any, pads: Ints, **attrs: Any) -> Any:
        return self.reference_convolution(to_accumulator_dtype(x), to_accumulator_dtype(w), pads, **attrs).astype(
            x.dtype
        )

    def samples(self) -> Iterable[Sample]:
        shape = ("float32", "float32", "shape")
        half = ("float16", "float16", "shape")
        yield Sample((("n", 3, "h", "w"), (4, 3, 1, 1), (0, 0, 0, 0)), dtypes=shape)
        yield Sample((("n", 2, "h", "w"), (4, 2, 3, 3), (1, 1, 1, 1)), {"strides": (2, 1)}, shape)
        yield Sample((("n", 4, "h", 9), (6, 2, 2, 3), (1, 2, 0, 1)), {"groups": 2, "dilations": (1, 2)}, shape)
        yield Sample((("n", 3, "h", "w"), (3, 1, 3, 3), (1, 1, 1, 1)), {"groups": 3}, shape)
        yield Sample((("n", "c", "h"), (2, "c", 1), ("p", "p")), dtypes=shape)
        yield Sample(((1, 2, "d", "h", "w"), (3, 2, 2, 1, 3), (1, 0, 1, 0, 0, 1)), {"strides": (1, 2, 2)}, shape)
        yield Sample((("n", 2, "l"), (3, 2, 3), (1, 1)), dtypes=half, tolerance=4e-3)
        last: dict[str, AttrValue] = {"layout": "last"}
        yield Sample((("n", "h", "w", 5), (1, 1, 5, 70), (0, 0, 0, 0)), last, shape)
        yield Sample((("n", "h", "w", 2), (3, 3, 2, 20), (1, 1, 1, 1)), {**last, "strides": (2, 1)}, shape)
        yield Sample((("n", "h", 9, 4), (2, 3, 2, 6), (1, 2, 0, 1)), {**last, "groups": 2, "dilations": (1, 2)}, shape)
        yield Sample((("n", "h", "w", 19), (3, 3, 1, 19), (1, 1, 1, 1)), {**last, "groups": 19}, shape)
        yield Sample(
            (("n", "h", "w", 16), (5, 3, 1, 16), (2, 2, 1, 1)), {**last, "groups": 16, "strides": (2, 2)}, shape
        )
        yield Sample((("n", "l", "c"), (3, "c", "m"), (1, 1)), last, shape)
        yield Sample(
            ((1, "d", "h", "w", 2), (2, 1, 3, 2, 3), (1, 0, 1, 0, 0, 1)), {**last, "strides": (1, 2, 2)}, shape
        )
        mixed: dict[str, AttrValue] = {"layout": "first_to_last", "strides": (2, 2)}
        yield Sample((("n", 3, "h", "w"), (3, 3, 3, 20), (1, 1, 1, 1)), mixed, shape)
        yield Sample((("n", "l", 2), (3, 2, 3), (1, 1)), last, half, tolerance=4e-3)


@register
class ConvInteger(ConvolutionWithLayout):
    """Integer convolution conv(x - x_zero, w - w_zero) of int8, uint8 or int16 in int32; sums wrap.

    Padding has the value x_zero. x_zero is a scalar, w_zero a scalar or one value per channel of the result; w_zero
    requires x_zero. `layout`: see `conv`.
    """

    name = "conv_integer"
    operands = ("x", "w", "pads", "x_zero?", "w_zero?")

    def infer(self, x: Expr, w: Expr, pads: Expr, *zeros: Expr, **window: Any) -> Type:
        for operand, name in ((x, "x"), (w, "w")):
            if self.tensor(operand, name).dtype not in PRODUCT_DTYPES:
                self.fail(f"{name} must be int8, uint8 or int16, got {operand.ty}")
        for zero, operand, name in zip(zeros, (x, w), ("x_zero", "w_zero"), strict=False):
            ty, like = self.tensor(zero, name), self.tensor(operand)
            if ty.dtype != like.dtype or len(ty.shape or ()) > 1:
                self.fail(f"{name} must be a scalar or a vector of {like.dtype}, got {ty}")
        return self.result("int32", x, w, pads, **window)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, w, pads, *zeros = call.args
        values = self.shape(pads)
        if is_zero_padding(values):
            return None
        attrs: dict[str, Any] = dict(call.attrs)
        value = emit_reshape(bb, zeros[0], ()) if zeros else None
        padded = pad_spatial(bb, x, values, value, last=attrs["layout"] == "last")
        return self(padded, w, (0,) * len(values), *zeros, **attrs)

    def lower(self, x: Buffer, w: Buffer, pads: Shape, *zeros: Buffer, out: Buffer, layout: str, **window: Any) -> Stmt:
        channels = out.shape[-1 if layout == "last" else 1]
        counts = [sym(1) if k == 0 or not z.shape or as_int(z.shape[0]) == 1 else channels for k, z in enumerate(zeros)]

        def term(a: Scalar, b: Scalar, oc: SymExpr) -> Scalar:
            pair = [a.cast("int32"), b.cast("int32")]
            for k, (zero, count) in enumerate(zip(zeros, counts, strict=True)):
                at = (oc if count is channels else sym(0),) * len(zero.shape)
                pair[k] = pair[k] - Scalar(zero[at]).cast("int32")
            return pair[0] * pair[1]

        pairs = [(zero.shape[0], count) for zero, count in zip(zeros, counts, strict=True) if zero.shape]
        checks = equality_checks("conv_integer: x has one zero point, w one or one per channel", *pairs)
        return seq(*checks, lower_windows(self.name, x, w, out, window, term, layout))

    def reference(self, x: Any, w: Any, pads: Ints, x_zero: Any = 0, w_zero: Any = 0, **attrs: Any) -> Any:
        zeros = np.asarray(w_zero, np.int32)
        if attrs["layout"] == "first":
            zeros = zeros.reshape(-1, *(1,) * (w.ndim - 1))
        return self.reference_convolution(
            x.astype(np.int32) - np.int32(np.reshape(x_zero, ())), w - zeros, pads, **attrs
        )

    def samples(self) -> Iterable[Sample]:
        kinds = ("uint8", "int8", "shape", "uint8", "int8")
        yield Sample((("n", 2, "h", "w"), (3, 2, 3, 3), (1, 1, 1, 1)), dtypes=kinds[:3])
        yield Sample((("n", 2, "h"), (4, 1, 3), (1, 1), ()), {"groups": 2, "strides": (2,)}, kinds[:4])
        yield Sample((("n", 2, "h"), (4, 2, 1), (0, 0), (1,), (4,)), dtypes=kinds)
        last: dict[str, AttrValue] = {"layout": "last"}
        yield Sample((("n", "h", "w", 4), (3, 3, 4, 20), (1, 1, 1, 1)), {**last, "strides": (2, 1)}, kinds[:3])
        yield Sample((("n", "h", "w", 8), (1, 1, 8, 70), (0, 0, 0, 0), (), (70,)), last, kinds)
        yield Sample((("n", "l", 12), (3, 12, 9), (2, 2), ()), {**last, "dilations": (2,)}, kinds[:4])
        yield Sample((("n", "l", 6), (3, 6, 9), (2, 2)), last, ("int16", "int16", "shape"))


def window_extents(w: Shape, dilations: Ints) -> list[SymExpr]:
    """`window_extent` of each spatial dimension of filters (oc, c, kernel...)."""
    return [window_extent(kernel, dilation) for kernel, dilation in zip(w[2:], dilations, strict=True)]


def pad_spatial(bb: BlockBuilder, x: Expr, pads: Shape, value: Expr | None = None, *, last: bool = False) -> Expr:
    """Pad the spatial dimensions of x (begins, then ends) by a scalar, 0 if None; `last`: channels last."""
    count = len(pads) // 2
    before, after = (sym(0), sym(0), *pads[:count]), (sym(0), sym(0), *pads[count:])
    return emit_op(
        bb, "pad", x, to_channels_last(before) if last else before, to_channels_last(after) if last else after, value
    )


def lower_windows(
    name: str,
    x: Buffer,
    w: Buffer,
    out: Buffer,
    window: Mapping[str, Any],
    term: Callable[[Scalar, Scalar, SymExpr], Scalar],
    layout: str = "first",
    pads: Shape = (),
) -> Stmt:
    """Build out[n, oc, o...] = sum over channels and taps of term(x element, w element, oc), with 0 for padding.

    There are no loops of extent 1, so that a 1x1 convolution is a matrix product and a depthwise one loops over taps
    only. The innermost reduction loop is over the contiguous dimension of x.
    """
    count, groups = len(x.shape) - 2, window["groups"]
    strides, dilations = window["strides"] or (1,) * count, window["dilations"] or (1,) * count
    begins, ends = pads[:count] or (sym(0),) * count, pads[count:] or (sym(0),) * count
    xs = to_channels_first(x.shape) if layout == "last" else x.shape
    ws = w.shape if layout == "first" else filters_to_channels_first(w.shape)
    order = range(1, count + 2) if layout == "first" else (*range(2, count + 2), 1)
    reduced = [axis for axis in order if as_int(ws[axis]) != 1]

    def value(*i: SymVar) -> Scalar:
        n, oc, *o = i[: 2 + count] if layout == "first" else to_channels_first(i[: 2 + count])
        filter_index = [sym(0)] * (count + 2)
        for axis, at in zip(reduced, i[2 + count :], strict=True):
            filter_index[axis] = at
        channel = filter_index[1] if groups == 1 else oc // (ws[0] // groups) * ws[1] + filter_index[1]
        where = [o[k] * strides[k] + filter_index[2 + k] * dilations[k] - begins[k] for k in range(count)]
        inside = [index(at) >= 0 for at, begin in zip(where, begins, strict=True) if as_int(begin) != 0]
        inside += [index(at) < s for at, s, end in zip(where, xs[2:], ends, strict=True) if as_int(end) != 0]
        in_x, in_w = (n, channel, *where), (oc, *filter_index[1:])
        element_x = Scalar(x[to_channels_last(in_x) if layout == "last" else in_x])
        element_w = w[in_w if layout == "first" else filters_to_channels_last(in_w)]
        return term(select(all_of(inside), element_x, 0) if inside else element_x, Scalar(element_w), oc)

    pairs = [(xs[1], ws[1] * groups), (ws[0] % groups, sym(0))]
    checks = equality_checks(f"{name}: the channels of x and w do not fit", *pairs)
    return seq(*checks, accumulate(out, [ws[axis] for axis in reduced], value))


def correlate(x: Any, w: Any, pads: Ints, *, strides: Ints | None, dilations: Ints | None, groups: int) -> Any:
    """Compute a channels-first convolution in NumPy, as one matrix product per kernel tap."""
    count = x.ndim - 2
    strides, dilations = strides or (1,) * count, dilations or (1,) * count
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:count], pads[count:], strict=True)])
    dims = [(x.shape[k + 2] - (w.shape[k + 2] - 1) * dilations[k] - 1) // strides[k] + 1 for k in range(count)]
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    filters = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    result = np.zeros((x.shape[0], groups, filters.shape[1], *dims), x.dtype)
    for tap in np.ndindex(*w.shape[2:]):
        begins = [tap[k] * dilations[k] for k in range(count)]
        ends = [begins[k] + dims[k] * strides[k] for k in range(count)]
        window = tuple(slice(b, e, s) for b, e, s in zip(begins, ends, strides, strict=True))
        slice_of_x = grouped[(slice(None),) * 3 + window]
        result += np.einsum("goi,ngi...->ngo...", filters[(slice(None),) * 3 + tap], slice_of_x)
    return result.reshape(x.shape[0], w.shape[0], *dims)
