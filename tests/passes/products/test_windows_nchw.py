"""Kernels of windows with channels first: compiled once, exact at every size, and made as planned."""

from __future__ import annotations

import subprocess
import sys
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
from relaxlite.ir.program import For, Select
from relaxlite.ir.program_visitor import all_values, stores, walk_stmts
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target
from tests.support.ir_text import module as parsed
from tests.support.paths import ROOT

SIZES = ((0, 5, 5), (1, 1, 1), (1, 3, 2), (2, 4, 16), (1, 5, 17), (1, 7, 31), (2, 9, 33), (1, 12, 66), (1, 0, 40))
LEVELS = ("host", "x86-64-v3", "x86-64-v2")
rng = np.random.default_rng(11)


def floats(*shape: int) -> Any:
    return rng.standard_normal(shape).astype("float32")


def target(level: str) -> Target:
    if level == "host":
        return Target.host()
    if not Target.host().has("avx2"):
        pytest.skip("needs an x86 processor with AVX2")
    return Target.parse(f"llvm -mcpu={level}")


def module_of(make: Any, channels: int, count: int = 2, dtype: str = "float32") -> IRModule:
    """main: x (n, channels, spatial...) -> what `make` emits."""
    bb = BlockBuilder()
    n, *spatial = (bb.symbol(name) for name in ("n", "d", "h", "w")[: 1 + count])
    with bb.function("main", x=TensorType.of((n, channels, *spatial), dtype)) as (x,):
        bb.result(make(bb, x))
    return bb.module()


def conv_module(filters: Any, pads: tuple[int, ...], **attrs: Any) -> IRModule:
    """relu(conv(x) + bias), in one kernel."""

    def make(bb: BlockBuilder, x: Var) -> Expr:
        y = bb.emit(ops.conv(x, Constant.of(filters), pads, **attrs))
        bias = np.linspace(-1, 1, len(filters), dtype="float32").reshape(-1, *(1,) * (filters.ndim - 2))
        return bb.emit(ops.relu(bb.emit(ops.add(y, Constant.of(bias)))))

    return module_of(make, attrs["groups"], filters.ndim - 2)


def steps_of(module: IRModule) -> str:
    made = run_passes(module, default_pipeline(), PassContext(Target.host()))
    return "".join(map(str, made.programs().values()))


def check_conv(filters: Any, pads: tuple[int, ...], level: str = "host", **attrs: Any) -> None:
    count = filters.ndim - 2
    module = conv_module(filters, pads, **attrs)
    exe = rl.compile(module, target(level))
    bias = np.linspace(-1, 1, len(filters)).reshape(-1, *(1,) * count)
    window = {"strides": None, "dilations": None, "layout": "first", **attrs}
    dilations = attrs.get("dilations", (1,) * count)
    extents = [(k - 1) * d + 1 for k, d in zip(filters.shape[2:], dilations, strict=True)]
    ran = 0
    for n, *spatial in SIZES:
        sizes = (*spatial, 5)[:count] if count != 1 else (spatial[1],)
        if any(s + pads[k] + pads[count + k] < extents[k] for k, s in enumerate(sizes)):
            continue
        x = floats(n, attrs["groups"], *sizes)
        want = get_op("conv").reference(x.astype(np.float64), filters.astype(np.float64), pads, **window)
        np.testing.assert_allclose(exe(x), np.maximum(want + bias, 0), rtol=1e-4, atol=1e-4, err_msg=f"{n}, {sizes}")
        ran += 1
    assert ran >= 3


