"""Schedules: primitives and rules keep the meaning of programs; only independent loops run in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from relaxlite.codegen.interpreter import run_program
from relaxlite.errors import ExecutionError
from relaxlite.ir.equality import first_difference
from relaxlite.ir.op import all_ops
from relaxlite.ir.ops.scalars import identity
from relaxlite.ir.program import (
    Allocate,
    Buffer,
    For,
    IfThenElse,
    Stmt,
    Store,
    TensorProgram,
    loops,
    seq,
)
from relaxlite.ir.program_verifier import verify_program
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, sym
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.pattern import reduction_of
from relaxlite.passes.loops.transforms import (
    distribute,
    fuse,
    hoist_lets,
    less,
    masked_tail,
    nest,
    split,
    split_reduction,
    when_positive,
)
from relaxlite.passes.loops.versioning import clamped_indices
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.passes.schedule.cpu.programs import schedule_program
from relaxlite.target import Target
from tests.ir.ops.test_conformance import sample_module
from tests.support import tiers
from tests.support.ir_text import program
from tests.support.random_programs import (
    COMBINATIONS,
    MAX_WORK,
    SIZES,
    N,
    assert_same_program,
    maps,
    products,
    reductions,
    rows,
    work_of,
)

TARGETS = {bits: Target.parse(f"llvm -mcpu=x86-64-v{level}") for bits, level in ((128, 2), (256, 3), (512, 4))}
SMALL = (0, 1, 2, 5, 9)

random_programs = settings(max_examples=tiers.examples(80), deadline=None, suppress_health_check=list(HealthCheck))


def with_body(given: TensorProgram, body: Stmt) -> TensorProgram:
    """A legal program of this body, with the symbols that it always had."""
    made = replace(given, body=body)
    verify_program("made", made)
    return made


def loops_of(given: TensorProgram) -> list[For]:
    return [s for s in walk_stmts(given.body) if isinstance(s, For)]


class Swap(ProgramRewriter):
    """Replaces one statement."""

    def __init__(self, old: Stmt, new: Stmt) -> None:
        super().__init__()
        self.old, self.new = old, new

    def stmt(self, stmt: Stmt) -> Stmt:
        return self.new if stmt is self.old else super().stmt(stmt)


def swapped(given: TensorProgram, old: Stmt, new: Stmt) -> TensorProgram:
    return with_body(given, Swap(old, new).stmt(given.body))


# Primitives

sizes = st.tuples(st.sampled_from(SMALL), st.sampled_from(SMALL))


def rest_of(loop: For, start: SymExpr, count: SymExpr) -> Stmt:
    """The iterations from `start` on: a loop of `count`."""
    var = SymVar(f"{loop.var.name}t")
    return For(var, count, Substitute({loop.var: start + var}, fresh=True).stmt(loop.body))


@random_programs
@given(st.data(), maps(), sizes, st.integers(1, 5))
def test_split(data: Any, given: TensorProgram, size: tuple[int, int], factor: int) -> None:
    assume(loops_of(given) and work_of(given, size) <= MAX_WORK)
    loop = data.draw(st.sampled_from(loops_of(given)))
    main, inner, start, count = split(loop, factor)
    assert isinstance(main.body, For) and main.body.var is inner and inner.upper == factor - 1
    rest = when_positive(count, rest_of(loop, start, count))
    assert_same_program(given, swapped(given, loop, seq(main, *rest)), size)


@random_programs
@given(maps(), sizes, st.integers(1, 8))
def test_the_masked_rest_of_a_split(given: TensorProgram, size: tuple[int, int], lanes: int) -> None:
    assume(loops_of(given) and work_of(given, size) <= MAX_WORK)
    loop = loops_of(given)[-1]
    main, _, start, count = split(loop, lanes)
    rest = when_positive(count, masked_tail(loop, start, lanes))
    assert_same_program(given, swapped(given, loop, seq(*when_positive(main.extent, main), *rest)), size)


@random_programs
@given(maps(), sizes)
def test_fuse(given: TensorProgram, size: tuple[int, int]) -> None:
    assume(len(loops_of(given)) > 1 and work_of(given, size) <= MAX_WORK)
    outer, inner = loops_of(given)[-2:]
    assert_same_program(given, swapped(given, outer, fuse(outer, inner)), size)


@random_programs
@given(reductions(), sizes, st.integers(0, 3))
def test_distribute(given: TensorProgram, size: tuple[int, int], masked: int) -> None:
    """With a mask: loops that are too long, and what is too much does nothing."""
    reduction = reduction_of(given.body)
    assert reduction is not None
    known = [loop for loop in reduction.spatial if as_int(loop.extent) is not None]
    assume(known and work_of(given, size) <= MAX_WORK)
    outer = [loop for loop in reduction.spatial if loop not in known]
    last = known[-1]
    longer = [*known[:-1], replace(last, extent=last.extent + masked)]
    block = Substitute(fresh=True).stmt(reduction.block)
    assert isinstance(block, Allocate)
    made = distribute(longer, block, less(last.var, last.extent) if masked else None)
    assert_same_program(given, with_body(given, nest(outer, made)), size)


@random_programs
@given(reductions(), sizes, st.sampled_from((1, 2, 4)), st.integers(1, 3))
def test_split_reduction(given: TensorProgram, size: tuple[int, int], lanes: int, accumulators: int) -> None:
    assume(work_of(given, size) <= MAX_WORK)
    inner = loops_of(given)[-1]
    assert isinstance(inner.body, Store) and inner.body.combine is not None
    start = identity(inner.body.combine, inner.body.buffer.dtype)
    made = swapped(given, inner, split_reduction(inner, lanes, accumulators, start))
    assert_same_program(given, made, size)


@pytest.mark.parametrize(("dtype", "combine"), [*COMBINATIONS, ("uint8", "or"), ("float16", "min"), ("bool", "max")])
def test_identity(dtype: str, combine: str) -> None:
    """A legal literal of the dtype that changes nothing it is combined with."""
    found = identity(combine, dtype)
    x, out = Buffer.of("x", (5,), dtype), Buffer.of("out", (5,), dtype)
    body = loops("i", (5,), lambda i: seq(Store(out, (i,), found), Store(out, (i,), x[i], combine)))
    made = TensorProgram((x, out), (), body)
    verify_program("identity", made)
    values = np.array([0, 1, 1, 0, 1], bool) if dtype == "bool" else np.array([0, 1, 2, 5, 100])
    data = values.astype(dtype)
    np.testing.assert_array_equal(run_program(made, [data])[0], data)


def test_guards_of_known_counts_are_decided_at_once() -> None:
    stmt = seq()
    assert when_positive(sym(0), stmt) == ()
    assert when_positive(sym(3), stmt) == (stmt,)
    (guarded,) = when_positive(N, stmt)
    assert isinstance(guarded, IfThenElse)
    loop = For(SymVar("i"), N, stmt)
    assert when_positive(N, loop) == (loop,)  # a loop guards itself


# Indices from data

GATHER = """
n = symbol("n")
m = symbol("m")
@program(symbols=(n, m), outputs=1)
def p(x: f32[n, m], places: i64[n], out: f32[n, m]):
"""


def assert_hoists(before: str, after: str | None) -> None:
    """`after`: None, when nothing moves."""
    given = program(GATHER + before)
    made = replace(given, body=hoist_lets(given.body))
    difference = first_difference(made, given if after is None else program(GATHER + after))
    assert difference is None, difference


def test_an_index_moves_out_of_the_loops_that_do_not_change_it() -> None:
    assert_hoists(
        """
    for i in serial(n):
        for j in serial(m):
            with let_index(places[i], lower=None) as p:
                assert (index(p) >= int64(0)) & (index(p) < index(n)), "outside"
                out[i, j] = x[p, j]
