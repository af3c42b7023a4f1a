"""Symbolic costs of programs: known formulas, and a count of what really happens when random programs run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite.codegen import interpreter
from relaxlite.codegen.interpreter import Interpreter, run_program
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr
from relaxlite.ir.intrinsics import INTRINSICS
from relaxlite.ir.module import IRModule
from relaxlite.ir.op_costs import FLOPS, value_flops
from relaxlite.ir.program import (
    BINARY,
    COMBINE,
    UNARY,
    Allocate,
    Binary,
    Buffer,
    Cast,
    Check,
    Compare,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Select,
    Store,
    TensorProgram,
    Unary,
    Value,
    compute,
    loops,
    reduce,
    seq,
)
from relaxlite.ir.program_visitor import program_symbols
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, smin, sym
from relaxlite.passes.context import PassContext
from relaxlite.passes.cost import Cost, cost_of
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target
from tests.support import tiers
from tests.support.counting import Counter
from tests.support.random_graphs import arguments, graphs
from tests.support.random_programs import (
    MAX_WORK,
    SIZES,
    inputs_for,
    maps,
    products,
    reductions,
    rows,
    values_of,
    work_of,
)

N, M, K = SymVar("n"), SymVar("m"), SymVar("k")
TARGET = Target.parse("llvm -mcpu=x86-64-v3")


def program(inputs: list[Buffer], out: Buffer, body: Any) -> TensorProgram:
    params = (*inputs, out)
    return TensorProgram(params, program_symbols(params, body), body)


def costs_of(module: IRModule) -> dict[str, Cost]:
    """What the pipeline notes, before programs are scheduled."""
    context = PassContext(TARGET)
    run_passes(module, default_pipeline(), context)
    return context.costs


def cost_of_graph(make: Callable[..., Expr], *shapes: tuple[Any, ...], dtypes: Sequence[str] = ()) -> Cost:
    """The cost of a graph that becomes one program."""
    bb = BlockBuilder()
    types = [rl.TensorType.of(s, d) for s, d in zip(shapes, dtypes or ["float32"] * len(shapes), strict=True)]
    with bb.function("main", **{f"x{k}": ty for k, ty in enumerate(types)}) as variables:
        bb.result(make(bb, *variables))
    ((_, cost),) = costs_of(bb.module()).items()
    return cost


def assert_cost(cost: Cost, flops: Any, read: Any, written: Any) -> None:
    """Each is the formula, written the same."""
    assert cost.is_bound
    for got, expected in zip((cost.flops, cost.bytes_read, cost.bytes_written), (flops, read, written), strict=True):
        assert sym(got) is sym(expected), (str(got), str(expected))


# Formulas


def test_matrix_product() -> None:
    a, b, out = (
        Buffer.of("a", (M, K), "float32"),
        Buffer.of("b", (K, N), "float32"),
        Buffer.of("out", (M, N), "float32"),
    )
    total = Buffer.of("total", (), "float32", "local")

    def element(i: SymVar, j: SymVar) -> Any:
        step = loops("k", (K,), lambda k: Store(total, (), Binary("mul", a[i, k], b[k, j]), "add"))
        return Allocate(total, seq(Store(total, (), Literal(0.0, "float32")), step, Store(out, (i, j), total[()])))

    body = loops("ij", (M, N), element)
    assert_cost(cost_of(program([a, b], out, body)), M * K * N * 2, (M * K + K * N) * 4, M * N * 4)


def test_elementwise_chain() -> None:
    cost = cost_of_graph(lambda bb, x, y: ops.relu(bb.emit(ops.add(bb.emit(ops.tanh(x)), y))), (N, M), (M,))
    assert_cost(cost, N * M * (FLOPS["tanh"] + 2), (N * M + M) * 4, N * M * 4)


def test_matrix_product_with_bias_and_relu_in_one_program() -> None:
    def make(bb: BlockBuilder, x: Expr, w: Expr, b: Expr) -> Expr:
        return ops.relu(bb.emit(ops.add(bb.emit(ops.matmul(x, w)), b)))

    cost = cost_of_graph(make, (M, 24), (24, 40), (40,))
    assert_cost(cost, M * 40 * (2 * 24 + 2), (M * 24 + 24 * 40 + 40) * 4, M * 40 * 4)


@pytest.mark.parametrize(("stride", "rows_read"), [(1, N + 2), (2, N * 2 + 1), (5, N * 3)])
def test_convolution_reads_each_pixel_once(stride: int, rows_read: SymExpr) -> None:
    """n x m outputs of 8 channels, from windows of 3 x 3 x 4; a stride beyond the window skips rows."""
    columns_read = {1: M + 2, 2: M * 2 + 1, 5: M * 3}[stride]
    size = [(d - 1) * stride + 3 for d in (N, M)]
    x, w, out = (Buffer.of(*b, "float32") for b in (("x", (4, *size)), ("w", (8, 4, 3, 3)), ("out", (8, N, M))))

    def value(o: SymVar, i: SymVar, j: SymVar, c: SymVar, u: SymVar, v: SymVar) -> Any:
        return Binary("mul", x[c, i * stride + u, j * stride + v], w[o, c, u, v])

    body = reduce(out, (4, 3, 3), "add", Literal(0.0, "float32"), value)
    assert_cost(
        cost_of(program([x, w], out, body)),
        N * M * (8 * 4 * 9 * 2),
        (rows_read * columns_read * 4 + 8 * 4 * 9) * 4,
        N * M * 8 * 4,
    )


def test_convolution_of_the_op() -> None:
    cost = cost_of_graph(lambda bb, x, w: ops.conv(x, w, (0, 0, 0, 0)), (N, 4, 34, 34), (8, 4, 3, 3))
    assert_cost(cost, N * 32 * 32 * 8 * 4 * 9 * 2, N * 4 * 34 * 34 * 4 + 8 * 4 * 9 * 4, N * 8 * 32 * 32 * 4)


def test_softmax_reads_its_rows_once() -> None:
    """A maximum, exp2((x - maximum) * log2(e)), a sum and a scale; what is stored and read again costs nothing."""
    cost = cost_of_graph(lambda bb, x: ops.softmax(x, axis=1), (N, M))
    per_element = 1 + 2 + FLOPS["exp2"] + 1 + 1
    assert (cost.bytes_read, cost.bytes_written) == (N * M * 4, N * M * 4)
    assert per_element * 12 <= evaluate(cost.flops, {N: 3, M: 4}) <= (per_element + 4) * 12


def test_gather_reads_one_row_per_index_or_the_whole_table() -> None:
    cost = cost_of_graph(lambda bb, x, i: ops.gather(x, i, axis=0), (100, 64), (N, M), dtypes=("float32", "int64"))
    assert cost.is_bound
    assert cost.bytes_read is sym(smin(N * M, 100) * 64 * 4 + N * M * 8)
    assert cost.bytes_written is N * M * 64 * 4


def test_one_element_per_index_though_the_place_is_data() -> None:
    """out[i, j] = x[place[i, j], j]: as many elements as there are places, at most."""
    x, place, out = (
        Buffer.of("x", (100, M), "float32"),
        Buffer.of("place", (N, M), "int64"),
        Buffer.of("out", (N, M), "float32"),
    )

    def element(i: SymVar, j: SymVar) -> Any:
        at = SymVar("at")
        return LetIndex(at, place[i, j], Store(out, (i, j), x[at, j]))

    cost = cost_of(program([x, place], out, loops("ij", (N, M), element)))
    for n, m in [(3, 7), (500, 2)]:
        assert evaluate(cost.bytes_read, {N: n, M: m}) == min(n, 100) * m * 4 + n * m * 8


def test_places_that_the_program_counts_itself() -> None:
    """out[at] = x[at]; at += 1, for each of n elements: where it reads depends on every loop round it."""
    x, out = Buffer.of("x", (100,), "float32"), Buffer.of("out", (100,), "float32")
    cursor = Buffer.of("cursor", (), "int64", "local")

    def element(i: SymVar) -> Any:
        at = SymVar("at")
        return LetIndex(at, cursor[()], seq(Store(out, (at,), x[at]), Store(cursor, (), Literal(1, "int64"), "add")))

    body = Allocate(cursor, seq(Store(cursor, (), Literal(0, "int64")), loops("i", (N,), element)))
    assert_cost(cost_of(program([x], out, body)), N, smin(N, 100) * 4, smin(N, 100) * 4)


def test_padding_and_concatenation_read_no_more_than_there_is() -> None:
    padded = cost_of_graph(lambda bb, x: ops.pad(x, (2, 0), (1, 3)), (N, M))
    assert_cost(padded, 0, N * M * 4, (N + 3) * (M + 3) * 4)
    joined = cost_of_graph(lambda bb, x, y: ops.concat(x, y, axis=0), (N, 5), (M, 5))
    assert_cost(joined, 0, (N + M) * 5 * 4, (N + M) * 5 * 4)


def test_a_slice_reads_what_it_takes() -> None:
    cost = cost_of_graph(lambda bb, x: ops.slice(x, (0, 4), (N, 8)), (N, 64))
    assert_cost(cost, 0, N * 8 * 4, N * 8 * 4)


def test_several_accesses_of_a_buffer_count_their_union() -> None:
    """x[i], x[i + 1], x[i + 2] overlap; x[i], x[i + 1000] do not."""
    out = Buffer.of("out", (N,), "float32")
    x = Buffer.of("x", (N + 2000,), "float32")

    def read(*places: int) -> SymExpr:
        def value(i: SymVar) -> Any:
            first, *others = (x[i + p] for p in places)
            return functools.reduce(lambda a, b: Binary("add", a, b), others, first)

        return cost_of(program([x], out, compute(out, value))).bytes_read

    assert read(0, 1, 2) is (N + 2) * 4 or evaluate(read(0, 1, 2), {N: 100}) == 102 * 4
    assert evaluate(read(0, 1000), {N: 100}) == 200 * 4
    assert evaluate(read(0, 1000), {N: 5000}) == 6000 * 4
    assert read(3, 3) is N * 4


def test_a_diagonal_and_a_flattened_view() -> None:
    x, out = Buffer.of("x", (N, N), "float32"), Buffer.of("out", (N,), "float32")
    assert cost_of(program([x], out, compute(out, lambda i: x[i, i]))).bytes_read is N * 4
    y, flat = Buffer.of("y", (N, 7), "float32"), Buffer.of("flat", (N * 7,), "float32")
    assert cost_of(program([y], flat, compute(flat, lambda i: y[i // 7, i % 7]))).bytes_read is N * 28


def test_variants_count_the_dearer_one() -> None:
    """if n <= m: out[i] = x[i] * 2  else: out[i] = exp(x[min(i, m - 1)])"""
    x, out = Buffer.of("x", (M,), "float32"), Buffer.of("out", (N,), "float32")
    simple = compute(out, lambda i: Binary("mul", x[smin(i, M - 1)], Literal(2.0, "float32")))
    dear = compute(out, lambda i: Unary("exp", x[smin(i, M - 1)]))
    body = IfThenElse(Compare("le", IndexValue(N), IndexValue(sym(M))), simple, dear)
    cost = cost_of(program([x], out, body))
    assert cost.flops is N * FLOPS["exp"]
    assert [evaluate(cost.bytes_read, {N: n, M: m}) for n, m in [(3, 7), (7, 3)]] == [12, 12]
    same_work = IfThenElse(body.cond, simple, simple)
    assert cost_of(program([x], out, same_work)).flops is N


def test_both_branches_of_a_select_count_and_shared_parts_once() -> None:
    x, out = Buffer.of("x", (N,), "float32"), Buffer.of("out", (N,), "float32")

    def value(i: SymVar) -> Any:
        shared = Unary("exp", x[i])
        positive = Compare("gt", shared, Literal(1.0, "float32"))
        return Select(positive, Unary("neg", shared), Binary("div", shared, shared))

    assert_cost(cost_of(program([x], out, compute(out, value))), N * (20 + 1 + 4), N * 4, N * 4)


def test_what_counts_as_an_operation() -> None:
    a, b, c = (Literal(2.0, "float32") for _ in range(3))
    flag = Compare("lt", a, b)
    assert value_flops(Intrinsic("fma", (a, b, c), "float32")) == 2
    assert value_flops(Binary("and", flag, Unary("not", flag))) == 0
    assert value_flops(Binary("mul", Literal(2, "int8"), Literal(3, "int8"))) == 1
    assert {*UNARY, *BINARY, *COMBINE, *INTRINSICS} <= set(FLOPS)


def test_triangular_loops_are_summed() -> None:
    """for i in n: for j in i + 1: out[i] += x[j]"""
    x, out = Buffer.of("x", (N,), "float32"), Buffer.of("out", (N,), "float32")
    body = loops("i", (N,), lambda i: loops("j", (i + 1,), lambda j: Store(out, (i,), x[j], "add")))
    cost = cost_of(program([x], out, body))
    assert_cost(cost, N + N * (N - 1) // 2, N * 4, N * 4)


def test_tiles_of_which_the_last_is_shorter() -> None:
    """for t in ceil(n / 16): for j in min(16, n - 16*t): out[16*t + j] = x[16*t + j] * 2"""
    x, out = Buffer.of("x", (N,), "float32"), Buffer.of("out", (N,), "float32")
    two = Literal(2.0, "float32")

    def tile(t: SymVar) -> Any:
        at = t * 16
        return loops("j", (smin(16, N - at),), lambda j: Store(out, (at + j,), Binary("mul", x[at + j], two)))

    cost = cost_of(program([x], out, loops("t", ((N + 15) // 16,), tile)))
    assert cost.flops is N
    full = cost_of(program([x], out, loops("t", (N // 16,), tile))).flops
    assert [evaluate(full, {N: n}) for n in (16, 17, 100)] == [16, 16, 96], "the last tile is left out"
    for n in (1, 15, 16, 17, 100):
        assert values(cost, {N: n}) == (n, n * 4, n * 4)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 7), (17, 49), (64, 48), (80, 100)])
def test_attention_reads_keys_and_values_once(m: int, n: int) -> None:
    """Its loops take queries in blocks, of which the last computes for columns that it does not store."""
    q, k, v = ("m", 8), ("n", 8), ("n", 4)
    bb = BlockBuilder()
    symbols = {name: bb.symbol(name) for name in "mn"}
    types = [rl.TensorType.of((symbols[s[0]], s[1]), "float32") for s in (q, k, v)]
    with bb.function("main", **{f"x{i}": ty for i, ty in enumerate(types)}) as variables:
        bb.result(ops.attention(*variables))
    cost = costs_of(bb.module())["attention"]
    at = {s: {"m": m, "n": n}[s.name] for s in cost.bytes_read.free_vars()}
    assert evaluate(cost.bytes_read, at) == 4 * (m * 8 + n * 8 + n * 4)
    assert evaluate(cost.bytes_written, at) == 4 * m * 4
    rows = m // 64 * 64 + -(-(m % 64) // 16) * 16
    per_score = 2 * 8 + 2 * 4 + FLOPS["exp2"] + 4
    assert per_score * m * n <= evaluate(cost.flops, at) <= (per_score + 2) * rows * n + 400 * rows * -(-n // 48)


def test_a_loop_that_may_not_run_never_costs_less_than_nothing() -> None:
    """for i in n: for j in i - 3: ..."""
    x, out = Buffer.of("x", (N,), "float32"), Buffer.of("out", (N,), "float32")
    body = loops("i", (N,), lambda i: loops("j", (i - 3,), lambda j: Store(out, (i,), x[j], "add")))
    cost = cost_of(program([x], out, body))
    for n in (1, 2, 5, 40):
        assert evaluate(cost.flops, {N: n}) >= sum(max(i - 3, 0) for i in range(n))


def test_a_loop_as_long_as_data_says_is_no_bound() -> None:
    lengths, x, out = (
        Buffer.of("lengths", (N,), "int64"),
        Buffer.of("x", (M,), "float32"),
        Buffer.of("out", (N,), "float32"),
    )

    def row(i: SymVar) -> Any:
        length = SymVar("length")
        total = loops("j", (length,), lambda j: Store(out, (i,), x[j], "add"))
        return LetIndex(length, lengths[i], total)

    cost = cost_of(program([lengths, x], out, loops("i", (N,), row)))
    assert not cost.is_bound
    assert cost.flops is N

    def clamped(i: SymVar) -> Any:
        length = SymVar("length")
        total = loops("j", (smin(length % 8, M),), lambda j: Store(out, (i,), x[j], "add"))
        return LetIndex(length, lengths[i], total)

    cost = cost_of(program([lengths, x], out, loops("i", (N,), clamped)))
    assert cost.is_bound
    assert evaluate(cost.flops, {N: 3, M: 100}) == 3 * 7


def test_checks_and_local_buffers_cost_no_traffic() -> None:
    x, out, local = Buffer.of("x", (N,), "float32"), Buffer.of("out", (N,), "float32"), Buffer.of("t", (N,), "float32")
    ok = Check(Compare("ge", IndexValue(sym(N)), IndexValue(sym(0))), "never")
    body = Allocate(local, seq(ok, compute(local, lambda i: x[i]), compute(out, lambda i: local[i])))
    assert_cost(cost_of(program([x], out, body)), 0, N * 4, N * 4)


# Against a count of what happens


def values(cost: Cost, symbols: Mapping[SymVar, int]) -> tuple[int, ...]:
    return tuple(evaluate(e, symbols) for e in (cost.flops, cost.bytes_read, cost.bytes_written))


@settings(max_examples=tiers.examples(120), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(maps(), reductions(), products(), rows()), st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_costs_of_random_programs_are_exact(drawn: TensorProgram, n: int, m: int) -> None:
    """Where no size is 0; there they are upper bounds."""
    assume(work_of(drawn, (n, m)) <= MAX_WORK // 3)
    symbols = values_of(drawn, (n, m))
    counted = Counter(drawn, inputs_for(drawn, (n, m)), symbols)
    cost, expected = cost_of(drawn), (counted.flops, counted.bytes_read, counted.bytes_written)
    assert cost.is_bound
    if n and m:
        assert values(cost, symbols) == expected
    else:
        assert all(max(got, 0) >= real for got, real in zip(values(cost, symbols), expected, strict=True))


@settings(max_examples=tiers.examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(control=True), st.sampled_from((0, 1, 2, 5)), st.sampled_from((0, 1, 3, 4)))
def test_costs_of_fused_programs_are_upper_bounds(drawn: IRModule, n: int, m: int) -> None:
    steps = list(itertools.takewhile(lambda step: step.name != "estimate_costs", default_pipeline()))
    module = run_passes(drawn, steps, PassContext(TARGET))

    def run_counting(
        called: TensorProgram, inputs: Any, symbols: Any = None, outputs: Any = None, name: str = ""
    ) -> Any:
        known = dict(zip(called.symbols, symbols, strict=True))
        counted, cost = Counter(called, inputs, known), cost_of(called)
        real = (counted.flops, counted.bytes_read, counted.bytes_written)
        assert not cost.is_bound or all(max(a, 0) >= b for a, b in zip(values(cost, known), real, strict=True)), name
        return run_program(called, inputs, symbols, outputs, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "run_program", run_counting)
        Interpreter(module).run("main", *arguments(n, m))


def test_a_dequantized_weight_counts_once_per_element_of_the_weight() -> None:
    m, k, n = SymVar("m"), SymVar("k"), SymVar("n")
    x, q, s = Buffer.of("x", (m, k), "float32"), Buffer.of("q", (k, n), "int8"), Buffer.of("s", (n,), "float32")
    out = Buffer.of("out", (m, n), "float32")

    def term(i: SymVar, j: SymVar, r: SymVar) -> Value:
        return Binary("mul", x[i, r], Binary("mul", Cast(q[r, j], "float32"), s[j]))

    body = reduce(out, (k,), "add", Literal(0.0, "float32"), term)
    cost = cost_of(TensorProgram((x, q, s, out), (m, k, n), body))
    assert cost.flops is 2 * m * k * n + k * n
    assert cost.bytes_read is 4 * m * k + k * n + 4 * n
