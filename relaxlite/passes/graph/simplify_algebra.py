"""Algebraic simplification of graph ops. Each rule states its equation; all are exact for every input, NaN included."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from relaxlite.ir import ops
from relaxlite.ir.expr import Call, Constant, Expr, ShapeValue, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.symbolic import as_int
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions

Bindings: TypeAlias = Mapping[Var, Expr]
Rule: TypeAlias = Callable[[Call, Bindings], "Expr | None"]


def simplify_algebra(module: IRModule) -> IRModule:
    """Simplify calls of ops by algebraic identities that are exact for every input, such as x * 1 = x."""
    return map_functions(module, lambda f: _Simplify().function(f))


class _Simplify(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self._bound: dict[Var, Expr] = {}

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        new: Expr | None = None
        while isinstance(value, Call) and isinstance(value.callee, Op):
            simpler = self._apply(value)
            if simpler is None:
                break
            new = value = simpler
        return new

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        target = self.env.get(var, var)
        if isinstance(target, Var) and target is not value:
            self._bound[target] = value

    def _apply(self, call: Call) -> Expr | None:
        for rule in RULES.get(call.callee.name, ()):
            simpler = rule(call, self._bound)
            if simpler is not None:
                return simpler
        return None


def _scalar(expr: Expr) -> float | int | None:
    """The value of a one-element constant; None for other expressions."""
    if not isinstance(expr, Constant) or expr.value.size != 1:
        return None
    return expr.value.reshape(-1)[0].item()  # type: ignore[no-any-return]


def _of_same_type(call: Call, operand: Expr) -> Expr | None:
    """The operand as replacement of a call, if both have the same type."""
    return operand if operand.ty == call.ty else None


def add_zero(call: Call, bound: Bindings) -> Expr | None:
    """x + 0 = x for integers. (For floats -0.0 + 0 = 0.0, so the constant must be -0.0.)"""
    for x, c in (call.args, call.args[::-1]):
        value = _scalar(c)
        if value == 0 and (isinstance(value, int) or math.copysign(1, value) < 0):
            return _of_same_type(call, x)
    return None


def subtract_zero(call: Call, bound: Bindings) -> Expr | None:
    """x - 0 = x. (-0.0 - -0.0 = 0.0, so the constant of floats must be 0.0.)"""
    value = _scalar(call.args[1])
    if value == 0 and (isinstance(value, int) or math.copysign(1, value) > 0):
        return _of_same_type(call, call.args[0])
    return None


def multiply_one(call: Call, bound: Bindings) -> Expr | None:
    """x * 1 = x"""
    for x, c in (call.args, call.args[::-1]):
        if _scalar(c) == 1:
            return _of_same_type(call, x)
    return None


def divide_one(call: Call, bound: Bindings) -> Expr | None:
    """x / 1 = x"""
    return _of_same_type(call, call.args[0]) if _scalar(call.args[1]) == 1 else None


def divide_power_of_two(call: Call, bound: Bindings) -> Expr | None:
    """x / 2**k = x * 2**-k, exact because both are powers of two"""
    c = call.args[1]
    if not isinstance(c, Constant) or c.ty.dtype not in ("float32", "float64") or c.value.size == 0:
        return None
    mantissa, exponent = np.frexp(c.value.astype(np.float64))
    if not np.all(np.abs(mantissa) == 0.5) or np.max(np.abs(exponent)) > 60:
        return None
    return ops.multiply(call.args[0], Constant.of(np.reciprocal(c.value), c.ty.dtype), loc=call.loc)


def power_constant(call: Call, bound: Bindings) -> Expr | None:
    """x ** 2 = x * x;  x ** 1 = x"""
    exponent, x = _scalar(call.args[1]), call.args[0]
    if exponent == 1:
        return _of_same_type(call, x)
    return ops.multiply(x, x, loc=call.loc) if exponent == 2 and x.ty == call.ty else None


def cast_same(call: Call, bound: Bindings) -> Expr | None:
    """cast(x, dtype of x) = x"""
    return _of_same_type(call, call.args[0])


def broadcast_same(call: Call, bound: Bindings) -> Expr | None:
    """broadcast_to(x, shape of x) = x"""
    return _of_same_type(call, call.args[0])


def reshape_reshape(call: Call, bound: Bindings) -> Expr | None:
    """reshape(x, shape of x) = x;  reshape(reshape(x, s), t) = reshape(x, t)"""
    x, shape = call.args
    if x.ty == call.ty:
        return x
    inner = bound.get(x) if isinstance(x, Var) else None
    if isinstance(inner, Call) and isinstance(inner.callee, Op) and inner.callee.name == "reshape":
        return ops.reshape(inner.args[0], shape, loc=call.loc)
    return None


def transpose_transpose(call: Call, bound: Bindings) -> Expr | None:
    """transpose(x, identity) = x;  transpose(transpose(x, p), q) = transpose(x, p[q])"""
    x, axes = call.args[0], call.attrs["axes"]
    if not isinstance(axes, tuple):
        return None
    axes = tuple(a % len(axes) for a in axes if isinstance(a, int))
    if axes == tuple(range(len(axes))):
        return x
    inner = bound.get(x) if isinstance(x, Var) else None
    if isinstance(inner, Call) and isinstance(inner.callee, Op) and inner.callee.name == "transpose":
        first = inner.attrs["axes"]
        if isinstance(first, tuple):
            return ops.transpose(inner.args[0], axes=tuple(first[a] for a in axes), loc=call.loc)
    return _moves_only_ones(call, axes)


def _moves_only_ones(call: Call, axes: tuple[int, ...]) -> Expr | None:
    """transpose(x, axes) = reshape(x), if only dimensions of size 1 are permuted"""
    ty = call.args[0].ty
    assert (
        isinstance(ty, TensorType)
        and ty.shape is not None
        and isinstance(call.ty, TensorType)
        and call.ty.shape is not None
    )
    large = [a for a in axes if as_int(ty.shape[a]) != 1]
    if large != sorted(large):
        return None
    return ops.reshape(call.args[0], ShapeValue(call.ty.shape), loc=call.loc)


def concat_one(call: Call, bound: Bindings) -> Expr | None:
    """concat(x) = x;  concat(x, empty) = concat(x), if the result keeps its type"""
    if len(call.args) == 1:
        return call.args[0]
    nonempty = [a for a in call.args if not _adds_nothing(a, call)]
    if len(nonempty) == len(call.args) or not nonempty:
        return None
    fewer = ops.concat(*nonempty, axis=call.attrs["axis"], loc=call.loc)
    return fewer if fewer.ty == call.ty else None


def _adds_nothing(expr: Expr, call: Call) -> bool:
    ty, out, axis = expr.ty, call.ty, call.attrs["axis"]
    assert isinstance(ty, TensorType) and ty.shape is not None and isinstance(axis, int)
    assert isinstance(out, TensorType) and out.shape is not None
    along = axis % len(out.shape)
    same = all(a is b for k, (a, b) in enumerate(zip(ty.shape, out.shape, strict=True)) if k != along)
    return same and as_int(ty.shape[along]) == 0


def slice_all(call: Call, bound: Bindings) -> Expr | None:
    """slice(x, from 0, step 1, all) = x"""
    begins, steps = call.args[1], call.attrs["steps"]
    whole = isinstance(begins, ShapeValue) and all(as_int(b) == 0 for b in begins.values)
    forward = steps is None or (isinstance(steps, tuple) and all(s == 1 for s in steps))
    return _of_same_type(call, call.args[0]) if whole and forward else None


RULES: dict[str, tuple[Rule, ...]] = {
    "add": (add_zero,),
    "subtract": (subtract_zero,),
    "multiply": (multiply_one,),
    "divide": (divide_one, divide_power_of_two),
    "power": (power_constant,),
    "cast": (cast_same,),
    "broadcast_to": (broadcast_same,),
    "reshape": (reshape_reshape,),
    "transpose": (transpose_transpose,),
    "concat": (concat_one,),
    "slice": (slice_all,),
}
