"""Tensor programs as machine code: loops, stores, conditions, checks, scratch memory, parallel loops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from relaxlite.codegen.llvm import compile_programs, emit_assembly, emit_program, parallel
from relaxlite.errors import ArtifactError, CodegenError
from relaxlite.ir.expr import Attrs
from relaxlite.ir.program import (
    Allocate,
    Barrier,
    Binary,
    Buffer,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    LetIndex,
    Literal,
    Load,
    Select,
    Store,
    TensorProgram,
    Unary,
    compute,
    index,
    loops,
    reduce,
    seq,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, ceildiv, evaluate, floordiv, floormod, smax, smin, sym
from relaxlite.runtime import threadpool
from relaxlite.runtime.native import load_objects
from relaxlite.target import Target
from tests.support.native_kernel import NativeKernel, run

F32_ZERO = Literal(0.0, "float32")


@pytest.fixture
def any_work_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel loops go to all threads however short they are."""
    monkeypatch.setattr(parallel, "MIN_CHUNK_WORK", 1)


def test_kernel_runs_at_many_sizes_once_compiled() -> None:
    n, m = SymVar("n"), SymVar("m")
    a, out = Buffer.of("a", (n, m), "float32"), Buffer.of("out", (m, n), "float32")
    kernel = NativeKernel(TensorProgram((a, out), (n, m), compute(out, lambda i, j: a[j, i])))
    for rows, columns in ((0, 0), (0, 3), (1, 1), (3, 7), (64, 5)):
        x = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
        result = np.zeros((columns, rows), np.float32)
        assert kernel([x, result], [rows, columns]) == 0
        np.testing.assert_array_equal(result, x.T)


@pytest.mark.parametrize(
    "kinds", [("serial", "serial"), ("serial", "unrolled"), ("unrolled", "vectorized"), ("parallel", "vectorized")]
)
def test_loop_kinds_do_not_change_results(kinds: tuple[str, str]) -> None:
    a, out = Buffer.of("a", (6, 24), "int32"), Buffer.of("out", (6, 24), "int32")
    i, j = SymVar("i"), SymVar("j")
    value = Binary("add", Binary("mul", a[i, j], index(i, "int32")), index(j * 3, "int32"))
    body = For(i, sym(6), For(j, sym(24), Store(out, (i, j), value), kinds[1]), kinds[0])  # type: ignore[arg-type]
    x = np.arange(144, dtype=np.int32).reshape(6, 24)
    result = np.zeros_like(x)
    run(TensorProgram((a, out), (), body), [x, result])
    np.testing.assert_array_equal(result, x * np.arange(6)[:, None] + np.arange(24) * 3)


def test_reduction_in_memory() -> None:
    n, m = SymVar("n"), SymVar("m")
    a, out = Buffer.of("a", (n, m), "float64"), Buffer.of("out", (n,), "float64")
    program = TensorProgram(
        (a, out), (n, m), reduce(out, (m,), "max", Literal(-1e300, "float64"), lambda i, r: a[i, r])
    )
    x = np.random.default_rng(0).standard_normal((5, 9))
    result = np.zeros(5)
    run(program, [x, result], [5, 9])
    np.testing.assert_array_equal(result, x.max(axis=1))


def test_rank_zero_and_empty_programs() -> None:
    out = Buffer.of("out", (), "int8")
    result = np.zeros((), np.int8)
    run(TensorProgram((out,), (), seq(Barrier(), Store(out, (), Literal(-7, "int8")))), [result])
    assert result == -7
    run(TensorProgram((out,), (), seq()), [result])


# Symbolic integers


def _index_program(make: Callable[[SymVar, SymVar], SymExpr], checked: bool = False) -> TensorProgram:
    a, b = SymVar("a", lower=None), SymVar("b", lower=None)
    out = Buffer.of("out", (1,), "int64")
    attrs = Attrs({"checked": True}) if checked else Attrs()
    return TensorProgram((out,), (a, b), Store(out, (sym(0),), IndexValue(make(a, b))), 1, attrs)


