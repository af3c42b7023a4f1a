"""Kernels of convolutions and windows with channels last: compiled once, exact at every size, and made as planned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.codegen.llvm import emit_assembly
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import For, Load, Select
from relaxlite.ir.program_visitor import all_values, walk_stmts
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.products.convolution import column_vectors
from relaxlite.passes.products.reduction import reduction_block
from relaxlite.passes.products.windows import nhwc_tile_of
from relaxlite.target import Target
from tests.support import tiers

SIZES = ((1, 1, 1), (1, 2, 3), (2, 3, 3), (1, 4, 17), (3, 7, 7), (0, 8, 8), (1, 13, 6), (1, 24, 25))
rng = np.random.default_rng(7)


def floats(*shape: int) -> Any:
    return rng.standard_normal(shape).astype("float32")


def module_of(make: Any, channels: int) -> IRModule:
    """main: x (n, h, w, channels) -> what `make` emits."""
    bb = BlockBuilder()
    n, h, w = (bb.symbol(name) for name in "nhw")
    with bb.function("main", x=TensorType.of((n, h, w, channels), "float32")) as (x,):
        bb.result(make(bb, x))
    return bb.module()


def conv_module(filters: Any, pad: int, *, epilogue: bool = True, **attrs: Any) -> IRModule:
    """conv(x) + bias, then x * sigmoid(x), in one kernel."""

    def make(bb: BlockBuilder, x: Var) -> Expr:
        y = bb.emit(ops.conv(x, Constant.of(filters), (pad,) * 4, layout="last", **attrs))
        if not epilogue:
            return y
        y = bb.emit(ops.add(y, Constant.of(np.linspace(-1, 1, filters.shape[-1], dtype="float32"))))
        return bb.emit(ops.multiply(y, bb.emit(ops.sigmoid(y))))

    return module_of(make, filters.shape[2] * attrs.get("groups", 1))


def expected_conv(x: Any, filters: Any, pad: int, *, epilogue: bool = True, **attrs: Any) -> Any:
    window = {"strides": None, "dilations": None, "groups": 1, **attrs}
    y = get_op("conv").reference(x.astype(np.float64), filters.astype(np.float64), (pad,) * 4, layout="last", **window)
    if epilogue:
        y = y + np.linspace(-1, 1, filters.shape[-1])
        y = y / (1 + np.exp(-y))
    return y


def fitting(extent: int, pad: int) -> Iterable[tuple[int, int, int]]:
    return (s for s in SIZES if min(s[1:]) + 2 * pad >= extent)


def check_conv(filters: Any, pad: int, **attrs: Any) -> None:
    exe = rl.compile(conv_module(filters, pad, **attrs))
    extents = [(k - 1) * d + 1 for k, d in zip(filters.shape[:2], attrs.get("dilations", (1, 1)), strict=True)]
    channels = filters.shape[2] * attrs.get("groups", 1)
    for n, h, w in fitting(max(extents), pad):
        x = floats(n, h, w, channels)
        np.testing.assert_allclose(exe(x), expected_conv(x, filters, pad, **attrs), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("channels", tiers.few([1, 8, 20, 33, 80, 130, 5, 16, 24, 48, 64, 72, 96], 6))
def test_any_number_of_output_channels(channels: int) -> None:
    check_conv(floats(1, 1, 3, channels), 0)
    check_conv(floats(2, 3, 4, channels), 1, strides=(2, 1))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "attrs", [{"strides": (2, 2)}, {"strides": (1, 3)}, {"dilations": (2, 2)}, {"dilations": (1, 2), "strides": (2, 1)}]
)
@pytest.mark.parametrize("epilogue", [True, False])
def test_strides_and_dilations(attrs: dict[str, Any], epilogue: bool) -> None:
    check_conv(floats(3, 3, 19, 40), 1, epilogue=epilogue, **attrs)
    check_conv(floats(1, 5, 2, 24), 2, epilogue=epilogue, **attrs)


@pytest.mark.each_value
@pytest.mark.parametrize("channels", [2, 16, 19, 48, 70, 80])
@pytest.mark.parametrize(("kernel", "pad", "attrs"), [
    ((3, 3), 1, {}), ((3, 3), 1, {"strides": (2, 2)}), ((5, 5), 2, {"strides": (1, 2)}), ((3, 3), 0, {}),
    ((1, 7), 3, {}), ((3, 2), 2, {"dilations": (2, 2)}),
])  # fmt: skip
def test_depthwise(channels: int, kernel: tuple[int, int], pad: int, attrs: dict[str, Any]) -> None:
    check_conv(floats(*kernel, 1, channels), pad, groups=channels, **attrs)


@pytest.mark.each_value
@pytest.mark.parametrize("op", ["max_pool", "avg_pool", "lp_pool"])
@pytest.mark.parametrize(("kernel", "pads", "attrs"), [
    ((3, 3), (1, 1, 1, 1), {"strides": (2, 2)}), ((2, 2), (0, 0, 0, 0), {"strides": (2, 2), "ceil_mode": True}),
    ((5, 5), (2, 2, 2, 2), {}), ((2, 3), (0, 1, 1, 0), {"dilations": (2, 1)}),
])  # fmt: skip
def test_pools(op: str, kernel: tuple[int, int], pads: tuple[int, ...], attrs: dict[str, Any]) -> None:
    pool = get_op(op)

    def make(bb: BlockBuilder, x: Var) -> Expr:
        return bb.emit(pool(x, pads, kernel=kernel, channels_last=True, **attrs))

    exe = rl.compile(module_of(make, 21))
    given = {**{name: attr.default for name, attr in pool.attrs.items()}, "kernel": kernel, "channels_last": True}
    for n, h, w in SIZES[2:]:
        x = floats(n, h, w, 21)
        want = pool.reference(x, pads, **{**given, **attrs})
        np.testing.assert_allclose(exe(x), want, rtol=1e-4, atol=1e-5)


def test_one_program_serves_sizes_from_nothing_to_many() -> None:
    exe = rl.compile(conv_module(floats(3, 3, 6, 24), 1, strides=(2, 2)))
    for n, h, w in ((0, 3, 3), (2, 0, 5), (1, 5, 0), (5, 1, 1), (2, 40, 3)):
        assert exe(floats(n, h, w, 6)).shape == (n, (h + 1) // 2, (w + 1) // 2, 24)


# Winograd


@pytest.mark.each_value
@pytest.mark.parametrize(("inner", "outer"), [(16, 16), (16, 24), (17, 33), (32, 64), (40, 80), (64, 130)])
@pytest.mark.parametrize("pad", [0, 1])
def test_winograd_is_near_the_direct_sum(inner: int, outer: int, pad: int) -> None:
    check_conv(floats(3, 3, inner, outer) / 10, pad)


def test_winograd_at_every_small_size() -> None:
    filters = floats(3, 3, 16, 32) / 10
    exe = rl.compile(conv_module(filters, 1))
    for n in (0, 1, 2):
        for h in range(1, 8):
            for w in (1, 2, 5, 6, 31):
                x = floats(n, h, w, 16)
                np.testing.assert_allclose(exe(x), expected_conv(x, filters, 1), rtol=1e-4, atol=1e-4)


def points(module: IRModule) -> int:
    """How many programs compute products of Winograd's transforms."""
    steps = [step.name for step in default_pipeline()]
    lowered = run_passes(module, default_pipeline()[: steps.index("winograd") + 1], PassContext(Target.host()))
    return sum(bool(p.attrs.get("scheduled")) for p in lowered.programs().values())


