"""Structural equality and hashing: the same up to names, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from relaxlite.ir.equality import first_difference, structural_equal, structural_hash
from relaxlite.ir.expr import (
    Attrs,
    Block,
    Body,
    Call,
    Constant,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import print_module
from relaxlite.ir.program import (
    Allocate,
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
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, floordiv, smax, sym
from relaxlite.ir.types import FuncType, ObjectType, ShapeType, TensorType, TupleType, Type
from tests.ir.test_printer_parser import programs
from tests.support import tiers
from tests.support.paths import ROOT

F32 = "float32"


def agree(a: Any, b: Any) -> None:
    assert first_difference(a, b) is None
    assert structural_equal(a, b) and structural_equal(b, a)
    assert structural_hash(a) == structural_hash(b)


def differ(a: Any, b: Any, message: str = "") -> None:
    assert not structural_equal(a, b) and not structural_equal(b, a)
    assert structural_hash(a) != structural_hash(b)
    found = first_difference(a, b)
    assert found is not None and message in found, found


def function(
    names: str = "nkxyzp", *, lower: int = 1, attrs: Attrs | None = None, loc: str | None = None, offset: int = 0
) -> Function:
    """A function with a bit of everything, under these names."""
    n, k = SymVar(names[0], lower=lower), SymVar(names[1])
    x = Var(names[2], TensorType.of((n, n * k - 3, k), F32), loc)
    flag = Var("flag", TensorType.of((), "bool"))
    y, z, p = (Var(name, x.ty, loc) for name in names[3:])
    shape = ShapeValue((n + k * 2, floordiv(n - k, 3), smax(n, k, n * k)))
    call = Call(GlobalVar("f"), (x, shape), Attrs({"axis": 1}), (k, n + offset), x.ty, loc)
    branch = If(flag, Body((Block((Let(z, x),)),), z), Body((), y), x.ty, loc)
    loop = Loop((p,), (y,), flag, Body((), Tuple((flag, p))), TupleType((x.ty,)))
    out = Var("out", loop.ty)
    blocks = (Block((Let(y, call),)), Block((Let(Var("b", x.ty), branch), Let(out, loop)), False))
    return Function((x, flag), Body(blocks, Tuple((out, y))), attrs or Attrs())


def test_names_and_places_do_not_count() -> None:
    agree(function(), function("knyxpz", loc="elsewhere"))
    agree(function(), function("nnaaaa"))
    agree(IRModule({"a": function(), "b": function()}), IRModule({"b": function("abcdef"), "a": function("fedcba")}))


def test_order_of_names_does_not_count() -> None:
    """The canonical form of (n - k) // 3 is another one when the names sort the other way round."""
    for make in (lambda a, b: floordiv(a - b, 3), lambda a, b: smax(a, b, a * 2), lambda a, b: a * b - a + b * 4):
        exprs = []
        for names in ("ab", "ba"):
            a, b = (SymVar(name) for name in names)
            exprs.append(Function((Var("x", TensorType.of((a, b, make(a, b)), F32)),), Body((), Tuple(()))))
        agree(*exprs)
        a, b = SymVar("a"), SymVar("b")
        differ(exprs[0], Function((Var("x", TensorType.of((a, b, make(b, a) + 1), F32)),), Body((), Tuple(()))))


def test_differences_say_where() -> None:
    f = function()
    differ(f, function(lower=2), "`x`: ('symbol', 1, None, 1) against ('symbol', 2, None, 1)")
    differ(f, function(attrs=Attrs({"fast": True})))
    differ(f, function(offset=1), "sym=(k, n)")
    differ(IRModule({"a": f}), IRModule({"b": f}), "definitions ['a'] against ['b']")
    differ(IRModule({"a": f}, Attrs({"v": 1})), IRModule({"a": f}, Attrs({"v": 1.0})), "attributes of the module")
    differ(IRModule({"a": f, "b": f}), IRModule({"a": f, "b": function(lower=3)}), "b: ")
    x, y = f.params
    differ(Function((x, y), Body((), x)), Function((x, y), Body((), y)), "`x` against `flag`")


