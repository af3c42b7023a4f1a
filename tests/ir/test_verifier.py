"""The rules of the IR: each fires with a message that names rule, binding and place, and lets legal code pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relaxlite.errors import InvalidArgumentError, VerifyError
from relaxlite.ir import op as op_module
from relaxlite.ir.expr import (
    Attrs,
    Binding,
    Block,
    Body,
    Call,
    Constant,
    Expr,
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
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Attr, Op, register_op
from relaxlite.ir.parser import parse_module
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Barrier,
    Binary,
    Buffer,
    CallLibrary,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    LibraryFound,
    Literal,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
    seq,
)
from relaxlite.ir.program_verifier import PROGRAM_RULES
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.ir.types import UNIT, FuncType, ObjectType, ShapeType, TensorType, TupleType, Type
from relaxlite.ir.verifier import RULES, STAGES, verify

F32 = "float32"


class Twin(Op):
    """Both operands have one type, which is the result's."""

    name = "test_verify.twin"
    operands = ("a", "b?")
    attrs = {"axis": Attr("int", 0)}

    def infer(self, a: Any, b: Any = None, *, axis: int) -> Type:
        if b is not None and a.ty != b.ty:
            self.fail(f"{a.ty} and {b.ty}")
        return a.ty


class Careless(Op):
    """Its type rule breaks on anything but a tensor of known shape."""

    name = "test_verify.careless"
    operands = ("a",)

    def infer(self, a: Any) -> Type:
        return TensorType.of((*a.ty.shape, 1), a.ty.dtype)


TWIN, CARELESS = Twin(), Careless()


@pytest.fixture(scope="module", autouse=True)
def private_ops() -> Iterator[None]:
    for op in (TWIN, CARELESS):
        register_op(op)
    yield
    for op in (TWIN, CARELESS):
        del op_module._registry[op.name]


N, M, K = SymVar("n"), SymVar("m"), SymVar("k")
X = Var("x", TensorType.of((N, 4), F32))
FLAG = Var("flag", TensorType.of((), "bool"))


def let(name: str, value: Expr, ty: Type | None = None) -> Let:
    return Let(Var(name, value.ty if ty is None else ty), value)


def twin(*args: Expr, ty: Type = X.ty, loc: str | None = None, **attrs: Any) -> Call:
    return Call(TWIN, args, Attrs({"axis": 0, **attrs}), (), ty, loc)


def function(
    *bindings: Binding, params: tuple[Var, ...] = (X, FLAG), result: Expr | None = None, is_dataflow: bool | None = None
) -> Function:
    if is_dataflow is None:
        is_dataflow = not any(isinstance(b, Let) and isinstance(b.value, If | Loop) for b in bindings)
    return Function(params, Body((Block(bindings, is_dataflow),), Tuple(()) if result is None else result))


def check(main: Function, stage: str = "graph", **others: Definition) -> None:
    verify(IRModule({"main": main, **others}), stage)


def refused(rule: str, message: str, main: Function, stage: str = "graph", **others: Definition) -> str:
    with pytest.raises(VerifyError) as caught:
        check(main, stage, **others)
    text = str(caught.value)
    assert f"rule: {RULES[rule]}\n" in text, text
    assert message in text.split("\n")[0], text
    return text


# Messages


def test_a_message_names_function_rule_binding_and_source() -> None:
    y = Var("y", X.ty)
    with pytest.raises(VerifyError) as caught:
        check(function(let("z", twin(X, y, loc="/layer/Add"))))
    assert str(caught.value) == (
        "function main: variable y is used before it is bound\n"
        f"  rule: {RULES['variable']}\n"
        '  in: z: var(Tensor((n, 4), "float32"), loc=None) = test_verify.twin(x, y, axis=0, loc="/layer/Add")\n'
        "  source: /layer/Add"
    )


def test_the_excerpt_of_a_large_binding_is_short() -> None:
    inner = Body((Block(tuple(let(f"v{k}", X) for k in range(50))),), X)
    text = refused("condition", "", function(let("y", If(X, inner, inner, X.ty))))
    assert len(text.split("\n")) < 10 and "    ..." in text


def test_an_unknown_stage() -> None:
    with pytest.raises(InvalidArgumentError, match="unknown stage 'grpah'; known: graph, lowered, dps, vm"):
        verify(IRModule({}), "grpah")


# Variables


def test_variables_are_bound_once_before_use() -> None:
    y = Var("y", X.ty)
    check(function(Let(y, X), let("z", y), result=y))
    refused("variable", "y is used before it is bound", function(let("z", y), Let(y, X)))
    refused("variable", "y is used before it is bound", function(result=y))
    refused("variable", "y is bound a second time", function(Let(y, X), Let(y, X)))
    refused("variable", "x is bound a second time", function(params=(X, X)))
    refused("variable", "x is bound a second time", function(Let(X, X)))
    refused("variable", "f is used before", function(let("z", Call(Var("f", FuncType((), UNIT)), ()))))


