"""Steps that are not ops: branches, loops, shapes that run time finds, functions, tensor programs, library calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir import ops
from relaxlite.ir.expr import (
    Call,
    Constant,
    Expr,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Loop,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.signatures import bind_symbols, instantiate
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, product, substitute
from relaxlite.ir.types import TensorType, TupleType, Type
from tests.fuzz.generator import MAX_STEPS, Generator, rank_of, shape_of, step, type_of
from tests.fuzz.steps_ops import bound, chosen
from tests.support.random_programs import a_map, a_product, a_reduction, a_row_program, work_at

MAX_DEPTH = 2


def flag(g: Generator) -> Expr:
    """A condition: an argument, a comparison of data, or a constant."""
    kind = g.roll.whole(0, 5)
    if kind == 0:
        return Constant.of(g.roll.chance(50))
    x = g.value(lambda ty: dtypes.is_integer(ty.dtype) or ty.dtype == "bool")
    if kind <= 2 and x is not None:
        return g.emit("any", g.emit("not_equal", x, Constant.of(0, type_of(x).dtype)))
    return g.like(g.type((), "bool")) or Constant.of(True)


@step(4)
def if_(g: Generator) -> Expr | None:
    """Branches of one type, or of sizes that differ."""
    x = g.value()
    if x is None or g.depth >= MAX_DEPTH:
        return None
    cond = flag(g)
    differs = rank_of(x) > 0 and g.roll.chance(25)
    bodies = []
    for _ in range(2):
        with g.nested() as scope:
            g.grow(g.roll.whole(0, 3))
            ty = type_of(x)
            same = g.values(lambda o, ty=ty: o.dtype == ty.dtype and (o.rank == ty.rank if differs else o == ty))
            result = g.roll.pick(same) if same else x
            g.bb.result(result)
        bodies.append(g.finish(scope))
    ty = TensorType(None, type_of(x).dtype, rank_of(x)) if differs else x.ty
    made = g.bb.emit(If(cond, bodies[0], bodies[1], ty))
    return bound(g, made) if differs else made


@step(3)
def loop(g: Generator) -> Expr | None:
    """A few times, or not at all: values that keep their size, or grow."""
    x = g.value()
    if x is None or g.depth >= MAX_DEPTH:
        return None
    grows = rank_of(x) > 0 and g.roll.chance(30)
    length = g.bb.symbol(g.bb.unique_name("length"))
    shape = (length, *shape_of(x)[1:]) if grows else shape_of(x)
    if grows and any(length in d.free_vars() for d in shape[1:]):
        return None
    carried = Var(g.bb.unique_name("carried"), g.type(shape, type_of(x).dtype))
    count = Var(g.bb.unique_name("count"), g.type((), "int64"))
    with g.nested() as scope:
        g.pool.append(carried)
        if grows:
            g.symbols.append(length)
        g.grow(g.roll.whole(0, 3))
        left = g.emit("subtract", count, np.array(1))
        again = g.emit("greater", left, np.array(0))
        ty = type_of(carried)
        same = g.values(lambda o: o == ty or (grows and o.dtype == ty.dtype and (o.shape or ())[1:] == shape[1:]))
        same = [y for y in same if rank_of(y) == len(shape)]
        result: Expr = g.roll.pick(same or [carried])
        if grows and g.roll.chance(70):
            result = g.emit("concat", result, carried, axis=0)
        g.bb.result(Tuple((again, result, left)))
    yielded = TensorType(None, carried.ty.dtype, rank_of(x)) if grows else carried.ty
    inits = (x, Constant.of(g.roll.whole(0, 3), "int64"))
    made = Loop((carried, count), inits, flag(g), g.finish(scope), TupleType((yielded, count.ty)))
    last = g.bb.emit(TupleGetItem(g.bb.emit(made), 0))
    return bound(g, last) if grows else last


@step(4)
def match(g: Generator) -> Expr | None:
    """New symbols for old sizes; or the claim, now and then wrong, that two sizes are the same."""
    x = g.value(lambda ty: (ty.rank or 0) > 0)
    if x is None:
        return None
    if g.roll.chance(75):
        return bound(g, x)
    shape = [g.roll.pick((d, d, g.dim())) if g.roll.chance(30) else d for d in shape_of(x)]
    return g.bb.match_shape(x, shape)


@step(4)
def data_dependent(g: Generator) -> Expr | None:
    x = g.value(lambda ty: (ty.rank or 0) > 0)
    if x is None:
        return None
    kind, most = g.roll.whole(0, 3), product(shape_of(x))
    if kind == 0:
        return chosen(g, g.emit("unique", x), most) if type_of(x).dtype != "bool" else None
    if kind == 1:
        keep = g.like(g.type((shape_of(x)[0],), "bool"), is_new=True)
        return None if keep is None else chosen(g, g.emit("compress", x, keep, axis=0), most)
    flat = g.emit("reshape", x, (most,))
    mask = g.emit("relu", flat) if dtypes.is_float(type_of(x).dtype) else flat
    count = g.bb.symbol(f"d{len(g.symbols)}")
    places = g.bb.match_shape(g.emit("non_zero", mask), (1, count))
    g.symbols.append(count)
    g.most[count] = most
    return ops.gather(flat, g.emit("reshape", places, (count,)), axis=0)


@step(4)
def shape_arithmetic(g: Generator) -> Expr | None:
    """Shape -> Gather -> Concat -> Reshape, as exporters write it; or a shape that only run time knows."""
    x = g.value(lambda ty: (ty.rank or 0) > 0)
    if x is None:
        return None
    sizes = g.emit("shape_of", x)
    axis = g.roll.whole(0, rank_of(x) - 1)
    size = g.emit("gather", sizes, Constant.of([axis], "int64"), axis=0)
    if g.roll.chance(40):
        return ops.add(size, Constant.of([1], "int64"))
    total = g.emit("prod", sizes, axes=(0,), keepdims=True)
    parts = g.emit("concat", size, g.emit("floor_divide", total, g.emit("maximum", size, np.array([1]))), axis=0)
    known = g.bb.known_shape(parts)
    if known is not None and g.roll.chance(70):
        return ops.reshape(x, known)
    rows, columns = (g.bb.symbol(f"d{len(g.symbols)}_{k}") for k in range(2))
    g.bb.match_shape(g.emit("tensor_to_shape", parts), (rows, columns))
    g.symbols.extend((rows, columns))
    g.most[rows] = g.most[columns] = product(shape_of(x))
    return ops.reshape(x, (rows, columns)) if g.roll.chance(50) else ops.full((rows, columns), np.float32(2))


@step(2)
def tuple_(g: Generator) -> Expr | None:
    fields = [x for x in (g.value() for _ in range(3)) if x is not None]
    if not fields:
        return None
    pair = g.bb.emit(Tuple(tuple(fields)))
    return TupleGetItem(pair, g.roll.whole(0, len(fields) - 1))


# Calls of what stands beside "main"


@step(3)
def function(g: Generator) -> Expr | None:
    """A function of its own symbols, called once or twice."""
    x = g.value()
    if x is None or g.depth > 0 or not g.is_main:
        return None
    args = [x]
    if g.roll.chance(50):
        args.append(g.value() or x)
    own: dict[SymExpr, SymVar] = {}
    params = [Var(g.bb.unique_name("p"), _own_type(g, type_of(a), own)) for a in args]
    g.most.update({symbol: dim for dim, symbol in own.items()})
    outer = g.pool, g.symbols
    g.pool, g.symbols, g.is_main = list(params), list(own.values()), False
    with g.nested() as scope:
        g.grow(g.roll.whole(1, 4))
        results = [g.pool[-1], *([g.value()] if g.roll.chance(30) else [])]
        g.bb.result(results[0] if len(results) == 1 else Tuple(tuple(r for r in results if r is not None)))
    (g.pool, g.symbols), g.is_main = outer, True
    name = f"helper{len(g.functions)}"
    g.functions[name] = Function(tuple(params), g.finish(scope))
    made = _called(g, name, args)
    if g.roll.chance(40):
        again = [y for y in args if y.ty == made.ty]
        if isinstance(made, Var) and again and len(args) == 1:
            made = _called(g, name, [made])
    return chosen(g, made)


def _own_type(g: Generator, ty: TensorType, own: dict[SymExpr, SymVar]) -> TensorType:
    for d in ty.shape or ():
        if as_int(d) is None and d not in own:
            facts = {"lower": d.lower, "upper": d.upper, "divisor": d.divisor} if isinstance(d, SymVar) else {}
            own[d] = g.bb.symbol(f"f{len(own)}", **(facts if g.roll.chance(50) else {}))
    return g.type([own.get(d, d) for d in ty.shape or ()], ty.dtype)


def _called(g: Generator, name: str, args: list[Expr]) -> Expr:
    callee = g.functions[name]
    values: dict[SymVar, SymExpr] = {}
    bind_symbols([p.ty for p in callee.params], [a.ty for a in args], values)
    ty = instantiate(callee.body.result.ty, values)
    return g.bb.emit(Call(GlobalVar(name), tuple(args), ty=ty))


@step(4)
def tensor_program(g: Generator) -> Expr | None:
    """Loops, called as a graph calls a library: with the values of their symbols."""
    make = g.roll.pick((a_map, a_reduction, a_product, a_row_program))
    program: TensorProgram = make(g.roll)
    values: dict[SymVar, SymExpr] = {s: g.dim() for s in program.symbols}
    for buffer in program.params:  # one operand that exists, where one fits
        for x in g.roll.order(g.pool):
            if type_of(x).dtype == buffer.dtype and rank_of(x) == len(buffer.shape) and g.roll.chance(60):
                values.update((d, e) for d, e in zip(buffer.shape, shape_of(x), strict=True) if d in values)
                break
    types = [g.type([substitute(d, values) for d in b.shape], b.dtype) for b in program.params]
    if not all(map(g.fits, types)) or not _is_quick(g, program, values):
        return None
    args = [g.like(ty) for ty in types[: len(program.inputs)]]
    if any(a is None for a in args):
        return None
    name = g.bb.define(f"program{len(g.bb.module())}", program)
    sizes = tuple(values[s] for s in program.symbols)
    return g.bb.emit(Call(name, tuple(a for a in args if a is not None), sym_args=sizes, ty=types[-1]))


def _is_quick(g: Generator, program: TensorProgram, values: dict[SymVar, SymExpr]) -> bool:
    """Whether its loops take no time, however deep they are nested."""
    at = ({s: g.largest(d, n) for s, d in values.items()} for n in MAX_STEPS)
    return all(work_at(program, sizes) <= most for sizes, most in zip(at, MAX_STEPS.values(), strict=True))


def _twice(x: Any, out: Any) -> None:
    out[...] = x + x


def _row_sums(x: Any, out: Any) -> None:
    out[...] = np.sum(x, axis=1)


def _halves(x: Any, low: Any, high: Any) -> None:
    low[...] = np.minimum(x, 0)
    high[...] = np.maximum(x, 0)


def _blend(x: Any, y: Any, out: Any) -> None:
    out[...] = x * np.float32(0.25) + y


EXTERNS: dict[str, Callable[..., None]] = {
    "fuzz_twice": _twice, "fuzz_row_sums": _row_sums, "fuzz_halves": _halves, "fuzz_blend": _blend,
}  # fmt: skip


@step(2)
def library_call(g: Generator) -> Expr | None:
    x = g.value(lambda ty: ty.dtype == "float32" and (ty.rank or 0) == 2)
    if x is None:
        return None
    symbol = g.roll.pick(tuple(EXTERNS))
    n, m = SymVar("rows"), SymVar("columns")
    matrix = TensorType.of((n, m), "float32")
    inputs: tuple[Type, ...] = (matrix, matrix) if symbol == "fuzz_blend" else (matrix,)
    outputs = {"fuzz_row_sums": (TensorType.of((n,), "float32"),), "fuzz_halves": (matrix, matrix)}.get(
        symbol, (matrix,)
    )
    args = (x, g.like(type_of(x)) or x) if symbol == "fuzz_blend" else (x,)
    name = g.bb.define(symbol, ExternFunction(symbol, (*inputs, *outputs), len(outputs)))
    found = {n: shape_of(x)[0], m: shape_of(x)[1]}
    types = tuple(instantiate(ty, found) for ty in outputs)
    return chosen(g, g.bb.emit(Call(name, args, ty=types[0] if len(types) == 1 else TupleType(types))))
