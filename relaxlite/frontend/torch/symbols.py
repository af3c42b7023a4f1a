"""Sizes of exported programs: sympy expressions as symbolic integers, scalars that are computed from sizes.

`torch.export` writes sizes as sympy expressions over symbols s0, s1, ... of the inputs' dimensions (backed) and u0, u1,
... that operators such as nonzero bind (unbacked). A symbol is named after the user's `Dim`, else after the input and
axis where it first occurs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch

from relaxlite.errors import ImportModelError, InvalidArgumentError
from relaxlite.frontend.common.bounds import Bounds, listed, parse_range
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int, floordiv, floormod, smax, smin, sym

Int: TypeAlias = "int | SymExpr"
Scalar: TypeAlias = "int | float | bool | SymExpr | torch.SymFloat | torch.SymBool"

Ratio: TypeAlias = "tuple[SymExpr, SymExpr]"  # numerator and positive denominator

_MAX_SIZE = 1 << 62  # upper bounds from here on say nothing
_INFERRED = (2, None)  # the range of a size that torch assumes to be neither 0 nor 1, and does not check


def sympy_of(value: Any) -> Any:
    """Return the sympy expression of a torch.SymInt, SymFloat or SymBool."""
    return value.node.expr


class SymbolTable:
    """The symbols of one program: sympy symbol -> symbolic integer."""

    def __init__(self, ranges: Mapping[Any, Any], bb: BlockBuilder, bounds: Bounds | None = None) -> None:
        """ranges: torch's, by its symbols. bounds: the user's, by names."""
        self._ranges, self._bb = ranges, bb
        self._bounds = {name: parse_range(name, value) for name, value in (bounds or {}).items()}
        self._values: dict[Any, SymExpr] = {}
        self._floats: dict[Any, Expr] = {}
        self._names: dict[str, int] = {}

    # definitions

    def fresh(self, name: str, *, lower: int | None = 0, upper: int | None = None, divisor: int = 1) -> SymVar:
        """Return a new symbol with a unique name."""
        count = self._names.get(name)
        self._names[name] = 0 if count is None else count + 1
        if count is not None:
            return self.fresh(f"{name}_{count + 1}", lower=lower, upper=upper, divisor=divisor)
        return SymVar(name, lower=lower, upper=upper, divisor=divisor)

    def define(self, symbol: Any, name: str) -> SymVar:
        """Define a symbol of torch by a new symbol with torch's range."""
        lower, upper = self._range(symbol)
        if name in self._bounds:
            low, high = self._bounds[name]
            lower, upper = max(lower or 0, low), high if upper is None else upper if high is None else min(upper, high)
        self._values[symbol] = variable = self.fresh(name, lower=lower, upper=upper)
        return variable

    def define_as(self, symbol: Any, value: SymExpr) -> None:
        """Define a symbol of torch by an expression."""
        self._values[symbol] = value

    def define_float(self, symbol: Any, value: Expr) -> None:
        """Define a float symbol of torch by a tensor of rank 0."""
        self._floats[symbol] = value

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Open a scope of definitions, for the body of a branch or loop."""
        values, floats = dict(self._values), dict(self._floats)
        try:
            yield
        finally:
            self._values, self._floats = values, floats

    def check_bounds_used(self) -> None:
        """Raise InvalidArgumentError if a name among the user's bounds is no symbol of the program."""
        names = [value.name for value in self._values.values() if isinstance(value, SymVar)]
        for name in self._bounds:
            if name not in names:
                raise InvalidArgumentError(f"bounds: the model has no symbol '{name}'; it has {listed(names)}")

    def knows(self, symbol: Any) -> bool:
        """Whether a symbol is defined."""
        return symbol in self._values or symbol in self._floats

    def unknown(self, value: Any) -> list[Any]:
        """Return the symbols of a size that are not defined, sorted by name."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return []
        return sorted((s for s in sympy_of(value).free_symbols if not self.knows(s)), key=str)

    def _range(self, expr: Any) -> tuple[int | None, int | None]:
        values = self._ranges.get(expr)
        if values is None:
            return 0, None
        lower = int(values.lower) if values.lower.is_Integer and abs(values.lower) < _MAX_SIZE else None
        upper = int(values.upper) if values.upper.is_Integer and values.upper < _MAX_SIZE else None
        return (1, None) if (lower, upper) == _INFERRED else (lower, upper)

    def input_dim(self, dim: Any, name: str) -> SymExpr:
        """Return the size of an input's dimension; defines the symbol that first occurs there, as `name`."""
        if not isinstance(dim, torch.SymInt):
            return sym(int(dim))
        expr = sympy_of(dim)
        if expr.is_Symbol and not self.knows(expr):
            return self.define(expr, name)
        missing = self.unknown(dim)
        return self._solve(expr, missing, name) if missing else self.expr(expr)

    def _solve(self, expr: Any, missing: Sequence[Any], name: str) -> SymVar:
        """Define the symbol s of a dimension a * s + b, which no other dimension of an input gives; return the size."""
        symbol = missing[0]
        factor, rest = expr.coeff(symbol), sympy.expand(expr - expr.coeff(symbol) * symbol)
        if len(missing) > 1 or not factor.is_Integer or factor <= 0 or not rest.is_Integer:
            raise ImportModelError(
                f"the size {expr} of '{name}' does not determine {', '.join(map(str, missing))}; hint: name the "
                "dimensions by torch.export.Dim and give each to one input as it is"
            )
        lower, upper = self._range(symbol)
        factor, rest = int(factor), int(rest)
        low = None if lower is None else factor * lower + rest
        high = None if upper is None else factor * upper + rest
        size = self.fresh(name, lower=low, upper=high, divisor=factor if rest % factor == 0 else 1)
        self.define_as(symbol, floordiv(size - rest, factor))
        return size

    # integers

    def dim(self, value: Any) -> SymExpr:
        """Return a size, a Python integer or torch.SymInt, as a symbolic integer."""
        return self.expr(sympy_of(value)) if isinstance(value, torch.SymInt) else sym(int(value))

    def dim_or_expr(self, value: Any) -> SymExpr:
        """Return a size, which may be a symbolic integer already, as a symbolic integer."""
        return value if isinstance(value, SymExpr) else self.dim(value)

    def int(self, value: Any) -> Int:
        """Return a size as an int where it is constant, else as a symbolic integer."""
        size = self.dim(value)
        constant = as_int(size)
        return size if constant is None else constant

    def shape(self, value: torch.Tensor) -> tuple[SymExpr, ...]:
        """Return the symbolic shape of a tensor with symbolic sizes."""
        return tuple(map(self.dim, value.shape))

    def expr(self, e: Any) -> SymExpr:
        """Convert an integer-valued sympy expression. ImportModelError for functions that sizes do not have."""
        if e.is_Integer:
            return sym(int(e))
        if e.is_Symbol:
            if e not in self._values:
                raise ImportModelError(f"the size {e} is used before an operator has computed it")
            return self._values[e]
        convert = _FUNCTIONS.get(type(e).__name__)
        if convert is not None:
            return convert(*map(self.expr, e.args))
        quotient = self._quotient(e)
        if quotient is not None:
            return quotient
        if isinstance(e, sympy.Piecewise) and e.args[-1][1] in (True, sympy.true):
            value = self.expr(e.args[-1][0])
            for case, condition in reversed(e.args[:-1]):
                value = value + (self.expr(case) - value) * self._indicator(condition)
            return value
        raise ImportModelError(f"the size {e} has the function {type(e).__name__}, which sizes cannot have")

    def _indicator(self, e: Any) -> SymExpr:
        """Return 1 where a condition on integers holds, else 0."""
        if e in (sympy.true, sympy.false):
            return sym(int(bool(e)))
        if isinstance(e, sympy.Not):
            return sym(1) - self._indicator(e.args[0])
        if isinstance(e, sympy.And):
            return smin(*map(self._indicator, e.args))
        if isinstance(e, sympy.Or):
            return smax(*map(self._indicator, e.args))
        if type(e) not in _COMPARISONS or not all(arg.is_integer for arg in e.args):
            raise ImportModelError(f"a size with the case {e} is not supported")
        a, b = map(self.expr, e.args)
        kind = type(e)
        if kind in (sympy.Eq, sympy.Ne):
            differs = smin(smax(a - b, b - a), 1)
            return differs if kind is sympy.Ne else sym(1) - differs
        low, high = (a, b) if kind in (sympy.Lt, sympy.Le) else (b, a)
        strict = 0 if kind in (sympy.Lt, sympy.Gt) else 1
        return smin(smax(high - low + strict, 0), 1)

    def _quotient(self, e: Any) -> SymExpr | None:
        """Convert a rounded true division of integers, as of math.ceil(n / 2); None for any other expression."""
        kind = type(e).__name__
        if kind not in ("CeilToInt", "FloorToInt", "TruncToInt", "RoundToInt", "floor", "ceiling"):
            return None
        ratio = self._ratio(e.args[0])
        if ratio is None:
            return None
        above, below = ratio
        if kind in ("CeilToInt", "ceiling"):
            return -floordiv(-above, below)
        if kind == "RoundToInt":
            if below.is_const and below.const == 1:
                return above
            return None
        if kind == "TruncToInt" and not PROVER.can_prove_le(0, above):
            return smax(floordiv(above, below), 0) - smax(floordiv(-above, below), 0)
        return floordiv(above, below)

    def _ratio(self, e: Any) -> Ratio | None:
        """Return an expression as numerator and positive denominator, or None."""
        kind = type(e).__name__
        if kind == "ToFloat":
            return self.expr(e.args[0]), sym(1)
        if kind in ("IntTrueDiv", "FloatTrueDiv"):
            above, below = self._ratio(e.args[0]), self._ratio(e.args[1])
            if above is None or below is None or not PROVER.can_prove_le(1, below[0]):
                return None
            return above[0] * below[1], above[1] * below[0]
        if e.is_Rational or e.is_Float:
            exact = sympy.nsimplify(e, rational=True)
            return (sym(int(exact.p)), sym(int(exact.q))) if abs(exact.q) < 1 << 24 else None
        if e.is_Mul or e.is_Add:
            parts = [self._ratio(arg) for arg in e.args]
            known = [part for part in parts if part is not None]
            return (_ratio_product if e.is_Mul else _ratio_sum)(known) if len(known) == len(parts) else None
        if e.is_integer:
            return self.expr(e), sym(1)
        return None

    # scalars as tensors of rank 0

    def tensor(self, value: Scalar, dtype: str) -> Expr:
        """Return a scalar that may depend on sizes as a tensor of rank 0."""
        if isinstance(value, torch.SymFloat | torch.SymBool):
            expr = sympy_of(value)
            exact = self._condition(expr) if isinstance(value, torch.SymBool) else self._float(expr)
            return exact if _dtype(exact) == dtype else self._bb.emit(ops.cast(exact, dtype=dtype))
        if isinstance(value, torch.SymInt):
            value = self.dim(value)
        assert isinstance(value, SymExpr)
        vector = self._bb.emit(ops.shape_to_tensor((value,)))
        size = self._bb.emit(ops.reshape(vector, ()))
        return size if dtype == "int64" else self._bb.emit(ops.cast(size, dtype=dtype))

    def _integer(self, e: Any) -> Expr:
        return self.tensor(self.expr(e), "float64")

    def _float(self, e: Any) -> Expr:
        """Compute a float-valued sympy expression in float64."""
        kind, emit = type(e).__name__, self._bb.emit
        if e in self._floats:
            return self._floats[e]
        if e.is_number:
            return Constant.of(np.float64(float(e)))
        if e.is_integer and kind not in _FLOAT_FUNCTIONS:
            return self._integer(e)
        if kind == "ToFloat":
            return self._integer(e.args[0])
        convert = _FLOAT_FUNCTIONS.get(kind)
        if convert is None:
            raise ImportModelError(f"the number {e} has the function {kind}, which is not supported")
        return (
            reduce(lambda a, b: emit(convert(a, b)), map(self._float, e.args))
            if len(e.args) > 1
            else emit(convert(self._float(e.args[0])))
        )

    def _condition(self, e: Any) -> Expr:
        """Compute a condition on sizes as a bool tensor of rank 0."""
        emit = self._bb.emit
        if e in (sympy.true, sympy.false):
            return Constant.of(np.bool_(bool(e)))
        if e in self._floats:
            return self._floats[e]
        if isinstance(e, sympy.Not):
            return emit(ops.logical_not(self._condition(e.args[0])))
        if isinstance(e, sympy.And | sympy.Or):
            combine = ops.logical_and if isinstance(e, sympy.And) else ops.logical_or
            return reduce(lambda a, b: emit(combine(a, b)), map(self._condition, e.args))
        compare = _COMPARISONS.get(type(e))
        if compare is None:
            raise ImportModelError(f"the condition {e} is not supported")
        if all(arg.is_integer for arg in e.args):
            left, right = (self.tensor(self.expr(arg), "int64") for arg in e.args)
        else:
            left, right = map(self._float, e.args)
        return emit(compare(left, right))

    def truth(self, value: Any) -> bool | None:
        """Return whether a condition on sizes holds for all of them, None where that is not proven."""
        if isinstance(value, bool):
            return value
        e = sympy_of(value)
        if e in (sympy.true, sympy.false):
            return bool(e)
        if type(e) not in _COMPARISONS or not all(arg.is_integer for arg in e.args):
            return None
        left, right = map(self.expr, e.args)
        return _decide(type(e), left, right)


