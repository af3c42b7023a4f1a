"""Recognition of attention, written as matmul, scale, bias, softmax and matmul, as one op.

    matmul(softmax(matmul(q, transpose(k)) * scale + bias, axis=-1), v)   =>   attention(q, k, v, bias, scale=scale)

Transposes of q, k, v and of the result become attributes of the op, as do repetitions of the heads of k and v for
groups of query heads (grouped-query attention):

    reshape(broadcast_to(expand_dims(k), (b, h, g, n, d)), (b, h*g, n, d))
    gather(k, (0, 0, .., 1, 1, ..), axis=1)                                 =>   attention(.., k, .., group=g)

A mask that selects between the scores and a constant becomes an operand. Candidates that are rejected, because they are
not attention or exceed the block sizes of the kernel, leave a decision with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import TypeInferenceError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import AttrValue, Call, Constant, Expr, Function, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.nn_attention import fits_blocks
from relaxlite.ir.symbolic import SymExpr, as_int, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, body_uses, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.records import dataclass

_ANALYZER = Analyzer()
Axes = tuple[int, ...]


class _NotAttention(Exception):
    """A product with softmax weights does not match; the message is the reason."""


def fuse_attention(module: IRModule, context: PassContext) -> IRModule:
    """Replace matmul, scale, bias, softmax and matmul by one attention op.

    Transposes, repeated heads, masks and guards against NaN become attributes or operands of the op.
    """
    return map_functions(module, partial(_rewritten, context=context))


def _rewritten(function: Function, context: PassContext) -> Function:
    return _FuseAttention(Counter(body_uses(function.body)), context).function(function)


@dataclass(frozen=True, slots=True)
class _Mask:
    """A mask: scores at elements where `mask` equals `where` are replaced by `value`."""

    mask: Expr
    value: float
    where: bool


@dataclass(frozen=True, slots=True)
class _Scores:
    """Attention scores: scale * q @ k, masked, + bias; `k` is (..., d, n)."""

    q: Expr
    k: Expr
    scale: float = 1.0
    mask: _Mask | None = None
    bias: Expr | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """An operand as stored, with its transpose, the number of repetitions of each head, and a constant factor."""

    expr: Expr
    axes: Axes | None
    group: int
    scale: float


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A tensor whose slices along `axis` are each repeated `times` times."""

    expr: Expr
    axis: int
    times: int