N = SymVar("n")
X = Var("x", TensorType.of((N,), F32))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (TensorType.of((N,), F32), TensorType.of((N,), "float16")),
        (TensorType.of((N,), F32), TensorType(None, F32, 1)),
        (TensorType(None, F32, 1), TensorType(None, F32)),
        (TensorType.of((N,), F32), TensorType.of((N, 1), F32)),
        (ShapeType.of((N,)), TensorType.of((N,), F32)),
        (ShapeType(None, 1), ShapeType(None)),
        (TupleType((ObjectType(),)), ObjectType()),
        (FuncType((ObjectType(),), ObjectType()), FuncType((), ObjectType())),
    ],
    ids=str,
)
def test_types(a: Type, b: Type) -> None:
    agree(a, replace(a))
    differ(a, b)
    differ(Function((X, Var("v", a)), Body((), X)), Function((X, Var("v", b)), Body((), X)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (TupleGetItem(X, 0), TupleGetItem(X, 1)),
        (ShapeValue((N,)), ShapeValue((N, N))),
        (GlobalVar("f"), GlobalVar("g")),
        (Tuple((X,)), Tuple((X, X))),
        (Tuple((X,)), X),
        (Call(GlobalVar("f"), (X,)), Call(GlobalVar("f"), (X, X))),
        (Call(GlobalVar("f"), (X,)), Call(GlobalVar("f"), (X,), ty=X.ty)),
        (Call(GlobalVar("f"), (X,)), Call(GlobalVar("f"), (X,), Attrs({"a": None}))),
        (Call(GlobalVar("f"), (X,), Attrs({"a": 1})), Call(GlobalVar("f"), (X,), Attrs({"a": True}))),
        (Call(GlobalVar("f"), (X,), Attrs({"a": 0.0})), Call(GlobalVar("f"), (X,), Attrs({"a": -0.0}))),
        (Call(GlobalVar("f"), (X,), sym_args=(N,)), Call(GlobalVar("f"), (X,), sym_args=(N * 2,))),
        (Body((), X), Body((Block(()),), X)),
        (Body((Block((), True),), X), Body((Block((), False),), X)),
        (MatchShape(X, X, (N,)), MatchShape(X, X, (N + 1,))),
        (MatchShape(X, X, (N,)), Let(X, X)),
    ],
    ids=lambda e: type(e).__name__,
)
def test_expressions(a: Any, b: Any) -> None:
    agree(a, replace(a))
    differ(a, b)


def test_what_is_bound_outside_equals_only_itself() -> None:
    twin = Var("x", X.ty)
    assert structural_equal(Tuple((X, X)), Tuple((X, X))) and not structural_equal(Tuple((X,)), Tuple((twin,)))
    other = SymVar("n")
    assert structural_equal(ShapeValue((N * 2,)), ShapeValue((N * 2,)))
    assert not structural_equal(ShapeValue((N * 2,)), ShapeValue((other * 2,)))
    assert structural_hash(ShapeValue((floordiv(X.ty.shape[0], N - other),)))  # type: ignore[union-attr, index]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_constants_are_compared_by_content(dtype: str) -> None:
    def constant(*values: float, name: str | None = None) -> Constant:
        return Constant.of(np.array(values, dtype), name=name)

    agree(constant(1, 2, name="w"), constant(1, 2))
    agree(constant(float("nan"), 1), constant(-float("nan"), 1))
    differ(constant(0.0), constant(-0.0))
    differ(constant(1, 2), constant(2, 1))
    differ(constant(1, 2), constant(1, 2, 3))
    differ(constant(1, 2), Constant.of(np.array([[1, 2]], dtype)))
    differ(constant(1, 2), Constant.of(np.array([1, 2], "bfloat16" if dtype == "float16" else "int32")))
    large = np.arange(1000).astype(dtype)
    agree(Constant.of(large), Constant.of(large.copy()))
    changed = large.copy()
    changed[-1] = 0
    differ(Constant.of(large), Constant.of(changed))