def _decide(kind: type, a: SymExpr, b: SymExpr) -> bool | None:
    """Decide a comparison of two sizes; None where neither answer is proven."""
    if kind in (sympy.Eq, sympy.Ne):
        equal = True if PROVER.can_prove_equal(a, b) else False if PROVER.can_prove_ne(a, b) else None
        return equal if kind is sympy.Eq or equal is None else not equal
    if kind in (sympy.Gt, sympy.Ge):
        a, b, kind = b, a, {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le}[kind]
    if kind is sympy.Lt:
        return True if PROVER.can_prove_le(a + 1, b) else False if PROVER.can_prove_le(b, a) else None
    return True if PROVER.can_prove_le(a, b) else False if PROVER.can_prove_le(b + 1, a) else None


def _dtype(x: Expr) -> str:
    return x.ty.dtype  # type: ignore[union-attr]


def _power(a: SymExpr, b: SymExpr) -> SymExpr:
    if not b.is_const or b.const < 0:
        raise ImportModelError(f"the size {a} ** {b} is not supported")
    return reduce(operator.mul, [a] * b.const, sym(1))


def _shift(a: SymExpr, b: SymExpr, *, left: bool) -> SymExpr:
    factor = 1 << int(b)
    return a * factor if left else floordiv(a, factor)