@pytest.mark.each_value
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kernel", "pads", "attrs"), [
    ((3, 3), (1, 1, 1, 1), {}), ((3, 3), (1, 1, 1, 1), {"strides": (2, 2)}), ((5, 5), (2, 2, 2, 2), {}),
    ((3, 3), (0, 0, 0, 0), {}), ((2, 4), (0, 3, 1, 0), {"strides": (1, 2)}), ((7, 7), (3, 3, 3, 3), {}),
    ((3, 3), (2, 2, 2, 2), {"dilations": (2, 2)}), ((3, 3), (2, 1, 2, 1), {"dilations": (2, 1), "strides": (2, 2)}),
    ((1, 5), (0, 2, 0, 2), {}), ((5, 1), (2, 0, 2, 0), {"strides": (3, 1)}),
    ((3, 3), (1, 1, 1, 1), {"strides": (1, 3)}),
])  # fmt: skip
def test_depthwise(kernel: tuple[int, int], pads: tuple[int, ...], attrs: dict[str, Any], level: str) -> None:
    check_conv(floats(3, 1, *kernel), pads, level, groups=3, **attrs)


def test_more_filters_than_channels() -> None:
    check_conv(floats(6, 1, 3, 3), (1, 1, 1, 1), groups=3, strides=(2, 1))
    check_conv(floats(6, 1, 5), (2, 2), groups=3)
    assert "nchw_tile" in steps_of(conv_module(floats(6, 1, 5), (2, 2), groups=3))


@pytest.mark.parametrize("attrs", [{}, {"strides": (2,)}, {"dilations": (3,)}])
@pytest.mark.parametrize("taps", [3, 31, 130])  # the last are more than fit a tile
def test_one_dimension(taps: int, attrs: dict[str, Any]) -> None:
    pad = taps // 2 * attrs.get("dilations", (1,))[0]
    check_conv(floats(4, 1, taps), (pad, pad), groups=4, **attrs)


@pytest.mark.parametrize("attrs", [{}, {"strides": (1, 2, 2)}, {"strides": (2, 1, 1)}])
def test_three_dimensions(attrs: dict[str, Any]) -> None:
    check_conv(floats(2, 1, 3, 2, 3), (1, 1, 1, 1, 0, 1), groups=2, **attrs)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize(("kernel", "pads", "attrs"), [
    ((3, 3), (1, 1, 1, 1), {"strides": (2, 2)}), ((2, 2), (0, 0, 0, 0), {"strides": (2, 2), "ceil_mode": True}),
    ((5, 5), (2, 2, 2, 2), {}), ((2, 3), (0, 1, 1, 0), {"dilations": (2, 1)}),
])  # fmt: skip
@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
def test_pools(op: str, kernel: tuple[int, int], pads: tuple[int, ...], attrs: dict[str, Any], dtype: str) -> None:
    pool = get_op(op)
    if op == "avg_pool" and dtype == "uint8":
        pytest.skip("means are of floats")
    exe = rl.compile(module_of(lambda bb, x: bb.emit(pool(x, pads, kernel=kernel, **attrs)), 3, dtype=dtype))
    given = {**{name: attr.default for name, attr in pool.attrs.items()}, "kernel": kernel, **attrs}
    for n, h, w in SIZES:
        if h + pads[0] + pads[2] >= 3 and w + pads[1] + pads[3] >= 3:
            x = (floats(n, 3, h, w) * 9).astype(np.int8).astype(dtype)
            want = pool.reference(x, pads, **given)
            np.testing.assert_allclose(
                exe(x), want, rtol=2e-3 if dtype == "float16" else 1e-5, err_msg=f"{n}, {h}, {w}"
            )