""",
        """
    for i in serial(n):
        with let_index(places[i], lower=None) as p:
            assert (index(m) < index(1)) | ((index(p) >= int64(0)) & (index(p) < index(n))), "outside"
            for j in serial(m):
                out[i, j] = x[p, j]
""",
    )


def test_a_place_that_only_a_check_inside_makes_safe_is_not_read_outside() -> None:
    assert_hoists(
        """
    for j in serial(m):
        with let_index(places[0], lower=None) as p:
            assert (index(p) >= int64(0)) & (index(p) < index(n)), "outside"
            with let_index(places[p], lower=None) as q:
                out[0, j] = x[q, j]
""",
        """
    with let_index(places[0], lower=None) as p:
        assert (index(m) < index(1)) | ((index(p) >= int64(0)) & (index(p) < index(n))), "outside"
        for j in serial(m):
            with let_index(places[p], lower=None) as q:
                out[0, j] = x[q, j]
""",
    )


def test_indices_move_out_one_after_the_other() -> None:
    assert_hoists(
        """
    for i in serial(n):
        for j in serial(m):
            with let_index(places[0]) as p:
                with let_index(places[p]) as q:
                    out[i, j] = x[q, j]
""",
        """
    with let_index(places[0]) as p:
        with let_index(places[p]) as q:
            for i in serial(n):
                for j in serial(m):
                    out[i, j] = x[q, j]