def test_what_a_branch_binds_ends_with_it() -> None:
    y = Var("y", X.ty)
    branch = If(FLAG, Body((Block((Let(y, X),)),), y), Body((), X), X.ty)
    check(function(let("z", branch)))
    refused("variable", "y is out of scope here", function(let("z", branch), let("w", y)))
    both = replace(branch, else_body=Body((), y))
    refused("variable", "y is out of scope here", function(let("z", both)))
    again = replace(branch, else_body=branch.then_body)
    refused("variable", "y is bound a second time", function(let("z", again)))


# Symbols


def matched(name: str, source: Expr, *dims: Any) -> MatchShape:
    shape = tuple(map(sym, dims))
    return MatchShape(Var(name, TensorType.of(shape, F32)), source, shape)


def test_symbols_are_defined_before_use() -> None:
    check(function(matched("y", X, K, 4), let("s", ShapeValue((K + N,)))))
    check(function(matched("y", X, K, K * 2)))
    check(function(params=(Var("y", TensorType.of((K * 2,), F32)), Var("s", ShapeType.of((K,))))))
    refused("symbol", "symbol k in Shape((k + n,)) is not defined here", function(let("s", ShapeValue((K + N,)))))
    refused("symbol", "symbol k", function(let("y", X, TensorType.of((K, 4), F32))))
    refused("symbol", "symbol k", function(let("y", ShapeValue((K,)), ShapeType.of((K,)))))
    refused("symbol", "symbol k", function(matched("y", X, K + 1, 4)))
    twice = Var("y", TensorType.of((K * 2,), F32))
    refused("symbol", 'symbol k in Tensor((k*2,), "float32")', function(params=(twice,)))
    refused("symbol", "symbol k", function(let("y", twin(X, ShapeValue((K,))))))
    refused("symbol", "symbol k", function(let("y", twin(X, ty=TensorType.of((K, 4), F32)))))  # not "infers another"
    refused("symbol", "symbol k", function(let("y", twin(X), TupleType((TensorType.of((K,), F32),)))))
    call = Call(GlobalVar("f"), (X,), sym_args=(K * 2,))
    refused("symbol", "symbol k in k*2", function(let("y", call)), f=program())


def test_a_symbol_of_the_same_name_is_pointed_out() -> None:
    other = SymVar("n")
    text = refused("symbol", "(a different symbol of that name, n, is)", function(let("s", ShapeValue((other,)))))
    assert "in: s: Shape((n,)) = shape(n)" in text


def test_what_a_branch_defines_is_not_known_after_it() -> None:
    y = matched("y", X, K, 4)
    unknown = TensorType(None, F32, 2)
    branch = If(FLAG, Body((Block((y, let("s", ShapeValue((K,))))),), y.var), Body((), X), unknown)
    check(function(let("z", branch)))
    refused("symbol", "symbol k", function(let("z", branch), let("s", ShapeValue((K,)))))
    other = replace(branch, else_body=Body((Block((let("t", ShapeValue((K,))),)),), X))
    refused("symbol", "symbol k", function(let("z", other)))
    loop = Loop((Var("p", X.ty),), (X,), FLAG, Body((Block((y,)),), Tuple((FLAG, X))), TupleType((X.ty,)))
    refused("symbol", "symbol k", function(let("z", loop), let("s", ShapeValue((K,)))))


def test_the_vm_stage_knows_no_symbols() -> None:
    check(function(let("y", X, TensorType.of((K, 4), F32))), "vm")


# Operands, definitions, constants, types


def test_operands_are_leaves() -> None:
    check(function(let("t", Tuple((X, Constant.of(1), ShapeValue((N,)), GlobalVar("main"))))))
    refused("operand", "Call as an operand", function(let("y", twin(twin(X)))))
    refused("operand", "Tuple as an operand", function(let("y", twin(Tuple((X,))))))
    refused("operand", "TupleGetItem as an operand", function(let("t", Tuple((TupleGetItem(X, 0),)), UNIT)))
    refused("operand", "Call as an operand", function(result=twin(X)))
    refused("operand", "Tuple as an operand", function(result=Tuple((Tuple(()),))))
    refused("operand", "If as an operand", function(matched("y", If(FLAG, Body((), X), Body((), X), X.ty), N, 4)))


def test_names_of_definitions_exist() -> None:
    refused("definition", "g is not defined", function(let("y", Call(GlobalVar("g"), (X,), ty=X.ty))))
    refused("definition", "g is not defined", function(let("t", Tuple((GlobalVar("g"),)))))


def test_constants_have_the_type_of_their_elements() -> None:
    array = np.ones((2, 3), np.float32)
    check(function(result=Constant.of(array)))
    refused("constant", "type (3, 2) float32", function(result=Constant(array, TensorType.of((3, 2), F32))))
    refused("constant", "type (2, 3) int8", function(result=Constant(array, TensorType.of((2, 3), "int8"))))


