"""Kernels derived from plain loops by schedule primitives alone, compiled, and compared with NumPy at many sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from relaxlite.codegen.llvm import emit_assembly
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.program_verifier import verify_program
from relaxlite.passes.schedule.primitives import Schedule
from relaxlite.target import Target
from tests.support.ir_text import program
from tests.support.native_kernel import NativeKernel

Arrays = dict[str, Any]


def run(kernel: NativeKernel, given: TensorProgram, arrays: Sequence[Any], sizes: dict[str, int], out: Any) -> Any:
    out.fill(np.nan if out.dtype.kind == "f" else 99)
    assert kernel([*arrays, out], [sizes[symbol.name] for symbol in given.symbols]) == 0
    return out


class Scheduled:
    """A scheduled program, compiled with the programs that pack its parameters."""

    def __init__(self, s: Schedule) -> None:
        self.program = s.program()
        verify_program("p", self.program)
        assert str(Schedule.replay(s.original, self.program.attrs["schedule"])) == str(s)  # type: ignore[arg-type]
        self.kernel = NativeKernel(self.program)
        self.packings = {name: (packing, NativeKernel(packing)) for name, packing in s.packings}

    def __call__(self, sizes: dict[str, int], out: Any, **arrays: Any) -> Any:
        for name, (packing, kernel) in self.packings.items():
            shape = [eval(str(dim), {}, sizes) for dim in packing.outputs[0].shape]
            packed = np.empty(shape, arrays[name].dtype)
            assert kernel([arrays[name], packed], [sizes[symbol.name] for symbol in packing.symbols]) == 0
            arrays[name] = packed
        return run(self.kernel, self.program, [arrays[b.name] for b in self.program.inputs], sizes, out)


# Matrix multiplication with bias and GELU


def matmul() -> TensorProgram:
    return program(
        """
        m = symbol("m")
        n = symbol("n")
        k = symbol("k")
        @program(symbols=(m, n, k), outputs=1)
        def matmul(a: f32[m, k], b: f32[k, n], bias: f32[n], c: f32[m, n]):
            for i in serial(m):
                for j in serial(n):
                    with allocate((), "float32", "local") as t:
                        t[()] = float32(0.0)
                        for r in serial(k):
                            t[()] += a[i, r] * b[r, j]
                        x = t[()] + bias[j]
                        c[i, j] = x * float32(0.5) * (erf(x * float32(0.70710678)) + float32(1.0))
        """
    )


def register_tiles(s: Schedule, rows: str, columns: Sequence[str], height: int) -> None:
    """The tiles of `height` rows, then lower ones for the rows that are left; `columns` are the tile's other loops,
    the last along vectors."""
    s.reorder(rows, *columns)
    rest = rows
    for size in (height, *(h for h in (4, 2, 1) if h < height)):
        outer, inner, *left = s.split(rest, size)
        (total,) = s.buffers_in(outer)
        s.decompose_reduction(total, *s.loops_in(outer)[: 1 + len(columns)])
        s.tensorize(s.loops_in(outer)[-1 - (1 + len(columns))], "fma")  # the update's innermost loop
        for name in s.loops_in(outer):
            if any(name in s.copies(base) for base in (inner, *columns[:-1])):
                s.unroll(name)
            elif name in s.copies(columns[-1]):
                s.vectorize(name)
        if not left:
            return
        (rest,) = left


def even_tiles(s: Schedule, rows: str, columns: Sequence[str], most: int) -> None:
    """Tiles of at most so many rows whose heights differ by one: a body for each height."""
    s.reorder(rows, *columns)
    _, inner = s.split(rows, most, tail="even")
    for loop in s.specialize(inner, *range(most, 0, -1)):
        (total,) = s.buffers_in(loop)
        s.decompose_reduction(total, loop, *s.loops_in(loop)[: len(columns)])
    for name in (*s.copies(inner), *(name for base in columns[:-1] for name in s.copies(base))):
        if name != inner:
            s.unroll(name)
    for name in s.copies(columns[-1]):
        s.vectorize(name)


def tiled_matmul() -> Schedule:
    """6 x 64 tiles of sums in registers, B in panels of 64 columns; exact tails down and across."""
    s = Schedule(matmul())
    s.pack("b", ((1, "//", 64), 0, (1, "%", 64)))
    s.reorder("j", "i")
    panel, _, rest = s.split("j", 64)
    vectors, lanes = s.split("ji", 16)
    last, last_lanes = s.split(rest, 16, tail="mask")
    even_tiles(s, "i", (vectors, lanes), 6)
    register_tiles(s, "i_1", (last_lanes,), 6)
    s.parallelize(panel)
    s.parallelize(last)
    return s


def gelu(x: Any) -> Any:
    return x * 0.5 * (np.vectorize(math.erf, otypes=[np.float64])(x * math.sqrt(0.5)) + 1)


def test_matmul_in_register_tiles() -> None:
    s = tiled_matmul()
    kernel = Scheduled(s)
    rng = np.random.default_rng(0)
    for m in (0, 1, 5, 6, 7, 64, 129):
        for n, k in ((64, 32), (1, 5), (100, 7), (16, 0)):
            a, b, bias = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal(n)
            a, b, bias = (x.astype(np.float32) for x in (a, b, bias))
            got = kernel({"m": m, "n": n, "k": k}, np.empty((m, n), np.float32), a=a, b=b, bias=bias)
            wanted = gelu(a.astype(np.float64) @ b.astype(np.float64) + bias)
            np.testing.assert_allclose(got, wanted, atol=2e-5, err_msg=f"{m}, {n}, {k}")


def test_register_tiles_stay_in_registers() -> None:
    text = emit_assembly({"p": tiled_matmul().program()}, Target.parse("llvm -mcpu=znver4"))
    loops = [block for block in text.split("\n.L") if "vfmadd231ps" in block and "zmm" in block]
    full = [block for block in loops if block.count("vfmadd231ps") == 24]
    assert full and not any("(%rsp)" in line for block in full for line in block.split("\n") if "zmm" in line)


# Softmax of rows


def softmax() -> TensorProgram:
    return program(
        """
        n = symbol("n")
        m = symbol("m")
        @program(symbols=(n, m), outputs=1)
        def softmax(x: f32[n, m], y: f32[n, m]):
            with allocate((n, m), "float32") as e:
                with allocate((n,), "float32") as top:
                    with allocate((n,), "float32") as total:
                        for i in serial(n):
                            with allocate((), "float32", "local") as t:
                                t[()] = float32(-inf)
                                for r in serial(m):
                                    combine("max", t[()], x[i, r])
                                top[i] = t[()]
                        for p in serial(n):
                            for q in serial(m):
                                e[p, q] = exp(x[p, q] - top[p])
                        for u in serial(n):
                            with allocate((), "float32", "local") as v:
                                v[()] = float32(0.0)
                                for w in serial(m):
                                    v[()] += e[u, w]
                                total[u] = v[()]
                        for g in serial(n):
                            for h in serial(m):
                                y[g, h] = e[g, h] / total[g]
        """
    )


def test_softmax_of_a_row_at_a_time() -> None:
    s = Schedule(softmax())
    s.compute_at("total", "g")
    s.compute_at("e", "g")
    s.compute_at("top", "g")
    for loop in ("r", "w"):
        s.split_reduction(loop, 16, 4)
    for loop in s.loops_in("g"):
        if loop.startswith(("e_1", "h")):
            _, inner, rest = s.split(loop, 16)
            s.vectorize(inner)
            _, inner = s.split(rest, 16, tail="mask")
            s.vectorize(inner)
    s.parallelize("g")
    kernel = Scheduled(s)
    rng = np.random.default_rng(0)
    for n, m in ((0, 3), (1, 1), (3, 16), (5, 100), (2, 333), (4, 7)):
        x = (rng.standard_normal((n, m)) * 5).astype(np.float32)
        got = kernel({"n": n, "m": m}, np.empty((n, m), np.float32), x=x)
        wanted = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
        np.testing.assert_allclose(got, wanted / wanted.sum(axis=1, keepdims=True), rtol=1e-5)


# Direct convolution


def conv() -> TensorProgram:
    return program(
        """
        h = symbol("h", lower=3)
        w = symbol("w", lower=3)
        @program(symbols=(h, w), outputs=1)
        def conv(x: f32[5, h, w], k: f32[12, 5, 3, 3], y: f32[12, h - 2, w - 2]):
            for o in serial(12):
                for i in serial(h - 2):
                    for j in serial(w - 2):
                        with allocate((), "float32", "local") as t:
                            t[()] = float32(0.0)
                            for c in serial(5):
                                for p in serial(3):
                                    for q in serial(3):
                                        t[()] += x[c, i + p, j + q] * k[o, c, p, q]
                            y[o, i, j] = max(t[()], float32(0.0))
        """
    )


def test_direct_convolution() -> None:
    """Tiles of 6 channels x 32 columns; weights packed so that the channels of a tile lie together."""
    s = Schedule(conv())
    s.pack("k", ((0, "//", 6), 1, 2, 3, (0, "%", 6)))
    block, channels = s.split("o", 6, tail="none")
    columns, _, rest = s.split("j", 16 * 2)
    vectors, lanes = s.split("ji", 16)
    last, last_lanes = s.split(rest, 16, tail="mask")
    s.reorder(block, "i", channels)
    first, second = s.distribute(channels)
    first, second = s.loops_in("i")[0], s.loops_in("i")[s.loops_in("i").index(last) - 1]
    s.reorder(columns, first, vectors, lanes)
    s.reorder(last, second, last_lanes)
    for outer, tile in ((columns, (first, vectors, lanes)), (last, (second, last_lanes))):
        (total,) = s.buffers_in(outer)
        s.decompose_reduction(total, *tile)
        for name in s.loops_in(outer):
            if any(name in s.copies(base) for base in (channels, vectors)):
                s.unroll(name)
            elif any(name in s.copies(base) for base in (lanes, last_lanes)):
                s.vectorize(name)
    fused = s.fuse(block, "i")
    s.parallelize(fused)
    kernel = Scheduled(s)
    rng = np.random.default_rng(0)
    for h, w in ((3, 3), (4, 18), (7, 35), (5, 67), (3, 2 + 64)):
        x = rng.standard_normal((5, h, w)).astype(np.float32)
        k = rng.standard_normal((12, 5, 3, 3)).astype(np.float32)
        got = kernel({"h": h, "w": w}, np.empty((12, h - 2, w - 2), np.float32), x=x, k=k)
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(1, 2))
        np.testing.assert_allclose(got, np.maximum(np.einsum("chwpq,ocpq->ohw", windows, k), 0), atol=1e-4)


# Transposition


def test_transposition_by_blocks() -> None:
    given = program(
        """
        n = symbol("n")
        m = symbol("m")
        @program(symbols=(n, m), outputs=1)
        def transpose(x: f32[n, m], y: f32[m, n]):
            for i in serial(m):
                for j in serial(n):
                    y[i, j] = x[j, i]
        """
    )
    s = Schedule(given)
    rows, row = s.split("i", 16, tail="mask")
    columns, column = s.split("j", 16, tail="mask")
    s.reorder(rows, columns, row, column)
    copy = s.stage("x", columns, order=(1, 0))
    assert copy == "x_copy"
    _, inner = s.loops_in(columns)[:2]
    s.vectorize(inner)
    s.vectorize(column)
    s.parallelize(rows)
    kernel = Scheduled(s)
    rng = np.random.default_rng(0)
    for n, m in ((0, 5), (1, 1), (16, 16), (15, 33), (100, 48), (129, 7)):
        x = rng.standard_normal((n, m)).astype(np.float32)
        np.testing.assert_array_equal(kernel({"n": n, "m": m}, np.empty((m, n), np.float32), x=x), x.T)