""",
    )


@pytest.mark.parametrize(
    "body",
    [
        """
    for i in serial(n):
        for j in serial(m):
            with let_index(places[i + j]) as p:
                out[i, j] = x[p, j]
""",
        """
    for i in serial(n):
        with allocate((1,), "int64", "local") as at:
            at[0] = int64(0)
            for j in serial(m):
                with let_index(at[0]) as p:
                    out[i, j] = x[p, j]
                    at[0] = at[0] + places[i]
""",
        """
    for i in parallel(n):
        with let_index(places[0]) as p:
            out[i, 0] = x[p, 0]
""",
        """
    for i in serial(n):
        for j in serial(m):
            out[i, j] = x[i, j]
            with let_index(places[i]) as p:
                out[i, j] += x[p, j]
""",
        """
    for i in serial(n):
        for j in serial(m):
            if index(i) < index(j):
                with let_index(places[i]) as p:
                    out[i, j] = x[p, j]
""",
        """
    for i in serial(n):
        for j in serial(m):
            assert index(j) < index(n), "wide"
            out[i, j] = x[i, j]
""",
    ],
    ids=[
        "uses the variable",
        "reads what is written",
        "parallel",
        "after a store",
        "under a condition",
        "varying check",
    ],
)
def test_an_index_stays(body: str) -> None:
    assert_hoists(body, None)


@pytest.mark.parametrize("hoists", [False, True])
def test_a_check_fails_where_its_loop_runs_only(hoists: bool) -> None:
    given = program(
        GATHER
        + """
    for i in serial(n):
        for j in serial(m):
            with let_index(places[i], lower=None) as p:
                assert index(p) < index(n), "outside"
                out[i, j] = x[p, j]
"""
    )
    given = replace(given, body=hoist_lets(given.body)) if hoists else given
    run_program(given, [np.zeros((2, 0), "f4"), np.array([7, 7])])
    with pytest.raises(ExecutionError, match="outside"):
        run_program(given, [np.zeros((2, 1), "f4"), np.array([7, 7])])


def test_windows_that_run_backwards_read_nothing_before_the_first_element() -> None:
    given = program(
        """
    n = symbol("n")
    @program(symbols=(n,), outputs=1)
    def p(x: f32[n, 3, n], out: f32[n, n]):
        for i in serial(n):
            for j in serial(n):
                with allocate((), "float32", "local") as acc:
                    acc[()] = float32(0.0)
                    for s in serial(3):
                        acc[()] += x[-i + n - 1, s, j]
                    out[i, j] = acc[()]
"""
    )
    for bits, target in TARGETS.items():
        made = schedule_program(given, target)
        assert "window_tile" in str(made.attrs.get("schedule")), bits
        for n in (0, 1, 2, 5, 17):
            x = np.random.default_rng(n).standard_normal((n, 3, n)).astype("f4")
            (got,) = run_program(made, [x], {made.symbols[0]: n})
            np.testing.assert_allclose(got, x.sum(axis=1)[::-1], rtol=1e-5, atol=1e-6)


# What may run in parallel


def kinds(given: TensorProgram, bits: int = 256) -> list[list[str]]:
    """For each statement that stores to an output: the kinds of the loops around it, outermost first."""
    made = schedule_program(given, TARGETS[bits])
    verify_program("scheduled", made)
    return [around for store, around in _stores(made.body, []) if store.buffer in given.outputs]


def _stores(stmt: Stmt, around: list[str]) -> Iterator[tuple[Store, list[str]]]:
    if isinstance(stmt, Store):
        yield stmt, around
    inner = [*around, stmt.kind] if isinstance(stmt, For) else around
    for name in ("body", "then", "other"):
        if getattr(stmt, name, None) is not None:
            yield from _stores(getattr(stmt, name), inner)
    for one in getattr(stmt, "stmts", ()):
        yield from _stores(one, inner)


HEAD = {
    "matrix": GATHER,
    "vector": GATHER.replace("[n, m]", "[n]"),
}

PARALLEL = {
    "a map": (
        HEAD["matrix"] + """
    for i in serial(n):
        for j in serial(m):
            out[i, j] = x[i, j] + float32(1.0)