_EXPRESSIONS: dict[str, Callable[[SymVar, SymVar], SymExpr]] = {
    "linear": lambda a, b: a * 3 - b * 4 + 7,
    "product": lambda a, b: a * b * a - b,
    "div": lambda a, b: floordiv(a, b),
    "mod": lambda a, b: floormod(a, b),
    "div by 7": lambda a, b: floordiv(a + b * 2, 7),
    "mod by 7": lambda a, b: floormod(a + b * 2, 7),
    "div by 8": lambda a, b: floordiv(a - b * 3, 8),
    "mod by 8": lambda a, b: floormod(a - b * 3, 8),
    "min max": lambda a, b: smin(a, b * 2) + smax(a - 3, b) * 2,
}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", _EXPRESSIONS)
def test_symbolic_integers_agree_with_evaluate(name: str, checked: bool) -> None:
    program = _index_program(_EXPRESSIONS[name], checked)
    kernel = NativeKernel(program)
    store = program.body
    assert isinstance(store, Store) and isinstance(store.value, IndexValue)
    for a in (-17, -8, -1, 0, 1, 5, 16, 100):
        for b in (-9, -2, -1, 1, 3, 8):
            result = np.zeros(1, np.int64)
            assert kernel([result], [a, b]) == 0
            assert result[0] == evaluate(store.value.index, dict(zip(program.symbols, (a, b), strict=True))), (a, b)


@pytest.mark.parametrize("checked", [False, True])
def test_symbolic_division_by_zero_gives_zero(checked: bool) -> None:
    result = np.ones(1, np.int64)
    run(_index_program(_EXPRESSIONS["div"], checked), [result], [5, 0])
    assert result[0] == 0
    run(_index_program(_EXPRESSIONS["mod"], checked), [result], [5, 0])
    assert result[0] == 0


def test_division_of_symbols_that_are_not_negative() -> None:
    n, m = SymVar("n"), SymVar("m", lower=1)
    out = Buffer.of("out", (4,), "int64")
    parts = (floordiv(n, m), floormod(n, m), floordiv(n, 16), floormod(m, n))
    body = seq(*(Store(out, (sym(k),), IndexValue(part)) for k, part in enumerate(parts)))
    result = np.zeros(4, np.int64)
    kernel = NativeKernel(TensorProgram((out,), (n, m), body))
    for values in ((100, 7), (0, 3), (31, 1)):
        assert kernel([result], values) == 0
        a, b = values
        assert result.tolist() == [a // b, a % b, a // 16, b % a if a else 0]


@pytest.mark.parametrize(
    ("make", "values", "status"),
    [
        (lambda a, b: a * b, (1 << 40, 1 << 40), -1),
        (lambda a, b: a * b, (1 << 31, 1 << 31), 0),
        (lambda a, b: a + b, ((1 << 63) - 1, 1), -1),
        (lambda a, b: a - b, (-(1 << 63), 1), -1),
        (lambda a, b: a * 4 + 1, (1 << 61, 0), -1),
        (lambda a, b: floordiv(a * 5, b), (1 << 62, 3), -1),
    ],
)
def test_checked_programs_report_overflow(
    make: Callable[[SymVar, SymVar], SymExpr], values: tuple[int, int], status: int
) -> None:
    result = np.zeros(1, np.int64)
    assert NativeKernel(_index_program(make, checked=True))([result], values) == status


def test_let_index_from_data() -> None:
    n = SymVar("n")
    table, which = Buffer.of("table", (n,), "float32"), Buffer.of("which", (3,), "int32")
    out = Buffer.of("out", (3,), "float32")
    i, k = SymVar("i"), SymVar("k", lower=None)
    wrapped = IndexValue(k + n)
    position = Select(Compare("lt", index(k), index(0)), wrapped, IndexValue(k))
    p = SymVar("p", lower=None)
    body = For(i, sym(3), LetIndex(k, which[i], LetIndex(p, position, Store(out, (i,), table[p]))))
    result = np.zeros(3, np.float32)
    run(
        TensorProgram((table, which, out), (n,), body),
        [np.arange(5, dtype=np.float32), np.array([4, -1, -5], np.int32), result],
        [5],
    )
    assert result.tolist() == [4, 4, 0]


def test_data_of_an_earlier_copy_is_not_taken_for_that_of_a_later_one() -> None:
    """In an unrolled loop one variable has many values: what was loaded by the first must be forgotten."""
    table, which = Buffer.of("table", (9,), "float32"), Buffer.of("which", (3,), "int64")
    tile, out = Buffer.of("tile", (3,), "float32", "local"), Buffer.of("out", (3,), "float32")
    i, k = SymVar("i"), SymVar("k")
    fill = For(i, sym(3), LetIndex(k, which[i], Store(tile, (i,), table[k])), "unrolled")
    body = Allocate(tile, seq(fill, loops("j", (3,), lambda j: Store(out, (j,), tile[j]))))
    result = np.zeros(3, np.float32)
    run(TensorProgram((table, which, out), (), body), [np.arange(9, dtype=np.float32), np.array([4, 7, 2]), result])
    assert result.tolist() == [4, 7, 2]


def test_check_of_data_is_not_optimized_away_by_the_bounds_of_its_variable() -> None:
    """A SymVar is at least 0 unless told otherwise; data is what it is."""
    which, out = Buffer.of("which", (1,), "int64"), Buffer.of("out", (1,), "int64")
    k = SymVar("k")
    check = Check(Compare("ge", index(k), index(0)), "negative")
    kernel = NativeKernel(
        TensorProgram((which, out), (), LetIndex(k, which[0], seq(check, Store(out, (sym(0),), index(k)))))
    )
    result = np.zeros(1, np.int64)
    assert kernel([np.array([-3]), result]) == 1
    assert kernel([np.array([3]), result]) == 0


# Conditions


def test_if_then_else() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "int64"), Buffer.of("out", (n,), "int64")
    i = SymVar("i")
    cond = Compare("gt", a[i], Literal(0, "int64"))
    body = For(i, n, IfThenElse(cond, Store(out, (i,), a[i]), Store(out, (i,), Unary("neg", a[i]))))
    x = np.array([1, -2, 0, 5], np.int64)
    result = np.zeros_like(x)
    run(TensorProgram((a, out), (n,), body), [x, result], [4])
    assert result.tolist() == [1, 2, 0, 5]