def test_a_constant_of_a_dead_array_is_not_mistaken_for_a_new_one() -> None:
    hashes = {structural_hash(Constant.of(np.full(100, k))) for k in range(50)}
    assert len(hashes) == 50


def test_extern_functions() -> None:
    m = SymVar("m")
    gemm = ExternFunction("gemm", (TensorType.of((N, N * 2), F32),), 1)
    agree(gemm, ExternFunction("gemm", (TensorType.of((m, m * 2), F32),), 1))
    differ(gemm, replace(gemm, symbol="gemv"))
    differ(gemm, replace(gemm, num_outputs=0))
    differ(gemm, replace(gemm, attrs=Attrs({"lib": "blas"})))


# Programs


def program(names: str = "nabij", make: Any = None, **changes: Any) -> TensorProgram:
    n = SymVar(names[0], lower=changes.pop("lower", 0))
    a, b = Buffer.of(names[1], (n, 4), F32), Buffer.of(names[2], (n, 4), F32)
    i, j = SymVar(names[3]), SymVar(names[4])
    inner = make(a, b, i, j) if make else Store(b, (i, j), Unary("exp", a[i, j]))
    made = TensorProgram((a, b), (n,), For(i, sym(n), For(j, sym(4), inner)))
    return replace(made, **changes)


def test_programs_are_compared_up_to_names() -> None:
    agree(program(), program("xyzst"))
    agree(program(), program("naaii"))
    differ(program(), program(lower=1))
    differ(program(), program(num_outputs=2))
    differ(program(), program(attrs=Attrs({"checked": True})))
    differ(program(), program(symbols=()))
    differ(program(), program(body=Seq(())))


STATEMENTS: tuple[Any, ...] = (
    lambda a, b, i, j: Store(b, (i, j), a[j, i]),
    lambda a, b, i, j: Store(b, (i, j), b[i, j]),
    lambda a, b, i, j: Store(b, (i, j + 1), a[i, j]),
    lambda a, b, i, j: Store(b, (i, j), a[i, j], "add"),
    lambda a, b, i, j: Store(b, (i, j), a[i, j], "max"),
    lambda a, b, i, j: Store(b, (i, j), Literal(0.0, F32)),
    lambda a, b, i, j: Store(b, (i, j), Literal(-0.0, F32)),
    lambda a, b, i, j: Store(b, (i, j), Literal(0, "float16")),
    lambda a, b, i, j: Store(b, (i, j), IndexValue(i * 4 + j, F32)),
    lambda a, b, i, j: Store(b, (i, j), IndexValue(i * 4 + j)),
    lambda a, b, i, j: Store(b, (i, j), Binary("sub", a[i, j], a[j, i])),
    lambda a, b, i, j: Store(b, (i, j), Binary("sub", a[j, i], a[i, j])),
    lambda a, b, i, j: Check(Compare("lt", a[i, j], b[i, j]), "m"),
    lambda a, b, i, j: Check(Compare("lt", a[i, j], b[i, j]), "another m"),
    lambda a, b, i, j: IfThenElse(a[i, j], Store(b, (i, j), a[i, j])),
    lambda a, b, i, j: IfThenElse(a[i, j], Store(b, (i, j), a[i, j]), Seq(())),
    lambda a, b, i, j: IfThenElse(a[i, j], Seq(()), Store(b, (i, j), a[i, j])),
    lambda a, b, i, j: LetIndex(SymVar("k"), a[i, j], Store(b, (i, j), a[i, j])),
    lambda a, b, i, j: LetIndex(SymVar("k", upper=7), a[i, j], Store(b, (i, j), a[i, j])),
    lambda a, b, i, j: Allocate(Buffer.of("t", (4,), F32), Store(b, (i, j), a[i, j])),
    lambda a, b, i, j: Allocate(Buffer.of("t", (4,), F32, "local"), Store(b, (i, j), a[i, j])),
    lambda a, b, i, j: For(SymVar("r"), sym(4), Store(b, (i, j), a[i, j])),
    lambda a, b, i, j: For(SymVar("r"), sym(4), Store(b, (i, j), a[i, j]), "unrolled"),
    lambda a, b, i, j: Seq((For(SymVar("r"), sym(4), Seq(())), Store(b, (i, j), a[i, j]))),
    lambda a, b, i, j: Seq((Store(b, (i, j), a[i, j]), Store(b, (i, j), a[i, j]))),
)