"""
    ),
    "rows of running sums": (
        HEAD["matrix"] + """
    for i in serial(n):
        with allocate((1,), "float32", "local") as total:
            total[0] = float32(0.0)
            for j in serial(m):
                total[0] += x[i, j]
                out[i, j] = total[0]
"""
    ),
    "blocks of four": (
        HEAD["vector"].replace("out: f32[n]", "out: f32[n*4]") + """
    for i in serial(n):
        for j in serial(4, upper=3):
            out[i*4 + j] = x[i]
"""
    ),
    "rows that read their own results": (
        HEAD["matrix"] + """
    for i in serial(n):
        for j in serial(m):
            out[i, j] = x[i, j]
        for j in serial(m):
            out[i, j] = out[i, j] + out[i, 0]
"""
    ),
    "a matrix product": (
        HEAD["matrix"].replace("out: f32[n, m]", "out: f32[n, n]") + """
    for i in serial(n):
        for j in serial(n):
            with allocate((), "float32", "local") as acc:
                acc[()] = float32(0.0)
                for r in serial(m):
                    acc[()] += x[i, r] * x[j, r]
                out[i, j] = acc[()]
"""
    ),
}  # fmt: skip

SERIAL = {
    "a running sum": (
        HEAD["vector"] + """
    for i in serial(n):
        out[i] = x[i]
        if index(0) < index(i):
            out[i] = out[i - 1] + x[i]
"""
    ),
    "a scatter": (
        HEAD["vector"] + """
    for i in serial(n):
        with let_index(places[i]) as p:
            out[p] = x[i]
"""
    ),
    "a scatter of rows": (
        HEAD["matrix"] + """
    for i in serial(n):
        for j in serial(m):
            with let_index(places[i]) as p:
                out[p, j] += x[i, j]