def test_select_is_lazy() -> None:
    """The index of the branch not taken would be far outside of every mapping."""
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (n,), "float32")
    i = SymVar("i")
    far = a[i * (1 << 40) - 1]
    body = For(i, n, Store(out, (i,), Select(Compare("lt", index(i), index(n)), a[i], far)))
    x = np.arange(4, dtype=np.float32)
    result = np.zeros_like(x)
    run(TensorProgram((a, out), (n,), body), [x, result], [4])
    np.testing.assert_array_equal(result, x)


def test_values_of_a_branch_are_not_reused_outside() -> None:
    """A load under a condition must not stand for the same load after it, when memory has changed."""
    a, out = Buffer.of("a", (1,), "int32"), Buffer.of("out", (2,), "int32")
    one = Literal(1, "int32")
    body = seq(
        IfThenElse(Compare("gt", a[0], Literal(5, "int32")), Store(out, (sym(0),), a[0])),
        Store(a, (sym(0),), Binary("add", a[0], one)),
        Store(out, (sym(1),), a[0]),
    )
    for start, expected in ((3, [0, 4]), (9, [9, 10])):
        result = np.zeros(2, np.int32)
        run(TensorProgram((a, out), (), body, 2), [np.array([start], np.int32), result])
        assert result.tolist() == expected


# Checks


def test_checks_return_their_number() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "int64"), Buffer.of("out", (n,), "int64")
    i = SymVar("i")
    body = For(
        i,
        n,
        seq(
            Check(Compare("ge", a[i], Literal(0, "int64")), "index is negative"),
            Check(Compare("lt", a[i], index(n)), "index is too large"),
            Check(Compare("ge", a[i], Literal(0, "int64")), "index is negative"),
            Store(out, (i,), a[i]),
        ),
    )
    kernel = NativeKernel(TensorProgram((a, out), (n,), body))
    assert kernel.info.checks == ("index is negative", "index is too large")
    result = np.zeros(3, np.int64)
    assert kernel([np.array([0, 1, 2]), result], [3]) == 0
    assert kernel([np.array([0, -1, 2]), result], [3]) == 1
    assert kernel([np.array([0, 1, 3]), result], [3]) == 2