def _ratio_product(ratios: Sequence[Ratio]) -> Ratio:
    return _product(*(above for above, _ in ratios)), _product(*(below for _, below in ratios))


def _ratio_sum(ratios: Sequence[Ratio]) -> Ratio:
    common = _product(*(below for _, below in ratios))
    return _sum(*(above * floordiv(common, below) for above, below in ratios)), common


def _sum(*args: SymExpr) -> SymExpr:
    return reduce(operator.add, args)


def _product(*args: SymExpr) -> SymExpr:
    return reduce(operator.mul, args)


_FUNCTIONS: dict[str, Callable[..., SymExpr]] = {
    "Add": _sum,
    "Mul": _product,
    "Pow": _power,
    "PowByNatural": _power,
    "FloorDiv": floordiv,
    "CleanDiv": floordiv,
    "CeilDiv": lambda a, b: -floordiv(-a, b),
    "Mod": floormod,
    "PythonMod": floormod,
    "Max": smax,
    "Min": smin,
    "Identity": lambda a: a,
    "LShift": lambda a, b: _shift(a, b, left=True),
    "RShift": lambda a, b: _shift(a, b, left=False),
    "Abs": lambda a: smax(a, -a),
}
_FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": ops.add,
    "Mul": ops.multiply,
    "Pow": ops.power,
    "FloatPow": ops.power,
    "FloatTrueDiv": ops.divide,
    "IntTrueDiv": ops.divide,
    "Max": ops.maximum,
    "Min": ops.minimum,
    "OpaqueUnaryFn_sqrt": ops.sqrt,
    "OpaqueUnaryFn_exp": ops.exp,
    "OpaqueUnaryFn_log": ops.log,
    "OpaqueUnaryFn_sin": ops.sin,
    "OpaqueUnaryFn_cos": ops.cos,
    "OpaqueUnaryFn_tanh": ops.tanh,
    "CeilToInt": ops.ceil,
    "FloorToInt": ops.floor,
    "Identity": lambda a: a,
}
_COMPARISONS: dict[Any, Callable[..., Any]] = {
    sympy.Eq: ops.equal,
    sympy.Ne: ops.not_equal,
    sympy.Lt: ops.less,
    sympy.Le: ops.less_equal,
    sympy.Gt: ops.greater,
    sympy.Ge: ops.greater_equal,
}