class _FuseAttention(Rewriter):
    def __init__(self, uses: Mapping[Var, int], context: PassContext) -> None:
        super().__init__()
        self._uses, self._context = uses, context
        self._bound: dict[Expr, Call] = {}  # calls of ops, by the variable they are bound to

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        target = self.env.get(var, var)
        if isinstance(target, Var) and isinstance(value, Call) and isinstance(value.callee, Op):
            self._bound[target] = value

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return None
        if value.callee.name == "transpose":
            return self._fold_output_transpose(value)
        if value.callee.name == "attention":
            return self._fold_operands(value)
        if value.callee.name != "matmul":
            return None
        weights = self._without_nan_guard(value.args[0])
        softmax = self._call_of(value.args[0] if weights is None else weights, "softmax")
        if softmax is None:
            return None
        try:
            return self._attention(softmax, value, zero_nan=weights is not None)
        except _NotAttention as reason:
            self._context.decide("fuse_attention", f"attention at {var.name}", False, str(reason))
            return None

    def _call_of(self, expr: Expr, *names: str) -> Call | None:
        """The call that a variable is bound to, if its op is among `names`."""
        call = self._bound.get(expr)
        return call if call is not None and call.callee.name in names else None

    def _is_private(self, expr: Expr) -> bool:
        return isinstance(expr, Var) and self._uses[expr] == 1

    def _without_nan_guard(self, expr: Expr) -> Expr | None:
        """x of where(isnan(x), 0, x), if x has no other uses; else None."""
        where = self._call_of(expr, "where")
        isnan = None if where is None else self._call_of(where.args[0], "isnan")
        if where is None or isnan is None or _factor(where.args[1]) != 0:
            return None
        x = where.args[2]
        is_exclusive = isinstance(x, Var) and self._uses[x] == 2 and self._is_private(where.args[0])
        return x if is_exclusive and isnan.args[0] is x else None

    def _attention(self, softmax: Call, product: Call, *, zero_nan: bool) -> Expr:
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
        pattern = self._scores(scores)
        q = self._source(pattern.q, scaled=True)
        k, values = self._source(pattern.k, swap=True, grouped=True, scaled=True), self._source(v, grouped=True)
        if k.group != values.group:
            k, values = self._source(pattern.k, swap=True, scaled=True), self._source(v)
        mask = pattern.mask
        masks = tuple(x for x in (pattern.bias, None if mask is None else mask.mask) if x is not None)
        shapes = [_shape(x) for x in (pattern.q, pattern.k, v)]
        if len({len(shape) for shape in shapes}) > 1:
            raise _NotAttention("q, k and v differ in rank")
        if not fits_blocks(shapes[0], shapes[2]):
            raise _NotAttention(f"the widths {shapes[0][-1]} and {shapes[2][-1]} are not constant and small")
        try:
            attention = get_op("attention")(
                q.expr,
                k.expr,
                values.expr,
                *masks,
                scale=pattern.scale * q.scale * k.scale,
                q_axes=q.axes,
                k_axes=k.axes,
                v_axes=values.axes,
                group=k.group,
                masked=0.0 if mask is None else mask.value,
                zero_nan=zero_nan,
                masked_where=mask is not None and mask.where,
                loc=product.loc,
            )
        except TypeInferenceError as error:
            raise _NotAttention(str(error)) from error
        if not _equal(_shape(attention), _shape(product)):
            raise _NotAttention(f"the result would be {attention.ty}, not {out}")
        return attention

    def _scores(self, expr: Expr) -> _Scores:
        """Match the operand of the softmax as scores. Raises _NotAttention with the reason."""
        if not self._is_private(expr):
            raise _NotAttention("the scores are used elsewhere too")
        call = self._call_of(expr, "matmul", "multiply", "divide", "add", "where")
        if call is None:
            raise _NotAttention(f"the scores are computed by {_name(self._bound.get(expr))}")
        if call.callee.name == "matmul":
            return _Scores(call.args[0], call.args[1])
        if call.callee.name == "where":
            return self._masked(call)
        a, b = call.args
        if call.callee.name == "add":
            for inner, bias in ((a, b), (b, a)):
                if self._leads_to_product(inner) and _equal(_shape(inner), _shape(call)):
                    scores = self._scores(inner)
                    if scores.bias is not None:
                        raise _NotAttention("two biases are added")
                    return replace(scores, bias=bias)
            raise _NotAttention("the bias is larger than the scores")
        factor = _factor(b) if call.callee.name == "divide" or isinstance(b, Constant) else None
        inner = a
        if factor is None and call.callee.name == "multiply":
            factor, inner = _factor(a), b
        if factor is None or (call.callee.name == "divide" and factor == 0):
            raise _NotAttention("the scale is no constant")
        scores = self._scores(inner)
        if scores.bias is not None or scores.mask is not None:
            raise _NotAttention("the scores are scaled after the bias or the mask")
        return replace(scores, scale=scores.scale / factor if call.callee.name == "divide" else scores.scale * factor)

    def _masked(self, where: Call) -> _Scores:
        """Match where(mask, scores, constant) or where(mask, constant, scores). Raises _NotAttention."""
        cond, a, b = where.args
        for inner, constant, masked_where in ((a, b, False), (b, a, True)):
            value = _factor(constant)
            if value is not None and _equal(_shape(inner), _shape(where)):
                scores = self._scores(inner)
                if scores.bias is not None or scores.mask is not None:
                    raise _NotAttention("the scores are masked after the bias or another mask")
                return replace(scores, mask=_Mask(cond, value, masked_where))
        raise _NotAttention("the mask does not choose between the scores and a constant")

    def _leads_to_product(self, expr: Expr) -> bool:
        while (call := self._call_of(expr, "multiply", "divide", "where", "matmul")) is not None:
            if call.callee.name == "matmul":
                return self._is_private(expr)
            operands = call.args[1:] if call.callee.name == "where" else call.args
            expr = next((x for x in operands if not isinstance(x, Constant)), operands[0])
        return False

    def _source(self, expr: Expr, *, swap: bool = False, grouped: bool = False, scaled: bool = False) -> _Source:
        """Look through transposes of an operand and compose their axes.

        `swap`: exchange the last two axes afterwards. `grouped`: look through repetitions along the third axis from the
        end, too; `scaled`: through multiplications by a constant.
        """
        rank, group, scale = len(_shape(expr)), 1, 1.0
        order = (*range(rank - 2), rank - 1, rank - 2) if swap else tuple(range(rank))
        while True:
            transpose = self._call_of(expr, "transpose")
            repeated = self._repeated(expr) if grouped and rank > 2 else None
            if transpose is not None:
                axes = _axes(transpose)
                expr, order = transpose.args[0], tuple(axes[p] for p in order)
            elif repeated is not None and repeated.axis == order[rank - 3]:
                expr, group = repeated.expr, group * repeated.times
            elif scaled and (factored := self._scaled(expr)) is not None:
                expr, scale = factored[0], scale * factored[1]
            else:
                return _Source(expr, None if order == tuple(range(rank)) else order, group, scale)

    def _scaled(self, expr: Expr) -> tuple[Expr, float] | None:
        """(x, c) of a product x * c with a scalar constant of no higher rank; else None."""
        call = self._call_of(expr, "multiply")
        for x, c in () if call is None else (call.args, call.args[::-1]):
            factor = _factor(c)
            if factor is not None and len(_shape(x)) == len(_shape(expr)):
                return x, factor
        return None

    def _repeated(self, expr: Expr) -> _Repeated | None:
        """Match a tensor with repeated slices: an expanded and reshaped tensor, or a gather; else None."""
        call = self._call_of(expr, "reshape", "gather")
        if call is None:
            return None
        if call.callee.name == "gather":
            return _repeating_gather(call)
        wide = self._call_of(call.args[0], "broadcast_to", "tile", "concat")
        source = None if wide is None else self._call_of(wide.args[0], "expand_dims", "reshape")
        if wide is None or source is None or (wide.callee.name == "concat" and len(set(wide.args)) > 1):
            return None
        inner, outer, result = _shape(source.args[0]), _shape(wide), _shape(call)
        for axis in range(len(inner)):  # (.., h, 1, ..) => (.., h, times, ..) => (.., h * times, ..)
            times = as_int(outer[axis + 1]) if len(outer) == len(inner) + 1 else None
            if (
                times is not None
                and times > 1
                and _equal(_shape(source), (*inner[: axis + 1], sym(1), *inner[axis + 1 :]))
                and _equal(outer, (*inner[: axis + 1], sym(times), *inner[axis + 1 :]))
                and _equal(result, (*inner[:axis], inner[axis] * times, *inner[axis + 1 :]))
            ):
                return _Repeated(source.args[0], axis, times)
        return None

    def _fold_operands(self, attention: Call) -> Expr | None:
        """Fold transposes and repeated heads of the operands into the attributes of an attention."""
        q, k, v, *masks = attention.args
        attrs = dict(attention.attrs)
        is_plain = attrs["group"] == 1 and attrs["k_axes"] is None and attrs["v_axes"] is None
        sources = [self._source(q), self._source(k, grouped=is_plain), self._source(v, grouped=is_plain)]
        if sources[1].group != sources[2].group:
            sources[1:] = [self._source(k), self._source(v)]
        for name, source in zip(("q_axes", "k_axes", "v_axes"), sources, strict=True):
            outer = _permutation(attrs[name])
            attrs[name] = source.axes if outer is None else tuple((source.axes or range(len(outer)))[a] for a in outer)
        attrs["group"] = sources[1].group if is_plain else attrs["group"]
        if all(source.expr is x for source, x in zip(sources, (q, k, v), strict=True)):
            return None
        folded = get_op("attention")(*(source.expr for source in sources), *masks, **attrs, loc=attention.loc)
        return folded if _equal(_shape(folded), _shape(attention)) else None

    def _fold_output_transpose(self, transpose: Call) -> Expr | None:
        """Fold transpose(attention(...)) into the output axes of the attention."""
        (x,) = transpose.args
        call = self._call_of(x, "attention")
        if call is None or not self._is_private(x):
            return None
        inner, axes = _permutation(call.attrs["out_axes"]), _axes(transpose)
        out_axes = axes if inner is None else tuple(inner[a] for a in axes)
        return get_op("attention")(*call.args, **{**call.attrs, "out_axes": out_axes}, loc=call.loc)


def _repeating_gather(call: Call) -> _Repeated | None:
    """Match a gather with constant indices 0, 0, .., 1, 1, .. that cover the axis; else None."""
    x, indices = call.args
    axis, shape = call.attrs["axis"], _shape(x)
    if not isinstance(indices, Constant) or indices.value.ndim != 1 or not isinstance(axis, int):
        return None
    size = as_int(shape[axis])
    times = len(indices.value) // size if size else 0
    if size is None or times < 2 or not np.array_equal(indices.value, np.repeat(np.arange(size), times)):
        return None
    return _Repeated(x, axis % len(shape), times)


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
    """The value of a one-element constant; None for other expressions."""
    if not isinstance(expr, Constant) or expr.value.size != 1:
        return None
    return float(np.asarray(expr.value).reshape(-1)[0])


def _name(call: Call | None) -> str:
    return "no op" if call is None else call.callee.name
