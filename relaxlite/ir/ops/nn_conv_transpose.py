"""Transposed convolution: one convolution computes all output phases, which are then interleaved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import AttrValue, Call, Expr
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER, Shape
from relaxlite.ir.ops.linalg import emit_op, to_accumulator_dtype
from relaxlite.ir.ops.nn_conv import Convolution, Ints, to_channels_first, window_extent, window_extents
from relaxlite.ir.ops.scalars import Scalar, all_of, index, select
from relaxlite.ir.program import Buffer, Stmt, Value, compute
from relaxlite.ir.symbolic import SymExpr, ceildiv, sym
from relaxlite.ir.types import TensorType, Type


@register
class ConvTranspose(Convolution):
    """Transposed convolution: each element of x (n, c, spatial...) adds a scaled copy of w (c, oc/groups, kernel...).

    The size of the result is (size - 1) * stride + window + output_padding - pads. Position s * q + r of the result,
    with stride s, takes kernel taps u * s + r times x[q - u]: each of the s phases r is a convolution over x. One
    convolution computes all phases as channels, then the phases are interleaved. Phases with fewer taps are filled up
    with zero taps, so that an infinity in x under such a tap gives NaN.
    """

    name = "conv_transpose"
    operands = ("x", "w", "pads")
    attrs: ClassVar[Mapping[str, Attr]] = {**Convolution.attrs, "output_padding": Attr("ints", None)}

    def infer(self, x: Expr, w: Expr, pads: Expr, *, output_padding: Ints | None, groups: int, **window: Any) -> Type:
        xs, ws, padding = self.shapes(x, w, pads)
        dtype, count = self.common_dtype(x, w), len(xs) - 2
        self.check_channels(xs[1], ws[0], groups, ws[0])
        strides = self.per_axis(window["strides"], count, "strides")
        extents = window_extents(ws, self.per_axis(window["dilations"], count, "dilations"))
        extra = (0,) * count if output_padding is None else output_padding
        if len(extra) != count or any(e < 0 for e in extra):
            self.fail(f"output_padding must be {count} integers >= 0, got {extra}")
        full = [(xs[k + 2] - 1) * strides[k] + extents[k] + extra[k] for k in range(count)]
        dims = [full[k] - padding[k] - padding[count + k] for k in range(count)]
        return TensorType.of((xs[0], ws[1] * groups, *dims), dtype)

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, w, pads = call.args
        shape, padding = self.tensor(x).shape or (), self.shape(pads)
        dims = (self.tensor(call).shape or ())[2:]
        attrs: dict[str, Any] = dict(call.attrs)
        del attrs["output_padding"]
        strides = attrs["strides"] or (1,) * len(dims)
        filters = emit_op(bb, "phase_filters", w, **attrs)
        taps = self.tensor(filters).shape or ()
        begins, ends, starts = [], [], []
        for k, size in enumerate(dims):
            skipped, start = padding[k] // strides[k], padding[k] % strides[k]
            begin = taps[k + 2] - 1 - skipped
            windows = ceildiv(start + size, strides[k])
            begins.append(begin)
            ends.append(windows + taps[k + 2] - 1 - shape[k + 2] - begin)
            starts.append(start)
        phases = emit_op(bb, "conv", x, filters, (*begins, *ends), groups=attrs["groups"])
        return get_op("phase_interleave")(phases, tuple(starts), dims, strides=strides)

    def reference(
        self, x: Any, w: Any, pads: Ints, *, strides: Ints | None, dilations: Ints | None, groups: int,
        output_padding: Ints | None,
    ) -> Any:  # fmt: skip
        count = x.ndim - 2
        ones, zeros = (1,) * count, (0,) * count
        strides, dilations, extra = strides or ones, dilations or ones, output_padding or zeros
        extents = [(w.shape[k + 2] - 1) * dilations[k] + 1 for k in range(count)]
        dims = [(x.shape[k + 2] - 1) * strides[k] + extents[k] + extra[k] for k in range(count)]
        taps = [-(-extents[k] // strides[k]) * strides[k] for k in range(count)]  # equally many for each phase
        grouped = to_accumulator_dtype(x).reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
        kernels, leading = (
            to_accumulator_dtype(w).reshape(groups, w.shape[0] // groups, *w.shape[1:]),
            (slice(None),) * 3,
        )
        filters = np.zeros((*kernels.shape[:3], *taps), kernels.dtype)
        filters[leading + tuple(slice(0, e, d) for e, d in zip(extents, dilations, strict=True))] = kernels
        sizes = [max(dims[k], (x.shape[k + 2] - 1) * strides[k] + taps[k]) for k in range(count)]
        result = np.zeros((x.shape[0], groups, w.shape[1], *sizes), grouped.dtype)
        for tap in np.ndindex(*taps):
            ends = [tap[k] + x.shape[k + 2] * strides[k] for k in range(count)]
            window = tuple(slice(b, e, s) for b, e, s in zip(tap, ends, strides, strict=True))
            result[leading + window] += np.einsum("gio,ngi...->ngo...", filters[leading + tap], grouped)
        result = result.reshape(x.shape[0], w.shape[1] * groups, *sizes)
        crop = tuple(slice(pads[k], dims[k] - pads[count + k]) for k in range(count))
        return result[(slice(None),) * 2 + crop].astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        shape = ("float32", "float32", "shape")
        yield Sample((("n", 3, "h", "w"), (3, 2, 2, 2), (0,) * 4), {"strides": (2, 2)}, shape)
        yield Sample((("n", 2, "h", "w"), (2, 3, 4, 4), (1, 1, 1, 1)), {"strides": (2, 2)}, shape)
        yield Sample((("n", 2, "h"), (2, 2, 3), (1, 1)), {"strides": (2,), "output_padding": (1,)}, shape)
        yield Sample((("n", 4, "h"), (4, 2, 3), (1, 0)), {"strides": (3,), "dilations": (2,), "groups": 2}, shape)
        yield Sample((("n", 2, "h", 3), (2, 1, 3, 1), (1, 0, 1, 0)), dtypes=shape)
        yield Sample((("n", 2, "h"), (2, 2, 1), (0, 0)), {"strides": (2,), "output_padding": (1,)}, shape)


@register
class PhaseFilters(Op):
    """Rearrange filters of `conv_transpose` for the convolution that computes every phase.

    w (c, oc / groups, kernel...) becomes (oc * phases, c / groups, taps...), with reversed taps and 0 for missing ones.
    """

    name = "phase_filters"
    operands = ("w",)
    attrs: ClassVar[Mapping[str, Attr]] = Convolution.attrs

    def infer(self, w: Expr, *, strides: Ints | None, dilations: Ints | None, groups: int) -> Type:
        ty = self.tensor(w, "w")
        shape = ty.shape or ()
        count = len(shape) - 2
        strides, dilations = strides or (1,) * count, dilations or (1,) * count
        taps = [ceildiv(e, s) for e, s in zip(window_extents(shape, dilations), strides, strict=True)]
        return TensorType.of((shape[1] * (groups * math.prod(strides)), shape[0] // groups, *taps), ty.dtype)

    def lower(self, w: Buffer, *, out: Buffer, strides: Ints | None, dilations: Ints | None, groups: int) -> Stmt:
        count = len(w.shape) - 2
        strides, dilations = strides or (1,) * count, dilations or (1,) * count

        def value(m: SymExpr, ic: SymExpr, *taps: SymExpr) -> Value:
            channel, phase = m // math.prod(strides), m % math.prod(strides)
            where: list[SymExpr] = []
            conditions = []
            for k in reversed(range(count)):
                kernel, dilation = w.shape[k + 2], dilations[k]
                position = (out.shape[k + 2] - 1 - taps[k]) * strides[k] + phase % strides[k]
                phase = phase // strides[k]
                where.insert(0, position // dilation)
                if dilation != 1:
                    conditions.append(index(position % dilation).equals(0))
                if not PROVER.can_prove_equal(out.shape[k + 2] * strides[k], window_extent(kernel, dilation)):
                    conditions.append(index(where[0]) < index(kernel))
            at = (channel // w.shape[1] * out.shape[1] + ic, channel % w.shape[1], *where)
            result = Scalar(w[at])
            return select(all_of(conditions), result, 0).value if conditions else result.value

        return compute(out, value)

    def reference(self, w: Any, *, strides: Ints | None, dilations: Ints | None, groups: int) -> Any:
        count = w.ndim - 2
        strides, dilations = strides or (1,) * count, dilations or (1,) * count
        extents = [(w.shape[k + 2] - 1) * dilations[k] + 1 for k in range(count)]
        taps = [-(-extents[k] // strides[k]) for k in range(count)]
        dilated = np.zeros((*w.shape[:2], *(t * s for t, s in zip(taps, strides, strict=True))), w.dtype)
        window = tuple(slice(0, e, d) for e, d in zip(extents, dilations, strict=True))
        dilated[(slice(None),) * 2 + window] = w
        split = [n for t, s in zip(taps, strides, strict=True) for n in (t, s)]
        parts = dilated.reshape(groups, w.shape[0] // groups, w.shape[1], *split)
        tap_axes, phase_axes = tuple(range(3, parts.ndim, 2)), tuple(range(4, parts.ndim, 2))
        parts = np.flip(parts, tap_axes).transpose(0, 2, *phase_axes, 1, *tap_axes)
        channels = groups * w.shape[1] * math.prod(strides)  # not -1, which is undetermined for empty w
        return np.ascontiguousarray(parts.reshape(channels, w.shape[0] // groups, *taps))

    def samples(self) -> Iterable[Sample]:
        yield Sample(((4, 3, 4, 3),), {"strides": (2, 2)})
        yield Sample(((4, 2, 3),), {"strides": (2,), "dilations": (3,), "groups": 2})
        yield Sample((("c", 2, "k"),), {"strides": (2,)})


@register
class PhaseInterleave(Op):
    """Interleave the phases of `conv_transpose`: out[n, c, s * q + r - start] = x[n, c * phases + r, q] per axis.

    channels_last: out[n, s * q + r - start, c] = x[n, q, r * channels + c], with the channels of a phase contiguous.
    """

    name = "phase_interleave"
    operands = ("x", "starts", "sizes")
    attrs: ClassVar[Mapping[str, Attr]] = {"strides": Attr("ints"), "channels_last": Attr("bool", False)}

    def infer(self, x: Expr, starts: Expr, sizes: Expr, *, strides: Ints, channels_last: bool) -> Type:
        ty, dims = self.tensor(x, "x"), self.shape(sizes, "sizes")
        shape = ty.shape or ()
        channels = shape[-1 if channels_last else 1] // math.prod(strides)
        return TensorType.of((shape[0], *dims, channels) if channels_last else (shape[0], channels, *dims), ty.dtype)

    def lower(self, x: Buffer, starts: Shape, sizes: Shape, *, out: Buffer, strides: Ints, channels_last: bool) -> Stmt:
        def value(*i: SymExpr) -> Value:
            n, c, *o = to_channels_first(i) if channels_last else i
            channel = sym(0) if channels_last else c
            for k, stride in enumerate(strides):
                channel = channel * stride + (o[k] + starts[k]) % stride
            where = [(o[k] + starts[k]) // stride for k, stride in enumerate(strides)]
            return x[(n, *where, channel * out.shape[-1] + c) if channels_last else (n, channel, *where)]

        return compute(out, value)

    def reference(self, x: Any, starts: Ints, sizes: Ints, *, strides: Ints, channels_last: bool) -> Any:
        count = len(strides)
        if channels_last:
            phases = math.prod(strides)
            by_phase = x.reshape(*x.shape[:-1], phases, x.shape[-1] // phases)
            first = np.moveaxis(np.moveaxis(by_phase, -2, -1).reshape(x.shape), -1, 1)
            result = self.reference(first, starts, sizes, strides=strides, channels_last=False)
            return np.ascontiguousarray(np.moveaxis(result, 1, -1))
        parts = x.reshape(x.shape[0], x.shape[1] // math.prod(strides), *strides, *x.shape[2:])
        order = [axis for k in range(count) for axis in (2 + count + k, 2 + k)]
        dims = [x.shape[k + 2] * strides[k] for k in range(count)]
        full = parts.transpose(0, 1, *order).reshape(*parts.shape[:2], *dims)
        crop = tuple(slice(starts[k], starts[k] + sizes[k]) for k in range(count))
        return np.ascontiguousarray(full[(slice(None),) * 2 + crop])

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 8, 3, 4), (1, 0), (5, 6)), {"strides": (2, 2)}, ("float32", "shape", "shape"))
        yield Sample((("n", 6, 2), (1,), (4,)), {"strides": (3,)}, ("float32", "shape", "shape"))
        last: dict[str, AttrValue] = {"strides": (2, 2), "channels_last": True}
        yield Sample((("n", 3, 4, 20), (1, 0), (5, 6)), last, ("float32", "shape", "shape"))
