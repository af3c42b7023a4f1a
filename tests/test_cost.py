"""Symbolic costs of programs: known formulas, and a count of what really happens when random programs run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import relaxlite as rl
from relaxlite.codegen import interpreter
from relaxlite.codegen.interpreter import Interpreter, run_program
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Expr
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import (
    Allocate,
    Binary,
    Buffer,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Select,
    Store,
    TensorProgram,
    Unary,
    compute,
    loops,
    seq,
)
from relaxlite.ir.program_visitor import program_symbols
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate, smin, sym
from relaxlite.passes.cost import FLOPS, Cost, cost_of, value_flops
from relaxlite.passes.manager import PassContext, run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.target import Target
from tests.counting import Counter
from tests.random_graphs import arguments, graphs
from tests.random_programs import MOST_WORK, SIZES, inputs_for, maps, products, reductions, rows, values_of, work_of

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


def cost_of_op(make: Any, *inputs: tuple[tuple[Any, ...], str]) -> tuple[Cost, Mapping[str, SymVar]]:
    """The cost of a graph that fuses into one program; sizes are numbers or names of symbols."""
    bb = BlockBuilder()
    symbols: dict[str, SymVar] = {}
    types = {}
    for number, (shape, dtype) in enumerate(inputs):
        sizes = [symbols.setdefault(d, bb.symbol(d)) if isinstance(d, str) else d for d in shape]
        types[f"x{number}"] = rl.TensorType.of(sizes, dtype)
    with bb.function("main", **types) as variables:
        bb.result(make(bb, *variables))
    costs = costs_of(bb.module())
    assert len(costs) == 1, f"one program was expected, there are {list(costs)}"
    (cost,) = costs.values()
    (name,) = costs
    return cost, {v.name: v for v in (*cost.flops.free_vars(), *cost.bytes_read.free_vars(), *symbols.values())}


def same(cost: Cost, flops: Any, read: Any, written: Any) -> None:
    assert tuple(map(str, (cost.flops, cost.bytes_read, cost.bytes_written))) == tuple(map(str, map(sym, (flops, read, written))))
    assert cost.is_bound


# Formulas


def test_matrix_product() -> None:
    a, b, out = Buffer.of("a", (M, K), "float32"), Buffer.of("b", (K, N), "float32"), Buffer.of("out", (M, N), "float32")
    total = Buffer.of("total", (), "float32", "local")

    def element(i: SymVar, j: SymVar) -> Any:
        step = loops("k", (K,), lambda k: Store(total, (), Binary("mul", a[i, k], b[k, j]), "add"))
        return Allocate(total, seq(Store(total, (), Literal(0.0, "float32")), step, Store(out, (i, j), total[()])))

    body = loops("ij", (M, N), element)
    same(cost_of(program([a, b], out, body)), M * K * N * 2, (M * K + K * N) * 4, M * N * 4)