@pytest.mark.usefixtures("any_work_is_enough")
def test_checks_in_parallel_loops_reach_the_caller() -> None:
    n = SymVar("n")
    a = Buffer.of("a", (n,), "int32")
    out = Buffer.of("out", (n,), "int32")
    i = SymVar("i")
    good = seq(Check(Compare("ne", a[i], Literal(7, "int32")), "seven"), Store(out, (i,), a[i]))
    kernel = NativeKernel(TensorProgram((a, out), (n,), For(i, n, good, "parallel")))
    x = np.zeros(100, np.int32)
    assert kernel([x, np.zeros_like(x)], [100]) == 0
    x[93] = 7
    assert kernel([x, np.zeros_like(x)], [100]) == 1


# Scratch memory


def _scratch_program(scope: str, size: int | str, fail: bool = False) -> TensorProgram:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (n,), "float32")
    tmp = Buffer.of("tmp", (n if isinstance(size, str) else size,), "float32", scope)  # type: ignore[arg-type]
    double = loops("i", (n,), lambda i: Store(tmp, (i,), Binary("add", a[i], a[i])))
    back = loops("i", (n,), lambda i: Store(out, (i,), tmp[n - 1 - i]))
    check = (Check(Compare("ge", a[0], F32_ZERO), "negative"),) if fail else ()
    return TensorProgram((a, out), (n,), Allocate(tmp, seq(double, *check, back)))


@pytest.mark.parametrize(("scope", "size"), [("local", 64), ("global", "n"), ("local", 1 << 20)])
def test_scratch_buffers(scope: str, size: int) -> None:
    x = np.arange(64, dtype=np.float32)
    result = np.zeros_like(x)
    run(_scratch_program(scope, size), [x, result], [64])
    np.testing.assert_array_equal(result, 2 * x[::-1])


def test_scratch_is_freed_when_a_check_fails() -> None:
    program = _scratch_program("global", "n", fail=True)
    assert emit_program("k", program, Target.host()).count("call void @relaxlite_scratch_free") == 2
    kernel = NativeKernel(program)
    x = np.full(1 << 20, -1.0, np.float32)
    for _ in range(100):
        assert kernel([x, np.zeros_like(x)], [1 << 20]) == 1


def test_scratch_that_cannot_be_had_is_a_status() -> None:
    n = SymVar("n")
    tmp, out = Buffer.of("tmp", (n,), "float32"), Buffer.of("out", (1,), "float32")
    body = Allocate(tmp, seq(Store(tmp, (sym(0),), F32_ZERO), Store(out, (sym(0),), tmp[0])))
    assert NativeKernel(TensorProgram((out,), (n,), body))([np.zeros(1, np.float32)], [1 << 60]) == -2


@pytest.mark.usefixtures("any_work_is_enough")
def test_scratch_inside_parallel_and_serial_loops() -> None:
    n, m = SymVar("n"), SymVar("m")
    a, out = Buffer.of("a", (n, m), "float32"), Buffer.of("out", (n, m), "float32")
    row = Buffer.of("row", (m,), "float32")
    i = SymVar("i")
    fill = loops("j", (m,), lambda j: Store(row, (j,), Binary("mul", a[i, j], a[i, j])))
    write = loops("j", (m,), lambda j: Store(out, (i, j), row[m - 1 - j]))
    for kind in ("serial", "parallel"):
        body = For(i, n, Allocate(row, seq(fill, write)), kind)
        x = np.random.default_rng(0).standard_normal((37, 11), dtype=np.float32)
        result = np.zeros_like(x)
        run(TensorProgram((a, out), (n, m), body), [x, result], [37, 11])
        np.testing.assert_array_equal(result, (x * x)[:, ::-1])


# Parallel loops


