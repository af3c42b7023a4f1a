"""The text form: every construct prints as valid Python and parses back to an equal module that prints the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relaxlite import dtypes
from relaxlite.errors import ParseError
from relaxlite.ir import op as op_module
from relaxlite.ir.equality import first_difference
from relaxlite.ir.expr import (
    Attrs,
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
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Attr, Op, register_op
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import (
    excerpt,
    module_constants,
    print_expr,
    print_function,
    print_module,
    print_program,
    print_stmt,
    print_type,
    print_value,
)
from relaxlite.ir.program import (
    BINARY,
    COMBINE,
    COMPARE,
    UNARY,
    Allocate,
    Barrier,
    Binary,
    Buffer,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    Literal,
    Load,
    LoopKind,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.symbolic import SymExpr, SymVar, floordiv, floormod, smax, smin, sym
from relaxlite.ir.types import UNIT, FuncType, ObjectType, ShapeType, TensorType, TupleType, Type
from tests.support import tiers


class Anything(Op):
    """Any operands, any result."""

    name = "test_text.anything"
    operands = ("*xs",)
    attrs = {
        "axis": Attr("int", 0),
        "axes": Attr("ints", None),
        "scale": Attr("float", 1.0),
        "mode": Attr("str", ""),
        "loc": Attr("bool", False),
        "tree": Attr("tuple", ()),
    }


class Shape(Op):
    """An op whose name the text form uses itself."""

    name = "shape"
    operands = ("x",)


class Plain(Op):
    """An op with one attribute."""

    name = "plain"
    operands = ("x",)
    attrs = {"axis": Attr("int")}


ANYTHING, SHAPE, PLAIN = Anything(), Shape(), Plain()


@pytest.fixture(scope="module", autouse=True)
def private_ops() -> Iterator[None]:
    for op in (ANYTHING, SHAPE, PLAIN):
        register_op(op)
    yield
    for op in (ANYTHING, SHAPE, PLAIN):
        del op_module._registry[op.name]


F32 = "float32"
N = SymVar("n", lower=1, upper=512)
X = Var("x", TensorType.of((N, 4), F32))


def function(*bindings: Any, params: tuple[Var, ...] = (X,), result: Expr = X) -> Function:
    return Function(params, Body((Block(tuple(bindings)),) if bindings else (), result))


def round_trip(module: IRModule) -> str:
    """The text, once it is known to be Python and to come back whole."""
    text = print_module(module)
    ast.parse(text)
    again = parse_module(text, module_constants(module))
    assert first_difference(again, module) is None
    assert print_module(again) == text
    assert parse_module(print_module(module, embed=True)) is not None
    return text


def round_trip_function(f: Function) -> str:
    return round_trip(IRModule({"main": f}))


def any_call(*args: Expr, ty: Type = X.ty, loc: str | None = None, attrs: dict[str, Any] | None = None) -> Call:
    return Call(ANYTHING, args, ANYTHING.check_attrs(attrs or {}), (), ty, loc)


# The form, by example


def test_a_function() -> None:
    k = SymVar("k")
    y, z = Var("y", X.ty, "/relu"), Var("z", TensorType.of((k, 4), F32))
    f = function(
        Let(y, Call(PLAIN, (X,), Attrs({"axis": 1}), (), X.ty, "/relu")),
        MatchShape(z, y, (k, sym(4))),
        params=(X, Var("flag", TensorType.of((), "bool"))),
        result=Tuple((z, Constant.of(1.5, F32), ShapeValue((k, N * 2)))),
    )
    assert print_function("main", f) == (
        'n = symbol("n", lower=1, upper=512)\n'
        "@function\n"
        'def main(x: Tensor((n, 4), "float32"), flag: Tensor((), "bool")):\n'
        "    with dataflow():\n"
        '        y: Tensor((n, 4), "float32") = plain(x, axis=1, loc="/relu")\n'
        '        k = symbol("k")\n'
        '        z: Tensor((k, 4), "float32") = match_shape(y, (k, 4))\n'
        '    return (z, const(1.5, "float32"), shape(k, n*2))\n'
    )
    round_trip_function(f)


def test_a_program() -> None:
    i, j = SymVar("i"), SymVar("j")
    a, b = Buffer.of("a", (N, 16), F32), Buffer.of("b", (N, 16), F32)
    c, s = Buffer.of("c", (N, 16), F32), Buffer.of("top", (), F32, "local")
    t = Unary("exp", Binary("sub", a[i, j], b[i, j]))
    body: Stmt = Seq(
        (
            Store(s, (), Literal(-float("inf"), F32)),
            For(j, sym(16), Store(s, (), a[i, j], "max")),
            For(j, sym(16), Store(c, (i, j), Binary("div", t, Binary("add", t, s[()])), "add"), "vectorized"),
        )
    )
    program = TensorProgram((a, b, c), (N,), For(i, sym(N), Allocate(s, body), "parallel"), 1, Attrs({"fast": True}))
    assert print_program("kernel", program) == (
        'n = symbol("n", lower=1, upper=512)\n'
        "@program(symbols=(n,), outputs=1, fast=True)\n"
        'def kernel(a: Buffer((n, 16), "float32"), b: Buffer((n, 16), "float32"), c: Buffer((n, 16), "float32")):\n'
        "    for i in parallel(n):\n"
        '        with allocate((), "float32", "local") as top:\n'
        "            top[()] = float32(-inf)\n"
        "            for j in serial(16):\n"
        '                combine("max", top[()], a[i, j])\n'
        "            for j in vectorized(16):\n"
        "                t = exp(a[i, j] - b[i, j])\n"
        "                c[i, j] += t / (t + top[()])\n"
    )
    round_trip(IRModule({"kernel": program}))


def test_if_and_loop() -> None:
    m = SymVar("m")
    flag, count = Var("flag", TensorType.of((), "bool")), Var("count", TensorType.of((), "int64"))
    y = Var("y", TensorType(None, F32, 2))
    branch = If(flag, Body((Block((Let(Var("t", X.ty), any_call(X)),)),), X), Body((), X), y.ty, "If_0")
    p = Var("p", TensorType.of((m, 4), F32))
    body = Body((), Tuple((flag, p, count)))
    loop = Loop((p, count), (y, Constant.of(0, "int64")), flag, body, TupleType((y.ty, count.ty)))
    out = Var("out", loop.ty)
    f = Function((X, flag), Body((Block((Let(y, branch),), False), Block((Let(out, loop),), False)), out))
    text = print_function("main", f)
    assert '    y: var(Tensor(rank=2, dtype="float32"), loc=None)\n    if branch(flag, loc="If_0"):\n' in text
    assert "        y = x\n    else:\n        y = x\n    with block():\n" in text
    assert '        @loop(flag, y, const(0, "int64"))\n' in text
    assert '        ) -> Tuple(Tensor(rank=2, dtype="float32"), Tensor((), "int64")):\n' in text  # wrapped
    assert "            return (flag, p, count)\n" in text
    round_trip_function(f)


# Every construct


@pytest.mark.parametrize(
    "ty",
    [
        TensorType.of((), F32),
        TensorType.of((N, N * N + 3, floordiv(N + 1, 2)), "bfloat16"),
        TensorType(None, "int8", 3),
        TensorType(None, "bool"),
        ShapeType.of(()),
        ShapeType.of((N, floormod(N, 4))),
        ShapeType(None, 2),
        ShapeType(None),
        UNIT,
        TupleType((TensorType.of((N,), F32), TupleType((ObjectType(),)))),
        FuncType((TensorType.of((N,), F32),), UNIT),
        ObjectType(),
    ],
    ids=str,
)
def test_every_type(ty: Type) -> None:
    round_trip_function(function(Let(Var("v", ty), any_call(X, ty=ty))))


def arrays() -> Iterator[np.ndarray]:
    for name in dtypes.ALL:
        dtype = dtypes.to_numpy(name)
        yield np.array([], dtype)
        yield np.zeros((2, 0, 3), dtype)
        yield np.array(1, dtype)
        yield np.arange(6).astype(dtype).reshape(1, 2, 3)
        yield np.arange(100).astype(dtype)
        if dtypes.is_integer(name):
            limits = np.iinfo(dtype)
            yield np.array([limits.min, limits.max], dtype)
        elif dtypes.is_float(name):
            yield np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 0.1, 1e-7, 65504.0], dtype)
            tiny = np.frombuffer(np.arange(16 * dtype.itemsize, dtype=np.uint8).tobytes(), dtype)
            yield tiny  # odd bits, subnormal numbers


@pytest.mark.parametrize("array", list(arrays()), ids=lambda a: f"{a.dtype.name}{list(a.shape)}")
def test_every_constant(array: np.ndarray) -> None:
    constant = Constant.of(array, name='the "name"\n')
    module = IRModule({"main": function(result=constant)})
    for embed in (False, True):
        again = parse_module(print_module(module, embed=embed), () if embed else module_constants(module))
        found = again["main"].body.result  # type: ignore[union-attr]
        assert isinstance(found, Constant) and found.value.dtype == array.dtype and found.name == constant.name
        assert found.value.shape == array.shape and found.value.tobytes() == array.tobytes()
    round_trip(module)


@given(st.sampled_from(["float16", "bfloat16", "float32", "float64"]), st.binary(min_size=64, max_size=64))
def test_floats_keep_every_bit(name: str, raw: bytes) -> None:
    array = np.frombuffer(raw, dtypes.to_numpy(name))[:8]
    again = parse_module(print_module(IRModule({"main": function(result=Constant.of(array))})))
    found = again["main"].body.result  # type: ignore[union-attr]
    assert isinstance(found, Constant)
    with np.errstate(invalid="ignore"):  # signalling NaN
        bits = array != array
    assert np.array_equal(found.value != found.value, bits) and found.value[~bits].tobytes() == array[~bits].tobytes()


def test_large_constants_stand_in_a_table() -> None:
    w, v = (Constant.of(np.full((5, 8), k, ml_dtypes.bfloat16), name=f"w{k}") for k in (1, 2))
    module = IRModule({"main": function(result=Tuple((v, w, v))), "other": function(result=w)})
    text = print_module(module)
    assert text.startswith('constants = [\n    constant((5, 8), "bfloat16", hash="')
    assert "return (constants[0], constants[1], constants[0])" in text and "return constants[1]" in text
    assert module_constants(module) == [v, w]
    again = parse_module(text, [v.value, w])
    assert again["other"].body.result is w  # type: ignore[union-attr]
    with pytest.raises(ParseError, match=r"elements of constants\[1\] are not in the text"):
        parse_module(text, [v])
    with pytest.raises(ParseError, match=r"constants\[0\] has other elements"):
        parse_module(text, [w, w])
    with pytest.raises(ParseError, match=r"constants\[0\] is given as \(8,\) float64, the text says \(5, 8\) bfloat16"):
        parse_module(text, [np.zeros(8), w])


def test_attributes_of_every_kind() -> None:
    attrs = {
        "axis": -3,
        "axes": (1, -2),
        "scale": float("-inf"),
        "mode": "quo\"te's \\ \n \u2028 é \udc80",
        "loc": True,
        "tree": ((1, ("a",), None), (), -1.5, False),
    }
    text = round_trip_function(function(Let(Var("y", X.ty), any_call(X, attrs=attrs))))
    assert "axis=-3" in text and "scale=-inf" in text and 'tree=((1, ("a",), None), (), -1.5, False)' in text
    assert 'attrs={"loc": True}' in text
    odd = Attrs({"a.b": 1, "lambda": (), "attrs": float("nan"), "né": "x", "name": "not the name", "ok": 0.1})
    f = replace(function(), attrs=odd)
    text = round_trip(IRModule({"main": f}, odd))
    assert text.startswith("module(name=")


def test_names_are_kept_or_shown() -> None:
    odd = [Var(name, X.ty) for name in ("x", "x", "input.1", "1", "", "class", "constants", "é", "main", "nan", "x_1")]
    f = Function(tuple(odd), Body((), odd[0]))
    again = parse_module(round_trip_function(f))["main"]
    assert isinstance(again, Function)
    assert [p.name for p in again.params] == [p.name for p in odd]
    text = round_trip_function(function(*(Let(v, X) for v in odd)))
    assert '        input_1: var(Tensor((n, 4), "float32"), name="input.1") = x\n' in text
    assert "        x_1: Tensor" in text  # a plain suffix is not worth a note


def test_names_of_definitions() -> None:
    module = IRModule({"a/b": function(), "a.b": function(), "class": function(), "main": function()})
    calls = [Let(Var(f"v{k}", X.ty), Call(GlobalVar(name), (X,), ty=X.ty)) for k, name in enumerate(module)]
    module = module.updated({"main": function(*calls)})
    text = round_trip(module)
    assert '@function(name="a/b")\ndef a_b(' in text and '@function(name="a.b")\ndef a_b_1(' in text
    assert "call(a_b_1, x)" in text and "call(class_, x)" in text


def test_locations_of_calls_and_variables() -> None:
    x = replace(X, loc='graph input "x"')
    cases = [(None, None), ("a", "a"), ("a", None), (None, "a"), ("a", "b")]
    bindings: list[Any] = [Let(Var("y", X.ty, mine), any_call(x, loc=its)) for mine, its in cases]
    bindings += [MatchShape(Var("m", X.ty, mine), x, (N, sym(4)), its) for mine, its in cases]
    bindings += [Let(Var("z", X.ty, "a"), x), Let(Var("u", UNIT, "a"), any_call(ty=UNIT, loc="b"))]
    again = parse_module(round_trip_function(function(*bindings, params=(x,), result=x)))["main"]
    assert isinstance(again, Function) and again.params[0].loc == x.loc
    for before, after in zip(bindings, again.body.bindings(), strict=True):
        assert before.var.loc == after.var.loc
        assert place(before) == place(after)


def place(binding: Any) -> str | None:
    loc: str | None = getattr(binding if isinstance(binding, MatchShape) else binding.value, "loc", None)
    return loc if not isinstance(binding, Let) or isinstance(binding.value, Call) else None


def test_calls_of_every_level() -> None:
    g = Var("g", FuncType((X.ty,), X.ty))
    y = Buffer.of("y", (N, 4), F32)
    module = IRModule(
        {
            "main": Function(
                (X, g),
                Body(
                    (
                        Block(
                            (
                                Let(Var("a", X.ty), Call(GlobalVar("kernel"), (X,), sym_args=(N,), ty=X.ty)),
                                Let(Var("_", UNIT), Call(GlobalVar("kernel"), (X, X), Attrs({"first_slot": 2}), (N,))),
                                Let(Var("b", X.ty), Call(g, (X,), ty=X.ty)),
                                Let(Var("c", ObjectType()), GlobalVar("gemm")),
                                Let(Var("d", X.ty), Call(SHAPE, (X,), ty=X.ty)),
                                Let(Var("u", UNIT), Call(GlobalVar("gemm"), (X, X), sym_args=(N + 1,))),
                                Let(Var("e", X.ty), any_call(ty=TensorType(None, F32, 2))),
                            )
                        ),
                    ),
                    Tuple(()),
                ),
            ),
            "kernel": TensorProgram((Buffer.of("x", (N, 4), F32), y), (N,), Seq(())),
            "gemm": ExternFunction("cblas_sgemm", (X.ty, X.ty), 1, Attrs({"lib": "blas", "outputs": 3})),
        }
    )
    text = round_trip(module)
    assert '        a: Tensor((n, 4), "float32") = call(kernel, x, sym=(n,))\n' in text
    assert "        call(kernel, x, x, first_slot=2, sym=(n,))\n" in text
    assert "call(g, x)" in text and 'op("shape")(x)' in text
    assert ', ty=Tensor(rank=2, dtype="float32"))' in text
    assert 'gemm = extern("cblas_sgemm", (Tensor((n, 4), "float32"), Tensor(' in text
    assert '), outputs=1, lib="blas", attrs={"outputs": 3})' in text


def test_unit_calls_whose_variable_is_used_keep_it() -> None:
    u = Var("u", UNIT)
    text = round_trip_function(function(Let(u, any_call(ty=UNIT)), Let(Var("v", UNIT), u)))
    assert "        u: Tuple() = test_text.anything(" in text


@pytest.mark.parametrize("kinds", [(), (True,), (False,), (False, False, False, True, True, False), (False, True)])
@pytest.mark.parametrize("size", [0, 2])
def test_blocks_stay_apart(kinds: tuple[bool, ...], size: int) -> None:
    blocks = [Block(tuple(Let(Var("v", X.ty), X) for _ in range(size)), kind) for kind in kinds]
    round_trip_function(Function((X,), Body(tuple(blocks), X)))


def test_nested_control_flow() -> None:
    flag = Var("flag", TensorType.of((), "bool"))
    k = SymVar("k", lower=None, divisor=4)

    def deep(level: int) -> Body:
        if level == 0:
            m = Var("m", TensorType.of((k, 4), F32))
            return Body((Block((MatchShape(m, X, (k, sym(4))),)),), Tuple((m, X)))
        y = Var("y", TupleType((TensorType(None, F32, 2), X.ty)))
        p = Var("p", X.ty)
        out = Var("out", TupleType((X.ty,)))
        loop = Loop((p,), (X,), flag, Body((), Tuple((flag, p))), TupleType((X.ty,)))
        branch = If(flag, deep(level - 1), Body((), Tuple((X, X))), y.ty)
        return Body((Block((Let(y, branch), Let(out, loop)), False),), y)

    round_trip_function(Function((X, flag), deep(3)))


def test_symbols_of_one_name_are_told_apart() -> None:
    n2 = SymVar("n", divisor=8)
    x = Var("x", TensorType.of((N, n2, N + n2 * 2, smin(n2, N), floordiv(n2, 3) * N), F32))
    text = round_trip_function(Function((x,), Body((), x)))
    assert 'n_1 = symbol("n", divisor=8)' in text
    assert "min(n, n_1), n*(n_1 // 3)" in text


def test_the_largest_of_many_does_not_nest() -> None:
    symbols = tuple(SymVar(f"s{k:03}") for k in range(250))
    x = Var("x", TensorType.of((*symbols, smax(*symbols), smin(*symbols, 7)), F32))
    assert "max(s000, s001, s002, " in round_trip_function(Function((x,), Body((), x)))


def test_an_undefined_symbol_is_declared_where_it_occurs() -> None:
    stray = SymVar("stray")
    text = print_function("main", function(Let(Var("y", TensorType.of((stray,), F32)), X)))
    assert '        stray = symbol("stray")\n        y: Tensor((stray,), "float32") = x\n' in text
    program = TensorProgram((), (), Store(Buffer.of("a", (4,), F32), (stray,), IndexValue(sym(stray), F32)))
    assert '    stray = symbol("stray")\n    a[stray] = index(stray, "float32")\n' in print_program("p", program)


# Programs

A, B, C = Buffer.of("a", (N, 16), F32), Buffer.of("b", (16,), "int32"), Buffer.of("c", (), "bool")
I = SymVar("i")  # noqa: E741
BARRIER = Barrier()
KINDS: tuple[Any, ...] = get_args(LoopKind)


def round_trip_stmt(stmt: Stmt, *params: Buffer) -> str:
    return round_trip(IRModule({"p": TensorProgram((A, B, C, *params), (N,), For(I, sym(16), stmt))}))


def round_trip_value(value: Value) -> str:
    text = round_trip_stmt(Check(value, "?"))
    return text.split("assert ")[1].split(', "?"')[0]


@pytest.mark.parametrize("op", UNARY)
def test_every_unary(op: str) -> None:
    for other in ("neg", "not", "exp"):
        round_trip_value(Unary(op, Unary(other, B[I])))
        round_trip_value(Unary(other, Binary("pow", Unary(op, B[I]), Unary(op, B[I]))))


@pytest.mark.parametrize("op", (*BINARY, *COMPARE))
def test_every_binary_keeps_its_operands_together(op: str) -> None:
    make = Binary if op in BINARY else Compare
    x = B[I]
    for other in (*BINARY, *COMPARE):
        inner = (Binary if other in BINARY else Compare)(other, x, x)
        round_trip_value(make(op, inner, x))
        round_trip_value(make(op, x, Unary("neg", inner)))
        round_trip_value(make(op, Unary("not", inner), Select(inner, x, inner)))
        round_trip_value(Select(make(op, x, x), Select(x, x, x), inner))


def test_values_read_like_python() -> None:
    x, y = B[I], Literal(2, "int32")
    assert round_trip_value(Binary("mul", Binary("add", x, y), y)) == "(b[i] + int32(2)) * int32(2)"
    assert round_trip_value(Binary("sub", x, Binary("sub", x, y))) == "b[i] - (b[i] - int32(2))"
    assert round_trip_value(Cast(Cast(x, F32), "int8")) == "int8(float32(b[i]))"
    assert round_trip_value(Compare("eq", Compare("lt", x, y), C[()])) == "(b[i] < int32(2)) == c[()]"
    assert round_trip_value(Select(C[()], x, y)) == "b[i] if c[()] else int32(2)"
    assert round_trip_value(Intrinsic("fma", (x, y), F32)) == 'intrinsic("fma", b[i], int32(2), dtype="float32")'
    assert round_trip_value(IndexValue(floormod(N * 2 + I, 3))) == "index((i + n*2) % 3)"


@pytest.mark.parametrize(
    "literal",
    [
        *(Literal(v, F32) for v in (0.0, -0.0, 1, 0.1, 1e300, float("nan"), float("inf"), -float("inf"))),
        *(Literal(v, "bool") for v in (True, False)),
        *(Literal(v, "uint64") for v in (0, 2**64 - 1)),
        Literal(-(2**63), "int64"),
        Literal(np.float32(0.1), "bfloat16"),
    ],
    ids=lambda x: f"{x.value}-{x.dtype}",
)
def test_every_literal(literal: Literal) -> None:
    round_trip_value(literal)
    round_trip_value(Unary("neg", literal))
    round_trip_value(Cast(literal, "int8"))


def test_every_statement() -> None:
    k = SymVar("k", lower=None, upper=15, divisor=3)
    t = Buffer.of("a", (N, k + 1), "float16")
    text = round_trip_stmt(
        Seq(
            (
                IfThenElse(C[()], BARRIER),
                IfThenElse(C[()], Seq(()), Seq(())),
                IfThenElse(C[()], BARRIER, IfThenElse(C[()], BARRIER, IfThenElse(C[()], Seq(()), BARRIER))),
                LetIndex(k, B[I], Allocate(t, Store(t, (sym(0), sym(k)), Cast(A[I, k], "float16")))),
                Check(C[()], 'a "message"'),
                *(Store(B, (sym(I),), B[I], combine) for combine in (None, *COMBINE)),
                *(For(SymVar("j"), sym(4), BARRIER, kind) for kind in KINDS),
                For(SymVar("j k", lower=2, upper=3), N + 1, BARRIER),
            )
        )
    )
    assert "        elif c[()]:\n" in text
    assert "with let_index(b[i], lower=None, upper=15, divisor=3) as k:" in text
    assert 'with allocate((n, k + 1), "float16") as a_1:' in text
    assert 'for j_k in serial(n + 1, name="j k", lower=2, upper=3):' in text


def test_sibling_loops_use_one_name_and_nested_ones_do_not() -> None:
    inner = For(SymVar("i"), sym(2), BARRIER)
    text = round_trip_stmt(Seq((inner, For(SymVar("i"), sym(3), inner))))
    assert "        for i_1 in serial(2):\n" in text
    assert "        for i_1 in serial(3):\n            for i_2 in serial(2):\n" in text


def test_shared_values_are_named_and_shared_again() -> None:
    value: Value = Binary("add", B[I], B[I])
    for _ in range(200):  # as a tree this would have 2**200 leaves
        value = Binary("mul", value, value)
    text = print_program("p", TensorProgram((B,), (), For(I, sym(16), Store(B, (sym(I),), value))))
    assert "        t_1 = t * t\n" in text
    stmt = Store(B, (sym(I),), value)
    assert len(round_trip_stmt(stmt)) < 10_000
    round_trip_stmt(IfThenElse(Compare("eq", value, value), stmt, IfThenElse(Compare("ne", value, value), stmt)))
    round_trip_stmt(LetIndex(SymVar("t"), value, stmt))


def test_deep_values_do_not_exhaust_the_tokenizer() -> None:
    value: Value = B[I]
    for k in range(300):
        value = Unary("exp", value) if k % 2 else Binary("sub", B[I], value)
    round_trip_stmt(Store(B, (sym(I),), value))


def test_a_chain_of_conditions_with_shared_parts_prints_without_elif() -> None:
    shared = Binary("add", B[I], B[I])
    cond = Compare("eq", shared, shared)
    text = round_trip_stmt(IfThenElse(C[()], BARRIER, IfThenElse(cond, BARRIER, IfThenElse(C[()], BARRIER))))
    assert "        else:\n            t = b[i] + b[i]\n            if t == t:\n" in text


def test_a_branch_may_use_the_name_of_a_value_of_the_condition() -> None:
    a, b = Unary("neg", C[()]), Unary("not", C[()])
    test_stmt = IfThenElse(Binary("and", a, a), BARRIER, Check(Binary("or", b, b), "?"))
    text = round_trip_stmt(test_stmt)
    assert "        t = -c[()]\n        if t & t:\n" in text
    assert "            t = not c[()]\n            assert t | t" in text


# Excerpts


def test_pieces_print_alone() -> None:
    y = Var("y", X.ty)
    assert print_expr(any_call(X, y)).startswith("test_text.anything(x, y, axes=None")
    assert print_expr(Call(GlobalVar("g"), (X,), ty=X.ty)) == "call(g, x)"
    assert excerpt(Let(y, X)) == 'y: Tensor((n, 4), "float32") = x'
    assert print_expr(Call(ANYTHING, (any_call(X),), ty=X.ty)).endswith('ty=Tensor((n, 4), "float32")))')
    assert print_value(Binary("add", A[I, 0], A[I, 1])) == "a[i, 0] + a[i, 1]"
    assert print_stmt(BARRIER) == "barrier()"
    assert print_type(TensorType.of((N,), F32)) == 'Tensor((n,), "float32")'
    assert excerpt(For(I, sym(2), Seq((BARRIER, BARRIER, BARRIER)))).endswith("barrier()\n    ...")
    flag = Var("flag", TensorType.of((), "bool"))
    assert "if flag:" in excerpt(Let(y, If(flag, Body((), X), Body((), X), X.ty)))


# Errors

HEAD = 'n = symbol("n")\n@function\ndef main(x: Tensor((n, 4), "float32"), y: Tensor((n, 4), "float32")):\n'
KERNEL = 'n = symbol("n")\n@program(symbols=(n,))\ndef p(a: Buffer((n,), "float32"), b: Buffer((n,), "int32")):\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def main(:", r"line 1, column 10: "),
        ("x = 1", "line 1, column 1: expected @function, @program"),
        ("\0", "line 1, column 1: .*null bytes"),
        (f"{HEAD}    return z", r"line 4, column 12: unknown variable z"),
        (f"{HEAD}    return xx", r"unknown variable xx; did you mean x\?"),
        (f"{HEAD}    return n", r"n is no variable"),
        (f"{HEAD}    x", r"this body must end with `return value`"),
        (f"{HEAD}    z: Tensor((n,), 'float23') = x\n    return z", r"unknown dtype 'float23'; did you mean float32\?"),
        (f"{HEAD}    z: Tenser((n,), 'float32') = x\n    return z", r"unknown type Tenser; did you mean Tensor\?"),
        (f"{HEAD}    z: Tensor((m,), 'float32') = x\n    return z", r"unknown symbol m"),
        (f"{HEAD}    z: Tensor(n, 'float32') = x\n    return z", r"expected a tuple; one element is written \(n,\)"),
        (f"{HEAD}    z: Tensor((n / 2,), 'float32') = x\n    return z", r"symbolic integers have only"),
        (f"{HEAD}    z: Tensor((n // 0,), 'float32') = x\n    return z", r"division by zero"),
        (f"{HEAD}    z: Object = test_text.anythin(x)\n    return z", r"unknown op test_text.anythin; did you"),
        (f"{HEAD}    z: Object = test_text.anything(x, axs=1)\n    return z", r"unknown attribute 'axs'; it takes"),
        (f"{HEAD}    z: Object = test_text.anything(x, axis='a')\n    return z", r"axis='a' is not of kind int"),
        (f"{HEAD}    z: Object = test_text.anything(x, axis=f(1))\n    return z", r"expected a literal"),
        (f"{HEAD}    z: Object = test_text.anything(x, **y)\n    return z", r"`\*\*` has no meaning here"),
        (f"{HEAD}    z = x\n    return z", r"z needs a type"),
        (f"{HEAD}    x: Object = x\n    return x", r"x is defined already"),
        (f"{HEAD}    z: Object = 1.0\n    return z", r"a constant needs a dtype: const\(1.0"),
        (f"{HEAD}    z: Object = const(300, 'int8')\n    return z", r"this is no constant of int8"),
        (f"{HEAD}    z: Object = const([[1], 2], 'int8')\n    return z", r"this is no constant of int8"),
        (f"{HEAD}    z: Object = constants[0]\n    return z", r"constants\[0\] is not in the table, which has 0 rows"),
        (f"{HEAD}    z: Object = call(1)\n    return z", r"a constant needs a dtype"),
        (f"{HEAD}    z: Object = call()\n    return z", r"call takes what to call first"),
        (f"{HEAD}    z: Object\n    return x", r"announces the result of an `if`, which must follow"),
        (f"{HEAD}    if x:\n        z = x\n    return x", r"is announced in front of it"),
        (f"{HEAD}    z: Object\n    if x:\n        z = x\n    return x", r"both branches must give z a value"),
        (f"{HEAD}    z: Object\n    if x:\n        y = x\n    else:\n        z = x\n    return x", r"must end with"),
        (f"{HEAD}    with data():\n        pass\n    return x", r"expected `with dataflow\(\):` or `with block\(\):`"),
        (f"{HEAD}    while x:\n        pass\n    return x", r"expected `y: Tensor\(...\) = op\(x\)`"),
        (f"{HEAD}    def f(): pass\n    return x", r"a loop is written `@loop"),
        ("n = symbol('n', lower=3, upper=2)", r"lower bound 3 exceeds upper bound 2"),
        ("n = symbol('n')\nn = symbol('n')", r"line 2, column 1: n is defined already"),
        ("@function\ndef f(): return ()\n@function\ndef f(): return ()", r"f is defined already"),
        ("def f(): pass", r"a definition begins with @function or @program"),
        ("@function\ndef f(x): return x", r"x needs a type: x: Tensor\(...\)"),
        ("@function\ndef f(*x): return ()", r"parameters are written name: type, nothing else"),
        ("@function\ndef f(x: Object = 1): return x", r"line 2, column 19: parameters are written"),
        ("@function\ndef f() -> Object: return ()", r"the type of the result is that of what the body returns"),
        (f"{KERNEL}    a[0] = {'-' * 5000}a[0]", r"nests too deep|too many|stack"),
        (f"{KERNEL}    a[0] = a[0]{' + a[0]' * 5000}", r"nests too deep"),
        ("constants = 1", r"the constants are a list"),
        ("constants = [constant((2,), 'int8', data='AA==')]", r"this is no data of \(2,\) int8"),
        ("e = extern('f', (Tensor((), 'int8'),), outputs='x')", r"expected an integer"),
        (f"{KERNEL}    a[0] = 1.0", r"a number needs a dtype: float32\(1.0\)"),
        (f"{KERNEL}    a[0] = n", r"n is a symbol; as data it is written index\(n\)"),
        (f"{KERNEL}    a[0] = a", r"a is a buffer; an element is written a\[...\]"),
        (f"{KERNEL}    a[0] = c[0]", r"unknown buffer c"),
        (f"{KERNEL}    a[i] = a[0]", r"unknown symbol i"),
        (f"{KERNEL}    a[0] = expp(a[0])", r"unknown function expp; did you mean exp\?"),
        (f"{KERNEL}    a[0] = exp(a[0], a[0])", r"exp takes 1 positional arguments, got 2"),
        (f"{KERNEL}    a[0] @= a[0]", r"this operator combines nothing"),
        (f"{KERNEL}    combine('mox', a[0], a[0])", r"unknown combination 'mox'; did you mean max\?"),
        (f"{KERNEL}    combine('max', a, a[0])", r"a store needs an element"),
        (f"{KERNEL}    prefetch(a)", r"prefetch takes an element: prefetch\(buffer\[i, j\]\)"),
        (f"{KERNEL}    prefetch(a[0], 3)", r"prefetch brings an element to cache 1 or 2"),
        (f"{KERNEL}    a = a[0]", r"a is defined already; an element is stored by a\[i\]"),
        (f"{KERNEL}    for i in range(n):\n        pass", r"unknown kind of loop range"),
        (f"{KERNEL}    for i in a:\n        pass", r"a loop is written `for i in serial\(n\):`"),
        (f"{KERNEL}    for i in serial(n, step=2):\n        pass", r"has no argument step"),
        (f"{KERNEL}    with allocate((4,), 'int8', 'texture') as t:\n        pass", r"unknown scope 'texture'"),
        (f"{KERNEL}    with open(n) as t:\n        pass", r"expected `with allocate"),
        (f"{KERNEL}    a[0] = a[0] and a[1]", r"joined by & and \|"),
        (f"{KERNEL}    a[0] = t", r"unknown name t"),
        (f"{KERNEL}    return a", r"expected a store, `for`, `if`"),
        ("@program()\ndef p(a: Tensor((), 'int8')):\n    pass", r"a parameter of a program is written a: Buffer"),
        ("@program(symbols=(1,))\ndef p():\n    pass", r"expected a symbol"),
    ],
)
def test_errors_say_what_and_where(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message) as caught:
        parse_module(text)
    assert str(caught.value).startswith(f"line {caught.value.lineno}, column {caught.value.offset}: ")
    assert (caught.value.text or "") in text


def test_an_error_points_into_its_line() -> None:
    with pytest.raises(ParseError) as caught:
        parse_module(f"{HEAD}    z: Object = test_text.anything(x, mode='é', axis=yy)\n    return z")
    assert str(caught.value) == (
        "line 4, column 54: expected a literal: a number, a string, True, False, None, or a tuple of these\n"
        "        z: Object = test_text.anything(x, mode='é', axis=yy)\n"
        "                                                         ^"
    )


def test_nothing_is_evaluated(tmp_path: Any) -> None:
    target = tmp_path / "made"
    for code in (f"open({str(target)!r}, 'w')", f"__import__('pathlib').Path({str(target)!r}).touch()"):
        for text in (code, f"{HEAD}    z: {code} = x\n    return z", f"{KERNEL}    a[0] = {code}"):
            with pytest.raises(ParseError):
                parse_module(text)
    assert not target.exists()


def test_attributes_left_out_get_their_defaults() -> None:
    module = parse_module(f"{HEAD}    z: Object = test_text.anything(x, scale=2)\n    return z")
    (binding,) = module["main"].body.bindings()  # type: ignore[union-attr]
    assert isinstance(binding, Let) and isinstance(binding.value, Call)
    assert binding.value.attrs == ANYTHING.check_attrs({"scale": 2.0})


# Random modules


@st.composite
def dims(draw: st.DrawFn, symbols: tuple[SymVar, ...], depth: int = 2) -> SymExpr:
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        leaves: list[SymExpr] = [*symbols, sym(draw(st.integers(-5, 70)))]
        return draw(st.sampled_from(leaves))
    a, b = draw(dims(symbols, depth - 1)), draw(dims(symbols, depth - 1))
    operator = draw(st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]))
    if operator in ("//", "%") and b == 0:
        b = sym(3)
    if operator in ("min", "max"):
        return smin(a, b) if operator == "min" else smax(a, b)
    made: SymExpr = {
        "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "//": lambda: floordiv(a, b),
        "%": lambda: floormod(a, b),
    }[operator]()  # fmt: skip
    return made


NAMES = st.sampled_from(["n", "m", "x", "x_1", "x_2", "t", "t_1", "a/b", "main", "class", "constants", "add", ""])
LOCS = st.sampled_from([None, None, "here", "there"])


@st.composite
def symbol_vars(draw: st.DrawFn) -> SymVar:
    lower = draw(st.sampled_from([0, 0, None, 1, -4]))
    upper = draw(st.sampled_from([None, None, 512]))
    return SymVar(draw(NAMES), lower=lower, upper=upper, divisor=draw(st.sampled_from([1, 1, 8])))


@st.composite
def types(draw: st.DrawFn, symbols: tuple[SymVar, ...], depth: int = 1) -> Type:
    kind = draw(st.integers(0, 9 if depth else 7))
    if kind <= 3:
        shape = tuple(draw(st.lists(dims(symbols, 1), max_size=2)))
        return ShapeType.of(shape) if kind == 3 else TensorType.of(shape, draw(st.sampled_from(dtypes.ALL)))
    if kind <= 7:
        return (TensorType(None, "int8", 2), TensorType(None, F32), ShapeType(None, 2), ObjectType())[kind - 4]
    inner = draw(types(symbols, depth - 1))
    return TupleType((inner, UNIT)) if kind == 8 else FuncType((inner,), inner)


@st.composite
def leaves(draw: st.DrawFn, symbols: tuple[SymVar, ...], variables: tuple[Var, ...]) -> Expr:
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return ShapeValue(tuple(draw(st.lists(dims(symbols), max_size=3))))
    if kind == 1:
        dtype = dtypes.to_numpy(draw(st.sampled_from(dtypes.ALL)))
        return Constant.of(np.arange(draw(st.sampled_from([0, 1, 5, 20]))).astype(dtype), name=draw(LOCS))
    if kind == 2:
        return GlobalVar(draw(st.sampled_from(["main", "other/one"])))
    return draw(st.sampled_from(variables))


@st.composite
def bodies(draw: st.DrawFn, symbols: tuple[SymVar, ...], variables: tuple[Var, ...], depth: int) -> Body:
    blocks = []
    for _ in range(draw(st.integers(0, 2))):
        found: list[Let | MatchShape] = []
        for _ in range(draw(st.integers(0, 3))):
            binding, symbols = draw(bindings(symbols, variables, depth))
            found.append(binding)
            variables = (*variables, binding.var)
        blocks.append(Block(tuple(found), draw(st.booleans())))
    fields = draw(st.lists(leaves(symbols, variables), max_size=2))
    return Body(tuple(blocks), Tuple(tuple(fields)) if draw(st.booleans()) or not fields else fields[0])


@st.composite
def bindings(
    draw: st.DrawFn, symbols: tuple[SymVar, ...], variables: tuple[Var, ...], depth: int
) -> tuple[Let | MatchShape, tuple[SymVar, ...]]:
    kind = draw(st.integers(0, 7 if depth else 5))
    loc = draw(LOCS)
    some = st.lists(leaves(symbols, variables), max_size=3).map(tuple)
    if kind == 0:
        fresh = draw(symbol_vars())
        shape = (fresh, *draw(st.lists(dims((*symbols, fresh)), max_size=2)))
        var = Var(draw(NAMES), TensorType.of(shape, F32), draw(LOCS))
        return MatchShape(var, draw(leaves(symbols, variables)), shape, loc), (*symbols, fresh)
    ty = draw(types(symbols))
    value: Expr
    if kind == 1:
        value = draw(leaves(symbols, variables))
    elif kind == 2:
        value = Tuple(draw(some))
    elif kind == 3:
        value = TupleGetItem(draw(st.sampled_from(variables)), draw(st.integers(0, 2)))
    elif kind in (4, 5):
        callee: Any = draw(st.sampled_from([ANYTHING, SHAPE, GlobalVar("other/one"), variables[0]]))
        attrs = ANYTHING.check_attrs({"axis": draw(st.integers(-3, 3))}) if callee is ANYTHING else Attrs()
        args = tuple(draw(st.lists(dims(symbols), max_size=2)))
        value = Call(callee, draw(some), attrs, args, draw(st.sampled_from([ty, UNIT])), loc)
    elif kind == 6:
        branches = [draw(bodies(symbols, variables, depth - 1)) for _ in range(2)]
        value = If(draw(leaves(symbols, variables)), branches[0], branches[1], ty, loc)
    else:
        fresh = draw(symbol_vars())
        params = (Var(draw(NAMES), TensorType.of((fresh, fresh * 2), F32)), Var(draw(NAMES), ty))
        inner = draw(bodies((*symbols, fresh), (*variables, *params), depth - 1))
        value = Loop(params, draw(some), draw(leaves(symbols, variables)), inner, ty, loc)
    return Let(Var(draw(NAMES), draw(st.sampled_from([ty, UNIT])), draw(LOCS)), value), symbols


@st.composite
def functions(draw: st.DrawFn) -> Function:
    symbols = tuple(draw(st.lists(symbol_vars(), min_size=1, max_size=3)))
    params = [Var(draw(NAMES), TensorType.of(symbols, F32), draw(LOCS))]
    params += [Var(draw(NAMES), draw(types(symbols))) for _ in range(draw(st.integers(0, 2)))]
    return Function(tuple(params), draw(bodies(symbols, tuple(params), 2)), Attrs({"k": draw(st.integers(0, 9))}))


@settings(
    max_examples=tiers.examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(functions(), functions())
def test_random_functions(f: Function, g: Function) -> None:
    round_trip(IRModule({"main": f, "other/one": g}))


@st.composite
def values(draw: st.DrawFn, buffers: tuple[Buffer, ...], symbols: tuple[SymVar, ...], depth: int) -> Value:
    kind = draw(st.integers(0, 9 if depth else 3))
    if kind <= 1:
        buffer = draw(st.sampled_from(buffers))
        return Load(buffer, tuple(draw(dims(symbols, 1)) for _ in buffer.shape))
    if kind == 2:
        return draw(st.sampled_from([Literal(1.5, F32), Literal(True, "bool"), Literal(-7, "int8")]))
    if kind == 3:
        return IndexValue(draw(dims(symbols)), draw(st.sampled_from(["int64", "int32"])))
    a = draw(values(buffers, symbols, depth - 1))
    if kind <= 5:
        return Unary(draw(st.sampled_from(UNARY)), a) if kind == 4 else Cast(a, draw(st.sampled_from(dtypes.ALL)))
    b = a if draw(st.booleans()) else draw(values(buffers, symbols, depth - 1))
    if kind == 6:
        return Binary(draw(st.sampled_from(BINARY)), a, b)
    if kind == 7:
        return Compare(draw(st.sampled_from(COMPARE)), a, b)
    return Select(a, b, Unary("not", a)) if kind == 8 else Intrinsic("f", (a, b), "int8")


@st.composite
def stmts(draw: st.DrawFn, buffers: tuple[Buffer, ...], symbols: tuple[SymVar, ...], depth: int) -> Stmt:
    kind = draw(st.integers(0, 8 if depth else 2))
    if kind == 0:
        return Check(draw(values(buffers, symbols, 2)), draw(st.sampled_from(["", 'not "it"', "\n"])))
    if kind <= 2:
        buffer = draw(st.sampled_from(buffers))
        indices = tuple(draw(dims(symbols, 1)) for _ in buffer.shape)
        return Store(buffer, indices, draw(values(buffers, symbols, 3)), draw(st.sampled_from([None, *COMBINE])))
    if kind <= 4:
        return Seq(tuple(draw(st.lists(stmts(buffers, symbols, depth - 1), max_size=3))))
    if kind == 5:
        other = draw(st.none() | stmts(buffers, symbols, depth - 1))
        return IfThenElse(draw(values(buffers, symbols, 2)), draw(stmts(buffers, symbols, depth - 1)), other)
    if kind == 6:
        scope: Any = draw(st.sampled_from(["global", "local"]))
        buffer = Buffer(draw(NAMES), (draw(dims(symbols)),), F32, scope)
        return Allocate(buffer, draw(stmts((*buffers, buffer), symbols, depth - 1)))
    var = draw(symbol_vars())
    body = draw(stmts(buffers, (*symbols, var), depth - 1))
    if kind == 7:
        return LetIndex(var, draw(values(buffers, symbols, 1)), body)
    return For(var, draw(dims(symbols)), body, draw(st.sampled_from(KINDS)))


@st.composite
def programs(draw: st.DrawFn) -> TensorProgram:
    symbols = tuple(draw(st.lists(symbol_vars(), min_size=1, max_size=3)))
    buffers = tuple(
        Buffer(draw(NAMES), tuple(draw(st.lists(dims(symbols), max_size=2))), draw(st.sampled_from(dtypes.ALL)))
        for _ in range(draw(st.integers(1, 3)))
    )
    return TensorProgram(buffers, symbols, draw(stmts(buffers, symbols, 3)), draw(st.integers(0, 1)))


@settings(
    max_examples=tiers.examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
def test_random_programs(program: TensorProgram) -> None:
    round_trip(IRModule({"p": program}))
