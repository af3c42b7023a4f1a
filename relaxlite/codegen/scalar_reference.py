"""What the scalar functions of tensor programs mean, on NumPy scalars: the interpreter's tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.dtypes import DType

Function = Callable[..., Any]

_UNARY: dict[str, Function] = {
    "neg": lambda x: -x, "not": lambda x: not x, "bitwise_not": lambda x: ~x, "abs": abs, "sign": np.sign, "sqrt": np.sqrt,
    "floor": np.floor, "ceil": np.ceil, "round": np.round, "trunc": np.trunc, "exp": np.exp, "log": np.log,
    "log1p": np.log1p, "expm1": np.expm1, "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "tanh": np.tanh, "isnan": lambda x: bool(x != x), "isinf": lambda x: bool(np.isinf(x)),
}  # fmt: skip


def _minimum(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


def _maximum(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


def _truncdiv(a: Any, b: Any) -> Any:
    if b == 0:
        return type(a)(0)
    quotient = abs(int(a)) // abs(int(b))
    return _wrap(quotient if (a < 0) == (b < 0) else -quotient, type(a))


def _power(a: Any, b: Any) -> Any:
    """Integers wrap; a negative integer exponent truncates 1 / a**-b."""
    if not isinstance(a, np.integer):
        return a**b
    if b < 0:
        return type(a)({1: 1, -1: -1 if int(b) % 2 else 1}.get(int(a), 0))
    return _wrap(pow(int(a), int(b), 1 << 64), type(a))


def _shift_right(a: Any, b: Any) -> Any:
    return a >> b


_BINARY: dict[str, Function] = {
    "div": lambda a, b: a / b, "floordiv": lambda a, b: a // b, "truncdiv": _truncdiv, "floormod": lambda a, b: a % b,
    "fmod": np.fmod, "min": _minimum, "max": _maximum, "pow": _power, "shift_left": lambda a, b: a << b,
    "shift_right": _shift_right, "atan2": np.arctan2,
}  # fmt: skip


def scalar_function(kind: str, op: str, dtype: DType) -> Function:
    """The function of kind "unary", "binary", "intrinsic" (of operands of `dtype`) or "cast" (from `op` to `dtype`)."""
    if kind == "unary" and op == "erf":
        target = dtypes.to_numpy(dtype).type
        return lambda x: target(math.erf(x))
    if kind == "unary":
        return _UNARY[op]
    if kind == "binary":
        return _BINARY[op]
    return _cast(op, dtype) if kind == "cast" else _intrinsic(op, dtype)


def _intrinsic(name: str, dtype: DType) -> Function:
    target = dtypes.to_numpy(dtype).type
    if name == "fma":
        return lambda a, b, c: target(np.float64(a) * np.float64(b) + np.float64(c))
    raise KeyError(f"no intrinsic {name!r}")


def _cast(source: DType, dtype: DType) -> Function:
    target: Any = dtypes.to_numpy(dtype).type
    if dtype == "bool":
        return lambda x: target(x != 0)
    if not dtypes.is_integer(dtype):
        return lambda x: target(x)
    if dtypes.is_float(source):
        info = np.iinfo(target)
        low, high = int(info.min), int(info.max)
        return lambda x: target(0 if x != x else low if x <= low else high if x >= high else int(x))
    return lambda x: _wrap(int(x), target)


def _wrap(value: int, target: Any) -> Any:
    """An integer modulo the number of values that the dtype holds."""
    info = np.iinfo(target)
    return target((value - int(info.min)) % (1 << info.bits) + int(info.min))
