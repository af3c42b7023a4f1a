"""Lowering of matrix products and attention to bfloat16 operands: `precision="bf16"`.

    matmul(x, w)         =>   matmul(cast(x, bfloat16), w as bfloat16, dtype=float32)      for constant weights w (k, n)
    attention(q, k, v)   =>   attention(cast(q), cast(k), cast(v), rounds=True, dtype=float32)

The result of attention is bfloat16 (dtype=bfloat16) if all uses round it so. Products that become 16-bit integer
products, which are faster and more accurate on some processors (int16_products.py), are left alone.

Products of two bfloat16 numbers are exact in float32 and accumulated in float32. Only the operands and the weights of
attention are rounded, each to 8 significant bits (relative error at most 2**-8). All other ops stay in float32.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from relaxlite.errors import InvalidArgumentError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Call, Constant, Expr, Function, Let, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op, get_op
from relaxlite.ir.ops.scalars import HALF
from relaxlite.ir.symbolic import as_int, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.graph.integer_products import LOW_BITS
from relaxlite.passes.products.contraction import Contraction, Encoding
from relaxlite.passes.products.int16_products import steps_of
from relaxlite.passes.products.pack_constants import SHARED_BYTES
from relaxlite.passes.products.strategy import Precision, allowed_of, candidates
from relaxlite.passes.products.strategy_table import DOT_BF16, TABLE, WINOGRAD_INT16

PRECISIONS = ("auto", "float32", "bf16", *LOW_BITS)
NARROW = "bfloat16"
MIN_DEPTH = 32  # terms per output below which rounding the operands does not pay


def lower_precision(module: IRModule, context: PassContext) -> IRModule:
    """Round the operands of matrix products with constant weights to bfloat16, if precision is "bf16".

    Raises InvalidArgumentError for an unknown precision, or one for which the target has no instructions.
    """
    if context.precision not in PRECISIONS:
        raise InvalidArgumentError(f"precision {context.precision!r} is not one of {', '.join(PRECISIONS)}")
    if context.precision != "bf16":
        return module
    if DOT_BF16.lacking(context.target) is not None:
        raise InvalidArgumentError(
            f"precision='bf16' needs a processor with bfloat16 dot products (avx512bf16), which {context.target.cpu} "
            "has not; compile with precision='float32'"
        )
    shared = _shared(module)
    return map_functions(module, lambda function: _Narrow(context, shared).function(function))


def _shared(module: IRModule) -> set[int]:
    """The ids of large constants with several uses: a second form of such a weight would duplicate it."""
    calls = [b.value for f in module.functions().values() for b in f.body.bindings() if isinstance(b, Let)]
    args = [arg for call in calls if isinstance(call, Call) for arg in call.args]
    large = [id(arg.value) for arg in args if isinstance(arg, Constant) and arg.value.nbytes >= SHARED_BYTES]
    return {key for key, count in Counter(large).items() if count > 1}


def narrow_attention(module: IRModule, context: PassContext) -> IRModule:
    """Round the operands of self-attention to bfloat16, if the precision allows it and the target is faster so.

    Attention with more keys than queries, as in decode steps, stays in float32: rounding all keys would cost more than
    it saves.
    """
    if context.precision != "bf16" or not context.target.has_fast_bf16_dots:
        return module
    module = eliminate_dead(module)  # attention with a folded transpose leaves its previous form behind
    return map_functions(module, lambda f: _NarrowAttention(context, _rounded_later(f)).function(f))


def _rounded_later(function: Function) -> set[Var]:
    """Variables that are cast to bfloat16, directly or after a reshape."""
    variables: set[Var] = set()
    for binding in reversed(list(function.body.bindings())):
        value = binding.value if isinstance(binding, Let) else None
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or not value.args:
            continue
        x = value.args[0]
        is_cast = value.callee.name == "cast" and value.attrs["dtype"] == NARROW
        if isinstance(x, Var) and (is_cast or (value.callee.name == "reshape" and binding.var in variables)):
            variables.add(x)
    return variables


class _NarrowAttention(Rewriter):
    def __init__(self, context: PassContext, rounded: set[Var]) -> None:
        super().__init__()
        self._context, self._rounded = context, rounded
        self._narrow: dict[Var, Expr] = {}  # widened variable -> its bfloat16 value

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return None
        first = value.args[0] if value.args else None
        bfloats = self._narrow.get(first) if isinstance(first, Var) else None
        if bfloats is not None and value.callee.name == "reshape":
            self._narrow[var] = self.bb.emit(get_op("reshape")(bfloats, *value.args[1:]))
            return get_op("cast")(self._narrow[var], dtype="float32")
        if bfloats is not None and value.callee.name == "cast" and value.attrs["dtype"] == NARROW:
            return bfloats
        if value.callee.name != "attention" or not isinstance(value.ty, TensorType) or value.ty.dtype != "float32":
            return None
        problem = _problem_of(value)
        self._context.decide("narrow_attention", f"{var.name} in {NARROW}", problem is None, problem or "it is faster")
        if problem is not None:
            return None
        cast = get_op("cast")
        operands = [self.bb.emit(cast(arg, dtype=NARROW, flushes=True)) for arg in value.args[:3]]
        attrs = {**value.attrs, "rounds": True}
        if var not in self._rounded:
            return value.callee(*operands, *value.args[3:], **{**attrs, "dtype": "float32"}, loc=value.loc)
        rounded = self.bb.emit(value.callee(*operands, *value.args[3:], **attrs, loc=value.loc))
        self._narrow[var] = rounded
        return cast(rounded, dtype="float32")


def _problem_of(attention: Call) -> str | None:
    """Why an attention is not rounded; None: it is."""
    sizes = []
    for arg, axes in zip(attention.args[:2], ("q_axes", "k_axes"), strict=True):
        assert isinstance(arg.ty, TensorType) and arg.ty.shape is not None
        order: Any = attention.attrs[axes] or range(len(arg.ty.shape))
        sizes.append([arg.ty.shape[axis] for axis in tuple(order)[-2:]])
    (queries, width), (keys, _) = sizes
    if (as_int(width) or 1) % 2:
        return f"queries are {width} wide, which is not known to be even"
    is_square = Analyzer().can_prove_equal(queries, keys)
    return (
        None if is_square else f"there are {queries} queries and {keys} keys, so rounding may take longer than it saves"
    )


def may_be_int16(weights: Constant, context: PassContext) -> bool:
    """Whether the pass word_products will take the product of a float32 matrix by these weights (k, n)."""
    (depth, columns), x, w = weights.value.shape, Encoding.of_dtype("float32"), Encoding.of_dtype(weights.ty.dtype)
    contraction = Contraction("matmul", None, sym(columns), sym(depth), x, w, is_constant=True)
    options = candidates(TABLE, contraction, context.target, Precision(context.precision))
    return WINOGRAD_INT16 in allowed_of(options) and not isinstance(steps_of(weights.value), str)


class _Narrow(Rewriter):
    def __init__(self, context: PassContext, shared: set[int]) -> None:
        super().__init__()
        self._context, self._shared = context, shared
        self._weights: dict[int, tuple[Constant, Constant]] = {}  # by the id of the array: each is rounded once
        self._widened: dict[Var, Constant] = {}  # casts to float32 of half-precision weights -> the weights

    def bind(self, var: Var, value: Expr) -> None:
        super().bind(var, value)
        if isinstance(value, Call) and isinstance(value.callee, Op) and value.callee.name == "cast":
            source = value.args[0]
            if isinstance(source, Constant) and source.ty.dtype in HALF and value.attrs["dtype"] == "float32":
                self._widened[var] = source

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op) or value.callee.name != "matmul":
            return None
        x, w = value.args
        w = self._widened.get(w, w) if isinstance(w, Var) else w
        if not isinstance(w, Constant) or isinstance(x, Constant):
            return None
        if not isinstance(x.ty, TensorType) or x.ty.dtype != "float32":
            return None
        if w.value.ndim != 2 or w.value.shape[0] < MIN_DEPTH or w.value.shape[0] % 2:
            reason = "its weights are no matrix" if w.value.ndim != 2 else f"it sums {w.value.shape[0]} products"
            self._context.decide("lower_precision", f"{var.name} in {NARROW}", False, reason)
            return None
        if id(w.value) not in self._shared and may_be_int16(w, self._context):
            return None
        narrow = self.bb.emit(get_op("cast")(x, dtype=NARROW, flushes=True))
        return get_op("matmul")(narrow, self._narrow(w), dtype="float32", loc=value.loc)

    def _narrow(self, w: Constant) -> Constant:
        if w.ty.dtype == NARROW:
            return w
        entry = self._weights.get(id(w.value))
        if entry is None:
            entry = self._weights[id(w.value)] = (w, Constant.of(w.value, NARROW, w.name))
        return entry[1]
