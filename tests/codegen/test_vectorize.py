"""Vectorized loops: masks, every way that an index can move from lane to lane, reductions over lanes, lazy loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from relaxlite import dtypes
from relaxlite.codegen.llvm import emit_assembly, emit_program
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    LetIndex,
    Literal,
    Select,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
    index,
    loops,
    seq,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, floordiv, floormod, sym
from relaxlite.target import Target
from tests.support.native_kernel import NativeKernel, run
from tests.support.paths import ROOT

ZERO = Literal(0.0, "float32")
NARROWED = (
    ("float32", "bfloat16"), ("float32", "float16"), ("int32", "int16"), ("int32", "uint8"), ("int16", "int8"),
    ("int64", "int32"), ("int64", "int8"), ("float64", "float32"), ("float64", "bfloat16"),
)  # fmt: skip
SIZES = (0, 1, 3, 15, 16, 17, 31, 64, 100)


def vector_loop(n: SymExpr, lanes: int, make: Callable[[SymExpr], Stmt]) -> Stmt:
    """for i in range(n), `lanes` at a time, with a guard for the tail."""
    outer, lane = SymVar("outer"), SymVar("lane")
    i = outer * lanes + lane
    guarded = IfThenElse(Compare("lt", index(i), index(n)), make(i))
    return For(outer, ceildiv(n, lanes), For(lane, sym(lanes), guarded, "vectorized"))


def over(n: SymVar, lanes: int, make: Callable[[SymExpr], Stmt], *params: Buffer) -> TensorProgram:
    return TensorProgram(params, (n,), vector_loop(n, lanes, make))


@pytest.mark.each_value
@pytest.mark.parametrize("lanes", [2, 3, 8, 16, 32, 64])
@pytest.mark.parametrize("dtype", dtypes.ALL)
def test_guarded_tail_writes_nothing_beyond_the_end(dtype: str, lanes: int) -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), dtype), Buffer.of("out", (n,), dtype)
    kernel = NativeKernel(over(n, lanes, lambda i: Store(out, (i,), a[i]), a, out))
    for size in SIZES:
        x = np.random.default_rng(0).integers(0, 2, size).astype(dtypes.to_numpy(dtype))
        result = np.full(size + 70, 1).astype(dtypes.to_numpy(dtype))
        assert kernel([x, result], [size]) == 0
        np.testing.assert_array_equal(result[:size], x)
        assert (result[size:] == 1).all()


@pytest.mark.parametrize("lanes", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(("source", "dtype"), NARROWED)
def test_a_tail_of_one_lane_that_is_known_writes_nothing_beyond_the_end(source: str, dtype: str, lanes: int) -> None:
    size, lane = lanes + 1, SymVar("lane")
    x, out = Buffer.of("x", (size,), source), Buffer.of("out", (size,), dtype)

    def vector(first: int) -> Stmt:
        store = Store(out, (lane + first,), Cast(x[(lane + first,)], dtype))
        guarded = IfThenElse(Compare("lt", index(lane + first), index(size)), store)
        return For(lane, sym(lanes), guarded, "vectorized")

    kernel = NativeKernel(TensorProgram((x, out), (), seq(vector(0), vector(lanes))))
    given = np.arange(size).astype(dtypes.to_numpy(source))
    result = np.full(size + 8, 55).astype(dtypes.to_numpy(dtype))
    assert kernel([given, result], []) == 0
    np.testing.assert_array_equal(result[:size], given.astype(result.dtype))
    assert (result[size:] == 55).all()


_ACCESSES: dict[str, tuple[Callable[[SymExpr, SymExpr], SymExpr], Callable[[np.ndarray, int], np.ndarray]]] = {
    "contiguous": (lambda i, n: i, lambda i, n: i),
    "broadcast": (lambda i, n: n - 1, lambda i, n: np.full_like(i, n - 1)),
    "stride 2": (lambda i, n: i * 2 + 1, lambda i, n: i * 2 + 1),
    "stride 3": (lambda i, n: i * 3, lambda i, n: i * 3),
    "stride 5": (lambda i, n: i * 5 + 2, lambda i, n: i * 5 + 2),
    "reversed": (lambda i, n: n - 1 - i, lambda i, n: n - 1 - i),
    "stride n": (lambda i, n: i * n, lambda i, n: i * n),
    "divided": (lambda i, n: floordiv(i, 3), lambda i, n: i // 3),
    "remainder": (lambda i, n: floormod(i, 5), lambda i, n: i % 5),
    "square": (lambda i, n: i * i, lambda i, n: i * i),
    "divided by n": (lambda i, n: floordiv(i * 7, n), lambda i, n: i * 7 // n),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "float16", "bool"])
@pytest.mark.parametrize("name", _ACCESSES)
def test_loads_by_every_kind_of_index(name: str, dtype: str, guarded: bool) -> None:
    make, expected = _ACCESSES[name]
    n = SymVar("n", lower=1)
    size = n * n * 7
    a, out = Buffer.of("a", (size,), dtype), Buffer.of("out", (n,), dtype)
    if guarded:
        program = over(n, 16, lambda i: Store(out, (i,), a[make(i, n)]), a, out)
    else:
        outer, lane = SymVar("outer"), SymVar("lane")
        i = outer * 16 + lane
        body = For(outer, floordiv(n, 16), For(lane, sym(16), Store(out, (i,), a[make(i, n)]), "vectorized"))
        program = TensorProgram((a, out), (n,), body)
    kernel = NativeKernel(program)
    for extent in (16, 32) if not guarded else (1, 5, 16, 23):
        x = np.random.default_rng(0).integers(0, 100, extent * extent * 7).astype(dtypes.to_numpy(dtype))
        result = np.zeros(extent, x.dtype)
        assert kernel([x, result], [extent]) == 0
        np.testing.assert_array_equal(result, x[expected(np.arange(extent), extent)])


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bfloat16"])
@pytest.mark.parametrize("name", ["contiguous", "stride 2", "stride 3", "reversed", "stride n", "square"])
def test_stores_by_every_kind_of_index(name: str, dtype: str) -> None:
    make, expected = _ACCESSES[name]
    n = SymVar("n", lower=1)
    a, out = Buffer.of("a", (n,), dtype), Buffer.of("out", (n * n * 7,), dtype)
    kernel = NativeKernel(over(n, 16, lambda i: Store(out, (make(i, n),), a[i]), a, out))
    for extent in (1, 7, 16, 40):
        x = np.random.default_rng(0).integers(1, 100, extent).astype(dtypes.to_numpy(dtype))
        result, wanted = np.zeros(extent * extent * 7, x.dtype), np.zeros(extent * extent * 7, x.dtype)
        assert kernel([x, result], [extent]) == 0
        wanted[expected(np.arange(extent), extent)] = x
        np.testing.assert_array_equal(result, wanted)


def test_last_active_lane_wins_where_all_store_to_one_element() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (1,), "float32")
    kernel = NativeKernel(over(n, 16, lambda i: Store(out, (sym(0),), a[i]), a, out))
    for size in SIZES:
        x, result = np.arange(size, dtype=np.float32) + 1, np.zeros(1, np.float32)
        assert kernel([x, result], [size]) == 0
        assert result[0] == size


def test_divisions_by_constants_vanish_where_lanes_stay_inside() -> None:
    a, out = Buffer.of("a", (8, 16), "float32"), Buffer.of("out", (128,), "float32")
    outer, lane = SymVar("outer"), SymVar("lane")
    i = outer * 16 + lane
    body = For(outer, sym(8), For(lane, sym(16), Store(out, (i,), a[floordiv(i, 16), floormod(i, 16)]), "vectorized"))
    text = emit_program("k", TensorProgram((a, out), (), body), Target.host())
    assert "gather" not in text and "load <16 x float>" in text


# Conditions


def test_nested_conditions_become_masks() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (n,), "float32")

    def body(i: SymExpr) -> Stmt:
        is_positive = Compare("gt", a[i], ZERO)
        is_even = Compare("eq", index(floormod(i, 2)), index(0))
        inner = IfThenElse(is_even, Store(out, (i,), a[i]), Store(out, (i,), Unary("neg", a[i])))
        return IfThenElse(is_positive, inner, Store(out, (i,), ZERO))

    kernel = NativeKernel(over(n, 16, body, a, out))
    for size in SIZES:
        x = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        result = np.full(size, np.nan, np.float32)
        assert kernel([x, result], [size]) == 0
        wanted = np.where(x > 0, np.where(np.arange(size) % 2 == 0, x, -x), 0)
        np.testing.assert_array_equal(result, wanted)


def test_condition_that_is_the_same_in_all_lanes_stays_a_branch() -> None:
    n = SymVar("n")
    a, flag, out = Buffer.of("a", (n,), "float32"), Buffer.of("flag", (1,), "bool"), Buffer.of("out", (n,), "float32")
    program = over(n, 16, lambda i: IfThenElse(flag[0], Store(out, (i,), a[i]), Store(out, (i,), ZERO)), a, flag, out)
    for on in (False, True):
        x, result = np.ones(20, np.float32), np.full(20, 9, np.float32)
        run(program, [x, np.array([on]), result], [20])
        np.testing.assert_array_equal(result, x * on)


@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("scale", [1, -1, 3])
def test_compare_of_lane_numbers(op: str, scale: int) -> None:
    limit, flip = SymVar("limit", lower=None), SymVar("flip")
    out = Buffer.of("out", (2, 16), "bool")
    lane = SymVar("lane")
    left, right = index(lane * scale), index(limit)
    body = For(
        lane,
        sym(16),
        seq(Store(out, (sym(0), lane), Compare(op, left, right)), Store(out, (sym(1), lane), Compare(op, right, left))),
        "vectorized",
    )
    kernel = NativeKernel(TensorProgram((out,), (limit, flip), body))
    compare = {
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "eq": np.equal,
        "ne": np.not_equal,
    }[op]
    for value in (-(1 << 62), -17, -16, -1, 0, 1, 7, 15, 16, 45, 1 << 62):
        result = np.zeros((2, 16), bool)
        assert kernel([result], [value, 0]) == 0
        numbers = np.arange(16) * scale
        np.testing.assert_array_equal(result, [compare(numbers, value), compare(value, numbers)])


def test_check_inside_a_vectorized_loop_looks_at_active_lanes_only() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (n,), "float32")
    program = over(
        n, 16, lambda i: seq(Check(Compare("gt", a[i], ZERO), "not positive"), Store(out, (i,), a[i])), a, out
    )
    kernel = NativeKernel(program)
    x, result = np.ones(21, np.float32), np.zeros(21, np.float32)
    assert kernel([x, result], [21]) == 0  # the 11 lanes beyond the end read as zero
    x[20] = -1
    assert kernel([x, result], [21]) == 1


# Loops and private buffers inside


@pytest.mark.parametrize("scope", ["local", "global"])
def test_serial_loop_inside_gives_vector_accumulators(scope: str) -> None:
    n, m = SymVar("n"), SymVar("m")
    a, out = Buffer.of("a", (m, n), "float32"), Buffer.of("out", (n,), "float32")

    def body(i: SymExpr) -> Stmt:
        acc = Buffer.of("acc", (1,), "float32", scope)  # type: ignore[arg-type]
        r = SymVar("r")
        update = For(r, m, Store(acc, (sym(0),), Binary("mul", a[r, i], a[r, i]), "add"))
        return Allocate(acc, seq(Store(acc, (sym(0),), ZERO), update, Store(out, (i,), acc[0])))

    program = TensorProgram((a, out), (n, m), vector_loop(n, 16, body))
    kernel = NativeKernel(program)
    for size in SIZES:
        x = np.random.default_rng(0).standard_normal((9, size), dtype=np.float32)
        result = np.zeros(size, np.float32)
        assert kernel([x, result], [size, 9]) == 0
        np.testing.assert_allclose(result, (x * x).sum(axis=0), rtol=1e-5)
    if scope == "local":
        assert "(%rsp)" not in emit_assembly({"k": program}, Target.host())


def test_inner_loop_whose_extent_differs_between_lanes() -> None:
    out, n = Buffer.of("out", (40,), "int64"), SymVar("n")

    def body(i: SymExpr) -> Stmt:
        j = SymVar("j")
        return seq(Store(out, (i,), Literal(0, "int64")), For(j, i, Store(out, (i,), index(j), "add")))

    result = np.zeros(40, np.int64)
    run(TensorProgram((out,), (n,), vector_loop(n, 16, body)), [result], [40])
    np.testing.assert_array_equal(result, [i * (i - 1) // 2 for i in range(40)])


def test_vectorized_inside_vectorized_and_unrolled() -> None:
    out = Buffer.of("out", (3, 4, 8), "int32")
    i, j, v = SymVar("i"), SymVar("j"), SymVar("v")
    for kinds in (
        ("unrolled", "vectorized", "vectorized"),
        ("vectorized", "serial", "unrolled"),
        ("serial", "parallel", "vectorized"),
    ):
        store = Store(out, (i, j, v), index(i * 100 + j * 10 + v, "int32"))
        body = For(i, sym(3), For(j, sym(4), For(v, sym(8), store, kinds[2]), kinds[1]), kinds[0])
        result = np.zeros((3, 4, 8), np.int32)
        run(TensorProgram((out,), (), body), [result])
        np.testing.assert_array_equal(
            result, np.arange(3)[:, None, None] * 100 + np.arange(4)[:, None] * 10 + np.arange(8)
        )


def test_indices_from_data_gather_and_scatter() -> None:
    n = SymVar("n")
    table, which = Buffer.of("table", (100,), "float32"), Buffer.of("which", (n,), "int64")
    out = Buffer.of("out", (n,), "float32")

    def body(i: SymExpr) -> Stmt:
        k = SymVar("k", lower=None)
        in_range = Binary("and", Compare("ge", index(k), index(0)), Compare("lt", index(k), index(100)))
        return LetIndex(k, which[i], seq(Check(in_range, "outside"), Store(out, (i,), table[k])))

    kernel = NativeKernel(over(n, 16, body, table, which, out))
    values = np.random.default_rng(0).standard_normal(100, dtype=np.float32)
    for size in SIZES:
        chosen = np.random.default_rng(1).integers(0, 100, size)
        result = np.zeros(size, np.float32)
        assert kernel([values, chosen, result], [size]) == 0
        np.testing.assert_array_equal(result, values[chosen])
    assert kernel([values, np.array([0, 100]), np.zeros(2, np.float32)], [2]) == 1


# Reductions over lanes


_REDUCERS = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", dtypes.ALL)
@pytest.mark.parametrize("combine", _REDUCERS)
def test_reduction_over_a_vectorized_variable(combine: str, dtype: str) -> None:
    if dtypes.is_float(dtype) and combine in ("and", "or"):
        pytest.skip("bitwise operations of floats have no meaning")
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), dtype), Buffer.of("out", (1,), dtype)
    kernel = NativeKernel(over(n, 16, lambda i: Store(out, (sym(0),), a[i], combine), a, out))
    for size in SIZES:
        x = np.random.default_rng(size).integers(0, 3, size + 1).astype(dtypes.to_numpy(dtype))
        result = x[-1:].copy()
        assert kernel([x, result], [size]) == 0
        wide = x.astype(np.float64) if dtypes.is_float(dtype) else x
        wanted = _REDUCERS[combine].reduce(wide, dtype=wide.dtype)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(
                result.astype(wide.dtype), np.atleast_1d(wanted).astype(x.dtype).astype(wide.dtype), rtol=0.02
            )


@pytest.mark.parametrize("combine", ["max", "min"])
def test_reduction_over_lanes_hands_on_nan(combine: str) -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (1,), "float32")
    kernel = NativeKernel(over(n, 16, lambda i: Store(out, (sym(0),), a[i], combine), a, out))
    for position in (0, 7, 15, 16, 20):
        x, result = np.ones(21, np.float32), np.ones(1, np.float32)
        x[position] = np.nan
        assert kernel([x, result], [21]) == 0
        assert np.isnan(result[0])


def test_reduction_of_a_value_that_is_the_same_in_all_lanes_counts_lanes() -> None:
    n = SymVar("n")
    out = Buffer.of("out", (1,), "int64")
    kernel = NativeKernel(over(n, 16, lambda i: Store(out, (sym(0),), Literal(2, "int64"), "add"), out))
    for size in SIZES:
        result = np.zeros(1, np.int64)
        assert kernel([result], [size]) == 0
        assert result[0] == 2 * size


def test_histogram_where_lanes_meet_in_one_element() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "int32"), Buffer.of("out", (4,), "float32")

    def body(i: SymExpr) -> Stmt:
        k = SymVar("k")
        return LetIndex(k, a[i], Store(out, (k,), Literal(1.0, "float32"), "add"))

    kernel = NativeKernel(over(n, 16, body, a, out))
    for size in SIZES:
        x = np.random.default_rng(0).integers(0, 4, size, dtype=np.int32)
        result = np.zeros(4, np.float32)
        assert kernel([x, result], [size]) == 0
        np.testing.assert_array_equal(result, np.bincount(x, minlength=4))


def test_softmax_row_by_row() -> None:
    """Three vector passes over a row, with reductions over lanes between them."""
    n, m = SymVar("n"), SymVar("m")
    a, out = Buffer.of("a", (n, m), "float32"), Buffer.of("out", (n, m), "float32")
    top, total = Buffer.of("top", (1,), "float32", "local"), Buffer.of("total", (1,), "float32", "local")
    i = SymVar("i")
    at = (sym(0),)
    passes = seq(
        Store(top, at, Literal(float("-inf"), "float32")),
        vector_loop(m, 16, lambda j: Store(top, at, a[i, j], "max")),
        Store(total, at, ZERO),
        vector_loop(
            m,
            16,
            lambda j: seq(
                Store(out, (i, j), Unary("exp", Binary("sub", a[i, j], top[0]))), Store(total, at, out[i, j], "add")
            ),
        ),
        vector_loop(m, 16, lambda j: Store(out, (i, j), Binary("div", out[i, j], total[0]))),
    )
    program = TensorProgram((a, out), (n, m), For(i, n, Allocate(top, Allocate(total, passes)), "parallel"))
    kernel = NativeKernel(program)
    for rows, columns in ((1, 1), (3, 17), (5, 64), (4, 100)):
        x = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32) * 5
        result = np.zeros_like(x)
        assert kernel([x, result], [rows, columns]) == 0
        e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
        np.testing.assert_allclose(result, e / e.sum(axis=1, keepdims=True), rtol=2e-6)


# Loads that must not happen


_PAGE_PROGRAMS = ("tail", "select", "gather", "uniform", "reversed", "stride")


def _page_program(name: str) -> tuple[TensorProgram, int]:
    """A program that reads `a`, which ends where a page that cannot be read begins; and the size of `a` for n == 21."""
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (n,), "float32")
    if name == "tail":
        return over(n, 16, lambda i: Store(out, (i,), a[i]), a, out), 21
    if name == "select":  # the last 5 elements are padding, and far more would be
        inside: Callable[[SymExpr], Value] = lambda i: Compare("lt", index(i), index(n - 5))  # noqa: E731
        return over(n, 16, lambda i: Store(out, (i,), Select(inside(i), a[i], ZERO)), a, out), 16
    if name == "gather":
        return over(
            n, 16, lambda i: Store(out, (i,), Select(Compare("lt", index(i * i), index(n)), a[i * i], ZERO)), a, out
        ), 21
    if name == "uniform":  # one element for all lanes, which no active lane ever reads
        cond: Callable[[SymExpr], Value] = lambda i: Compare("lt", index(i), index(n - 100))  # noqa: E731
        return over(n, 16, lambda i: Store(out, (i,), Select(cond(i), a[n * 4096], ZERO)), a, out), 21
    if name == "reversed":
        return over(n, 16, lambda i: Store(out, (i,), a[n - 1 - i]), a, out), 21
    return over(
        n, 16, lambda i: Store(out, (i,), Select(Compare("lt", index(i * 2), index(n)), a[i * 2], ZERO)), a, out
    ), 21


_CHILD = """
import ctypes, mmap, sys
import numpy as np
from tests.support.native_kernel import NativeKernel
from tests.codegen.test_vectorize import _page_program