def test_a_variable_has_the_type_of_its_value() -> None:
    m = Var("y", TensorType.of((N + 4 - 4, 4), F32))
    check(function(Let(m, X)))
    refused("type", "y: dtype float16 against float32", function(let("y", X, TensorType.of((N, 4), "float16"))))
    refused("type", "dimension 1: 5 against 4", function(let("y", X, TensorType.of((N, 5), F32))))
    refused("type", "rank 1 against 2", function(let("y", X, TensorType.of((N,), F32))))
    refused("type", "knows less", function(let("y", X, TensorType(None, F32, 2))))
    unknown = twin(X, ty=TensorType(None, F32, 2))
    refused("type", "shape (n, 4) against an unknown one", function(let("y", unknown, X.ty)))
    refused("type", "Object against", function(let("y", X, ObjectType())))
    refused("type", "2 fields against 1", function(let("y", Tuple((X,)), TupleType((X.ty, X.ty)))))
    refused("type", "field 0: dtype", function(let("y", Tuple((X,)), TupleType((TensorType.of((N, 4), "int8"),)))))
    refused("type", "unknown dtype 'float8'", function(params=(Var("y", TensorType.of((1,), "float8")),)))
    refused("type", "says rank 2", function(params=(Var("y", TensorType((N,), F32, 2)),)))


def test_fields_of_tuples_exist() -> None:
    t = let("t", Tuple((X, FLAG)))
    check(function(t, let("y", TupleGetItem(t.var, 1))))
    refused("type", "field 2 of Tuple(", function(t, Let(X, TupleGetItem(t.var, 2))))
    refused("type", "field 0 of Tensor(", function(Let(X, TupleGetItem(X, 0))))


# Operators


def test_operators_fit_their_declaration() -> None:
    check(function(let("y", twin(X, X))))
    check(function(let("y", twin(X, X, ty=TensorType(None, F32, 2)))))  # knows less than what is inferred
    refused("operator", "takes operands (a, b?), got 3", function(let("y", twin(X, X, X))))
    refused("operator", "unknown attribute 'axes'", function(let("y", twin(X, axes=1))))
    refused("operator", "is not of kind int", function(let("y", twin(X, axis="a"))))
    refused("operator", "are not what", function(let("y", Call(TWIN, (X,), ty=X.ty))))
    refused("operator", "test_verify.twin: (n, 4) float32 and () bool", function(let("y", twin(X, FLAG))))
    text = "test_verify.twin infers another type: dimension 0: 7 against n"
    refused("operator", text, function(let("y", twin(X, ty=TensorType.of((7, 4), F32)))))
    refused("operator", "infers another type: dtype", function(let("y", twin(X, ty=TensorType.of((N, 4), "int8")))))
    broken = Call(CARELESS, (Constant.of(1),), ty=UNIT)
    refused("operator", "infers another type", function(let("y", broken)))
    broken = Call(CARELESS, (ShapeValue(()),), ty=UNIT)
    refused("operator", "the type rule of test_verify.careless failed: AttributeError", function(let("y", broken)))


# Stages


def dps_call(*args: Expr) -> Call:
    return Call(GlobalVar("f"), args, sym_args=(N,))


def program(body: Stmt | None = None, **changes: Any) -> TensorProgram:
    """f(x: (n, 4), out: (n, 4))"""
    a, b = Buffer.of("a", (N, 4), F32), Buffer.of("b", (N, 4), F32)
    i, j = SymVar("i"), SymVar("j")
    made = For(i, sym(N), For(j, sym(4), Store(b, (i, j), a[i, j])))
    return replace(TensorProgram((a, b), (N,), made if body is None else body), **changes)


def test_stages_allow_what_their_table_says() -> None:
    value = function(let("y", Call(GlobalVar("f"), (X,), sym_args=(N,), ty=X.ty)))
    dps = function(let("_", dps_call(X, X)))
    for stage, form in (("graph", "value"), ("lowered", "value"), ("dps", "dps"), ("vm", "dps")):
        good, bad = (value, dps) if form == "value" else (dps, value)
        check(good, stage, f=program())
        other = "dps" if form == "value" else "value"
        refused("stage", f"a call in {other} form at stage '{stage}'", bad, stage, f=program())
    check(function(let("y", twin(X))))
    for stage in list(STAGES)[1:]:
        refused("stage", f"op test_verify.twin at stage '{stage}'", function(let("y", twin(X))), stage)
    by_value = function(let("y", Call(GlobalVar("f"), (X,), ty=X.ty)))
    for stage in STAGES:
        check(by_value, stage, f=identity())  # functions are called by value at every stage


def identity() -> Function:
    p = Var("p", TensorType.of((M, 4), F32))
    return Function((p,), Body((), p))


def test_a_program_without_outputs_may_be_called_at_every_stage() -> None:
    f = TensorProgram((Buffer.of("a", (N, 4), F32),), (N,), Seq(()), 0)
    for stage in STAGES:
        check(function(let("_", dps_call(X))), stage, f=f)


# Signatures


def call(callee: Definition, *args: Expr, ty: Type = X.ty, sym_args: tuple[Any, ...] = ()) -> dict[str, Any]:
    main = function(let("y", Call(GlobalVar("f"), args, sym_args=tuple(map(sym, sym_args)), ty=ty)))
    return {"main": main, "f": callee}