def test_which_convolutions_winograd_takes() -> None:
    assert points(conv_module(floats(3, 3, 16, 16), 1)) == 1
    assert points(conv_module(floats(3, 3, 16, 16), 1, strides=(2, 2))) == 0
    assert points(conv_module(floats(3, 3, 16, 16), 1, dilations=(2, 2))) == 0
    assert points(conv_module(floats(3, 3, 8, 16), 1)) == 0
    assert points(conv_module(floats(5, 3, 16, 16), 1)) == 0
    assert points(conv_module(floats(3, 3, 1, 16), 1, groups=16)) == 0


def test_winograd_needs_filters_that_are_known() -> None:
    bb = BlockBuilder()
    n, h = bb.symbol("n"), bb.symbol("h")
    x_type, w_type = TensorType.of((n, h, h, 16), "float32"), TensorType.of((3, 3, 16, 16), "float32")
    with bb.function("main", x=x_type, w=w_type) as (x, w):
        bb.result(bb.emit(ops.conv(x, w, (0,) * 4, layout="last")))
    module = bb.module()
    assert points(module) == 0
    x, filters = floats(2, 5, 5, 16), floats(3, 3, 16, 16)
    want = expected_conv(x, filters, 0, epilogue=False)
    np.testing.assert_allclose(rl.compile(module)(x, filters), want, rtol=2e-4, atol=2e-4)