def test_a_residual_is_added_once_whatever_shares_its_memory() -> None:
    filters = floats(4, 1, 3, 3)

    def make(bb: BlockBuilder, x: Var) -> Expr:
        other = bb.emit(ops.exp(x))
        y = bb.emit(ops.conv(x, Constant.of(filters), (1, 1, 1, 1), groups=4))
        return bb.emit(ops.add(y, other))

    exe = rl.compile(module_of(make, 4))
    for n, h, w in SIZES:
        x = floats(n, 4, h, w)
        want = get_op("conv").reference(
            x, filters, (1, 1, 1, 1), strides=None, dilations=None, groups=4, layout="first"
        ) if x.size else x  # fmt: skip
        np.testing.assert_allclose(exe(x), want + np.exp(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_nothing_is_padded_and_tiles_in_the_middle_ask_nothing(strides: tuple[int, int]) -> None:
    module = conv_module(floats(8, 1, 3, 3), (1, 1, 1, 1), groups=8, strides=strides)
    made = run_passes(module, default_pipeline(), PassContext(Target.host()))
    assert "pad" not in made.programs()
    (program,) = (p for name, p in made.programs().items() if "conv" in name)
    assert "nchw_tile" in str(program.attrs["schedule"])
    tiles = [s for s in walk_stmts(program.body) if isinstance(s, For) and s.kind == "vectorized"]
    sums = [s for s in tiles if any(store.combine for store in stores(s))]
    assert {any(isinstance(v, Select) for v in all_values(s)) for s in sums} == {True, False}
    if Target.host().has("avx512f"):
        code = emit_assembly({"conv": program}, Target.host())
        assert "gather" not in code and code.count("vfmadd") >= 2 * 9 * 4


@pytest.mark.parametrize("columns", ["sum of a few rows", "row of a small product"])
def test_what_is_no_window_is_scheduled_otherwise(columns: str) -> None:
    bb = BlockBuilder()
    n, w = bb.symbol("n"), bb.symbol("w")
    with bb.function("main", x=TensorType.of((n, 3, w), "float32")) as (x,):
        made = get_op("sum")(x, axes=(1,)) if columns.startswith("sum") else ops.matmul(floats(2, 3), x)
        bb.result(bb.emit(made))
    assert "nchw_tile" not in steps_of(bb.module())


SLIDING = """
        n = symbol("n")
        @program(symbols=(n,), outputs=1)
        def slide(a: f32[4, 3], b: f32[n], out: f32[4, n - 2]):
            for i in serial(4):
                for j in serial(n - 2):
                    with allocate((), "float32", "local") as acc:
                        acc[()] = float32(0.0)
                        for k in serial(3):
                            acc[()] += a[i, k] * b[j + k]
                        out[i, j] = acc[()]
        n = symbol("n")
        @function
        def main(a: f32[4, 3], b: f32[n]):
            y: f32[4, n - 2] = call(slide, a, b, sym=(n,))
            return y
"""


def test_windows_that_serve_several_rows_are_scheduled_otherwise() -> None:
    module = parsed(SLIDING)
    assert "nchw_tile" not in steps_of(module)
    exe = rl.compile(module)
    for n in (0, 1, 15, 16, 33):
        a, b = floats(4, 3), floats(n + 2)
        want = [[np.dot(row, b[j : j + 3]) for j in range(n)] for row in a]
        np.testing.assert_allclose(exe(a, b), np.reshape(want, (4, n)), rtol=1e-5, atol=1e-5)


_CHILD = """
import ctypes, mmap, os, sys
import numpy as np
import relaxlite as rl
from relaxlite.ir.op import get_op
from tests.passes.products.test_windows_nchw import conv_module, floats, target

stride, page = int(sys.argv[1]), mmap.PAGESIZE
filters = floats(2, 1, 3, 3)
attrs = {"groups": 2, "strides": (stride, stride)}
exe = rl.compile(conv_module(filters, (1, 1, 1, 1), **attrs), target(sys.argv[2]))
memory = mmap.mmap(-1, 3 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None)
for place in (address, address + 2 * page):
    assert libc.mprotect(ctypes.c_void_p(place), page, 0) == 0
for h, w in ((1, 1), (3, 16), (5, 17), (4, 35), (7, 40)):
    size = 2 * h * w
    for start in (2 * page - 4 * size, page):  # at the end of what can be read, and at its beginning
        x = np.frombuffer(memory, np.float32, size, start).reshape(1, 2, h, w)
        x[:] = floats(*x.shape)
        exe(x)
print("done")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.each_value
@pytest.mark.skipif(sys.platform == "win32", reason="uses mprotect")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_is_read_beyond_the_image(stride: int, level: str) -> None:
    target(level)
    found = subprocess.run(
        [sys.executable, "-c", _CHILD, str(stride), level], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert found.stdout == "done\n", found.stderr
