"""Random tensor programs for tests, and running them so that a wrong order of iterations shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from relaxlite import dtypes
from relaxlite.codegen.interpreter import run_program
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Cast,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Literal,
    Load,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
    loops,
    seq,
)
from relaxlite.ir.program import reduce as reduce_loops
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, program_symbols, walk_stmts
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, evaluate, smin, sym
from tests.support.choices import Choices, Drawn

N, M = SymVar("n"), SymVar("m")
SIZES = (0, 1, 3, 7, 16, 17, 33)
DTYPES = ("float32", "float32", "float64", "int32", "int8", "float16")
MAX_WORK = 6000  # elements, or multiplications, of a program that the interpreter runs

Draw = Any
Index = tuple[SymExpr, SymExpr]  # an index expression and the size of the dimension that holds it


# Running


class Scrambled(ProgramRewriter):
    """Loops that run side by side run backwards, and a vectorized one statement by statement for all its lanes: what
    depends on the order of iterations gives other results then."""

    def stmt(self, stmt: Stmt) -> Stmt:
        stmt = super().stmt(stmt)
        if not isinstance(stmt, For) or stmt.kind in ("serial", "unrolled"):
            return stmt
        back = For(stmt.var, stmt.extent, Substitute({stmt.var: stmt.extent - 1 - stmt.var}).stmt(stmt.body))
        return _by_lanes(back) if stmt.kind == "vectorized" else back


def _by_lanes(loop: For) -> Stmt:
    body = loop.body
    if isinstance(body, IfThenElse) and body.other is None and isinstance(body.then, Seq):
        parts: list[Stmt] = [IfThenElse(body.cond, s) for s in body.then.stmts]
    elif isinstance(body, Seq):
        parts = list(body.stmts)
    else:
        return loop
    return seq(*(Substitute(fresh=True).stmt(For(loop.var, loop.extent, part)) for part in parts))


def scrambled(program: TensorProgram) -> TensorProgram:
    return TensorProgram(program.params, program.symbols, Scrambled().stmt(program.body), program.num_outputs)


def values_of(program: TensorProgram, sizes: tuple[int, int]) -> dict[SymVar, int]:
    return {s: {"n": sizes[0], "m": sizes[1]}[s.name] for s in program.symbols}


def inputs_for(program: TensorProgram, sizes: tuple[int, int], seed: int = 0) -> list[Any]:
    rng, values = np.random.default_rng(seed), values_of(program, sizes)
    return [draw_array(tuple(evaluate(d, values) for d in b.shape), b.dtype, rng) for b in program.inputs]


def draw_array(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    if dtype == "bool":
        return rng.random(shape) < 0.7
    low = 0 if dtype.startswith("uint") else -4
    drawn = rng.integers(low, 5, shape) if dtypes.is_integer(dtype) else rng.standard_normal(shape)
    return np.asarray(drawn).astype(dtypes.to_numpy(dtype))


def assert_same_program(before: TensorProgram, after: TensorProgram, sizes: tuple[int, int], seed: int = 0) -> None:
    """Both fill equal outputs, whatever the order of independent iterations. (Sums may be rounded otherwise.)"""
    inputs, values = inputs_for(before, sizes, seed), values_of(before, sizes)
    expected = run_program(before, inputs, values)
    for other in (after, scrambled(after)):
        for got, want, buffer in zip(run_program(other, inputs, values), expected, before.outputs, strict=True):
            assert_close(got, want, buffer.dtype)


def assert_close(got: Any, want: Any, dtype: str) -> None:
    if not dtypes.is_float(dtype):
        np.testing.assert_array_equal(got, want)
        return
    tolerance = {"float16": 2e-2, "float32": 1e-4}.get(dtype, 1e-9)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 10)


def work_of(program: TensorProgram, sizes: tuple[int, int]) -> int:
    """At most how often the innermost statements run."""
    return work_at(program, values_of(program, sizes))


def work_at(program: TensorProgram, values: Mapping[SymVar, int]) -> int:
    """The same, where the symbols are these."""
    total = 1
    for loop in (s for s in walk_stmts(program.body) if isinstance(s, For)):
        free = {v: 1 for v in loop.extent.free_vars()}
        total *= max(1, evaluate(loop.extent, {**free, **values}))
    return total


# Making


@dataclass
class Parts:
    """What the values of a program are made of."""

    choices: Choices
    dtype: str
    inputs: list[Buffer]

    def load(self, variables: Sequence[tuple[SymVar, SymExpr]]) -> Value:
        """An element of a new input (or once more of an old one) at indices made of some of the loop variables."""
        chosen = [v for v in variables if self.choices.whole(0, 3)]
        if self.choices.pick((False, True)):
            chosen = self.choices.order(chosen)
        made = [self.index(var, extent) for var, extent in chosen]
        buffer = Buffer(f"x{len(self.inputs)}", tuple(size for _, size in made), self.dtype)
        self.inputs.append(buffer)
        return Load(buffer, tuple(index for index, _ in made))

    def index(self, var: SymVar, extent: SymExpr) -> Index:
        kind = self.choices.pick(("plain",) * 6 + ("shifted", "strided", "reversed", "clamped", "one", "divided"))
        known = as_int(extent)
        return {
            "plain": (var, extent),
            "shifted": (var + 2, extent + 3),
            "strided": (var * 2, extent * 2 if known is None else sym(max(known * 2, 1))),
            "reversed": (extent - 1 - var, extent),
            "clamped": (smin(var, extent - 1), extent),
            "one": (sym(0), sym(1)),
            "divided": (var // 2, (extent + 1) // 2),
        }[kind]

    def value(self, variables: Sequence[tuple[SymVar, SymExpr]], depth: int = 2) -> Value:
        kinds = ("load", "load", "literal", "binary", "binary", "unary", "select", "position")
        kind = self.choices.pick(kinds) if depth else "load"
        if kind == "binary":
            op = self.choices.pick(("add", "sub", "mul", "max", "min"))
            return Binary(op, self.value(variables, depth - 1), self.value(variables, depth - 1))
        if kind == "unary":
            return Unary(self.choices.pick(("neg", "abs")), self.value(variables, depth - 1))
        if kind == "literal":
            return Literal(2 if dtypes.is_integer(self.dtype) else 0.5, self.dtype)
        if kind == "position" and variables:
            return Cast(IndexValue(self.choices.pick(variables)[0]), self.dtype)
        if kind == "select" and variables:
            return self.guarded(*self.choices.pick(variables))
        return self.load(variables)

    def guarded(self, var: SymVar, extent: SymExpr) -> Value:
        """An element one before, where there is one: the other is never read."""
        buffer = Buffer(f"x{len(self.inputs)}", (extent,), self.dtype)
        self.inputs.append(buffer)
        is_inside = Compare("ge", IndexValue(var - 1), IndexValue(sym(0)))
        return Select(is_inside, buffer[var - 1], Literal(1, self.dtype))


def extents(choices: Choices, count: int) -> tuple[SymExpr, ...]:
    return tuple(choices.pick((N, N, M, M, sym(1), sym(3), sym(5), sym(19))) for _ in range(count))


def make(inputs: Sequence[Buffer], outputs: Sequence[Buffer], body: Stmt) -> TensorProgram:
    params = (*inputs, *outputs)
    return TensorProgram(params, program_symbols(params, body), body, len(outputs))


def a_map(choices: Choices) -> TensorProgram:
    """One nest that stores each element once."""
    parts = Parts(choices, choices.pick(DTYPES), [])
    out = Buffer("out", extents(choices, choices.whole(0, 3)), parts.dtype)

    def element(*i: SymVar) -> Stmt:
        return Store(out, i, parts.value(list(zip(i, out.shape, strict=True))))

    body = loops("ijk", out.shape, element)
    return make(parts.inputs, [out], body)


def literal_start(combine: str, dtype: str) -> Literal:
    if combine in ("add", "mul"):
        return Literal(0 if combine == "add" else 1, dtype)
    if dtype == "bool":
        return Literal(combine == "and", dtype)
    if dtypes.is_float(dtype):
        return Literal(-np.inf if combine == "max" else np.inf, dtype)
    info = np.iinfo(dtype)
    return Literal(
        int({"max": info.min, "min": info.max, "and": info.max if info.min == 0 else -1, "or": 0}[combine]), dtype
    )


COMBINATIONS = [
    *(("float32", c) for c in ("add", "max", "min")), ("float64", "add"), ("int32", "add"), ("int32", "mul"),
    ("int64", "min"), ("int8", "max"), ("uint8", "and"), ("int32", "or"), ("bool", "and"), ("bool", "or"),
]  # fmt: skip


def a_reduction(choices: Choices) -> TensorProgram:
    """A reduction of one product, or one element, over some loops, with an epilogue."""
    dtype, combine = choices.pick(COMBINATIONS)
    parts = Parts(choices, dtype, [])
    out = Buffer("out", extents(choices, choices.whole(0, 3)), dtype)
    reduced = extents(choices, choices.whole(1, 2))

    def value(*all_vars: SymVar) -> Value:
        variables = list(zip(all_vars, (*out.shape, *reduced), strict=True))
        a = parts.load(variables)
        if combine != "add" or choices.pick((False, True)):
            return a
        return Binary("mul", a, parts.load(variables))

    def finish(total: Value, *i: SymVar) -> Value:
        if dtype == "bool" or choices.pick((False, True)):
            return total
        return Binary("max", total, parts.load(list(zip(i, out.shape, strict=True))))

    body = reduce_loops(out, reduced, combine, literal_start(combine, dtype), value, finish)
    return make(parts.inputs, [out], body)


def a_product(choices: Choices) -> TensorProgram:
    """Matrix products and convolutions: two operands, each without one of the result's dimensions."""
    batches: tuple[tuple[SymExpr, ...], ...] = ((), (N,), (sym(2),))
    batch = choices.pick(batches)
    rows, columns, inner = (choices.pick((N, M, sym(1), sym(3), sym(8), sym(40))) for _ in range(3))
    is_window = choices.pick((False, True))
    taps = sym(3) if is_window else inner
    spread = columns + taps - 1 if is_window else columns
    a = Buffer("a", (*batch, rows, taps), "float32")
    b = Buffer("b", (*batch, spread) if is_window else (*batch, taps, columns), "float32")
    bias = Buffer("bias", (columns,), "float32")
    out = Buffer("out", (*batch, rows, columns), "float32")

    def value(*at: SymVar) -> Value:
        *outer, i, j, r = at
        right = (*outer, j + r) if is_window else (*outer, r, j)
        return Binary("mul", Load(a, (*outer, i, r)), Load(b, right))

    body = reduce_loops(
        out, (taps,), "add", Literal(0.0, "float32"), value, lambda t, *i: Binary("add", t, bias[i[-1]])
    )
    return make([a, b, bias], [out], body)