"""
    ),
    "a histogram": (
        HEAD["vector"] + """
    for i in serial(n):
        out[i // 2] += x[i]
"""
    ),
    "a counter": (
        HEAD["vector"] + """
    with allocate((1,), "int64") as count:
        count[0] = int64(0)
        for i in serial(n):
            if x[i] > float32(0.0):
                with let_index(count[0]) as p:
                    out[p] = x[i]
                    count[0] += int64(1)
"""
    ),
    "scratch that iterations share": (
        HEAD["matrix"] + """
    with allocate((m,), "float32") as row:
        for i in serial(n):
            for j in serial(m):
                row[j] = x[i, j]
            for j in serial(m):
                out[i, j] = row[m - 1 - j]
"""
    ),
    "results read at another scale": (
        HEAD["vector"].replace("out: f32[n]", "out: f32[n*2]") + """
    for i in serial(n):
        out[i*2] = out[i] + x[i]
"""
    ),
    "overlapping blocks": (
        HEAD["vector"].replace("out: f32[n]", "out: f32[n*4 + 1]") + """
    for i in serial(n):
        for j in serial(5, upper=4):
            out[i*4 + j] = x[i]
"""
    ),
    "sums into one element": (
        HEAD["matrix"].replace("out: f32[n, m]", "out: f32[1]") + """
    for i in serial(n):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(m):
                acc[()] += x[i, r]
            out[0] += acc[()]
"""
    ),
    "forward substitution": (
        HEAD["matrix"].replace("out: f32[n, m]", "out: f32[n]") + """
    for i in serial(n):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(i):
                acc[()] += x[i, r] * out[r]
            out[i] = x[i, i] - acc[()]
"""
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARALLEL)
def test_runs_in_parallel(name: str) -> None:
    levels = [around.count("parallel") for around in kinds(program(PARALLEL[name]))]
    assert max(levels) == 1  # never one inside another; a short tail may run alone


@pytest.mark.parametrize("name", SERIAL)
def test_must_not_run_in_parallel(name: str) -> None:
    for around in kinds(program(SERIAL[name])):
        assert "parallel" not in around


def test_a_scatter_of_rows_moves_the_index_out_and_vectorizes_the_row() -> None:
    assert ["serial", "serial", "vectorized"] in kinds(program(SERIAL["a scatter of rows"]))


def test_numbers_of_a_kernels_own_were_changed_one_by_one_where_a_constant_of_the_loop_was_loaded() -> None:
    """An update of rank one of a local matrix: what the inner loop reads of `x` does not move."""
    text = """
@program(symbols=(), outputs=1)
def p(x: Buffer((8,), "float32"), out: Buffer((8, 32), "float32")):
    for t in parallel(4):
        with allocate((8, 32), "float32", "local") as own:
            for i in serial(8):
                for j in serial(32):
                    own[i, j] = float32(1.0)
            for i in serial(8):
                for j in serial(32):
                    own[i, j] = own[i, j] * float32(2.0) + x[i]
            for i in serial(8):
                for j in serial(32):
                    out[i, j] = own[i, j]
"""
    made = schedule_program(program(text), TARGETS[256])
    found = [around[-1] for store, around in _stores(made.body, []) if store.buffer.name == "own"]
    assert found == ["vectorized", "vectorized"]


# Programs as the rules arrange them


def any_order(sizes: tuple[int, int], given: TensorProgram, bits: int) -> None:
    made = schedule_program(given, TARGETS[bits])
    assert made.symbols == given.symbols  # callers pass them by position
    verify_program("scheduled", made)
    assert_same_program(given, made, sizes)


def fitting(given: TensorProgram, sizes: tuple[int, int]) -> tuple[int, int]:
    while work_of(given, sizes) > MAX_WORK and sizes != (0, 0):
        sizes = (sizes[0] // 2, sizes[1] // 2)
    assume(work_of(given, sizes) <= MAX_WORK)
    return sizes


many_programs = settings(max_examples=tiers.examples(120), deadline=None, suppress_health_check=list(HealthCheck))
any_size = st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES))
any_bits = st.sampled_from(sorted(TARGETS))


@many_programs
@given(maps(), any_size, any_bits)
def test_scheduled_maps(given: TensorProgram, size: tuple[int, int], bits: int) -> None:
    any_order(fitting(given, size), given, bits)


@many_programs
@given(reductions(), any_size, any_bits)
def test_scheduled_reductions(given: TensorProgram, size: tuple[int, int], bits: int) -> None:
    any_order(fitting(given, size), given, bits)


@many_programs
@given(products(), any_size, any_bits)
def test_scheduled_products(given: TensorProgram, size: tuple[int, int], bits: int) -> None:
    any_order(fitting(given, size), given, bits)


@many_programs
@given(rows(), any_size, any_bits)
def test_scheduled_rows(given: TensorProgram, size: tuple[int, int], bits: int) -> None:
    any_order(fitting(given, size), given, bits)


def _two_stores(distance: int) -> str:
    """Of a loop of 4 iterations, to elements that are so far apart."""
    return (
        HEAD["matrix"].replace("out: f32[n, m]", f"out: f32[n, {distance + 4}]")
        + f"""
    for i in serial(n):
        for b in serial(4):
            out[i, b] = x[i, 0] + float32(index(b))
            out[i, b + {distance}] = x[i, 0] - float32(index(b))
"""
    )


ODD = {
    "extents that depend on other loops": (
        HEAD["matrix"] + """
    for i in serial(n):
        for j in serial(m):
            with allocate((), "float32", "local") as acc:
                acc[()] = float32(0.0)
                for r in serial(j + 1):
                    acc[()] += x[i, r]
                out[i, j] = acc[()]
"""
    ),
    "a triangle": (
        HEAD["matrix"].replace("out: f32[n, m]", "out: f32[n, n]") + """
    for i in serial(n):
        for j in serial(n):
            out[i, j] = float32(0.0)
    for i in serial(n):
        for j in serial(i + 1):
            with allocate((), "float32", "local") as acc:
                acc[()] = float32(0.0)
                for r in serial(m):
                    acc[()] += x[i, r] * x[j, r]
                out[i, j] = acc[()]
"""
    ),
    "reduced loops that depend on each other": (
        HEAD["vector"] + """
    for i in serial(n):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(3):
                for s in serial(r + 1):
                    acc[()] += x[i]
            out[i] = acc[()]
"""
    ),
    "a sum on top of what is there": (
        HEAD["matrix"].replace("out: f32[n, m]", "out: f32[n]") + """
    for i in serial(n):
        out[i] = x[i, 0]
    for i in serial(n):
        out[i] += float32(1.0)
        for r in serial(m):
            out[i] += x[i, r]
"""
    ),
    "a result that does not use the sum": (
        HEAD["matrix"].replace("out: f32[n, m]", "out: f32[m]") + """
    for i in serial(m):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(n):
                acc[()] += x[r, i]
            out[i] = float32(1.0)
"""
    ),
    "a broadcast decided at run time": (
        HEAD["matrix"].replace("x: f32[n, m]", "x: f32[n]") + """
    for i in serial(n):
        for j in serial(m):
            out[i, j] = x[min(j, n - 1)]
"""
    ),
    "a clamped index of a triangle": (
        HEAD["matrix"] + """
    for i in serial(n):
        for j in serial(m):
            out[i, j] = float32(0.0)
    for i in serial(min(n, m)):
        for j in serial(i):
            out[i, j] = x[min(j, n - 1), j]
"""
    ),
    "steps of a symbolic size": (
        HEAD["vector"].replace("out: f32[n]", "out: f32[2, 3]").replace("x: f32[n]", "x: f32[n*9 + m + 9]") + """
    for i in serial(2):
        for j in serial(3):
            out[i, j] = x[i*3*n + j*n + m]
"""
    ),
    "two stores of a short loop that lie apart": _two_stores(4),
    "two stores of a short loop that meet": _two_stores(2),
    "a symbol that disappears": (
        HEAD["vector"].replace("out: f32[n]", "out: f32[1]") + """
    for i in serial(1):
        with allocate((), "float32", "local") as acc:
            acc[()] = float32(0.0)
            for r in serial(n):
                acc[()] += x[r + i*m]
            out[i] = acc[()]
"""
    ),
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (9, 17)])
@pytest.mark.parametrize("name", ODD)
def test_odd_programs(name: str, size: tuple[int, int]) -> None:
    for bits in TARGETS:
        any_order(size, program(ODD[name]), bits)


@pytest.mark.parametrize(("name", "is_vector"), [("lie apart", True), ("meet", False)])
def test_two_stores_are_vectors_where_they_lie_apart(name: str, is_vector: bool) -> None:
    found = kinds(program(ODD[f"two stores of a short loop that {name}"]))
    assert all((around[-1] == "vectorized") == is_vector for around in found) and len(found) == 2


def test_a_clamped_index_gets_a_nest_of_its_own_for_the_usual_case() -> None:
    given = program(ODD["a broadcast decided at run time"])
    assert clamped_indices(given.body)
    made = schedule_program(given, TARGETS[256])
    assert isinstance(made.body, IfThenElse)


def test_scheduling_twice_is_refused_by_an_attribute() -> None:
    given = program(PARALLEL["a map"])
    marked = replace(given, attrs=type(given.attrs)({"scheduled": True}))
    assert schedule_program(marked, TARGETS[256]) is marked


def vector_widths(given: TensorProgram, bits: int) -> set[int]:
    made = schedule_program(given, TARGETS[bits])
    return {as_int(loop.extent) or 0 for loop in loops_of(made) if loop.kind == "vectorized"}


@pytest.mark.parametrize(("dtype", "lanes"), [("f32", 8), ("f64", 4), ("f16", 16), ("i8", 32), ("i64", 4)])
def test_vectors_fill_the_register(dtype: str, lanes: int) -> None:
    text = PARALLEL["a map"].replace("float32(1.0)", "x[i, j]").replace("f32[", f"{dtype}[")
    for bits in TARGETS:
        assert vector_widths(program(text), bits) == {lanes * bits // 256}


def test_every_op_keeps_its_signature_when_scheduled() -> None:
    """Scheduling changes loops alone: parameters, outputs and symbols of a program stay as they were."""
    steps = default_pipeline()
    lowering = steps[: [step.name for step in steps].index("schedule")]
    for op in all_ops():
        for sample in list(op.samples())[: None if tiers.is_exhaustive() else 1]:
            lowered = run_passes(sample_module(op, sample), lowering, PassContext(TARGETS[256]))
            for kernel in lowered.programs().values():
                made = schedule_program(kernel, TARGETS[256])
                verify_program(op.name, made)
                assert (made.params, made.num_outputs, made.symbols) == (
                    kernel.params,
                    kernel.num_outputs,
                    kernel.symbols,
                )
