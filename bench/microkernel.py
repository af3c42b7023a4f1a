"""Matrix-multiplication micro-kernels of 6x64 results against the measured peak of their instruction.

    python bench/microkernel.py                    float32, built by hand in loop IR
    python bench/microkernel.py --kind dot2_bf16   bfloat16 products summed in float32, derived by schedule primitives
    python bench/microkernel.py --kind dot4_u8s8   products of bytes summed in int32, likewise

C[m, n] = A[m, k] B[k, n] with B packed as Bp[n/64][k][64]: loops over column panels, blocks of 6 rows and k; a tile of
6x64 sums stays in registers. Rows per block and the reduction's length can be changed on the command line:

    python bench/microkernel.py --rows 4 --k 384

Prints, for one thread: the peak (independent chains of the instruction on registers), the kernel's rate and their
ratio, and how often the inner loop touches the stack.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time
from collections.abc import Callable

import numpy as np

from relaxlite.codegen.llvm import compile_programs, emit_assembly
from relaxlite.dtypes import to_numpy
from relaxlite.ir.intrinsics import DOT_PRODUCTS, DotProduct
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    For,
    Intrinsic,
    Literal,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    reduce,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.passes.schedule.primitives import Schedule
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


def narrow_matmul(name: str, rows: int) -> TensorProgram:
    """C = A B by a dot product of ir/intrinsics.py, for m and n multiples of `rows` and 64, k of the dot's length.

    B is packed as [n/64, k/length, 64, length]. Made from plain loops by schedule primitives.
    """
    dot = DOT_PRODUCTS[name]
    mo, no, ko = SymVar("num_blocks"), SymVar("num_panels"), SymVar("num_steps")
    a = Buffer.of("A", (mo * rows, ko * dot.length), dot.a)
    b = Buffer.of("B", (ko * dot.length, no * COLUMNS), dot.b)
    c = Buffer.of("C", (mo * rows, no * COLUMNS), dot.total)
    zero = Literal(0, dot.total)

    def term(i: SymVar, j: SymVar, r: SymVar) -> Binary:
        return Binary("mul", Cast(a[i, r], dot.total), Cast(b[r, j], dot.total))

    s = Schedule(TensorProgram((a, b, c), (mo, no, ko), reduce(c, (ko * dot.length,), "add", zero, term)))
    s.pack("B", ((1, "//", COLUMNS), (0, "//", dot.length), (1, "%", COLUMNS), (0, "%", dot.length)))
    s.split("r", dot.length, tail="none")
    s.split("i", rows, tail="none")
    s.split("j", COLUMNS, tail="none")
    s.split("ji", LANES)
    s.reorder("jo", "io", "ii", "jio", "jii")
    s.decompose_reduction("C_acc", "ii", "jio", "jii")
    s.reorder("ii_1", "jio_1", "jii_1", "ri")
    s.tensorize("ri", name)
    for loop in (*s.copies("ii"), *s.copies("jio")):
        s.unroll(loop)
    for loop in s.copies("jii"):
        s.vectorize(loop)
    return s.program()


def peak_program(name: str = "fma", chains: int = 24) -> TensorProgram:
    """Independent chains of an intrinsic on registers: chains * LANES results per step."""
    steps = SymVar("steps")
    dot = DOT_PRODUCTS.get(name, DotProduct(1, "float32", "float32", "float32"))
    x = Buffer.of("x", (LANES, dot.length), dot.a)
    y = Buffer.of("y", (LANES, dot.length), dot.b)
    out = Buffer.of("out", (chains, LANES), dot.total)
    tile = Buffer.of("tile", (chains, LANES), dot.total, "local")

    def each(make: Callable[[SymVar, SymVar], Stmt]) -> Stmt:
        chain, lane = SymVar("chain"), SymVar("lane")
        return nest((chain, chains, "unrolled"), (lane, LANES, "vectorized"), body=make(chain, lane))

    def step(chain: SymVar, v: SymVar) -> Stmt:
        left, right = ([z[v, k] for k in range(dot.length)] for z in (x, y))
        if name == "fma":
            return Store(tile, (chain, v), Binary("mul", *left, *right), "add")
        return Store(tile, (chain, v), Intrinsic(name, (tile[chain, v], *left, *right), dot.total))

    init = each(lambda c, v: Store(tile, (c, v), Literal(0, dot.total)))
    write = each(lambda c, v: Store(out, (c, v), tile[c, v]))
    body = Allocate(tile, Seq((init, For(SymVar("step"), steps, each(step)), write)))
    return TensorProgram((x, y, out), (steps,), body)


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


def measure_peak(kind: str, target: Target) -> float:
    """Operations per second in 1e9, a multiplication and an addition being two."""
    program = peak_program(kind)
    kernel, library = load_kernel(program, target)
    arrays = [np.zeros([int(d) for d in b.shape], to_numpy(b.dtype)) for b in program.params]
    length, steps = int(program.params[0].shape[1]), 200_000
    seconds = best_seconds(lambda: kernel(arrays, [steps]))
    library.close()
    return 2 * 24 * LANES * length * steps / seconds / 1e9


def operands(kind: str, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if kind == "dot4_u8s8":
        return rng.integers(0, 256, (m, k), np.uint8), rng.integers(-128, 128, (k, n), np.int8)
    if kind == "dot2_i16":
        return tuple(rng.integers(-2000, 2000, shape, np.int16) for shape in ((m, k), (k, n)))  # type: ignore[return-value]
    dtype = to_numpy("bfloat16" if kind == "dot2_bf16" else "float32")
    a, b = (rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in ((m, k), (k, n)))
    return a, b


def panels(kind: str, b: np.ndarray) -> np.ndarray:
    """B in the layout of the kernel."""
    k, n = b.shape
    length = DOT_PRODUCTS[kind].length if kind in DOT_PRODUCTS else 1
    packed = b.reshape(k // length, length, n // COLUMNS, COLUMNS).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(packed if length > 1 else packed[..., 0])


def measure(kind: str, rows: int, k: int, m: int, n: int, target: Target) -> tuple[float, float]:
    """(1e9 operations per second, largest error against float64)"""
    blocks = -(-m // rows)
    program = matmul(rows) if kind == "fma" else narrow_matmul(kind, rows)
    length = DOT_PRODUCTS[kind].length if kind in DOT_PRODUCTS else 1
    kernel, library = load_kernel(program, target)
    a, b = operands(kind, blocks * rows, k, n)
    packed = panels(kind, b)
    c = np.zeros((blocks * rows, n), to_numpy(program.params[2].dtype))
    symbols = [blocks, n // COLUMNS, k // length]
    assert kernel([a, packed, c], symbols) == 0
    error = float(np.abs(c - a.astype(np.float64) @ b.astype(np.float64)).max())
    seconds = best_seconds(lambda: kernel([a, packed, c], symbols))
    library.close()
    return 2 * blocks * rows * k * n / seconds / 1e9, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("rows", 6), ("k", 384), ("m", 120), ("n", 384)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--kind", choices=["fma", *DOT_PRODUCTS], default="fma")
    parser.add_argument("--target", default="llvm", help="as Target.parse takes it")
    options = parser.parse_args()
    target, kind, rows = Target.parse(options.target), options.kind, options.rows
    peak = measure_peak(kind, target)
    rate, error = measure(kind, rows, options.k, options.m, options.n, target)
    program = matmul(rows) if kind == "fma" else narrow_matmul(kind, rows)
    print(f"{rows}x{COLUMNS} tile, (m, n, k) = ({options.m}, {options.n}, {options.k}), 1 thread, {target.cpu}, {kind}")
    print(f"peak {peak:.1f} GOP/s; kernel {rate:.1f} GOP/s = {100 * rate / peak:.1f} %; largest error {error:.1e}")
    print(f"vector instructions that touch the stack: {stack_references(program, target)}")


if __name__ == "__main__":
    main()