ROW_STAGES = ("map", "scan", "sum", "scale")


def a_row_program(choices: Choices) -> TensorProgram:
    """Several stages over the rows of a matrix: maps in place, running sums, sums that scale the row."""
    x, out = Buffer("x", (N, M), "float32"), Buffer("out", (N, M), "float32")
    stages = [choices.pick(ROW_STAGES) for _ in range(choices.whole(1, 3))]
    total = Buffer("total", (), "float32", "local")
    zero = Literal(0.0, "float32")

    def stage(kind: str, i: SymVar) -> Stmt:
        if kind == "map":
            return loops("j", (M,), lambda j: Store(out, (i, j), Binary("max", out[i, j], x[i, j])))
        if kind == "scan":
            step = loops("j", (M,), lambda j: seq(Store(total, (), out[i, j], "add"), Store(out, (i, j), total[()])))
            return seq(Store(total, (), zero), step)
        if kind == "sum":
            return seq(Store(total, (), zero), loops("j", (M,), lambda j: Store(total, (), out[i, j], "add")))
        return loops("j", (M,), lambda j: Store(out, (i, j), Binary("mul", out[i, j], Literal(0.5, "float32"))))

    def row(i: SymVar) -> Stmt:
        first = loops("j", (M,), lambda j: Store(out, (i, j), x[i, j]))
        body = seq(first, *(stage(kind, i) for kind in stages))
        return Allocate(total, body)

    return make([x], [out], loops("i", (N,), row))


# By Hypothesis


@st.composite
def maps(draw: Draw) -> TensorProgram:
    return a_map(Drawn(draw))


@st.composite
def reductions(draw: Draw) -> TensorProgram:
    return a_reduction(Drawn(draw))


@st.composite
def products(draw: Draw) -> TensorProgram:
    return a_product(Drawn(draw))


@st.composite
def rows(draw: Draw) -> TensorProgram:
    return a_row_program(Drawn(draw))
