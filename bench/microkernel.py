"""The 6x64 float32 matrix-multiplication micro-kernel, built by hand in loop IR, against the measured FMA peak.

    python bench/microkernel.py

C[m, n] = A[m, k] B[k, n] with B packed as Bp[n/64][k][64]: loops over column panels, blocks of 6 rows and k; a tile of
6x64 sums stays in registers. Rows per block and the reduction's length can be changed on the command line:

    python bench/microkernel.py --rows 4 --k 384

Prints, for one thread: the peak (independent fused multiply-adds on registers), the kernel's rate and their ratio, and
how often the inner loop touches the stack.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time
from collections.abc import Callable

import numpy as np

from relaxlite.codegen.llvm import compile_programs, emit_assembly
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    For,
    Literal,
    Seq,
    Stmt,
    Store,
    TensorProgram,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.runtime.native import NativeLibrary, load_objects
from relaxlite.target import Target

LANES, COLUMNS = 16, 64


def nest(*loops: tuple[SymVar, int | SymVar, str], body: Stmt) -> Stmt:
    for var, extent, kind in reversed(loops):
        body = For(var, sym(extent), body, kind)  # type: ignore[arg-type]
    return body


def matmul(rows: int) -> TensorProgram:
    """C = A B for m a multiple of `rows`; mo is the number of row blocks, no that of column panels."""
    mo, no, k = SymVar("num_blocks"), SymVar("num_panels"), SymVar("k")
    a = Buffer.of("A", (mo * rows, k), "float32")
    b = Buffer.of("Bp", (no, k, COLUMNS), "float32")
    c = Buffer.of("C", (mo * rows, no * COLUMNS), "float32")
    tile = Buffer.of("tile", (rows, COLUMNS), "float32", "local")
    panel, block, kk = SymVar("panel"), SymVar("block"), SymVar("kk")
    zero = Literal(0.0, "float32")

    def for_tile(make: Callable[[SymVar, SymExpr], Stmt]) -> Stmt:
        row, part, lane = SymVar("row"), SymVar("part"), SymVar("lane")
        body = make(row, part * LANES + lane)
        return nest(
            (row, rows, "unrolled"), (part, COLUMNS // LANES, "unrolled"), (lane, LANES, "vectorized"), body=body
        )

    init = for_tile(lambda r, n: Store(tile, (r, n), zero))
    update = for_tile(lambda r, n: Store(tile, (r, n), Binary("mul", a[block * rows + r, kk], b[panel, kk, n]), "add"))
    write = for_tile(lambda r, n: Store(c, (block * rows + r, panel * COLUMNS + n), tile[r, n]))
    body = Allocate(tile, Seq((init, For(kk, k, update), write)))
    return TensorProgram((a, b, c), (mo, no, k), nest((panel, no, "serial"), (block, mo, "serial"), body=body))


def fma_peak(chains: int = 24) -> TensorProgram:
    """Independent chains of fused multiply-adds on registers: 2 * chains * LANES operations per step."""
    steps = SymVar("steps")
    x = Buffer.of("x", (LANES,), "float32")
    out = Buffer.of("out", (chains, LANES), "float32")
    tile = Buffer.of("tile", (chains, LANES), "float32", "local")

    def each(make: Callable[[SymVar, SymVar], Stmt]) -> Stmt:
        chain, lane = SymVar("chain"), SymVar("lane")
        return nest((chain, chains, "unrolled"), (lane, LANES, "vectorized"), body=make(chain, lane))

    init = each(lambda c, v: Store(tile, (c, v), x[v]))
    update = each(lambda c, v: Store(tile, (c, v), Binary("mul", x[v], x[v]), "add"))
    write = each(lambda c, v: Store(out, (c, v), tile[c, v]))
    body = Allocate(tile, Seq((init, For(SymVar("step"), steps, update), write)))
    return TensorProgram((x, out), (steps,), body)


def load_kernel(program: TensorProgram, target: Target) -> tuple[Callable[..., int], NativeLibrary]:
    code = compile_programs({"kernel": program}, target)
    library = load_objects(code.objects)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    function = prototype(library.address(code.kernels["kernel"].symbol))

    def call(arrays: list[np.ndarray], symbols: list[int]) -> int:
        pointers = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        return int(function(pointers, (ctypes.c_int64 * len(symbols))(*symbols)))

    return call, library


def best_seconds(run: Callable[[], object], repeats: int = 30) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def stack_references(program: TensorProgram, target: Target) -> int:
    """Vector instructions of the kernel that touch the stack: spills."""
    text = emit_assembly({"kernel": program}, target)
    return len(re.findall(r"^\s*v\w+\s.*\(%rsp\)", text, re.MULTILINE))


def measure(rows: int, k: int, m: int, n: int, target: Target) -> tuple[float, float, float]:
    """(GFLOP/s, peak GFLOP/s, largest error against float64)"""
    peak, peak_library = load_kernel(fma_peak(), target)
    x, out = np.full(LANES, 1e-3, np.float32), np.zeros((24, LANES), np.float32)
    steps = 200_000
    peak_rate = 2 * 24 * LANES * steps / best_seconds(lambda: peak([x, out], [steps])) / 1e9

    kernel, library = load_kernel(matmul(rows), target)
    rng = np.random.default_rng(0)
    blocks, panels = -(-m // rows), n // COLUMNS
    a = rng.standard_normal((blocks * rows, k), dtype=np.float32)
    b = rng.standard_normal((k, n), dtype=np.float32)
    packed = np.ascontiguousarray(b.reshape(k, panels, COLUMNS).transpose(1, 0, 2))
    c = np.zeros((blocks * rows, n), np.float32)
    assert kernel([a, packed, c], [blocks, panels, k]) == 0
    error = float(np.abs(c - a.astype(np.float64) @ b.astype(np.float64)).max())
    seconds = best_seconds(lambda: kernel([a, packed, c], [blocks, panels, k]))
    library.close()
    peak_library.close()
    return 2 * blocks * rows * k * n / seconds / 1e9, peak_rate, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("rows", 6), ("k", 384), ("m", 120), ("n", 384)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--target", default="llvm", help="as Target.parse takes it")
    options = parser.parse_args()
    target = Target.parse(options.target)
    rate, peak, error = measure(options.rows, options.k, options.m, options.n, target)
    print(f"{options.rows}x{COLUMNS} tile, (m, n, k) = ({options.m}, {options.n}, {options.k}), 1 thread, {target.cpu}")
    print(f"peak {peak:.1f} GFLOP/s; kernel {rate:.1f} GFLOP/s = {100 * rate / peak:.1f} %; largest error {error:.1e}")
    print(f"vector instructions that touch the stack: {stack_references(matmul(options.rows), target)}")


if __name__ == "__main__":
    main()