@pytest.mark.usefixtures("any_work_is_enough")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_parallel_loops(threads: int) -> None:
    """A parallel loop inside a serial one, with another inside that must then run serially."""
    n, m = SymVar("n"), SymVar("m")
    a, out = Buffer.of("a", (n, m), "float64"), Buffer.of("out", (n,), "float64")
    i, j, repeat = SymVar("i"), SymVar("j"), SymVar("repeat")
    inner = For(j, m, Store(out, (i,), Binary("mul", a[i, j], a[i, j]), "add"), "parallel")
    outer = For(i, n, seq(Store(out, (i,), Literal(0.0, "float64")), inner), "parallel")
    before = threadpool.num_threads()
    threadpool.set_num_threads(threads)
    try:
        kernel = NativeKernel(TensorProgram((a, out), (n, m), For(repeat, sym(2), outer)))
        for rows in (0, 1, 3, 1000):
            x = np.random.default_rng(0).standard_normal((rows, 6))
            result = np.zeros(rows)
            assert kernel([x, result], [rows, 6]) == 0
            np.testing.assert_allclose(result, (x * x).sum(axis=1))
    finally:
        threadpool.set_num_threads(before)


@pytest.mark.usefixtures("any_work_is_enough")
def test_parallel_loop_uses_what_surrounds_it() -> None:
    n = SymVar("n")
    out = Buffer.of("out", (3, n), "int64")
    row, i, k = SymVar("row"), SymVar("i"), SymVar("k", lower=None)
    table = Buffer.of("table", (4,), "int64", "local")
    value = Binary("add", table[floormod(i, 4)], IndexValue(k * row + i))
    inner = For(i, n, Store(out, (row, i), value), "parallel")
    body = For(row, sym(3), LetIndex(k, Literal(100, "int64"), inner), "unrolled")
    fill = loops("q", (4,), lambda q: Store(table, (q,), IndexValue(q * 1000)))
    result = np.zeros((3, 50), np.int64)
    run(TensorProgram((out,), (n,), Allocate(table, seq(fill, body))), [result], [50])
    i_, row_ = np.arange(50), np.arange(3)[:, None]
    np.testing.assert_array_equal(result, i_ % 4 * 1000 + 100 * row_ + i_)


@pytest.mark.parametrize(
    ("inner", "count", "wanted"),
    [(4, 7, [1, 1, 1, 7]), (5000, 7, [1, 2, 7, 7]), (4, 8, [1, 1, 1, 32]), (5000, 8, [1, 2, 32, 32])],
)
def test_little_work_is_not_shared_out(inner: int, count: int, wanted: list[int]) -> None:
    """As many chunks as are worth a thread each, at most one for each thread or of many four, and one at least."""
    n = SymVar("n")
    out = Buffer.of("out", (n,), "float32")
    i, j = SymVar("i"), SymVar("j")
    body = For(j, sym(inner), Store(out, (i,), Literal(1.0, "float32"), "add"))
    chunks: list[int] = []
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    note = prototype(lambda function, context, number: chunks.append(number) or 0)
    threads = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: count)
    code = compile_programs({"k": TensorProgram((out,), (n,), For(i, n, body, "parallel"))}, Target.host())
    addresses = {
        "relaxlite_parallel_for": ctypes.cast(note, ctypes.c_void_p).value or 0,
        "relaxlite_num_threads": ctypes.cast(threads, ctypes.c_void_p).value or 0,
    }
    library = load_objects(code.objects, addresses)
    kernel = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(
        library.address(code.kernels["k"].symbol)
    )
    result = np.zeros(10**6, np.float32)
    for size in (0, 1, 2, 100, 10**6):
        assert kernel((ctypes.c_void_p * 1)(result.ctypes.data), (ctypes.c_int64 * 1)(size)) == 0
    assert chunks == wanted


# The text, and errors


def test_emitted_text_is_pretty_and_stable() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (n,), "float32")
    program = TensorProgram((a, out), (n,), compute(out, lambda i: Unary("neg", a[i])))
    text = emit_program("negate", program, Target.host())
    assert text == emit_program("negate", program, Target.host())
    assert "; program negate(a: float32[n]) -> out: float32[n]; symbols n" in text
    assert "define i32 @kernel_negate(ptr %buffers, ptr %symbols)" in text
    assert "fneg float %a.1" in text
    assert "kernel_negate:" in emit_assembly({"negate": program}, Target.host())