program, size = _page_program(sys.argv[1])
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None)
assert libc.mprotect(ctypes.c_void_p(address + 2 * page), page, 0) == 0
assert libc.mprotect(ctypes.c_void_p(address), page, 0) == 0
for start in (2 * page - 4 * size, page):  # at the end of what can be read, and at its beginning
    a = np.frombuffer(memory, np.float32, size, start)
    a[:] = np.arange(size)
    out = np.full(21, -1, np.float32)
    assert NativeKernel(program)([a, out], [21]) == 0
    print(out.tolist())
sys.stdout.flush()
import os; os._exit(0)
"""


@pytest.mark.each_value
@pytest.mark.skipif(sys.platform == "win32", reason="uses mprotect")
@pytest.mark.parametrize("cpu", ["host", "x86-64-v3", "x86-64-v2"])
@pytest.mark.parametrize("name", _PAGE_PROGRAMS)
def test_lanes_that_are_off_read_nothing(name: str, cpu: str) -> None:
    code = _CHILD
    if cpu != "host":
        if not Target.host().has("avx2"):
            pytest.skip("needs an x86 CPU with AVX2")
        code = code.replace(
            "NativeKernel(program)", f"NativeKernel(program, Target.parse('llvm -mcpu={cpu}'))"
        ).replace("import numpy as np", "import numpy as np\nfrom relaxlite.target import Target")
    found = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    i = np.arange(21)
    wanted = {
        "tail": i,
        "select": np.where(i < 16, i, 0),
        "gather": np.where(i * i < 21, i * i, 0),
        "uniform": i * 0,
        "reversed": 20 - i,
        "stride": np.where(i * 2 < 21, i * 2, 0),
    }[name]
    assert found.stdout.splitlines() == [str(wanted.astype(float).tolist())] * 2


def test_masked_loop_of_local_tile_stays_in_registers() -> None:
    """A guarded tile (only `rows` of 6 rows exist) must not spill its sums to the stack."""
    n = SymVar("n")
    a, out = Buffer.of("a", (n, 16), "float32"), Buffer.of("out", (16,), "float32")
    tile = Buffer.of("tile", (16,), "float32", "local")
    lane, k = SymVar("lane"), SymVar("k")

    def each(make: Callable[[SymVar], Stmt]) -> Stmt:
        return For(lane, sym(16), IfThenElse(Compare("lt", index(lane), index(13)), make(lane)), "vectorized")

    body = Allocate(
        tile,
        seq(
            each(lambda v: Store(tile, (v,), ZERO)),
            For(k, n, each(lambda v: Store(tile, (v,), a[k, v], "add"))),
            each(lambda v: Store(out, (v,), tile[v])),
        ),
    )
    program = TensorProgram((a, out), (n,), body)
    x, result = np.random.default_rng(0).standard_normal((20, 16), dtype=np.float32), np.full(16, 7, np.float32)
    run(program, [x, result], [20])
    np.testing.assert_allclose(result[:13], x.sum(axis=0)[:13], rtol=1e-5)
    assert (result[13:] == 7).all()
    assert "(%rsp)" not in emit_assembly({"k": program}, Target.host())


def test_gathered_lanes_may_lie_anywhere_in_a_local_table() -> None:
    """A vector store elsewhere in the table overwrites what was gathered before it."""
    table = Buffer.of("table", (32,), "float32", "local")
    a, places = Buffer.of("a", (32,), "float32"), Buffer.of("places", (16,), "int64")
    first, second = Buffer.of("first", (16,), "float32"), Buffer.of("second", (16,), "float32")
    u, lane, place = SymVar("u"), SymVar("lane", upper=15), SymVar("place")
    fill = For(lane, sym(16), Store(table, (u * 16 + lane,), a[u * 16 + lane]), "vectorized")
    use = seq(
        Store(first, (lane,), table[place]),
        Store(table, (lane + 16,), ZERO),
        Store(second, (lane,), table[place]),
    )
    gather = For(lane, sym(16), LetIndex(place, places[lane], use), "vectorized")
    program = TensorProgram(
        (places, a, first, second), (), Allocate(table, seq(For(u, sym(2), fill, "unrolled"), gather)), 2
    )
    x, at = np.arange(1, 33, dtype=np.float32), np.arange(16) * 2 % 31
    found, again = np.zeros(16, np.float32), np.zeros(16, np.float32)
    run(program, [at, x, found, again])
    np.testing.assert_array_equal(found, x[at])
    np.testing.assert_array_equal(again, np.where(at < 16, x[at], 0))


def test_loops_helper_matches() -> None:
    out = Buffer.of("out", (2, 3), "int32")
    result = np.zeros((2, 3), np.int32)
    run(
        TensorProgram((out,), (), loops("ij", (2, 3), lambda i, j: Store(out, (i, j), index(i * 3 + j, "int32")))),
        [result],
    )
    np.testing.assert_array_equal(result, np.arange(6).reshape(2, 3))