def test_two_convolutions_of_one_program_keep_their_own_filters() -> None:
    first, second = floats(3, 3, 16, 16) / 4, floats(3, 3, 16, 16) / 4

    def make(bb: BlockBuilder, x: Var) -> Expr:
        y = bb.emit(ops.conv(x, Constant.of(first), (0,) * 4, layout="last"))
        return bb.emit(ops.conv(y, Constant.of(second), (0,) * 4, layout="last"))

    x = floats(1, 9, 8, 16)
    want = expected_conv(expected_conv(x, first, 0, epilogue=False), second, 0, epilogue=False)
    np.testing.assert_allclose(rl.compile(module_of(make, 16))(x), want, rtol=1e-3, atol=1e-3)


# What the schedules make


def test_the_width_of_tiles_leaves_no_narrow_rest() -> None:
    assert [column_vectors(count, 32) for count in range(1, 10)] == [1, 2, 3, 4, 3, 3, 4, 4, 3]
    assert [column_vectors(count, 16) for count in (1, 2, 3, 8)] == [1, 2, 2, 2]


def lowered_programs(module: IRModule, last: str) -> list[Any]:
    steps = [step.name for step in default_pipeline()]
    made = run_passes(module, default_pipeline()[: steps.index(last) + 1], PassContext(Target.host()))
    return [p for name, p in made.programs().items() if "conv" in name]


def test_padding_is_tested_once_per_tile_of_a_depthwise_convolution() -> None:
    module = conv_module(floats(3, 3, 1, 32), 1, groups=32, epilogue=False)
    (program,) = lowered_programs(module, "drop_unused")
    block = reduction_block(program.body)
    assert block is not None
    window = nhwc_tile_of(block, 16)
    assert window is not None and len(window.rows) == 2 and len(window.inside) == 2
    assert not any(isinstance(v, Select) for v in all_values(window.block.body) if v is window.value)
    (scheduled,) = lowered_programs(module, "schedule")
    inner = [s for s in walk_stmts(scheduled.body) if isinstance(s, For) and s.kind == "vectorized"]
    plain = [s for s in inner if not any(isinstance(v, Select) for v in all_values(s))]
    assert any(sum(isinstance(v, Load) for v in all_values(s)) >= 2 for s in plain)  # a tile without any condition


@pytest.mark.skipif(not Target.host().has("avx512f"), reason="counts registers of 512 bits")
def test_no_gathers_whatever_the_stride() -> None:
    (program,) = lowered_programs(conv_module(floats(3, 3, 8, 32), 1, strides=(2, 3)), "pack_constants")
    code = emit_assembly({"conv": program}, Target.host())
    assert "gather" not in code and code.count("vfmadd231ps") >= 8