def test_calls_of_programs_fit() -> None:
    f = program()
    check(**call(f, X, sym_args=(N,)))
    check(**call(f, Constant.of(np.ones((3, 4), F32)), ty=TensorType.of((3, 4), F32), sym_args=(3,)))
    refused("signature", "f: takes 1 symbols, got 0", **call(f, X))
    refused("signature", "takes 1 inputs and 1 outputs, got 2 inputs for 1 results", **call(f, X, X, sym_args=(N,)))
    refused("signature", "got 2 inputs for 1 results", **call(f, X, FLAG, sym_args=(N,)))
    refused("signature", "parameter a has dtype float32 against bool", **call(f, FLAG, sym_args=(N,)))
    refused("signature", "parameter a has dimension 0: n + 1 against n, which are not", **call(f, X, sym_args=(N + 1,)))
    half = TensorType.of((N, 4), "float16")
    refused("signature", "parameter b has dtype float32 against float16", **call(f, X, ty=half, sym_args=(N,)))
    wide = TensorType.of((N * 2, 4), F32)
    refused("signature", "parameter b has dimension 0: n against n*2", **call(f, X, ty=wide, sym_args=(N,)))
    unknown = Var("u", TensorType(None, F32, 2))
    main = function(let("y", Call(GlobalVar("f"), (unknown,), sym_args=(N,), ty=X.ty)), params=(X, unknown))
    refused("signature", "shape (n, 4) against an unknown one", main, f=f)


def test_calls_of_programs_fit_in_destination_passing_form() -> None:
    f = program()
    check(function(let("_", dps_call(X, X))), "dps", f=f)
    message = "takes 1 inputs and 1 outputs, got 1 arguments in destination-passing form"
    refused("signature", message, function(let("_", dps_call(X))), "dps", f=f)
    refused("signature", "parameter b has dtype", function(let("_", dps_call(X, FLAG))), "dps", f=f)


def test_symbols_of_programs_keep_their_facts() -> None:
    def f(**facts: Any) -> TensorProgram:
        n = SymVar("n", **facts)
        return TensorProgram((Buffer.of("a", (n, 4), F32), Buffer.of("b", (n, 4), F32)), (n,), Seq(()))

    check(**call(f(lower=None), X, sym_args=(N,)))
    for facts in ({"lower": 1}, {"upper": 9}, {"divisor": 8}):
        refused("signature", "which is not proven of n", **call(f(**facts), X, sym_args=(N,)))
    k = SymVar("k", lower=1, upper=9)
    x, s = Var("x", TensorType.of((k * 8, 4), F32)), Var("s", ShapeType.of((k,)))
    y = let("y", Call(GlobalVar("f"), (x,), sym_args=(k * 8,), ty=x.ty))
    check(function(y, params=(x, s)), f=f(lower=1, upper=72, divisor=8))


def test_calls_of_functions_fit() -> None:
    f = identity()
    check(**call(f, X))
    refused("signature", "takes 1 arguments, got 2", **call(f, X, X))
    refused("signature", "argument 0: the callee has dtype", **call(f, FLAG))
    refused("signature", "result: dimension 0: n*2 against n", **call(f, X, ty=TensorType.of((N * 2, 4), F32)))
    twice = Function((Var("a", TensorType.of((M,), F32)), Var("b", TensorType.of((M * 2,), F32))), Body((), Tuple(())))
    a, b = Var("a", TensorType.of((N,), F32)), Var("b", TensorType.of((N + N,), F32))
    check(function(let("y", Call(GlobalVar("f"), (a, b))), params=(a, b)), f=twice)
    bad = function(let("y", Call(GlobalVar("f"), (b, a))), params=(a, b))
    refused("signature", "argument 1: the callee has dimension 0: n*4 against n", bad, f=twice)


def test_the_size_of_a_result_that_the_callee_alone_knows_is_unknown() -> None:
    p = Var("p", TensorType.of((M, 4), F32))
    y = matched("y", p, K, 4)
    f = Function((p,), Body((Block((y,)),), y.var))
    check(**call(f, X, ty=TensorType(None, F32, 2)))
    refused("signature", "result: shape (n, 4) against an unknown one", **call(f, X))


def test_calls_of_variables_and_externs_fit() -> None:
    g = Var("g", FuncType((X.ty,), X.ty))
    check(function(let("y", Call(g, (X,), ty=X.ty)), params=(X, g)))
    refused("signature", "takes 1 arguments", function(let("y", Call(g, (), ty=X.ty)), params=(X, g)))
    refused("signature", "x is Tensor", function(let("y", Call(X, (), ty=X.ty))))
    e = ExternFunction("gemm", (TensorType.of((M, K), F32), TensorType.of((M, K * 2), F32)))
    wide = TensorType.of((N, 8), F32)
    check(**call(e, X, ty=wide))
    refused("signature", "argument 1: the callee has dimension 1: 8 against 4", **call(e, X))
    refused("signature", "takes 1 inputs and 1 outputs, got 2 inputs", **call(e, X, X))
    loose = ExternFunction("any", (TensorType(None, F32), TensorType.of((M * 2,), F32)))
    refused("signature", "nothing determines the callee's symbol m", **call(loose, X, ty=TensorType.of((4,), F32)))
    with pytest.raises(VerifyError, match="extern f: 3 outputs of 2 parameters"):
        verify(IRModule({"f": replace(e, num_outputs=3)}))


