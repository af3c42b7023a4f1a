"""Normalizations of x (n, c, spatial...) per channel, group or batch, and over channels or chosen axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, ShapeValue
from relaxlite.ir.op import Attr, Op, Sample, get_op, register
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.ops.linalg import accumulator, emit_op, emit_reshape, equality_checks, to_accumulator_dtype
from relaxlite.ir.ops.nn_norm import (
    RowBuilder,
    apply_in_accumulator,
    mean_over,
    row_program,
    scale_and_shift,
    standardize,
    standardize_array,
)
from relaxlite.ir.ops.reduce import composed_in_float32, normalize_axes
from relaxlite.ir.ops.scalars import Scalar, identity, index, select
from relaxlite.ir.program import Buffer, Stmt, Value, reduce, seq
from relaxlite.ir.symbolic import SymVar, product, sym
from relaxlite.ir.types import Type


class _ChannelNorm(Op):
    """Base of normalizations of x (n, c, spatial...) with per-channel weights (c,)."""

    attrs: ClassVar[Mapping[str, Attr]] = {"epsilon": Attr("float", 1e-5)}

    def infer(self, x: Expr, *weights: Expr, **attrs: Any) -> Type:
        ty = self.tensor(x, "x")
        shape = ty.shape or ()
        if len(shape) < 2 or not dtypes.is_float(ty.dtype):
            self.fail(f"x must be (n, c, spatial...) of a float dtype, got {ty}")
        for weight, name in zip(weights, self.operands[1:], strict=True):
            wt = self.tensor(weight, name)
            if len(wt.shape or ()) != 1 or PROVER.can_prove_ne((wt.shape or shape)[0], shape[1]):
                self.fail(f"{name} must have one value for each of the {shape[1]} channels of x, got {wt}")
            if wt.dtype != ty.dtype:
                self.fail(f"{name} must have the dtype of x, {ty.dtype}, got {wt.dtype}; cast it")
        return ty


def _per_channel(bb: BlockBuilder, weight: Expr, rank: int) -> Expr:
    """Reshape (c,) to (c, 1, ...), which broadcasts over (n, c, spatial...)."""
    (channels,) = weight.ty.shape  # type: ignore[union-attr, misc]
    return emit_reshape(bb, weight, (channels, *(sym(1),) * (rank - 2)))


def _channel_values(weight: Any, x: Any) -> Any:
    """Reshape an array (c,) to (c, 1, ...) and convert it to its accumulator dtype."""
    return to_accumulator_dtype(weight).reshape(-1, *(1,) * (x.ndim - 2))


@register
class InstanceNorm(_ChannelNorm):
    """Instance normalization: standardize each channel of each sample, then scale and shift per channel."""

    name = "instance_norm"
    operands = ("x", "scale", "bias")

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, scale, bias = call.args
        shape = self.tensor(x).shape or ()
        if len(shape) == 3:
            return None
        attrs: dict[str, Any] = dict(call.attrs)
        rows = emit_reshape(bb, x, (*shape[:2], product(shape[2:])))
        return get_op("reshape")(bb.emit(self(rows, scale, bias, **attrs)), ShapeValue(shape))

    def lower(self, x: Buffer, scale: Buffer, bias: Buffer, *, out: Buffer, epsilon: float) -> Stmt:
        def stages(row: RowBuilder) -> None:
            value = standardize(row, epsilon)
            row.write(lambda j: scale_and_shift(row, value(j), scale, bias, row.i[1:]))

        pairs = [(x.shape[1], weight.shape[0]) for weight in (scale, bias)]
        checks = equality_checks("instance_norm: channels of x and of its weights", *pairs)
        return seq(*checks, row_program(x, out, stages))

    def reference(self, x: Any, scale: Any, bias: Any, *, epsilon: float) -> Any:
        spatial = tuple(range(2, x.ndim))
        return apply_in_accumulator(
            lambda v: standardize_array(v, spatial, epsilon) * _channel_values(scale, x) + _channel_values(bias, x), x
        )

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 3, "h"), (3,), (3,)), tolerance=1e-4)
        yield Sample((("n", "c", "h", "w"), ("c",), ("c",)), {"epsilon": 0.01}, tolerance=1e-4)


@register
class GroupNorm(_ChannelNorm):
    """Group normalization: standardize each group of channels of each sample, then scale and shift per channel."""

    name = "group_norm"
    operands = ("x", "scale", "bias")
    attrs: ClassVar[Mapping[str, Attr]] = {"groups": Attr("int"), "epsilon": Attr("float", 1e-5)}

    def infer(self, x: Expr, *weights: Expr, **attrs: Any) -> Type:
        ty, groups = super().infer(x, *weights), attrs["groups"]
        channels = (self.tensor(x).shape or ())[1]
        if groups < 1 or PROVER.can_prove_ne(channels % groups, 0):
            self.fail(f"groups={groups} must be positive and divide the {channels} channels of x")
        return ty

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, scale, bias = call.args
        ty = self.tensor(x)
        shape, groups = ty.shape or (), int(call.attrs["groups"])  # type: ignore[arg-type]
        rows = emit_reshape(bb, x, (shape[0], sym(groups), shape[1] // groups * product(shape[2:])))
        unit = [Constant.of(np.full(groups, value), ty.dtype) for value in (1, 0)]
        normal = emit_op(bb, "instance_norm", rows, *unit, epsilon=call.attrs["epsilon"])
        scaled = emit_op(bb, "multiply", emit_reshape(bb, normal, shape), _per_channel(bb, scale, len(shape)))
        return get_op("add")(scaled, _per_channel(bb, bias, len(shape)))

    def reference(self, x: Any, scale: Any, bias: Any, *, groups: int, epsilon: float) -> Any:
        def normalize(v: Any) -> Any:
            rows = v.reshape(v.shape[0], groups, v.shape[1] // groups, *v.shape[2:])
            normal = standardize_array(rows, tuple(range(2, rows.ndim)), epsilon).reshape(v.shape)
            return normal * _channel_values(scale, x) + _channel_values(bias, x)

        return apply_in_accumulator(normalize, x)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", 4, "h", "w"), (4,), (4,)), {"groups": 2}, tolerance=1e-4)
        yield Sample((("n", 3, "h"), (3,), (3,)), {"groups": 3}, tolerance=1e-4)


@register
class BatchNorm(_ChannelNorm):
    """Batch normalization for inference: (x - mean) / sqrt(var + epsilon) * scale + bias per channel.

    Decomposes so that constant operands fold into one multiply and one add.
    """

    name = "batch_norm"
    operands = ("x", "scale", "bias", "mean", "var")

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        x, *weights = call.args
        ty = self.tensor(x)
        wide, rank = accumulator(ty.dtype), len(ty.shape or ())
        scale, bias, mean, var = (w if wide == ty.dtype else emit_op(bb, "cast", w, dtype=wide) for w in weights)
        root = emit_op(bb, "sqrt", emit_op(bb, "add", var, Constant.of(call.attrs["epsilon"], wide)))
        factor = emit_op(bb, "divide", scale, root)
        offset = emit_op(bb, "subtract", bias, emit_op(bb, "multiply", mean, factor))
        if wide != ty.dtype:
            factor, offset = (emit_op(bb, "cast", w, dtype=ty.dtype) for w in (factor, offset))
        scaled = emit_op(bb, "multiply", x, _per_channel(bb, factor, rank))
        return get_op("add")(scaled, _per_channel(bb, offset, rank))

    def reference(self, x: Any, scale: Any, bias: Any, mean: Any, var: Any, *, epsilon: float) -> Any:
        def normalize(v: Any) -> Any:
            normal = (v - _channel_values(mean, x)) / np.sqrt(_channel_values(var, x) + v.dtype.type(epsilon))
            return normal * _channel_values(scale, x) + _channel_values(bias, x)

        return apply_in_accumulator(normalize, x)

    def samples(self) -> Iterable[Sample]:
        positive = {4: lambda shape, rng: rng.uniform(0.5, 2, shape).astype(np.float32)}
        yield Sample((("n", 3, "h", "w"), *((3,),) * 4), make=positive, tolerance=1e-4)
        yield Sample((("n", "c"), *(("c",),) * 4), {"epsilon": 0.1}, make=positive, tolerance=1e-4)


@register
class Lrn(Op):
    """Local response normalization x / (bias + alpha / size * sum of x ** 2 over `size` neighbour channels) ** beta."""

    name = "lrn"
    operands = ("x",)
    attrs: ClassVar[Mapping[str, Attr]] = {
        "size": Attr("int"), "alpha": Attr("float", 1e-4), "beta": Attr("float", 0.75), "bias": Attr("float", 1.0),
    }  # fmt: skip

    def infer(self, x: Expr, *, size: int, **attrs: Any) -> Type:
        ty = self.tensor(x, "x")
        if len(ty.shape or ()) < 2 or ty.dtype not in ("float32", "float64") or size < 1:
            self.fail(f"x must be (n, c, spatial...) of float32 or float64 and size positive, got {ty} and size={size}")
        return ty

    def lower(self, x: Buffer, *, out: Buffer, size: int, alpha: float, beta: float, bias: float) -> Stmt:
        def square(*i: SymVar) -> Value:
            channel = i[1] + i[-1] - (size - 1) // 2
            where = (i[0], channel, *i[2:-1])
            inside = (index(channel) >= 0) & (index(channel) < index(x.shape[1]))
            return select(inside, Scalar(x[where]) * Scalar(x[where]), 0.0).value

        def finish(total: Value, *i: SymVar) -> Value:
            scale = Scalar(total) * (alpha / size) + bias
            return (Scalar(x[i]) / scale.binary("pow", beta)).value

        return reduce(out, (size,), "add", identity("add", x.dtype), square, finish)

    def reference(self, x: Any, *, size: int, alpha: float, beta: float, bias: float) -> Any:
        before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
        padded = np.pad(x * x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        total = sum(padded[:, k : k + x.shape[1]] for k in range(size))
        return (x / (bias + alpha / size * total) ** beta).astype(x.dtype)

    def samples(self) -> Iterable[Sample]:
        yield Sample((("n", "c", 3, "w"),), {"size": 3, "alpha": 0.5})
        yield Sample((("n", 5, 2),), {"size": 4, "alpha": 0.3, "beta": 0.5, "bias": 2.0})


@register
class MeanVarianceNormalize(Op):
    """Mean-variance normalization (x - mean) / (standard deviation + 1e-9) over axes."""

    name = "mean_variance_normalize"
    operands = ("x",)
    attrs: ClassVar[Mapping[str, Attr]] = {"axes": Attr("ints", (0, 2, 3))}

    def infer(self, x: Expr, *, axes: tuple[int, ...]) -> Type:
        ty = self.tensor(x, "x")
        if not dtypes.is_float(ty.dtype):
            self.fail(f"x must be of a float dtype, got {ty.dtype}")
        normalize_axes(self, axes, len(ty.shape or ()))
        return ty

    def decompose(self, bb: BlockBuilder, call: Call) -> Expr | None:
        axes = call.attrs["axes"]

        def normalize(x: Expr) -> Expr:
            centered = emit_op(bb, "subtract", x, emit_op(bb, "mean", x, axes=axes, keepdims=True))
            variance = emit_op(bb, "mean", emit_op(bb, "multiply", centered, centered), axes=axes, keepdims=True)
            deviation = emit_op(bb, "add", emit_op(bb, "sqrt", variance), Constant.of(1e-9, self.tensor(x).dtype))
            return emit_op(bb, "divide", centered, deviation)

        return composed_in_float32(bb, call.args[0], normalize)

    def reference(self, x: Any, *, axes: tuple[int, ...]) -> Any:
        def normalize(v: Any) -> Any:
            centered = v - mean_over(v, axes)
            return centered / (np.sqrt(mean_over(centered * centered, axes)) + v.dtype.type(1e-9))

        return apply_in_accumulator(normalize, x)

    def samples(self) -> Iterable[Sample]:
        yield Sample(((3, 2, "h", 4),), tolerance=1e-4)
        yield Sample((("n", 5),), {"axes": (-1,)}, tolerance=1e-4)
