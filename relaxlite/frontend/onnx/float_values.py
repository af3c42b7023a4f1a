"""Sizes that exporters compute in floats (`floor(cast(height) * 0.5)`), followed as exact fractions of symbols."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Call, Constant, Expr, Var
from relaxlite.ir.op import Op
from relaxlite.ir.ops.binary import symbolic_truncdiv
from relaxlite.ir.symbolic import SymExpr, as_int, floordiv, smax, smin, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.records import dataclass

_MAX_ELEMENTS = 64
_MAX_VISITED = 200  # variables that one question follows


@dataclass(frozen=True, slots=True)
class Ratio:
    """numerator / denominator, with a constant positive denominator."""

    num: SymExpr
    den: int

    @staticmethod
    def of(value: float) -> Ratio:
        """The simplest fraction that is the same float32."""
        simple = Fraction(value).limit_denominator(1000)
        exact = simple if np.float32(float(simple)) == np.float32(value) else Fraction(value)
        return Ratio(sym(exact.numerator), exact.denominator)

    def floor(self) -> SymExpr:
        return floordiv(self.num, self.den)

    def truncated(self) -> SymExpr | None:
        """Towards zero, as a cast to integers does."""
        return symbolic_truncdiv(self.num, sym(self.den))


def _reduced(num: SymExpr, den: int) -> Ratio:
    whole = floordiv(num, den)
    return Ratio(whole, 1) if whole * den is num else Ratio(num, den)


def _add(a: Ratio, b: Ratio) -> Ratio:
    return _reduced(a.num * b.den + b.num * a.den, a.den * b.den)


def _multiply(a: Ratio, b: Ratio) -> Ratio:
    return _reduced(a.num * b.num, a.den * b.den)


def _divide(a: Ratio, b: Ratio) -> Ratio | None:
    divisor = as_int(b.num)
    if divisor is None:
        whole = floordiv(a.num * b.den, b.num)
        return _reduced(whole, a.den) if whole * b.num is a.num * b.den else None
    if divisor == 0:
        return None
    sign = 1 if divisor > 0 else -1
    return _reduced(a.num * (b.den * sign), a.den * abs(divisor))


def _extremum(function: Callable[..., SymExpr]) -> Callable[[Ratio, Ratio], Ratio]:
    return lambda a, b: _reduced(function(a.num * b.den, b.num * a.den), a.den * b.den)


_OPS: dict[str, Callable[..., Ratio | None]] = {
    "add": _add,
    "subtract": lambda a, b: _add(a, Ratio(-b.num, b.den)),
    "multiply": _multiply,
    "divide": _divide,
    "neg": lambda a: Ratio(-a.num, a.den),
    "floor": lambda a: Ratio(a.floor(), 1),
    "ceil": lambda a: Ratio(-floordiv(-a.num, a.den), 1),
    "maximum": _extremum(smax),
    "minimum": _extremum(smin),
}
_MOVES = frozenset(("reshape", "expand_dims", "squeeze", "concat", "gather", "slice", "transpose", "broadcast_to"))


class RatioReader:
    """Follows small float tensors. `resolve` gives the elements of an integer tensor as an object array, or None."""

    def __init__(self, bb: BlockBuilder, resolve: Callable[[Expr], Any]) -> None:
        self._bb, self._resolve = bb, resolve
        self._found: dict[Var, Any] = {}

    def values(self, x: Expr) -> Any:
        """The elements of x as an object array of `Ratio`, or None."""
        if isinstance(x, Constant) and _is_small(x.ty):
            return _each(Ratio.of, x.value) if np.isfinite(x.value.astype(np.float64)).all() else None
        if not isinstance(x, Var) or not _is_small(x.ty):
            return None
        if x not in self._found and len(self._found) < _MAX_VISITED:
            self._found[x] = None  # while it is computed
            call = self._bb.definition(x)
            self._found[x] = self._computed(call) if isinstance(call, Call) and isinstance(call.callee, Op) else None
        return self._found.get(x)

    def _computed(self, call: Call) -> Any:
        name, args = call.callee.name, call.args
        if name == "cast" and isinstance(args[0].ty, TensorType) and dtypes.is_integer(args[0].ty.dtype):
            result = self._resolve(args[0])
            return None if result is None else _each(lambda v: Ratio(sym(v), 1), result)
        if name == "cast":
            return self.values(args[0])
        if name in _OPS:
            operands = [self.values(a) for a in args]
            return None if any(v is None for v in operands) else _each(_OPS[name], *operands)
        return self._moved(call) if name in _MOVES else None

    def _moved(self, call: Call) -> Any:
        """Ops that only move elements, run on object arrays by their own reference."""
        operands = []
        for a in call.args:
            is_float = isinstance(a.ty, TensorType) and dtypes.is_float(a.ty.dtype)
            result = self.values(a) if is_float else self._bb.known_value(a)
            if result is None:
                return None
            operands.append(result if isinstance(a.ty, TensorType) else tuple(result))
        try:
            return np.asarray(call.callee.reference(*operands, **call.attrs), dtype=object)  # type: ignore[union-attr]
        except (TypeError, ValueError):
            return None


def _each(function: Callable[..., Any], *arrays: Any) -> Any:
    spread = np.broadcast_arrays(*(np.asarray(a, dtype=object) for a in arrays))
    out = np.empty(spread[0].shape, dtype=object)
    for at in np.ndindex(out.shape):
        result = function(*(a[at] for a in spread))
        if result is None:
            return None
        out[at] = result
    return out


def truncated_values(ratios: Any) -> Any:
    """As integers, or None."""
    return _each(lambda r: r.truncated(), ratios)


def _is_small(ty: Type) -> bool:
    if not isinstance(ty, TensorType) or ty.shape is None or not all(d.is_const for d in ty.shape):
        return False
    count = 1
    for d in ty.shape:
        count *= d.const
    return count <= _MAX_ELEMENTS