def test_shapes_are_compared_by_proof() -> None:
    """After MatchShape has compared them at run time, n and m are one size."""
    a, b = Var("a", TensorType.of((N,), F32)), Var("b", TensorType.of((M,), F32))
    f = TensorProgram((Buffer.of("p", (K,), F32), Buffer.of("q", (K,), F32)), (K,), Seq(()))
    y = let("y", Call(GlobalVar("f"), (a,), sym_args=(N,), ty=b.ty))
    refused("signature", "n against m, which are not proven equal", function(y, params=(a, b)), f=f)
    same = MatchShape(Var("c", b.ty), a, (sym(M),))
    check(function(same, y, params=(a, b)), f=f)
    fresh = SymVar("r")
    bound = MatchShape(Var("d", TensorType.of((fresh,), F32)), a, (fresh,))
    check(function(bound, let("y", Call(GlobalVar("f"), (a,), sym_args=(fresh,), ty=a.ty)), params=(a,)), f=f)
    branch = If(FLAG, Body((Block((same,)),), FLAG), Body((), FLAG), FLAG.ty)
    refused("signature", "not proven", function(let("t", branch), y, params=(a, b, FLAG)), f=f)


# Control flow


def test_dataflow_blocks_hold_no_control_flow() -> None:
    branch = let("y", If(FLAG, Body((), X), Body((), X), X.ty))
    check(function(branch, is_dataflow=False))
    refused("dataflow", "If in a dataflow block", function(branch, is_dataflow=True))
    loop = let("y", Loop((), (), FLAG, Body((), Tuple((FLAG,))), UNIT))
    refused("dataflow", "Loop in a dataflow block", function(loop, is_dataflow=True))


def test_conditions_are_bools_of_one_element() -> None:
    one = Var("one", TensorType.of((1, 1), "bool"))
    check(function(let("y", If(one, Body((), X), Body((), X), X.ty)), params=(X, one)))
    for ty in (TensorType.of((), F32), TensorType.of((2,), "bool"), TensorType(None, "bool"), UNIT):
        cond = Var("cond", ty)
        branch = let("y", If(cond, Body((), X), Body((), X), X.ty))
        refused("condition", "the condition is", function(branch, params=(X, cond)))


def test_branches_agree() -> None:
    refused("branch", "else: ", function(let("y", If(FLAG, Body((), X), Body((), FLAG), X.ty))))
    refused("branch", "then: ", function(let("y", If(FLAG, Body((), FLAG), Body((), X), X.ty))))
    check(function(let("y", If(FLAG, Body((), X), Body((), X), TensorType(None, F32, 2)))))


def loop(init: Expr, param: Var, result: Expr, ty: Type, cond: Expr = FLAG, *bindings: Binding) -> Function:
    body = Body((Block(bindings),) if bindings else (), result)
    return function(let("y", Loop((param,), (init,), cond, body, TupleType((ty,)))))


def test_loops_fit_their_parameters() -> None:
    p = Var("p", X.ty)
    check(loop(X, p, Tuple((FLAG, X)), X.ty))
    refused("loop", "initial value 0: dtype", loop(FLAG, p, Tuple((FLAG, X)), X.ty))
    refused("loop", "next value 0: dtype", loop(X, p, Tuple((FLAG, FLAG)), X.ty))
    refused("loop", "must yield a tuple of the condition and 1 values", loop(X, p, Tuple((FLAG,)), X.ty))
    refused("loop", "must yield a tuple", loop(X, p, FLAG, X.ty))
    refused("condition", "the condition is", loop(X, p, Tuple((X, X)), X.ty))
    refused("condition", "the condition is", loop(X, p, Tuple((FLAG, X)), X.ty, X))
    refused("loop", "what the loop yields: field 0: dtype", loop(X, p, Tuple((FLAG, X)), FLAG.ty))
    two = function(let("y", Loop((p,), (X, X), FLAG, Body((), Tuple((FLAG, p))), TupleType((X.ty,)))))
    refused("loop", "1 parameters, 2 initial values", two)
    refused("variable", "p is out of scope here", replace_result(loop(X, p, Tuple((FLAG, X)), X.ty), p))


def replace_result(f: Function, result: Expr) -> Function:
    return replace(f, body=replace(f.body, result=result))


def test_a_loop_may_change_the_size_of_its_values() -> None:
    p = Var("p", TensorType.of((K, 4), F32))
    unknown = TensorType(None, F32, 2)
    grown = matched("grown", p, SymVar("j"), 4)
    check(loop(X, p, Tuple((FLAG, grown.var)), unknown, FLAG, grown, let("s", ShapeValue((K * 2,)))))
    message = "what the loop yields: field 0: shape (n, 4) against an unknown one"
    refused("loop", message, loop(X, p, Tuple((FLAG, p)), X.ty))
    q = Var("q", TensorType.of((K, K), F32))
    square = Var("s", TensorType.of((5, 5), F32))
    body = Body((), Tuple((FLAG, q)))
    good = Loop((q,), (square,), FLAG, body, TupleType((unknown,)))
    check(function(let("y", good), params=(X, FLAG, square)))
    refused("loop", "initial value 0: dimension 1: n against 4", function(let("y", replace(good, inits=(X,)))))