def test_every_kind_of_statement_counts() -> None:
    made = [program(make=make) for make in STATEMENTS]
    for make, one in zip(STATEMENTS, made, strict=True):
        agree(one, program("sijab", make=make))
    assert len({structural_hash(p) for p in made}) == len(made)
    for k, one in enumerate(made):
        assert not any(structural_equal(one, other) for other in made[k + 1 :])


def test_messages_show_both_statements() -> None:
    found = first_difference(program(), program(make=STATEMENTS[0]))
    assert found == "`b[i, j] = exp(a[i, j])` against `b[i, j] = a[j, i]`"


def test_nesting_of_sequences_and_sharing_of_values_do_not_count() -> None:
    def stores(a: Buffer, b: Buffer, i: SymExpr, j: SymExpr) -> list[Stmt]:
        return [Store(b, (i, j), a[i, j]), Store(a, (i, j), b[i, j]), Store(b, (j, i), a[i, j])]

    flat = program(make=lambda *x: Seq(tuple(stores(*x))))
    nested = program(make=lambda *x: Seq((Seq(tuple(stores(*x)[:2])), Seq(()), Seq(tuple(stores(*x)[2:])))))
    agree(flat, nested)

    def doubled(share: bool) -> Any:
        def make(a: Buffer, b: Buffer, i: SymExpr, j: SymExpr) -> Stmt:
            value: Value = a[i, j]
            for _ in range(5):
                twin = value if share else rebuilt(value)
                value = Binary("add", value, twin)
            return Store(b, (i, j), value)

        return make

    agree(program(make=doubled(True)), program(make=doubled(False)))


def rebuilt(value: Value) -> Value:
    if isinstance(value, Binary):
        return Binary(value.op, rebuilt(value.a), rebuilt(value.b))
    return replace(value)


def test_one_variable_in_two_sibling_loops_is_as_good_as_two() -> None:
    a = Buffer.of("a", (4,), F32)
    i, j = SymVar("i"), SymVar("j")
    once = [For(v, sym(4), Store(a, (v,), a[v])) for v in (i, i)]
    twice = [For(v, sym(4), Store(a, (v,), a[v])) for v in (i, j)]
    agree(*(TensorProgram((a,), (), Seq(tuple(loops))) for loops in (once, twice)))


def test_shared_values_cost_their_number_not_their_tree() -> None:
    a = Buffer.of("a", (4,), F32)
    made = []
    for _ in range(2):
        value: Value = Load(a, (sym(0),))
        for _ in range(400):
            value = Binary("mul", value, value)
        made.append(TensorProgram((a,), (), Store(a, (sym(0),), value)))
    agree(*made)


def test_the_hash_is_the_same_in_every_process() -> None:
    code = (
        "from tests.ir.test_equality import *; import numpy as np;"
        "print(structural_hash(function()), *(structural_hash(program(make=m)) for m in STATEMENTS),"
        "structural_hash(Constant.of(np.arange(5.0))))"
    )
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        root = str(ROOT)
        run = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, check=True, capture_output=True)
        found.add(run.stdout)
    assert len(found) == 1


@settings(
    max_examples=tiers.examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs(), programs())
def test_random_programs(a: TensorProgram, b: TensorProgram) -> None:
    again = parse_module(print_module(IRModule({"p": a})))["p"]
    agree(a, again)
    assert structural_equal(a, b) == (structural_hash(a) == structural_hash(b))