def test_row_offsets_are_computed_outside_the_inner_loop() -> None:
    n, m = SymVar("n"), SymVar("m")
    a, out = Buffer.of("a", (n, m), "float32"), Buffer.of("out", (n, m), "float32")
    text = emit_program("k", TensorProgram((a, out), (n, m), compute(out, lambda i, j: a[i, j])), Target.host())
    before, inner = text.split("j_loop:")
    assert "mul" in before and "mul" not in inner


def test_names_that_are_not_symbols() -> None:
    out = Buffer.of("a.b/c d", (1,), "int32")
    programs = {
        name: TensorProgram((out,), (), Store(out, (sym(0),), Literal(number, "int32")))
        for number, name in enumerate(("exp", "a b", "a_b", "ü", "main"))
    }
    code = compile_programs(programs, Target.host())
    assert list(code.kernels) == list(programs)
    assert len({info.symbol for info in code.kernels.values()}) == 5
    for number, name in enumerate(programs):
        result = np.full(1, -1, np.int32)
        assert NativeKernel(programs[name], name=name)([result]) == 0
        assert result[0] == number


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Unary("exp", Literal(1, "int32")), "exp of an integer"),
        (Binary("div", Literal(1, "int32"), Literal(1, "int32")), "div of integers"),
    ],
)
def test_meaningless_programs_are_errors_that_name_the_program(value: Unary | Binary, message: str) -> None:
    out = Buffer.of("out", (1,), "int32")
    with pytest.raises(CodegenError, match=f"program 'broken'.*{message}"):
        compile_programs({"broken": TensorProgram((out,), (), Store(out, (sym(0),), value))}, Target.host())


def test_too_many_lanes_is_an_error() -> None:
    out = Buffer.of("out", (1000,), "int32")
    i = SymVar("i")
    body = For(i, sym(1000), Store(out, (i,), Literal(0, "int32")), "vectorized")
    with pytest.raises(CodegenError, match="vectorized over 1000 lanes"):
        compile_programs({"wide": TensorProgram((out,), (), body)}, Target.host())


def test_unknown_symbol_is_an_error_that_names_it() -> None:
    out = Buffer.of("out", (SymVar("n"),), "int32")
    program = TensorProgram((out,), (), Store(out, (sym(0),), IndexValue(SymVar("nowhere"), "int32")))
    with pytest.raises(CodegenError, match=r"program 'lost'.*nowhere"):
        compile_programs({"lost": program}, Target.host())


def test_loader_names_missing_symbols() -> None:
    out = Buffer.of("out", (1,), "int32")
    code = compile_programs({"k": TensorProgram((out,), (), Store(out, (sym(0),), Literal(1, "int32")))}, Target.host())
    library = load_objects(code.objects)
    with pytest.raises(ArtifactError, match="no function 'nonsense'"):
        library.address("nonsense")
    library.close()
    with pytest.raises(ArtifactError, match="closed"):
        library.address(code.kernels["k"].symbol)
    with pytest.raises(ArtifactError, match="not object code"):
        load_objects([b"not an object file"])
    with pytest.raises(ArtifactError, match="truncated"):
        load_objects([code.objects[0][:100]])


def test_loader_lists_undefined_functions() -> None:
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(
        "declare i32 @nobody_has_this()\ndefine i32 @f() { %r = call i32 @nobody_has_this() ret i32 %r }"
    )
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic")
    with pytest.raises(ArtifactError, match="needs nobody_has_this"):
        load_objects([machine.emit_object(module)])


def test_ceildiv_loop_with_load() -> None:
    n = SymVar("n")
    a, out = Buffer.of("a", (n,), "float32"), Buffer.of("out", (ceildiv(n, 3),), "float32")
    i = SymVar("i")
    body = For(i, ceildiv(n, 3), Store(out, (i,), Load(a, (i * 3,))))
    result = np.zeros(4, np.float32)
    run(TensorProgram((a, out), (n,), body), [np.arange(10, dtype=np.float32), result], [10])
    assert result.tolist() == [0, 3, 6, 9]
