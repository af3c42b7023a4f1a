"""Channels last, as a specification: which ops get them, where data change places, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relaxlite.codegen.interpreter import Interpreter
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, If, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.types import TensorType
from relaxlite.ir.verifier import verify
from relaxlite.passes.graph.channels_last import channels_last, order_first, order_last
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.graph.simplify_algebra import simplify_algebra
from tests.support.ir_text import assert_becomes, assert_stays

Make = Callable[[BlockBuilder, Var], Expr]


def cleaned(module: IRModule) -> IRModule:
    return eliminate_dead(simplify_algebra(channels_last(module)))


def built(make: Make, *shape: int | str, dtype: str = "float32") -> IRModule:
    """A module whose main takes x of this shape."""
    bb = BlockBuilder()
    symbols = {d: bb.symbol(d) for d in shape if isinstance(d, str)}
    dims = tuple(symbols[d] if isinstance(d, str) else d for d in shape)
    with bb.function("main", x=TensorType.of(dims, dtype)) as (x,):
        bb.result(make(bb, x))
    return bb.module()


def filters(*shape: int) -> Constant:
    return Constant.of(np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32"))


def names(module: IRModule) -> list[str]:
    """The ops of main, in order."""
    function = module.functions()["main"]
    values = [b.value for b in function.body.bindings() if isinstance(b, Let)]
    return [v.callee.name for v in values if isinstance(v, Call) and isinstance(v.callee, Op)]


def layouts(module: IRModule) -> list[Any]:
    function = module.functions()["main"]
    values = [b.value for b in function.body.bindings() if isinstance(b, Let)]
    calls = [v for v in values if isinstance(v, Call) and isinstance(v.callee, Op) and v.callee.name == "conv"]
    return [call.attrs["layout"] for call in calls]


def assert_same_values(before: IRModule, *shapes: tuple[int, ...]) -> IRModule:
    """Both modules are legal and compute the same; gives the new one."""
    after = cleaned(before)
    verify(after, "graph")
    rng = np.random.default_rng(0)
    for shape in shapes:
        x = rng.standard_normal(shape).astype("float32")
        want, got = (Interpreter(m).run("main", x) for m in (before, after))
        want, got = (v if isinstance(v, tuple) else (v,) for v in (want, got))
        for a, b in zip(want, got, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)
    return after


def window(layout: str, groups: int = 1) -> str:
    """The attributes of a convolution as they are printed."""
    return f', dilations=None, groups={groups}, layout="{layout}", strides=None'


def conv(bb: BlockBuilder, x: Expr, w: Constant, pad: int = 0, **attrs: Any) -> Var:
    return bb.emit(ops.conv(x, w, (pad,) * (2 * (w.value.ndim - 2)), **attrs))


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_the_two_orders_are_inverse(rank: int) -> None:
    assert [order_last(rank)[a] for a in order_first(rank)] == list(range(rank))


def test_a_convolution_of_few_channels_reads_them_as_they_are_and_elementwise_ops_follow() -> None:
    ones, bias = [[[[1.0] * 8]]], [[[0.5]]] * 8
    assert_becomes(
        lambda m: eliminate_dead(channels_last(m)),
        f"""
        n = symbol("n")
        h = symbol("h")
        @function
        def main(x: f32[n, 1, h, h]):
            y: f32[n, 8, h, h] = conv(x, const({[[[[1.0]]]] * 8}, "float32"), shape(0, 0, 0, 0){window("first")})
            z: f32[n, 8, h, h] = add(y, const({bias}, "float32"))
            r: f32[n, 8, h, h] = relu(z)
            return r
        """,
        f"""
        n = symbol("n")
        h = symbol("h")
        @function
        def main(x: f32[n, 1, h, h]):
            y: f32[n, h, h, 8] = conv(x, const({ones}, "float32"), shape(0, 0, 0, 0){window("first_to_last")})
            z: f32[n, h, h, 8] = add(y, const([[[{[0.5] * 8}]]], "float32"))
            u: f32[n, h, h, 8] = relu(z)
            r: f32[n, 8, h, h] = transpose(u, axes=(0, 3, 1, 2))
            return r
        """,
    )  # fmt: skip


def test_data_change_places_only_at_the_ends_of_a_network() -> None:
    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(16, 12, 3, 3), 1, strides=(2, 2))
        y = bb.emit(ops.relu(bb.emit(ops.multiply(y, filters(16, 1, 1)))))
        skip = y
        y = conv(bb, bb.emit(ops.pad(y, (0, 0, 1, 1), (0, 0, 1, 1))), filters(16, 1, 3, 3), groups=16)
        y = bb.emit(ops.add(y, skip))
        y = bb.emit(ops.concat(y, skip, axis=1))
        return bb.emit(ops.max_pool(y, (0, 0, 0, 0), kernel=(2, 2), strides=(2, 2)))

    after = assert_same_values(built(network, "n", 12, "h", "w"), (1, 12, 9, 7), (2, 12, 5, 16), (0, 12, 8, 8))
    found = names(after)
    assert found.count("transpose") == 2 and found[0] == found[-1] == "transpose", str(after)
    assert found.count("pad") == 0 and layouts(after) == ["last", "last"]  # the depthwise convolution pads itself


def test_a_transpose_in_front_and_one_behind_cancel() -> None:
    def network(bb: BlockBuilder, x: Var) -> Expr:
        first = bb.emit(ops.transpose(x, axes=(0, 3, 1, 2)))
        y = bb.emit(ops.relu(conv(bb, first, filters(8, 9, 3, 3))))
        return bb.emit(ops.transpose(y, axes=(0, 2, 3, 1)))

    after = assert_same_values(built(network, "n", "h", "w", 9), (1, 5, 4, 9), (3, 3, 8, 9))
    assert names(after) == ["conv", "relu"]


def test_sizes_that_are_equal_by_chance_do_not_confuse_the_layouts() -> None:
    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(8, 8, 1, 1))
        return bb.emit(ops.softmax(bb.emit(ops.relu(y)), axis=1))

    assert_same_values(built(network, 8, 8, 8, 8), (8, 8, 8, 8))


def test_reductions_and_reshapes_of_spatial_dimensions_follow() -> None:
    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(8, 9, 3, 3), 1)
        scale = bb.emit(ops.mean(y, axes=(2, 3), keepdims=True))
        y = bb.emit(ops.multiply(y, bb.emit(ops.sigmoid(conv(bb, scale, filters(8, 8, 1, 1))))))
        flat = bb.emit(ops.max(y, axes=(2, 3), keepdims=False))
        rows = bb.emit(ops.max(y, axes=(-2,), keepdims=False))
        dims = x.ty.shape  # type: ignore[union-attr]
        pixels = bb.emit(ops.reshape(y, (dims[0], 8, dims[2] * dims[3])))
        joined = bb.emit(ops.concat(rows, pixels, axis=-1))
        return bb.emit(ops.add(joined, bb.emit(ops.reshape(flat, (dims[0], 8, 1)))))

    after = assert_same_values(built(network, "n", 9, "h", "w"), (1, 9, 4, 5), (2, 9, 3, 3))
    assert layouts(after) == ["last", "last"]


def test_resizing_slicing_and_broadcasting_follow() -> None:
    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(12, 9, 1, 1))
        n, _, h, w = x.ty.shape  # type: ignore[union-attr, misc]
        y = bb.emit(ops.resize(y, (n, 12, h * 2, w * 3), scales=(1, 1, 2, 3), mode="nearest"))
        y = bb.emit(ops.slice(y, (2, 1), (8, w), axes=(1, 3)))
        one = bb.emit(ops.mean(y, axes=(2,), keepdims=True))
        return bb.emit(ops.add(y, bb.emit(ops.broadcast_to(one, (n, 8, h * 2, w)))))

    after = assert_same_values(built(network, "n", 9, "h", "w"), (1, 9, 2, 3), (2, 9, 1, 4))
    assert names(after).count("transpose") == 2


@pytest.mark.parametrize("channels", [1, 3, 20])
def test_a_transposed_convolution_keeps_the_channels_of_a_phase_together(channels: int) -> None:
    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(8, 9, 1, 1))
        phases = conv(bb, y, filters(4 * channels, 8, 1, 1))
        _, _, h, w = x.ty.shape  # type: ignore[union-attr, misc]
        y = bb.emit(ops.phase_interleave(phases, (0, 0), (h * 2, w * 2), strides=(2, 2)))
        return bb.emit(ops.add(y, filters(channels, 1, 1)))

    after = assert_same_values(built(network, "n", 9, "h", "w"), (1, 9, 3, 2), (2, 9, 1, 5))
    assert layouts(after) == ["last", "last"]
    assert names(after).index("phase_interleave") < len(names(after)) - 2  # the add comes before the last transpose


def test_a_transposed_convolution_of_no_channels() -> None:
    """No size of nothing tells how many channels a phase has."""

    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(8, 9, 1, 1))
        none = bb.emit(ops.slice(y, (0,), (0,), axes=(1,)))
        phases = conv(bb, none, filters(8, 0, 1, 1))
        _, _, h, w = x.ty.shape  # type: ignore[union-attr, misc]
        return bb.emit(ops.phase_interleave(phases, (0, 0), (h * 2, w * 2), strides=(2, 2)))

    assert layouts(assert_same_values(built(network, "n", 9, "h", "w"), (1, 9, 3, 2), (0, 9, 1, 5))) == ["last", "last"]


def test_one_and_three_spatial_dimensions() -> None:
    def line(bb: BlockBuilder, x: Var) -> Expr:
        return bb.emit(ops.relu(conv(bb, x, filters(8, 6, 3), 1, dilations=(1,))))

    def volume(bb: BlockBuilder, x: Var) -> Expr:
        return bb.emit(ops.relu(conv(bb, x, filters(8, 6, 3, 1, 2), strides=(1, 2, 1))))

    assert layouts(assert_same_values(built(line, "n", 6, "l"), (2, 6, 5))) == ["last"]
    assert layouts(assert_same_values(built(volume, "n", 6, 4, "h", "w"), (1, 6, 4, 5, 3))) == ["last"]


def test_a_branch_computes_for_itself() -> None:
    """What a branch has brought to channels last is not known outside of it."""

    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(8, 9, 1, 1))
        cond = bb.emit(ops.less(bb.emit(ops.sum(x, axes=None, keepdims=False)), Constant.of(np.float32(0))))
        bodies = []
        for sign in (1.0, -1.0):
            with bb.body() as scope:
                z = conv(bb, x, filters(8, 9, 1, 1))
                bb.result(bb.emit(ops.multiply(bb.emit(ops.add(y, z)), Constant.of(np.float32(sign)))))
            bodies.append(bb.finish(scope))
        chosen = bb.emit(If(cond, bodies[0], bodies[1], y.ty))
        return bb.emit(ops.add(chosen, conv(bb, x, filters(8, 9, 1, 1))))

    assert_same_values(built(network, "n", 9, "h", "w"), (1, 9, 2, 3), (2, 9, 3, 1))


@pytest.mark.parametrize(
    "statement",
    [
        f'y: f32[n, 8, h, h] = conv(x, w, shape(0, 0, 0, 0){window("first")})',
        f'y: f32[n, 8, h, h] = conv(x, const({[[[[1.0]]]] * 8}, "float32"), shape(0, 0, 0, 0){window("first", 8)})',
        "y: f32[n, 8, h, h] = relu(x)",
    ],
    ids=["filters that are no constants", "depthwise alone", "no convolution"],
)  # fmt: skip
def test_what_would_not_pay_stays(statement: str) -> None:
    assert_stays(
        channels_last,
        f"""
        n = symbol("n")
        h = symbol("h")
        @function
        def main(x: f32[n, 8, h, h], w: f32[8, 8, 1, 1]):
            {statement}
            return y
        """,
    )


def test_grouped_convolutions_and_ops_over_channels_take_them_first() -> None:
    def network(bb: BlockBuilder, x: Var) -> Expr:
        y = conv(bb, x, filters(8, 9, 3, 3))
        y = conv(bb, y, filters(8, 4, 3, 3), groups=2)
        return bb.emit(ops.cumsum(y, axis=1))

    after = assert_same_values(built(network, "n", 9, "h", "w"), (1, 9, 6, 5), (2, 9, 5, 5))
    assert layouts(after) == ["last", "first"]