def test_match_shape_keeps_dtype_and_rank() -> None:
    u = Var("u", UNIT)
    refused("match", "neither tensor nor shape", function(MatchShape(Var("y", UNIT), u, ()), params=(u,)))
    refused("match", "the source has rank 2, the shape 1 dimensions", function(matched("y", X, N)))
    half = MatchShape(Var("y", TensorType.of((N, 4), "float16")), X, (sym(N), sym(4)))
    refused("match", "y: dtype float16 against float32", function(half))
    wrong = MatchShape(Var("y", TensorType.of((N, 5), F32)), X, (sym(N), sym(4)))
    refused("match", "dimension 1: 5 against 4", function(wrong))
    s = Var("s", ShapeType(None, 2))
    check(function(MatchShape(Var("t", ShapeType.of((K, N))), s, (K, sym(N))), params=(X, s)))


# Programs

A, B = Buffer.of("a", (N, 4), F32), Buffer.of("b", (N, 4), F32)
IDS, OK = Buffer.of("ids", (4,), "int64"), Buffer.of("ok", (4,), "bool")
I = SymVar("i")  # noqa: E741
ZERO = sym(0)


def tensor_program(body: Stmt, *, symbols: tuple[SymVar, ...] = (N,), attrs: Attrs | None = None) -> TensorProgram:
    return TensorProgram((A, IDS, OK, B), symbols, body, 1, attrs or Attrs())


def store(value: Value, i: Any = 0, j: Any = 0, buffer: Buffer = B) -> Store:
    return Store(buffer, (sym(i), sym(j)), value)


def program_refused(rule: str, message: str, body: Stmt, **changes: Any) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(IRModule({"p": tensor_program(body, **changes)}), "vm")
    text = str(caught.value)
    assert text.startswith(f"program p: {message}") or message in text.split("\n")[0], text
    assert f"rule: {PROGRAM_RULES[rule]}\n" in text, text
    return text


def accepted(body: Stmt, **changes: Any) -> None:
    verify(IRModule({"p": tensor_program(body, **changes)}))


X0 = A[0, 0]


def test_a_message_shows_the_statement() -> None:
    text = program_refused("symbol", "symbol i of i + 1 is not bound here", For(SymVar("j"), sym(N), store(X0, I + 1)))
    assert text.endswith("\n  in: b[i + 1, 0] = a[0, 0]")


def test_loop_level_symbols() -> None:
    accepted(For(I, sym(N), store(A[I, 0], I)))
    accepted(LetIndex(K, IDS[0], store(X0, K)))
    accepted(Seq((For(I, sym(N), store(X0, I)), For(I, sym(4), store(X0, 0, I)))))
    program_refused("symbol", "symbol i", Seq((For(I, sym(N), store(X0, I)), store(X0, I))))
    program_refused("symbol", "symbol k", Seq((LetIndex(K, IDS[0], store(X0, K)), store(X0, K))))
    program_refused("symbol", "symbol i", For(I, sym(I), store(X0)))
    program_refused("symbol", "symbol k", store(A[K, 0]))
    program_refused("symbol", "symbol k", store(IndexValue(K * 2, F32)))
    program_refused("symbol", "symbol k", Allocate(Buffer.of("t", (K,), F32), store(X0)))
    program_refused("symbol", "symbol n", store(X0), symbols=())
    program_refused("symbol", "symbol n is listed twice", store(X0), symbols=(N, N))
    twice = For(I, sym(2), For(I, sym(2), store(X0)))
    program_refused("symbol", "symbol i is bound again inside of its own scope", twice)
    program_refused("symbol", "symbol n is bound again", LetIndex(N, IDS[0], store(X0)))


def test_buffers_are_known() -> None:
    t = Buffer.of("t", (4,), F32)
    accepted(Seq((Allocate(t, Store(t, (ZERO,), X0)), Allocate(t, Store(t, (ZERO,), X0)))))
    program_refused("buffer", "buffer t is not known here", Store(t, (ZERO,), X0))
    program_refused("buffer", "buffer t is not known here", store(t[0]))
    program_refused("buffer", "buffer t is not known here", Seq((Allocate(t, Store(t, (ZERO,), X0)), store(t[0]))))
    program_refused("buffer", "allocated again", Allocate(t, Allocate(t, store(X0))))
    with pytest.raises(VerifyError, match="buffer a is listed twice"):
        verify(IRModule({"p": TensorProgram((A, A), (N,), Seq(()))}))
    with pytest.raises(VerifyError, match="3 outputs of 2 parameters"):
        verify(IRModule({"p": TensorProgram((A, B), (N,), Seq(()), 3)}))


def test_inputs_are_not_written() -> None:
    program_refused("input", "a is an input", store(X0, buffer=A))
    accepted(store(X0, buffer=A), attrs=Attrs({"writes_inputs": True}))


