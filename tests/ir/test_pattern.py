"""Patterns of graph-level expressions: what matches, what must not, and why it did not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from relaxlite.ir import op as op_module
from relaxlite.ir.expr import (
    Attrs,
    Block,
    Body,
    Call,
    Constant,
    Expr,
    GlobalVar,
    If,
    Let,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.op import Attr, Op, register_op
from relaxlite.ir.pattern import Matcher, is_const, is_field, is_op, let_values, match, wildcard
from relaxlite.ir.symbolic import SymVar, sym
from relaxlite.ir.types import TensorType

N = SymVar("n")
F32 = TensorType.of((N, 4), "float32")


def make_op(op_name: str, count: int) -> Op:
    class Made(Op):
        """An op of this test."""

        name = f"test_pattern.{op_name}"
        operands = tuple(f"x{k}" for k in range(count))
        attrs = {"axis": Attr("int", 0)}

    return Made()


OPS = {name: make_op(name, count) for name, count in [("add", 2), ("sub", 2), ("mul", 2), ("relu", 1), ("split", 1)]}


@pytest.fixture(scope="module", autouse=True)
def private_ops() -> Iterator[None]:
    for op in OPS.values():
        register_op(op)
    yield
    for op in OPS.values():
        del op_module._registry[op.name]


def call(name: str, *args: Any, ty: Any = F32, axis: int = 0) -> Call:
    return Call(OPS[name], args, Attrs({"axis": axis}), ty=ty)


def op(name: str, *, commutative: bool = False) -> Any:
    return is_op(f"test_pattern.{name}", commutative=commutative)


A, B, C = (Var(name, F32) for name in "abc")


def bind(*values: Expr, result: int = -1) -> tuple[Matcher, list[Var]]:
    """One variable per value, v0, v1, ...; strings like "v0" among the operands stand for them."""
    variables = [Var(f"v{k}", v.ty) for k, v in enumerate(values)]
    names = dict(zip((f"v{k}" for k in range(len(values))), variables, strict=True))
    lets = []
    for var, value in zip(variables, values, strict=True):
        if isinstance(value, Call):
            args = tuple(names.get(a, a) if isinstance(a, str) else a for a in value.args)
            value = Call(value.callee, args, value.attrs, ty=value.ty)
        lets.append(Let(var, value))
    return Matcher.of_body(Body((Block(tuple(lets)),), variables[result])), variables


def test_a_wildcard_takes_anything() -> None:
    found = match(wildcard("x"), A, {})
    assert found is not None and found["x"] is A and found.root is A and found.inner == ()


def test_ops_are_matched_through_variables() -> None:
    matcher, v = bind(call("mul", A, B), call("add", "v0", C))
    pattern = op("add")(op("mul")(wildcard("a"), wildcard("b")), wildcard("c"))
    found = matcher.match(pattern, v[1])
    assert found is not None and dict(found.captures) == {"a": A, "b": B, "c": C}
    assert found.inner == (v[1], v[0]) and found.is_removable
    assert matcher.match(pattern, v[0]) is None and matcher.reason == "v0 is no test_pattern.add"
    assert matcher.match(op("add")(op("add"), wildcard()), v[1]) is None
    assert matcher.reason == "v0 is no test_pattern.add"
    assert matcher.match(op("add")(wildcard(), op("mul")), v[1]) is None
    assert matcher.reason == "c is no test_pattern.mul"
    assert matcher.match(op("add"), v[1]) is not None
    assert matcher.match(op("add")(wildcard()), v[1]) is None
    assert matcher.reason == "test_pattern.add has 2 operands, not 1"


def test_a_call_itself_can_be_matched() -> None:
    assert match(op("add")(wildcard("x"), wildcard()), call("add", A, B), {}) is not None
    assert match(op("add"), Call(GlobalVar("add"), (A, B)), {}) is None


def test_several_names_of_ops() -> None:
    either = is_op("test_pattern.add", "test_pattern.sub")
    assert match(either, call("sub", A, B), {}) is not None
    matcher = Matcher({})
    assert matcher.match(either, call("mul", A, B)) is None
    assert matcher.reason == "a call of test_pattern.mul is no test_pattern.add or test_pattern.sub"


def test_operands_of_a_commutative_op_match_in_either_order() -> None:
    matcher, v = bind(call("relu", A), call("add", B, "v0"))
    assert matcher.match(op("add")(op("relu"), wildcard("x")), v[1]) is None
    found = matcher.match(op("add", commutative=True)(op("relu"), wildcard("x")), v[1])
    assert found is not None and found["x"] is B


def test_orders_are_tried_until_everything_fits() -> None:
    """mul(a, b) + b: the inner order that is tried first gives x the wrong operand."""
    for inner in (call("mul", A, B), call("mul", B, A)):
        matcher, v = bind(inner, call("add", "v0", B))
        product = op("mul", commutative=True)(wildcard("x"), wildcard("y"))
        found = matcher.match(op("add", commutative=True)(product, wildcard("x")), v[1])
        assert found is not None and found["x"] is B and found["y"] is A


def test_one_name_matches_one_value() -> None:
    same = op("add")(wildcard("x"), wildcard("x"))
    assert match(same, call("add", A, A), {}) is not None
    matcher = Matcher({})
    assert matcher.match(same, call("add", A, B)) is None and matcher.reason == "x is both a and b"
    one, again, two = (Constant.of(np.float32(k)) for k in (1, 1, 2))
    assert match(same, call("add", one, again), {}) is not None
    assert match(same, call("add", one, two), {}) is None
    assert match(same, call("add", ShapeValue((N,)), ShapeValue((N,))), {}) is not None
    assert match(same, call("add", ShapeValue((N,)), ShapeValue((N + 1,))), {}) is None


def test_alternatives() -> None:
    pattern = op("add")(wildcard("x"), wildcard("y")) | op("relu")(wildcard("x")) | is_const(1)
    found = match(pattern, call("relu", A), {})
    assert found is not None and dict(found.captures) == {"x": A}
    assert match(pattern, Constant.of(1.0), {}) is not None
    assert match(pattern, call("mul", A, B), {}) is None
    nested = op("sub")(pattern.named("left"), wildcard("x"))
    matcher, v = bind(call("relu", A), call("sub", "v0", A))
    found = matcher.match(nested, v[1])
    assert found is not None and found["left"] is v[0]
    matcher, v = bind(call("relu", A), call("sub", "v0", B))
    assert matcher.match(nested, v[1]) is None


def test_what_an_alternative_captured_is_forgotten_when_it_fails() -> None:
    first = op("sub")(wildcard("x"), is_const()) | op("sub")(wildcard(), wildcard("y"))
    found = match(first, call("sub", A, B), {})
    assert found is not None and dict(found.captures) == {"y": B}


def test_constants() -> None:
    two = Constant.of(np.full((3,), 2.0))
    matcher, v = bind(two)
    assert matcher.match(is_const(), v[0]) is not None and matcher.match(is_const(2), v[0]) is not None
    assert matcher.match(is_const(3), v[0]) is None and matcher.reason == "the constant is not 3"
    assert matcher.match(is_const(), A) is None and matcher.reason == "a is no constant"
    assert match(is_const(2), Constant.of(np.array([2.0, 3.0])), {}) is None
    assert match(is_const(2), Constant.of(np.array([])), {}) is None
    found = matcher.match(is_const().named("c"), v[0])
    assert found is not None and found["c"] is v[0] and matcher.value_of(found["c"]) is two


def test_conditions_on_types_and_attributes() -> None:
    matcher, v = bind(call("relu", A, axis=1))
    assert matcher.match(op("relu").has_dtype("float16", "float32"), v[0]) is not None
    assert matcher.match(op("relu").has_dtype("float16", "int8"), v[0]) is None
    assert matcher.reason == "dtype is not float16 or int8"
    assert matcher.match(wildcard().has_rank(2), v[0]) is not None
    assert matcher.match(wildcard().has_rank(3), v[0]) is None and matcher.reason == "rank is not 3"
    assert matcher.match(op("relu").has_attr(axis=1), v[0]) is not None
    assert matcher.match(op("relu").has_attr(axis=2), v[0]) is None and matcher.reason == "attribute axis is 1, not 2"
    assert matcher.match(wildcard().has_attr(axes=2), v[0]) is None
    assert matcher.match(wildcard().has_attr(axis=2), A) is None
    assert matcher.match(wildcard().where(lambda e: e is A, "not a"), v[0]) is None and matcher.reason == "not a"
    assert matcher.match(op("relu")(wildcard().where(lambda e: e is A, "not a")), v[0]) is not None


def test_patterns_are_immutable() -> None:
    plain = wildcard("x")
    plain.has_dtype("int8").named("y").used_once()
    assert match(plain, A, {}) is not None


def test_use_counts_say_what_may_be_removed() -> None:
    relu_of_mul = op("relu")(op("mul").used_once().named("m"))
    anywhere = op("relu")(op("mul"))
    matcher, v = bind(call("mul", A, B), call("relu", "v0"))
    assert matcher.match(relu_of_mul, v[1]) is not None
    matcher, v = bind(call("mul", A, B), call("relu", "v0"), call("add", "v0", "v1"))
    assert matcher.match(relu_of_mul, v[1]) is None and matcher.reason == "v0 is used 2 times"
    found = matcher.match(anywhere, v[1])
    assert found is not None and not found.is_removable
    matcher, v = bind(call("mul", A, B), call("relu", "v0"), result=0)
    assert matcher.match(relu_of_mul, v[1]) is None  # the body's result is a use
    assert match(relu_of_mul, v[1], matcher.bindings) is None
    found = match(anywhere, v[1], matcher.bindings)
    assert found is not None and not found.is_removable  # without counts nothing is known


def test_uses_inside_of_the_match_do_not_keep_it_alive() -> None:
    matcher, v = bind(call("relu", A), call("mul", "v0", "v0"), call("add", "v1", "v0"))
    x = op("relu")(wildcard("x"))
    found = matcher.match(op("add")(op("mul")(x, x), x), v[2])
    assert found is not None and found.is_removable
    matcher, v = bind(call("relu", A), call("mul", "v0", "v0"), call("add", "v1", "v0"), result=0)
    found = matcher.match(op("add")(op("mul")(x, x), x), v[2])
    assert found is not None and not found.is_removable


def test_fields_of_tuples() -> None:
    parts = Var("parts", Tuple((A, B)).ty)
    second = Var("second", F32)
    bindings: dict[Var, Expr] = {parts: call("split", A, ty=parts.ty), second: TupleGetItem(parts, 1)}
    assert match(is_field(op("split")(wildcard("x")), 1), second, bindings) is not None
    assert match(is_field(op("split")), second, bindings) is not None
    matcher = Matcher(bindings)
    assert matcher.match(is_field(op("split"), 0), second) is None
    assert matcher.reason == "second is no field 0 of a tuple"
    assert matcher.match(is_field(op("add")), second) is None
    assert matcher.reason == "parts is no test_pattern.add"


def test_aliases_are_followed_and_match_shapes_are_not() -> None:
    matched = Var("m", F32)
    y, z = Var("y", F32), Var("z", F32)
    body = Body(
        (Block((Let(y, call("relu", A)), Let(z, y), MatchShape(matched, y, (N, sym(4))))),),
        Tuple((z, matched)),
    )
    matcher = Matcher.of_body(body)
    found = matcher.match(op("relu"), z)
    assert found is not None and found.inner == (z, y) and not found.is_removable
    assert matcher.match(op("relu"), matched) is None


def test_values_of_nested_bodies_are_known() -> None:
    flag, inner, outer = Var("flag", TensorType.of((), "bool")), Var("inner", F32), Var("outer", F32)
    branch = If(flag, Body((Block((Let(inner, call("relu", A)),)),), inner), Body((), A), F32)
    body = Body((Block((Let(outer, branch),), False),), outer)
    assert set(let_values(body)) == {inner, outer}
    assert Matcher.of_body(body).match(op("relu").used_once(), inner) is not None
