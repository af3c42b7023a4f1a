"""Recognise attention in a graph of matmul, scale, bias, softmax and matmul, and make it one op.

    matmul(softmax(matmul(q, transpose(k)) * scale + bias, axis=-1), v)   =>   attention(q, k, v, bias, scale=scale)

Transposes of q, k, v and of the result become attributes of the op, which reads and writes through them. Whatever looks
like attention and is none, or is too wide for its blocks, leaves a note that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import TypeInferenceError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import AttrValue, Call, Constant, Expr, Function, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.nn_attention import has_blocks
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, body_uses, map_functions
from relaxlite.passes.manager import PassContext

_ANALYZER = Analyzer()
Axes = tuple[int, ...]


class _NotAttention(Exception):
    """Why a product of a softmax is not rewritten."""


def fuse_attention(module: IRModule, context: PassContext) -> IRModule:
    return map_functions(module, partial(_rewritten, context=context))


def _rewritten(function: Function, context: PassContext) -> Function:
    return _FuseAttention(Counter(body_uses(function.body)), context).function(function)


@dataclass(frozen=True, slots=True)
class _Scores:
    """scale * q @ k + bias; k is (..., d, n)."""

    q: Expr
    k: Expr
    scale: float = 1.0
    bias: Expr | None = None


class _FuseAttention(Rewriter):
    def __init__(self, uses: Mapping[Var, int], context: PassContext) -> None:
        super().__init__()
        self._uses, self._context = uses, context
        self._bound: dict[Expr, Call] = {}  # calls of ops

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        target = self.env.get(var, var)
        if isinstance(target, Var) and isinstance(value, Call) and isinstance(value.callee, Op):
            self._bound[target] = value

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return None
        if value.callee.name == "transpose":
            return self._turned(value)
        weights = self._call_of(value.args[0], "softmax") if value.callee.name == "matmul" else None
        if weights is None:
            return None
        try:
            return self._attention(weights, value)
        except _NotAttention as reason:
            self._context.decide("fuse_attention", f"attention at {var.name}", False, str(reason))
            return None

    def _call_of(self, expr: Expr, *names: str) -> Call | None:
        """The call of one of these ops that a variable is bound to."""
        call = self._bound.get(expr)
        return call if call is not None and call.callee.name in names else None

    def _is_private(self, expr: Expr) -> bool:
        return isinstance(expr, Var) and self._uses[expr] == 1

    def _attention(self, softmax: Call, product: Call) -> Expr:
        weights, v = product.args
        (scores,) = softmax.args
        ty, out = scores.ty, product.ty
        if (
            not isinstance(ty, TensorType)
            or not isinstance(out, TensorType)
            or softmax.attrs["axis"] not in (-1, (ty.rank or 0) - 1)
        ):
            raise _NotAttention("the softmax is not over the last axis")
        if not dtypes.is_float(ty.dtype):
            raise _NotAttention(f"the scores are of {ty.dtype}")
        if not self._is_private(weights):
            raise _NotAttention("the weights are used elsewhere too")
        found = self._scores(scores)
        q, q_axes = self._source(found.q)
        k, k_axes = self._source(found.k, swap=True)
        values, v_axes = self._source(v)
        operands = (q, k, values) if found.bias is None else (q, k, values, found.bias)
        shapes = [_shape(x) for x in (found.q, found.k, v)]
        if len({len(shape) for shape in shapes}) > 1:
            raise _NotAttention("q, k and v differ in rank")
        if not has_blocks(shapes[0], shapes[2]):
            raise _NotAttention(f"the widths {shapes[0][-1]} and {shapes[2][-1]} are not constant and small")
        try:
            made = get_op("attention")(
                *operands, scale=found.scale, q_axes=q_axes, k_axes=k_axes, v_axes=v_axes, loc=product.loc
            )
        except TypeInferenceError as error:
            raise _NotAttention(str(error)) from error
        if not _equal(_shape(made), _shape(product)):
            raise _NotAttention(f"the result would be {made.ty}, not {out}")
        return made

    def _scores(self, expr: Expr) -> _Scores:
        """What the scores are made of, from the softmax inwards."""
        if not self._is_private(expr):
            raise _NotAttention("the scores are used elsewhere too")
        call = self._call_of(expr, "matmul", "multiply", "divide", "add")
        if call is None:
            raise _NotAttention(f"the scores are computed by {_name(self._bound.get(expr))}")
        if call.callee.name == "matmul":
            return _Scores(call.args[0], call.args[1])
        a, b = call.args
        if call.callee.name == "add":
            for inner, bias in ((a, b), (b, a)):
                if self._leads_to_product(inner) and _equal(_shape(inner), _shape(call)):
                    found = self._scores(inner)
                    if found.bias is not None:
                        raise _NotAttention("two biases are added")
                    return replace(found, bias=bias)
            raise _NotAttention("the bias is larger than the scores")
        factor = _factor(b) if call.callee.name == "divide" or isinstance(b, Constant) else None
        inner = a
        if factor is None and call.callee.name == "multiply":
            factor, inner = _factor(a), b
        if factor is None or (call.callee.name == "divide" and factor == 0):
            raise _NotAttention("the scale is no constant")
        found = self._scores(inner)
        if found.bias is not None:
            raise _NotAttention("the scores are scaled after the bias")
        return replace(found, scale=found.scale / factor if call.callee.name == "divide" else found.scale * factor)

    def _leads_to_product(self, expr: Expr) -> bool:
        while (call := self._call_of(expr, "multiply", "divide", "matmul")) is not None:
            if call.callee.name == "matmul":
                return self._is_private(expr)
            expr = next((x for x in call.args if not isinstance(x, Constant)), call.args[0])
        return False

    def _source(self, expr: Expr, swap: bool = False) -> tuple[Expr, Axes | None]:
        """What transposes read, and their axes together; `swap`: the last two change places after them."""
        rank = len(_shape(expr))
        order = (*range(rank - 2), rank - 1, rank - 2) if swap else tuple(range(rank))
        while (call := self._call_of(expr, "transpose")) is not None:
            axes = _axes(call)
            expr, order = call.args[0], tuple(axes[p] for p in order)
        return expr, None if order == tuple(range(rank)) else order

    def _turned(self, transpose: Call) -> Expr | None:
        """transpose(attention(...)) as one op."""
        (x,) = transpose.args
        call = self._call_of(x, "attention")
        if call is None or not self._is_private(x):
            return None
        inner, axes = _permutation(call.attrs["out_axes"]), _axes(transpose)
        made = axes if inner is None else tuple(inner[a] for a in axes)
        return get_op("attention")(*call.args, **{**call.attrs, "out_axes": made}, loc=call.loc)


def _axes(transpose: Call) -> Axes:
    rank = len(_shape(transpose))
    axes = _permutation(transpose.attrs["axes"])
    return tuple(reversed(range(rank))) if axes is None else tuple(a % rank for a in axes)


def _permutation(value: AttrValue) -> Axes | None:
    return value  # type: ignore[return-value]  # of kind "ints"


def _shape(expr: Expr) -> tuple[SymExpr, ...]:
    shape = expr.ty.shape if isinstance(expr.ty, TensorType) else None
    if shape is None:
        raise _NotAttention("a shape is unknown")
    return shape


def _equal(a: tuple[SymExpr, ...], b: tuple[SymExpr, ...]) -> bool:
    return len(a) == len(b) and all(_ANALYZER.can_prove_equal(x, y) for x, y in zip(a, b, strict=True))


def _factor(expr: Expr) -> float | None:
    """The one value of a constant."""
    if not isinstance(expr, Constant) or expr.value.size != 1:
        return None
    return float(np.asarray(expr.value).reshape(-1)[0])


def _name(call: Call | None) -> str:
    return "no op" if call is None else call.callee.name