def test_attributes_are_those_of_the_schema() -> None:
    y = let("y", twin(X, X))
    marked = replace(function(y, result=y.var), attrs=Attrs({"exported": 1}))
    refused("attribute", "attribute 'exported' takes True or False, got 1", marked)
    refused("attribute", "there is no attribute 'coarse' of a function", replace(marked, attrs=Attrs({"coarse": True})))
    program_refused("attribute", "takes a tuple of pairs of integers", store(X0), attrs=Attrs({"panels": (3,)}))
    program_refused("attribute", "there is no attribute 'inplace'", store(X0), attrs=Attrs({"inplace": True}))
    accepted(store(X0), attrs=Attrs({"panels": ((0, 16),), "scheduled": True}))
    with pytest.raises(VerifyError, match="module: attribute 'batch_invariant' takes True or False, got 'yes'"):
        verify(IRModule({}, Attrs({"batch_invariant": "yes"})))


def test_libraries_are_called_with_what_they_can_take() -> None:
    written = AddressOf(B, (ZERO, ZERO), is_written=True)
    found = LibraryFound("blas", "f")
    call = CallLibrary(
        "blas", "f", (IndexValue(N, "int32"), Literal(1.0, F32), AddressOf(A, (I, ZERO)), written), "c", N
    )
    accepted(IfThenElse(found, For(I, sym(N), call, "parallel"), store(X0)))
    program_refused("library", "an argument is a Load", replace(call, args=(X0,)))
    program_refused("library", "unknown convention 'pascal'", replace(call, args=(), convention="pascal"))  # type: ignore[arg-type]
    program_refused("library", "the address of an element of a is used as data", store(AddressOf(A, (ZERO, ZERO))))
    program_refused("symbol", "symbol i", call)
    program_refused("symbol", "symbol k", replace(call, args=(), work=K))
    program_refused("input", "a is an input", replace(call, args=(replace(written, buffer=A),)))
    program_refused("buffer", "buffer t is not known", replace(call, args=(AddressOf(Buffer.of("t", (), F32), ()),)))
    program_refused("rank", "a has 2 dimensions, got 1", replace(call, args=(AddressOf(A, (ZERO,)),)))


def test_elements_have_one_index_per_dimension() -> None:
    program_refused("rank", "b has 2 dimensions, got 1 indices", Store(B, (ZERO,), X0))
    program_refused("rank", "a has 2 dimensions, got 3 indices", store(A[0, 0, 0]))


def test_constant_indices_lie_inside() -> None:
    accepted(store(A[0, 3], 100, 0))  # n is not known
    program_refused("bounds", "index 4 of a lies outside of 0..3", store(A[0, 4]))
    program_refused("bounds", "index -1 of b lies outside", store(X0, -1))
    outside, cond = A[0, 4], OK[0]
    accepted(store(Select(cond, outside, X0)))
    accepted(store(Select(cond, X0, Unary("exp", Binary("add", outside, X0)))))
    accepted(IfThenElse(cond, store(outside), store(outside)))
    accepted(For(I, sym(0), store(outside)))
    program_refused("bounds", "index 4", store(Select(Compare("lt", outside, X0), X0, X0)))
    shared = Unary("exp", outside)
    program_refused("bounds", "index 4", store(Binary("add", Select(cond, shared, X0), shared)))
    program_refused("bounds", "index 4", store(Binary("add", shared, Select(cond, shared, X0))))
    program_refused("bounds", "index 9 of ok", IfThenElse(OK[9], Seq(())))


def test_dtypes_agree() -> None:
    half, true = Literal(1.0, "float16"), Literal(True, "bool")
    accepted(store(Cast(Intrinsic("fma", (half, half, half), "float16"), F32)))
    program_refused("operation", "unknown intrinsic 'f'; known: fma", store(Intrinsic("f", (half, true), F32)))
    program_refused("dtype", "fma takes 3 operands, got 1", store(Intrinsic("fma", (X0,), F32)))
    program_refused("dtype", "fma of float32, float32, float16 giving", store(Intrinsic("fma", (X0, X0, half), F32)))
    byte = Literal(1, "uint8")
    bad = Intrinsic("dot4_u8s8", (Literal(0, "int32"), *(byte,) * 8), "int32")
    program_refused("dtype", "it takes int32, uint8, uint8, uint8, uint8, int8", store(Cast(bad, F32)))
    accepted(Seq((Check(OK[0], "m"), Store(OK, (ZERO,), Compare("lt", X0, X0)))), attrs=Attrs({"writes_inputs": True}))
    program_refused("dtype", "a float16 is stored into b, which is float32", store(half))
    program_refused("dtype", "a bool is stored into b, which is float32", store(true))
    program_refused("dtype", "add of float32 and float16", store(Binary("add", X0, half)))
    program_refused("dtype", "lt of float32 and float16", Check(Compare("lt", X0, half), "m"))
    program_refused("dtype", "select of float32 and float16", store(Select(true, X0, half)))
    program_refused("dtype", "the condition of a select is float32, not bool", store(Select(X0, X0, X0)))
    program_refused("dtype", "a condition is float32, not bool", IfThenElse(X0, Seq(())))
    program_refused("dtype", "a condition is float32, not bool", Check(X0, "m"))
    quotient = Binary("div", IDS[0], IDS[0])
    program_refused("dtype", "div of int64; integers have floordiv", LetIndex(K, quotient, Seq(())))
    program_refused("dtype", "symbol k is bound to a float32; an index is an integer", LetIndex(K, X0, Seq(())))
    program_refused("dtype", "unknown dtype 'float8'", store(Cast(X0, "float8")))
    program_refused("dtype", "unknown dtype 'float8'", Allocate(Buffer.of("t", (1,), "float8"), Seq(())))


