"""Symbolic evaluation of sizes computed in floats (`floor(cast(height) * 0.5)`), as exact fractions of symbols."""

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
_MAX_VISITED = 200  # variables per reader


@dataclass(frozen=True, slots=True)
class Ratio:
    """A fraction num / den of a symbolic numerator and a positive constant denominator."""

    num: SymExpr
    den: int

    @staticmethod
    def of(value: float) -> Ratio:
        """Return the simplest fraction that rounds to the same float32."""
        simple = Fraction(value).limit_denominator(1000)
        exact = simple if np.float32(float(simple)) == np.float32(value) else Fraction(value)
        return Ratio(sym(exact.numerator), exact.denominator)

    def floor(self) -> SymExpr:
        """Return the quotient rounded down."""
        return floordiv(self.num, self.den)

    def truncated(self) -> SymExpr | None:
        """Return the quotient rounded towards zero, as by a cast to integers; None if its sign is not known."""
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
_MOVEMENT_OPS = frozenset(
    ("reshape", "expand_dims", "squeeze", "concat", "gather", "slice", "transpose", "broadcast_to")
)


class RatioReader:
    """Evaluates small float tensors. `resolve` returns an integer tensor's elements as an object array, or None."""

    def __init__(self, bb: BlockBuilder, resolve: Callable[[Expr], Any]) -> None:
        self._bb, self._resolve = bb, resolve
        self._cache: dict[Var, Any] = {}

    def values(self, x: Expr) -> Any:
        """Return the elements of x as an object array of `Ratio`, or None."""
        if isinstance(x, Constant) and _is_small(x.ty):
            return _map_elements(Ratio.of, x.value) if np.isfinite(x.value.astype(np.float64)).all() else None
        if not isinstance(x, Var) or not _is_small(x.ty):
            return None
        if x not in self._cache and len(self._cache) < _MAX_VISITED:
            self._cache[x] = None  # ends recursion
            call = self._bb.bound_value(x)
            self._cache[x] = self._evaluate(call) if isinstance(call, Call) and isinstance(call.callee, Op) else None
        return self._cache.get(x)

    def _evaluate(self, call: Call) -> Any:
        name, args = call.callee.name, call.args
        if name == "cast" and isinstance(args[0].ty, TensorType) and dtypes.is_integer(args[0].ty.dtype):
            integers = self._resolve(args[0])
            return None if integers is None else _map_elements(lambda v: Ratio(sym(v), 1), integers)
        if name == "cast":
            return self.values(args[0])
        if name in _OPS:
            operands = [self.values(a) for a in args]
            return None if any(v is None for v in operands) else _map_elements(_OPS[name], *operands)
        return self._move_elements(call) if name in _MOVEMENT_OPS else None

    def _move_elements(self, call: Call) -> Any:
        """Evaluate an op that only moves elements by its reference, on object arrays."""
        operands = []
        for a in call.args:
            is_float = isinstance(a.ty, TensorType) and dtypes.is_float(a.ty.dtype)
            values = self.values(a) if is_float else self._bb.known_value(a)
            if values is None:
                return None
            operands.append(values if isinstance(a.ty, TensorType) else tuple(values))
        try:
            return np.asarray(call.callee.reference(*operands, **call.attrs), dtype=object)  # type: ignore[union-attr]
        except (TypeError, ValueError):
            return None


def _map_elements(function: Callable[..., Any], *arrays: Any) -> Any:
    broadcasted = np.broadcast_arrays(*(np.asarray(a, dtype=object) for a in arrays))
    out = np.empty(broadcasted[0].shape, dtype=object)
    for index in np.ndindex(out.shape):
        value = function(*(a[index] for a in broadcasted))
        if value is None:
            return None
        out[index] = value
    return out


def truncate_ratios(ratios: Any) -> Any:
    """Return an array of ratios rounded towards zero, or None if the sign of one is not known."""
    return _map_elements(lambda r: r.truncated(), ratios)


def _is_small(ty: Type) -> bool:
    if not isinstance(ty, TensorType) or ty.shape is None or not all(d.is_const for d in ty.shape):
        return False
    count = 1
    for d in ty.shape:
        count *= d.const
    return count <= _MAX_ELEMENTS
