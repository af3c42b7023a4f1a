"""NumPy reference of the scalar functions of tensor programs, for the interpreter and the tests.

Machine code (codegen/llvm/scalars.py) has the same semantics:

- Integers wrap. Integer division by zero gives quotient 0 and remainder 0, signed or not, for both roundings;
  INT_MIN // -1 wraps. `pow` with a negative exponent is the reciprocal rounded towards zero: nonzero for the bases 1
  and -1 only.
- A shift by a negative count, or by the bit width or more, gives 0, or -1 for a right shift of a negative number.
- `min` and `max` propagate NaN.
- `round` rounds to nearest, ties to even. `sign` of NaN is NaN.
- float16 and bfloat16 are computed in float32 and rounded to nearest even: here after every function, in machine code
  only at stores and casts, so results may differ in the last place.
- A cast of a float to an integer truncates towards zero and saturates; NaN becomes 0. A cast to bool tests != 0, so
  NaN becomes true. Integers wrap.
- Arithmetic on bool: add is `or`, mul is `and`, sub is `xor`; other functions compute in uint8 and test != 0.

All functions take and return arrays of the NumPy dtypes that `relaxlite.dtypes` lists, and broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relaxlite import dtypes
from relaxlite.dtypes import DType
from relaxlite.ir.intrinsics import (
    BITCASTS,
    DOT2_PACKED_BF16,
    DOT2_PACKED_INT16,
    DOT4_PACKED_U8S8,
    DOT_PRODUCTS,
    INTRINSICS,
    LOOKUP,
    NARROW,
    PACK_BF16,
    PACK_BYTES,
    ROUND_TO_INT32,
    SHUFFLE_XOR,
    type_error,
)

Array: TypeAlias = "NDArray[Any]"

_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Array) -> Array:
    return np.where(x == -np.inf, 0, x * (1 + _erf(x * math.sqrt(0.5))) / 2)


_MATH: Mapping[str, Callable[[Array], Array]] = {
    "exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "exp2": np.exp2, "sin": np.sin, "cos": np.cos,
    "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "tanh": np.tanh, "erf": _erf,
    "gelu": _gelu, "sqrt": np.sqrt,
}  # fmt: skip
_ROUNDING: Mapping[str, Callable[[Array], Array]] = {
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc,
}  # fmt: skip
_COMPARE: Mapping[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_BITWISE: Mapping[str, Callable[[Array, Array], Array]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_BOOL_BINARY = {
    "add": "or",
    "mul": "and",
    "sub": "xor",
    "min": "and",
    "max": "or",
    "and": "and",
    "or": "or",
    "xor": "xor",
}


def apply_unary(op: str, x: Array) -> Array:
    """Apply a function of `UNARY`. Raises TypeError for an unsupported dtype, such as `exp` of an integer."""
    x = np.asarray(x)
    dtype = _dtype_of(x)
    with np.errstate(all="ignore"):
        if op == "isnan":
            return np.isnan(x) if dtypes.is_float(dtype) else np.zeros(x.shape, np.bool_)
        if op == "isinf":
            return np.isinf(x) if dtypes.is_float(dtype) else np.zeros(x.shape, np.bool_)
        if op == "not":
            return np.asarray(x == x.dtype.type(0))
        if dtypes.is_float(dtype):
            return np.asarray(_unary_float(op, _widen(x))).astype(x.dtype)
        return _unary_bool(op, x) if dtype == "bool" else _unary_int(op, x)


def _unary_float(op: str, x: Array) -> Array:
    if op in _MATH:
        return _MATH[op](x)
    if op in _ROUNDING:
        return _ROUNDING[op](x)
    if op == "neg":
        return np.negative(x)
    if op == "abs":
        return np.abs(x)
    if op == "sign":
        return np.sign(x)
    raise TypeError(f"{op} of a float has no meaning")


def _unary_bool(op: str, x: Array) -> Array:
    if op == "bitwise_not":
        return np.logical_not(x)
    if op in ("neg", "abs", "sign", *_ROUNDING):
        array: Array = x.copy()
        return array
    raise TypeError(f"{op} of a bool has no meaning")


def _unary_int(op: str, x: Array) -> Array:
    if op == "neg":
        return np.asarray(x.dtype.type(0) - x)
    if op == "bitwise_not":
        return np.invert(x)
    if op == "abs":
        return np.abs(x)
    if op == "sign":
        return np.sign(x)
    if op in _ROUNDING:
        array: Array = x.copy()
        return array
    raise TypeError(f"{op} of an integer has no meaning; cast it to a float first")


def apply_binary(op: str, a: Array, b: Array) -> Array:
    """Apply a function of `BINARY` to two arrays of one dtype, which is also the result's.

    Raises TypeError for two dtypes, or an unsupported dtype.
    """
    a, b = np.asarray(a), np.asarray(b)
    dtype = _dtype_of(a)
    if dtype != _dtype_of(b):
        raise TypeError(f"{op} of {dtype} and {_dtype_of(b)}: both operands must have the same element type")
    with np.errstate(all="ignore"):
        if dtypes.is_float(dtype):
            return np.asarray(_binary_float(op, _widen(a), _widen(b))).astype(a.dtype)
        return np.asarray(_binary_bool(op, a, b) if dtype == "bool" else _binary_int(op, a, b)).astype(a.dtype)


def _binary_float(op: str, a: Array, b: Array) -> Array:
    functions: Mapping[str, Callable[[Array, Array], Array]] = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum, "max": np.maximum,
        "floordiv": np.floor_divide, "floormod": np.mod, "fmod": np.fmod, "pow": np.power, "atan2": np.arctan2,
        "truncdiv": lambda x, y: np.trunc(np.divide(x, y)),
    }  # fmt: skip
    if op not in functions:
        raise TypeError(f"{op} of floats has no meaning")
    return functions[op](a, b)


def _binary_bool(op: str, a: Array, b: Array) -> Array:
    if op in _BOOL_BINARY:
        return _BITWISE[_BOOL_BINARY[op]](a, b)
    return np.asarray(_binary_int(op, a.astype(np.uint8), b.astype(np.uint8)) != 0)


def _binary_int(op: str, a: Array, b: Array) -> Array:
    simple: Mapping[str, Callable[[Array, Array], Array]] = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
        "floordiv": np.floor_divide, "floormod": np.mod, "fmod": np.fmod, **_BITWISE,
        "truncdiv": _truncdiv, "shift_left": np.left_shift, "shift_right": np.right_shift, "pow": _int_pow,
    }  # fmt: skip
    if op not in simple:
        raise TypeError(f"{op} of integers has no meaning; cast them to floats first")
    return simple[op](a, b)


def _truncdiv(a: Array, b: Array) -> Array:
    quotient = np.floor_divide(a, b)
    is_off = (np.mod(a, b) != 0) & ((a < 0) != (b < 0))
    return np.asarray(quotient + is_off.astype(a.dtype))


def _int_pow(a: Array, b: Array) -> Array:
    power = np.power(a, np.maximum(b, b.dtype.type(0)))
    odd_sign = np.where(b % 2 != 0, a, a * a)
    reciprocal = np.where((a == 1) | ((a == a.dtype.type(0) - a.dtype.type(1)) & (a < 0)), odd_sign, a.dtype.type(0))
    return np.where(b < 0, reciprocal, power)


def apply_compare(op: str, a: Array, b: Array) -> Array:
    """Apply a comparison of `COMPARE`. Comparisons with NaN are false, except `ne`."""
    with np.errstate(invalid="ignore"):
        return np.asarray(_COMPARE[op](a, b))


def apply_combine(op: str, a: Array, b: Array) -> Array:
    """Apply one step of a reduction, a function of `COMBINE`; `a` is the accumulator."""
    return np.where(b > a, b, a) if op == "maxnum" else apply_binary(op, a, b)


def apply_intrinsic(name: str, args: tuple[Array, ...]) -> Array:
    """Apply an intrinsic of ir/intrinsics.py, whose docstring defines results and rounding.

    Raises TypeError for an unknown name or wrong dtypes.
    """
    args = tuple(np.asarray(a) for a in args)
    arg_dtypes = tuple(_dtype_of(a) for a in args)
    signature = INTRINSICS.get(name)
    problem = type_error(name, arg_dtypes, (signature and signature.result) or (arg_dtypes[0] if arg_dtypes else ""))
    if problem is not None:
        raise TypeError(problem)
    if name == SHUFFLE_XOR:
        raise TypeError("shuffle_xor has no meaning outside of a warp (codegen/simt.py)")
    if name == "fma" and arg_dtypes[0] == "float32":  # float64 holds the products exactly: one rounding
        x, y, z = (arg.astype(np.float64) for arg in args)
        with np.errstate(all="ignore"):
            return np.asarray((x * y + z).astype(np.float32))
    if name == "fma":
        return apply_binary("add", apply_binary("mul", args[0], args[1]), args[2])
    if name == PACK_BYTES:
        bits = [a.astype(np.uint8).astype(np.uint32) << np.uint32(8 * n) for n, a in enumerate(args)]
        return np.asarray(bits[0] | bits[1] | bits[2] | bits[3]).astype(np.int32)
    if name == ROUND_TO_INT32:
        in_range = np.abs(args[0]) < 2.0**31
        return np.where(in_range, np.rint(np.where(in_range, args[0], 0)), -(2.0**31)).astype(np.int32)
    if name == NARROW:
        return cast(args[0], "bfloat16")
    if name in BITCASTS.values():
        return args[0].view(dtypes.to_numpy(str(INTRINSICS[name].result)))
    if name == PACK_BF16:
        low, high = (a.view(np.uint16).astype(np.uint32) for a in args)
        return np.asarray(low | high << np.uint32(16)).astype(np.int32)
    if name == DOT2_PACKED_BF16:
        a, b = ([_half(x, n) for n in range(2)] for x in args[1:])
        return apply_intrinsic("dot2_bf16", (args[0], *a, *b))
    if name == DOT2_PACKED_INT16:
        a, b = ([(x >> np.int32(16 * n)).astype(np.int16) for n in range(2)] for x in args[1:])
        return apply_intrinsic("dot2_i16", (args[0], *a, *b))
    if name == LOOKUP:
        table = np.concatenate([np.concatenate(_bytes_of(word.reshape(1), np.uint8)) for word in args[1:]])
        result = [
            table[index].astype(np.int32) << np.int32(8 * n) for n, index in enumerate(_bytes_of(args[0], np.uint8))
        ]
        return np.asarray(result[0] | result[1] | result[2] | result[3])
    if name == DOT4_PACKED_U8S8:
        a, b = (_bytes_of(x, dtype) for x, dtype in zip(args[1:3], (np.uint8, np.int8), strict=True))
        return apply_intrinsic("dot4_u8s8", (args[0], *a, *b))
    dot = DOT_PRODUCTS[name]
    total, wide = args[0], dtypes.to_numpy(dot.total)
    with np.errstate(all="ignore"):
        for k in reversed(range(dot.length)):
            total = total + args[1 + k].astype(wide) * args[1 + dot.length + k].astype(wide)
    return np.asarray(total)


def _half(packed: Array, number: int) -> Array:
    """Lower (0) or upper (1) bfloat16 of each packed int32."""
    array: Array = (packed >> np.int32(16 * number)).astype(np.uint16).view(dtypes.to_numpy("bfloat16"))
    return array


def _bytes_of(packed: Array, dtype: Any) -> list[Array]:
    """Four bytes of each packed int32, lowest first."""
    return [(packed >> np.int32(8 * n)).astype(dtype) for n in range(4)]


def cast(x: Array, dtype: DType) -> Array:
    """Convert to another dtype."""
    x = np.asarray(x)
    source, target = _dtype_of(x), dtypes.to_numpy(dtype)
    with np.errstate(all="ignore"):
        if dtype == "bool":
            return np.asarray(x != x.dtype.type(0))
        if dtypes.is_float(source) and dtypes.is_integer(dtype):
            return _saturate(x, target)
        if dtype in ("float16", "bfloat16") and not dtypes.is_float(source):
            return x.astype(np.float32).astype(target)
        return x.astype(target)


def _saturate(x: Array, target: np.dtype[Any]) -> Array:
    wide = x.astype(np.float64)
    info = np.iinfo(target)
    limit = float(info.max) if info.bits < 64 else float(info.max + 1)
    is_over, is_under = wide >= limit, wide <= float(info.min)
    inside = np.where(np.isnan(wide) | is_over | is_under, 0.0, wide)
    result = inside.astype(target)
    return np.where(is_over, target.type(info.max), np.where(is_under, target.type(info.min), result))


def _dtype_of(x: Array) -> DType:
    result = dtypes.from_numpy(x.dtype)
    if result is None:
        raise TypeError(f"an array of NumPy type {x.dtype} has no relaxlite element type")
    return result


def _widen(x: Array) -> Array:
    """Convert 16-bit floats to float32, in which they are computed."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x