@pytest.mark.parametrize(("value", "dtype"), [(300, "uint8"), (-1, "uint8"), (1.5, "int8"), (2, "bool"), (1, "f8")])
def test_literals_fit_their_dtype(value: Any, dtype: str) -> None:
    message = "unknown dtype" if dtype == "f8" else f"{value} is no {dtype}"
    program_refused("dtype", message, store(Cast(Literal(value, dtype), F32)))
    accepted(store(Cast(Literal(255, "uint8"), F32)))
    accepted(store(Literal(float("nan"), F32)))


def test_operations_are_known() -> None:
    program_refused("operation", "unknown operation 'relu'", store(Unary("relu", X0)))
    program_refused("operation", "unknown operation 'plus'", store(Binary("plus", X0, X0)))
    program_refused("operation", "unknown operation 'equals'", Check(Compare("equals", X0, X0), "m"))
    program_refused("operation", "unknown combination 'sub'; known: add, mul", replace(store(X0), combine="sub"))
    program_refused("operation", "unknown kind of loop 'gpu'", For(I, sym(4), Seq(()), "gpu"))  # type: ignore[arg-type]
    private = Buffer.of("t", (1,), F32, "private")  # type: ignore[arg-type]
    program_refused("operation", "unknown scope 'private'", Allocate(private, Seq(())))


def test_launches_are_well_formed() -> None:
    """tests/gpu/test_launches.py breaks each rule in several ways."""

    def launch(body: Stmt) -> Stmt:
        return For(SymVar("b"), sym(4), For(I, sym(32), body, "thread_x"), "block_x")

    shared = Buffer.of("t", (1,), F32, "shared")
    accepted(launch(Barrier()))
    program_refused("axes", "thread_x of i stands outside of blocks", For(I, sym(4), Seq(()), "thread_x"))
    program_refused("host", f"{B.name} is accessed outside of launches", seq(launch(Seq(())), store(X0)))
    program_refused("scope", "the shared buffer t is not between block and thread axes", Allocate(shared, Seq(())))
    first = Compare("lt", IndexValue(sym(I)), IndexValue(sym(1)))
    program_refused("barrier", "a barrier under a condition", launch(IfThenElse(first, Barrier())))
    program_refused("warp", "unknown warp instruction 'add'", launch(CallLibrary("warp", "add", ())))


def test_sizes_are_constant_where_they_must_be() -> None:
    accepted(For(I, sym(N), Seq(()), "parallel"))
    accepted(Allocate(Buffer.of("t", (N,), F32), Seq(())))
    program_refused("extent", "the vectorized loop over i has the extent n", For(I, sym(N), Seq(()), "vectorized"))
    local = Buffer.of("t", (N,), F32, "local")
    program_refused("extent", "the local buffer t has the shape (n)", Allocate(local, Seq(())))


# Whole


def test_a_whole_module_passes() -> None:
    text = """
n = symbol("n", lower=1)
@function
def main(x: Tensor((n, 4), "float32"), flag: Tensor((), "bool")):
    with dataflow():
        y: Tensor((n, 4), "float32") = test_verify.twin(x, x)
        k = symbol("k")
        z: Tensor((k, 4), "float32") = match_shape(y, (k, 4))
        w: Tensor((k, 4), "float32") = call(copy, z, sym=(n,))
    v: Tensor(rank=2, dtype="float32")
    if flag:
        v = w
    else:
        v = x
    m = symbol("m")
    @loop(flag, v)
    def out(p: Tensor((m, 4), "float32")) -> Tuple(Tensor(rank=2, dtype="float32")):
        with dataflow():
            q: Tensor((m, 4), "float32") = call(copy, p, sym=(m,))
        return (flag, q)
    return out

n = symbol("n")
@program(symbols=(n,), outputs=1)
def copy(a: Buffer((n, 4), "float32"), b: Buffer((n, 4), "float32")):
    for i in parallel(n):
        for j in vectorized(4):
            b[i, j] = a[i, j]
"""
    with pytest.raises(VerifyError, match=r"initial value 0: .* against an unknown shape; match it first"):
        verify(parse_module(text))
    match = '    r = symbol("r")\n    u: Tensor((r, 4), "float32") = match_shape(v, (r, 4))\n'
    verify(parse_module(text.replace("    @loop(flag, v)", f"{match}    @loop(flag, u)")))


def test_every_rule_is_tested() -> None:
    with open(__file__) as file:
        source = file.read()
    for rule in RULES:
        assert f'refused("{rule}"' in source, rule
    for rule in PROGRAM_RULES:
        assert f'program_refused("{rule}"' in source, rule
